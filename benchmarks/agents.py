"""Tokens per second of conversations with tools that take 0, 50 or 500 ms, against turn-by-turn lockstep.

    python benchmarks/agents.py [--rows 32] [--prompts 32] [--completions 8] [--turns 4] [--write]

nano talks to an environment whose reply takes a fixed time. In lockstep all rows of a batch sample their turn, then all
environments reply (at the same time, or one after the other), then the next turn; the next batch begins when all
conversations of this one have ended. Continuous: a conversation that waits for its tool holds no row, and the rows that
are free decode for the others. All sides have the same prompts, the same limits and the same number of rows at once.
``--write`` writes benchmarks/results/agents.json; without it the recorded table is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import earnest as en
from earnest.models import SampleSpec
from earnest.rollouts import TurnSettings, graded
from earnest.rollouts.conversing import plain_message
from earnest.rollouts.transcript import Transcript
from earnest.tasks import Ending, Grade, Message, Opening, Prompt, Split, StepResult

RESULTS = Path(__file__).parent / "results" / "agents.json"
LATENCIES = (0.0, 0.05, 0.5)
SPEC = SampleSpec(max_new_tokens=16, seed=1)


@dataclass
class Slow:
    """Replies after ``latency`` seconds, for ``turns`` turns."""

    latency: float
    turns: int
    name: str = "slow"
    description: str = "replies late"
    tools: Sequence[Mapping[str, Any]] = ()

    def prompts(self, split: Split, count: int, seed: int) -> list[Prompt]:
        return en.get_task("sort").prompts(split, count, seed)

    async def reset(self, prompt: Prompt, seed: int) -> Opening:
        return Opening(prompt.messages, {"turns": 0})

    async def step(self, state: dict[str, int], message: Message) -> StepResult:
        await asyncio.sleep(self.latency)
        state["turns"] += 1
        done = state["turns"] >= self.turns
        return StepResult(() if done else ({"role": "user", "content": "sort 9 2 4 again"},), done)

    async def grade(self, state: dict[str, int], ending: Ending) -> Grade:
        return Grade(0.0, "", False)


def continuous(engine: en.LocalEngine, world: Slow, prompts: Sequence[Prompt], n: int, rows: int) -> int:
    settings = TurnSettings(max_turns=world.turns, at_once=rows)
    found = graded(engine, world, prompts, n, SPEC, settings)  # type: ignore[arg-type]
    return sum(len(a.rollout.tokens) for a in found.attempts)


def lockstep(engine: en.LocalEngine, world: Slow, prompts: Sequence[Prompt], rows: int, *, together: bool) -> int:
    return sum(
        asyncio.run(_batch(engine, world, prompts[i : i + rows], i, together)) for i in range(0, len(prompts), rows)
    )


async def _batch(engine: en.LocalEngine, world: Slow, prompts: Sequence[Prompt], first: int, together: bool) -> int:
    openings = [await world.reset(prompt, 0) for prompt in prompts]
    alive = [(Transcript(engine.policy, o.messages), o.state) for o in openings]
    tokens = 0
    for turn in range(world.turns):
        spec = replace(SPEC, seed=SPEC.seed + 1000 * first + turn)
        rollouts = engine.sample([transcript.prompt for transcript, _ in alive], 1, spec)
        tokens += sum(len(r.tokens) for r in rollouts)
        messages = [plain_message(engine.policy, r.prompt, r.tokens) for r in rollouts]
        for (transcript, _), rollout, message in zip(alive, rollouts, messages, strict=True):
            transcript.turn(rollout, message)
        work = [world.step(state, message) for (_, state), message in zip(alive, messages, strict=True)]
        steps = await asyncio.gather(*work) if together else [await one for one in work]
        going = []
        for pair, rollout, step in zip(alive, rollouts, steps, strict=True):
            if not step.done and rollout.finish == "stop":
                pair[0].observe(step.messages)
                going.append(pair)
        alive = going
        if not alive:
            break
    return tokens


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    policy = en.load("nano")
    engine = en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=8), seed=0))
    prompts = Slow(0, 1).prompts("train", args.prompts, 0)
    each = [prompt for prompt in prompts for _ in range(args.completions)]
    continuous(engine, Slow(0.0, 2), prompts[:4], 2, 8)  # warms up
    results = []
    for latency in LATENCIES:
        world, row = Slow(latency, args.turns), {"latency_ms": 1000 * latency}
        sides = {
            "continuous": lambda w=world: continuous(engine, w, prompts, args.completions, args.rows),
            "lockstep": lambda w=world: lockstep(engine, w, each, args.rows, together=True),
        }
        for name, side in sides.items():
            started = time.perf_counter()
            tokens = side()
            row[name] = tokens / (time.perf_counter() - started)
        started = time.perf_counter()  # one batch is enough here: every batch takes the same time
        tokens = lockstep(engine, world, each[: args.rows], args.rows, together=False)
        row["one_after_the_other"] = tokens / (time.perf_counter() - started)
        print(json.dumps(row), flush=True)
        results.append(row)
    return {
        "rows": args.rows,
        "prompts": args.prompts,
        "completions": args.completions,
        "turns": args.turns,
        "results": results,
    }


def table(found: dict[str, Any]) -> str:
    lines = [
        "| a tool takes | continuous | lockstep, tools together | ratio | lockstep, tool after tool | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for r in found["results"]:
        a, b, c = r["continuous"], r["lockstep"], r["one_after_the_other"]
        lines.append(f"| {r['latency_ms']:.0f} ms | {a:.0f} | {b:.0f} | {a / b:.1f} | {c:.0f} | {a / c:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.write:
        RESULTS.write_text(json.dumps(measure(args), indent=1) + "\n", encoding="utf-8")
    print(table(json.loads(RESULTS.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
