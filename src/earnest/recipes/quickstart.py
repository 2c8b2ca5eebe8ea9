"""The quickstart in Python, from prompts to an adapter. `earnest run quickstart` is the same job with a run folder,
checkpoints, evaluations and a report.

    python -m earnest.recipes.quickstart [steps] [seed]
"""

from __future__ import annotations

import sys

import earnest as en
from earnest.tasks import PromptStream, get_task


def main(steps: int = 40, seed: int = 0) -> None:
    policy = en.load("nano")
    adapter = en.attach(policy, en.LoRA(rank=8), targets=("q_proj", "v_proj"), seed=seed)
    engine = en.LocalEngine(policy, adapter, en.AdamW(lr=2e-3))
    objective = en.Objective.of(en.GRPO(clip=0.2))
    task = get_task("sort")
    stream = PromptStream(task, seed)
    for step in range(1, steps + 1):
        spec = en.SampleSpec(max_new_tokens=12, temperature=1.0, seed=1000 * seed + step)
        rollouts = en.collect(engine, task, stream.next(8), 8, spec)
        if step == 1:
            en.prove(engine, objective, rollouts.batch, quick=True).raise_if_failed()
        report = engine.step(rollouts.batch, objective)
        print(f"step {step}: reward {rollouts.reward:.3f}, gradient norm {report.update.gradient_norm:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
