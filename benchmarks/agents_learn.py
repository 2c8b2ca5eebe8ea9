"""What nano and SmolLM2 learn on environments of several turns, and the part of each channel of the recipe ``agent``.

    python -m benchmarks.agents_learn tasks                  GRPO on calculator, lookup and fix, 5 seeds
    python -m benchmarks.agents_learn verifiers              GRPO on two environments of verifiers, 5 seeds
    python -m benchmarks.agents_learn channels               each channel alone and together, on lookup, 5 seeds
    python -m benchmarks.agents_learn smollm2                GRPO of SmolLM2-135M-Instruct on calculator, 3 seeds
    python -m benchmarks.agents_learn tasks --from benchmarks/results/agents_learn_tasks.json    the table of a JSON

A command that is repeated continues with the runs that are not in its JSON file.

Each seed has its own warm start (``STARTS``): supervised steps of all weights on 256 conversations, until the mean
reward of 32 conversations on training prompts is a quarter or more. The oracle makes them; in the built-in environments
every second one answers without a call instead, so the policy learns the form of a call, and that it may do without.
Training then starts from those weights with a fresh adapter and the recipe's settings (``SMOLLM2`` for SmolLM2, of
which only the upper third trains in both).

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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from earnest.config import RunConfig, from_mapping, recipes
from earnest.disk import write_json
from earnest.errors import NothingToTrain
from earnest.models.places import nano_folder
from earnest.models.protocol import PolicyLike
from earnest.models.replies import message_tokens
from earnest.replay import pairs
from earnest.replay.pipeline import replay
from earnest.replay.settings import ReplayConfig
from earnest.rollouts import Row, Trajectory, demonstration
from earnest.rollouts.rows import conversation_row, stack
from earnest.runs.collect import BatchSource, attempt
from earnest.runs.evaluate import HeldOutEvaluation, evaluate
from earnest.runs.own_data import standard_error
from earnest.runs.setup import Setup, build
from earnest.seeds import derive
from earnest.tasks import Environment, Prompt, PromptStream, is_environment
from earnest.tasks.playing import play, run_to_end
from earnest.tasks.tool_environment import ToolEnvironment

OWN, VERIFIERS = ("calculator", "lookup", "fix"), ("verifiers/shop_prices", "verifiers/alphabet_sort")


@dataclass(frozen=True)
class Start:
    """A warm start: at least ``steps`` steps on ``rows`` conversations, then until the reward, which is measured every
    ``every`` steps, is ``enough``, for at most ``most`` steps. ``only``: which layers train; none: all."""

    steps: int
    lr: float = 1.5e-3
    enough: float = 0.25
    most: int = 120
    rows: int = 32
    every: int = 8
    only: range | None = None


STARTS = {
    "calculator": Start(40),
    "lookup": Start(16, 4e-4),
    "fix": Start(40),
    "verifiers/shop_prices": Start(4, 2e-4),
    "verifiers/alphabet_sort": Start(160, enough=0.35, most=240),
    "smollm2": Start(5, 2e-4, rows=8, every=1, only=range(20, 30)),
}
"""For each environment, and for SmolLM2. nano already calls the tool ``price`` for every item; at a higher rate it
forgets to copy the names of items that no demonstration asks about, which are the held-out ones."""
SMOLLM2: dict[str, Any] = {
    "model": "smollm2",
    "chat_template": str(nano_folder() / "chat_template.jinja"),
    "adapter": {"kind": "lora", "rank": 8, "targets": ["q_proj", "v_proj"], "layers": list(range(20, 30))},
    "optimizer": {"kind": "adamw", "lr": 1e-3},
    "sampling": {"prompts_per_step": 4, "completions_per_prompt": 4, "max_new_tokens": 40, "temperature": 1.0},
    "turns": {"max_turns": 2},
}
"""Settings for SmolLM2, for one core. Its own chat template has no tools; nano's has the same marks of messages."""
LENGTH = {"verifiers/alphabet_sort": 64}
"""Tokens of a turn, where the recipe's 48 are too few."""
ENVIRONMENTS = Path(__file__).parents[1] / "experiments" / "environments"
DEMONSTRATIONS = 256
GRPO, SDPO, SIMPO, BARRIER = (
    {"kind": "grpo", "clip": 0.2},
    {"kind": "sdpo", "weight": 0.5, "alpha": 0.5, "top_k": 100},
    {"kind": "simpo", "weight": 0.1},
    {"kind": "kl_barrier", "tau": 1.0, "over": "rmse"},
)
LOW = "replayed preferences, a tenth of the rate"
CHANNELS: dict[str, list[dict[str, Any]]] = {
    "GRPO": [GRPO],
    "hint SDPO": [SDPO | {"weight": 1.0}],
    "replayed preferences": [SIMPO | {"weight": 1.0}],
    LOW: [SIMPO | {"weight": 1.0}],
    "barrier": [BARRIER],
    "all four": [GRPO, SDPO, SIMPO, BARRIER],
    "best and worst": [SIMPO | {"weight": 1.0}],
    "all four, best and worst": [GRPO, SDPO, SIMPO, BARRIER],
}
REPLAYED = ("replayed preferences", LOW, "all four")
"""The arms whose preferences are pairs of replayed traces; those of the others are a prompt's best and worst
conversation."""
TRACES = 48
"""Prompts of the traces, with two conversations each."""


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
    pairs: int = 0
    """Preference pairs of replayed traces that it trained on."""


