"""What nano learns on environments of several turns, and what each channel of the recipe ``agent`` contributes.

    python -m benchmarks.agents_learn tasks                  GRPO on calculator, lookup and fix, 5 seeds
    python -m benchmarks.agents_learn verifiers              GRPO on two environments of verifiers, 5 seeds
    python -m benchmarks.agents_learn channels               each channel alone and together, on lookup, 5 seeds
    python -m benchmarks.agents_learn tasks --from benchmarks/results/agents_learn_tasks.json    the table of a JSON

A command that is repeated continues with the runs that are not in its JSON file.

Each seed has its own warm start: supervised steps of all weights on 256 conversations, at least as many as ``WARM``,
until the mean reward of 32 conversations on training prompts is a quarter. The oracle makes them; in the built-in
environments every second one answers without a call instead, so the policy learns the form of a call, and that it may
do without. Training then starts from those weights with a fresh adapter and the recipe's settings.

Held-out prompts, with their seeds, are the same before and after; the standard error is that of the prompts'
differences. "rises" counts the seeds whose gain is above three standard errors.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from earnest.config import RunConfig, from_mapping, recipes
from earnest.disk import write_json
from earnest.errors import NothingToTrain
from earnest.models.protocol import PolicyLike
from earnest.models.replies import message_tokens
from earnest.rollouts import Row, Trajectory, demonstration
from earnest.rollouts.rows import stack
from earnest.runs.collect import BatchSource, attempt
from earnest.runs.evaluate import HeldOutEvaluation, evaluate
from earnest.runs.own_data import standard_error
from earnest.runs.setup import Setup, build
from earnest.tasks import Environment, Prompt, PromptStream, is_environment
from earnest.tasks.tool_environment import ToolEnvironment

OWN, VERIFIERS = ("calculator", "lookup", "fix"), ("verifiers/shop_prices", "verifiers/alphabet_sort")
WARM = {"calculator": 40, "lookup": 16, "fix": 40, "verifiers/shop_prices": 4, "verifiers/alphabet_sort": 40}
WARM_LR = {"lookup": 4e-4, "verifiers/shop_prices": 2e-4}
"""The learning rate of the warm start, where it is not 1.5e-3. nano already calls the tool for every item; at a higher
rate it forgets to copy the names of items that no demonstration asks about, which are the held-out ones."""
LENGTH = {"verifiers/alphabet_sort": 64}
"""Tokens of a turn, where the recipe's 48 are too few."""
ENVIRONMENTS = Path(__file__).parents[1] / "experiments" / "environments"
ENOUGH, MOST, DEMONSTRATIONS = 0.25, 120, 256
GRPO, SDPO, SIMPO, BARRIER = (
    {"kind": "grpo", "clip": 0.2},
    {"kind": "sdpo", "weight": 0.5, "alpha": 0.5, "top_k": 100},
    {"kind": "simpo", "weight": 0.1},
    {"kind": "kl_barrier", "tau": 1.0, "over": "rmse"},
)
CHANNELS: dict[str, list[dict[str, Any]]] = {
    "GRPO": [GRPO],
    "hint SDPO": [SDPO | {"weight": 1.0}],
    "preferences": [SIMPO | {"weight": 1.0}],
    "barrier": [BARRIER],
    "all four": [GRPO, SDPO, SIMPO, BARRIER],
}


@dataclass(frozen=True)
class Result:
    """One run: the held-out rewards before and after, the gain with its standard error, and how conversations ended.

    ``idle``: steps on which no term had a gradient. ``seconds``: warm start, training.
    """

    arm: str
    task: str
    seed: int
    warm_steps: int
    steps: int
    prompts: int
    before: float
    after: float
    gain: float
    se: float
    endings_before: dict[str, float]
    endings_after: dict[str, float]
    rewards: tuple[float, ...]
    spread: tuple[float, ...]
    """The share of groups with different rewards, for each step."""
    idle: int
    seconds: tuple[float, float]


def quiet(_: str) -> None:
    """No progress lines."""


def demonstrations(policy: PolicyLike, environment: Environment, prompts: Sequence[Prompt]) -> list[Row]:
    """The oracle's conversations; in the built-in environments every second one is an answer without a call instead."""
    rows: list[Row] = []
    if not isinstance(environment, ToolEnvironment):
        environment.oracle = importlib.import_module(environment.name.partition("/")[2]).oracle  # type: ignore[attr-defined]
    for i, prompt in enumerate(prompts):
        if i % 2 or not isinstance(environment, ToolEnvironment):
            rows.append(demonstration(policy, environment, prompt, 0, i))
            continue
        said = {"role": "assistant", "content": str(prompt.data.get("code", prompt.data["answer"]))}
        asked, reply = message_tokens(policy, prompt.messages, said, environment.tools)
        rows.append(Row("demonstration", tuple(asked), tuple(reply), i, 0))
    return rows


def warm(task: str, seed: int, folder: Path) -> tuple[int, float]:
    """(steps, seconds) of the warm start; the weights go to ``folder``."""
    started = time.perf_counter()
    config = RunConfig.model_validate(
        {
            "model": "nano",
            "task": task,
            "adapter": {"kind": "full"},
            "objective": [{"kind": "sft"}],
            "optimizer": {"kind": "adamw", "lr": WARM_LR.get(task, 1.5e-3)},
            "sampling": {"max_new_tokens": LENGTH.get(task, 48)},
            "turns": {"max_turns": 4},
            "steps": MOST,
            "seed": seed,
        }
    )
    setup = build(config, quiet)
    assert is_environment(setup.task)
    stream = PromptStream(setup.task, seed)
    rows = demonstrations(setup.policy, setup.task, stream.next(DEMONSTRATIONS))
    prompts, rng = stream.next(16), random.Random(seed)

    def enough(step: int) -> bool:
        if step < WARM[task] or (step - WARM[task]) % 8:
            return False
        return statistics.fmean(a.grade.reward for a in attempt(setup, prompts, 2, step)) >= ENOUGH

    step = 0
    while step < MOST and not enough(step):
        batch = stack(rng.sample(rows, 32), pad=setup.policy.pad_id, device=setup.policy.device)
        setup.engine.step(batch, setup.objective)
        step += 1
    setup.require_local("the warm start").adapter.save(folder, "nano")
    return step, time.perf_counter() - started


