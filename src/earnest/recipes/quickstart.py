"""The quickstart in Python: the line from prompts to an adapter, drawn once. `earnest run quickstart` is the same job
with a run folder, checkpoints, evaluations and a report.

    python -m earnest.recipes.quickstart [steps] [seed]
"""

from __future__ import annotations

import sys

import earnest as en
from earnest.audit.alive import prove_alive
from earnest.signals import with_advantages
from earnest.tasks import PromptStream, get_task, grade_all


def main(steps: int = 60, seed: int = 0) -> None:
    policy = en.load("nano")
    adapter = en.attach(policy, en.LoRA(rank=8), targets=("q_proj", "v_proj"), seed=seed)
    engine = en.LocalEngine(policy, adapter, en.AdamW(lr=2e-3))
    objective = en.Objective.of(en.GRPO(clip=0.2))
    task = get_task("sort")
    stream = PromptStream(task, seed)
    for step in range(1, steps + 1):
        prompts = stream.next(8)
        spec = en.SampleSpec(max_new_tokens=12, temperature=1.0, seed=1000 * seed + step)
        rollouts = engine.sample([policy.render(p.messages) for p in prompts], 8, spec)
        texts = [policy.decode(r.tokens) for r in rollouts]
        grades = grade_all(task, [prompts[r.prompt_index] for r in rollouts], texts)
        batch = en.Batch.from_rows(
            [r.prompt for r in rollouts],
            [r.tokens for r in rollouts],
            group=[r.prompt_index for r in rollouts],
            behaviour=[r.logprobs for r in rollouts],
            policy_version=[r.policy_version for r in rollouts],
        )
        batch = with_advantages(batch, [g.reward for g in grades])
        if step == 1:
            prove_alive(engine, objective, batch).raise_if_failed()
        report = engine.step(batch, objective)
        reward = sum(g.reward for g in grades) / len(grades)
        print(f"step {step}: reward {reward:.3f}, gradient norm {report.update.gradient_norm:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