def quiet(_: str) -> None:
    """No progress lines."""


def demonstrations(policy: PolicyLike, environment: Environment, prompts: Sequence[Prompt]) -> list[Row]:
    """The oracle's conversations. Every second one is an answer without a call in the built-in environments, and a
    conversation of ``careless`` in an environment that has it."""
    rows: list[Row] = []
    careless = None
    if not isinstance(environment, ToolEnvironment):
        module = importlib.import_module(environment.name.partition("/")[2])
        environment.oracle, careless = module.oracle, getattr(module, "careless", None)  # type: ignore[attr-defined]
    for i, prompt in enumerate(prompts):
        if i % 2 == 0 and careless is not None:
            messages, _ = run_to_end(play(environment, prompt, careless))
            rows.append(conversation_row(policy, environment, messages, 0, i))
            continue
        if i % 2 or not isinstance(environment, ToolEnvironment):
            rows.append(demonstration(policy, environment, prompt, 0, i))
            continue
        said = {"role": "assistant", "content": str(prompt.data.get("code", prompt.data["answer"]))}
        asked, reply = message_tokens(policy, prompt.messages, said, environment.tools)
        rows.append(Row("demonstration", tuple(asked), tuple(reply), i, 0))
    return rows


def warm(task: str, seed: int, folder: Path, model: Mapping[str, Any] | None = None) -> tuple[int, float]:
    """(steps, seconds) of the warm start; the weights go to ``folder``. ``model``: settings of another model."""
    started, start = time.perf_counter(), STARTS["smollm2" if model else task]
    config = RunConfig.model_validate(
        {
            "model": "nano",
            "task": task,
            "sampling": {"max_new_tokens": LENGTH.get(task, 48)},
            "turns": {"max_turns": 4},
            **(model or {}),
            "adapter": {"kind": "full", "layers": start.only and list(start.only)},
            "objective": [{"kind": "sft"}],
            "optimizer": {"kind": "adamw", "lr": start.lr},
            "steps": start.most,
            "seed": seed,
        }
    )
    setup = build(config, quiet)
    assert is_environment(setup.task)
    stream = PromptStream(setup.task, seed)
    rows = demonstrations(setup.policy, setup.task, stream.next(DEMONSTRATIONS))
    prompts, rng = stream.next(16), random.Random(seed)

    def enough(step: int) -> bool:
        if step < start.steps or (step - start.steps) % start.every:
            return False
        return statistics.fmean(a.grade.reward for a in attempt(setup, prompts, 2, step)) >= start.enough

    step = 0
    while step < start.most and not enough(step):
        batch = stack(rng.sample(rows, start.rows), pad=setup.policy.pad_id, device=setup.policy.device)
        setup.engine.step(batch, setup.objective)
        step += 1
    setup.require_local("the warm start").adapter.save(folder, config.model)
    return step, time.perf_counter() - started


def endings(found: HeldOutEvaluation) -> dict[str, float]:
    count = Counter(a.rollout.ending for a in found.attempts if isinstance(a.rollout, Trajectory))
    return {ending: n / len(found.attempts) for ending, n in count.items()}


def replayed(task: str, seed: int, model: Path, folder: Path) -> tuple[Path, int]:
    """(file of pairs, how many), made once. Traces are conversations of the warm-started policy on training prompts. It
    and nano answer each of their turns again, and the environment judges."""
    out = folder / "pairs.parquet"
    if out.exists():
        return out, len(pairs.read(out))
    _, recipe = recipes.read("agent")
    recipe |= {"model": str(model), "task": task, "objective": [GRPO], "seed": seed}
    setup = build(from_mapping(recipe), quiet)
    assert is_environment(setup.task)
    found = attempt(setup, PromptStream(setup.task, derive(seed, "traces") % 2**31).next(TRACES), 2, seed)
    traces = folder / "traces.jsonl"
    with traces.open("w", encoding="utf-8") as file:
        for number, one in enumerate(found):
            assert isinstance(one.rollout, Trajectory)
            about = {"task": task, "data": dict(one.prompt.data)}
            line = {"id": f"trace-{number}", "messages": [logged(m) for m in one.rollout.messages], "meta": about}
            file.write(json.dumps(line | {"tools": list(setup.task.tools)}) + "\n")
    teacher = {"kind": "policy", "temperature": 1.0, "max_tokens": 48}
    settings = {
        "teachers": [teacher | {"name": "warm", "model": str(model), "samples": 2}, teacher | {"name": "nano"}],
        "judge": {"kind": "task"},
        "clean": [{"op": "exact_duplicates", "field": "pair"}],
        "bad_lines": "drop",  # a turn with a malformed call has an answer without a call in the trace
        "seed": seed,
        "out": str(out),
    }
    made = replay(traces, ReplayConfig.model_validate(settings))
    return made.path, len(made.cleaned.pairs)