def endings(found: HeldOutEvaluation) -> dict[str, float]:
    count = Counter(a.rollout.ending for a in found.attempts if isinstance(a.rollout, Trajectory))
    return {ending: n / len(found.attempts) for ending, n in count.items()}


def train(arm: str, terms: Sequence[dict[str, Any]], task: str, seed: int, model: Path, warmed: tuple[int, float],
          args: argparse.Namespace) -> Result:  # fmt: skip
    """The recipe ``agent`` with these terms, from the warm start."""
    started = time.perf_counter()
    _, recipe = recipes.read("agent")
    recipe |= {"model": str(model), "task": task, "objective": list(terms), "seed": seed, "steps": args.steps}
    recipe["sampling"] |= {"max_new_tokens": LENGTH.get(task, 48)}
    recipe["eval"] = {"every": 0, "prompts": args.prompts, "samples": 2}
    setup = build(from_mapping(recipe), quiet)
    before = evaluate(setup, 0)
    rewards, spread, idle = _steps(setup, args.steps)
    after = evaluate(setup, args.steps)
    gains = [b - a for a, b in zip(before.means, after.means, strict=True)]
    return Result(
        arm, task, seed, warmed[0], args.steps, args.prompts, before.value, after.value, after.value - before.value,
        standard_error(gains) or float("nan"), endings(before), endings(after), rewards, spread, idle,
        (warmed[1], time.perf_counter() - started),
    )  # fmt: skip


def _steps(setup: Setup, steps: int) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    source, rewards, spread, idle = BatchSource(setup), [], [], 0
    for step in range(1, steps + 1):
        found = source.next(step)
        if found.attempts:
            groups = setup.config.sampling.prompts_per_step
            rewards.append(found.reward)
            spread.append(1 - found.metrics["zero_variance_groups"] / groups)
        try:
            setup.engine.step(found.batch, setup.objective)
        except NothingToTrain:
            idle += 1
    return tuple(rewards), tuple(spread), idle


def table(results: Sequence[Result]) -> str:
    by_task = len({r.arm for r in results}) == 1
    lines = [
        f"| {'environment' if by_task else 'channel'} | held-out reward before | after | gain | rises, seeds | "
        "groups with spread | seconds, warm start and training |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(r.task if by_task else r.arm for r in results):
        own = [r for r in results if name in (r.task, r.arm)]
        rises = sum(r.gain > 3 * r.se for r in own)
        spread = [value for r in own for value in r.spread]
        cells = [
            name,
            _spread([r.before for r in own]),
            _spread([r.after for r in own]),
            _spread([r.gain for r in own]),
            f"{rises} of {len(own)}",
            f"{statistics.fmean(spread):.0%}" if spread else "",
            " + ".join(f"{statistics.fmean(r.seconds[i] for r in own):.0f}" for i in (0, 1)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.3f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tasks", "verifiers", "channels"])
    parser.add_argument("--tasks", nargs="*", choices=list(WARM), help="default: all, and lookup for the channels")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(range(5)))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts, 2 conversations each")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/agents_learn_WHAT.json")
    parser.add_argument("--from", dest="earlier", type=Path, nargs="*", help="print the table of these JSON files")
    args = parser.parse_args(argv)
    if args.earlier:
        print(table([result for path in args.earlier for result in read(path)]))
        return 0
    torch.set_num_threads(1)
    sys.path.insert(0, str(ENVIRONMENTS))
    place = args.json or Path(f"benchmarks/results/agents_learn_{args.what}.json")
    arms = CHANNELS if args.what == "channels" else {"GRPO": [GRPO]}
    tasks = {"tasks": OWN, "verifiers": VERIFIERS, "channels": ("lookup",)}[args.what]
    place.parent.mkdir(parents=True, exist_ok=True)
    results = read(place) if place.exists() else []
    done = {(r.arm, r.task, r.seed, r.steps, r.prompts) for r in results}
    for seed in args.seeds:
        for task in args.tasks or tasks:
            todo = [arm for arm in arms if (arm, task, seed, args.steps, args.prompts) not in done]
            with tempfile.TemporaryDirectory() as folder:
                warmed = warm(task, seed, Path(folder) / "model") if todo else (0, 0.0)
                for arm in todo:
                    last = train(arm, arms[arm], task, seed, Path(folder) / "model", warmed, args)
                    results.append(last)
                    write_json(place, {"results": [asdict(r) for r in results]})
                    print(
                        f"{task} seed {seed} {arm}: {last.before:.3f} → {last.after:.3f} ± {last.se:.3f} after "
                        f"{last.warm_steps} warm steps, {sum(last.seconds):.0f} s", file=sys.stderr, flush=True,
                    )  # fmt: skip
    print(table(results))
    return 0


def read(place: Path) -> list[Result]:
    """The results in a file of this program."""
    return [Result(**one) for one in json.loads(place.read_text())["results"]]


if __name__ == "__main__":
    sys.exit(main())