def logged(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as a log has it: the arguments of calls as JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    kept = {name: message[name] for name in ("role", "content", "tool_call_id") if name in message}
    return kept | ({"tool_calls": calls} if calls else {})


def train(arm: str, terms: Sequence[dict[str, Any]], task: str, seed: int, model: Path, warmed: tuple[int, float],
          args: argparse.Namespace) -> Result:  # fmt: skip
    """The recipe ``agent`` with these terms, from the warm start."""
    started = time.perf_counter()
    _, recipe = recipes.read("agent")
    recipe["sampling"] |= {"max_new_tokens": LENGTH.get(task, 48)}
    recipe |= SMOLLM2 if args.what == "smollm2" else {}
    recipe |= {"model": str(model), "task": task, "objective": list(terms), "seed": seed, "steps": args.steps}
    recipe["eval"] = {"every": 0, "prompts": args.prompts, "samples": 2}
    count = 0
    if args.what == "channels" and arm in REPLAYED:
        place, count = replayed(task, seed, model, model.parent)
        recipe["data"] = {"train": str(place), "heldout": 0.1}
        recipe["optimizer"] |= {"lr": recipe["optimizer"]["lr"] / 10} if arm == LOW else {}
    setup = build(from_mapping(recipe), quiet)
    before = evaluate(setup, 0)
    rewards, spread, idle = _steps(setup, args.steps)
    after = evaluate(setup, args.steps)
    gains = [b - a for a, b in zip(before.means, after.means, strict=True)]
    return Result(
        arm, task, seed, warmed[0], args.steps, args.prompts, before.value, after.value, after.value - before.value,
        standard_error(gains) or float("nan"), endings(before), endings(after), rewards, spread, idle,
        (warmed[1], time.perf_counter() - started), count,
    )  # fmt: skip


def _steps(setup: Setup, steps: int) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    source, rewards, spread, idle = BatchSource(setup), [], [], 0
    for step in range(1, steps + 1):
        found = source.next(step)
        if found.attempts:
            rewards.append(found.reward)
            spread.append(1 - found.metrics["groups_without_spread"])
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
    parser.add_argument("what", choices=["tasks", "verifiers", "channels", "smollm2"])
    parser.add_argument("--tasks", nargs="*", choices=OWN + VERIFIERS, help="default: those in the list above")
    parser.add_argument("--arms", nargs="*", choices=CHANNELS, help="of channels; default: all")
    parser.add_argument("--seeds", nargs="*", type=int, help="default: 0 to 4, 0 to 2 for SmolLM2")
    parser.add_argument("--steps", type=int, help="default: 40, 16 for SmolLM2")
    parser.add_argument("--prompts", type=int, help="held-out prompts, 2 conversations each (64)")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/agents_learn_WHAT.json")
    parser.add_argument("--from", dest="earlier", type=Path, nargs="*", help="print the table of these JSON files")
    args = parser.parse_args(argv)
    if args.earlier:
        found = [result for path in args.earlier for result in read(path)]
        print(table([result for result in found if result.task in (args.tasks or OWN + VERIFIERS)]))
        return 0
    torch.set_num_threads(1)
    small = args.what == "smollm2"
    seeds = range(3 if small else 5) if args.seeds is None else args.seeds
    args.steps, args.prompts = args.steps or (16 if small else 40), args.prompts or 64
    sys.path.insert(0, str(ENVIRONMENTS))
    place = args.json or Path(f"benchmarks/results/agents_learn_{args.what}.json")
    arms = CHANNELS if args.what == "channels" else {"GRPO": [GRPO]}
    tasks = {"tasks": OWN, "verifiers": VERIFIERS, "channels": ("lookup",), "smollm2": ("calculator",)}[args.what]
    place.parent.mkdir(parents=True, exist_ok=True)
    results = read(place) if place.exists() else []
    done = {(r.arm, r.task, r.seed, r.steps, r.prompts) for r in results}
    for seed in seeds:
        for task in args.tasks or tasks:
            todo = [arm for arm in args.arms or arms if (arm, task, seed, args.steps, args.prompts) not in done]
            with tempfile.TemporaryDirectory() as folder:
                warmed = (0, 0.0)
                if todo:
                    warmed = warm(task, seed, Path(folder) / "model", SMOLLM2 if small else None)
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
    """The results in a file of this program. A standard error of null is that of a run in which no reward changed."""
    found = json.loads(place.read_text())["results"]
    return [Result(**one | {"se": float("nan") if one["se"] is None else one["se"]}) for one in found]


if __name__ == "__main__":
    sys.exit(main())
