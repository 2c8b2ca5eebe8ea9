"""Tokens per second of earnest's sampler, transformers' ``generate``, vLLM, and the bare matrix products, in one run.

    python benchmarks/sampling.py                       print the recorded table
    python benchmarks/sampling.py --write [--threads 2] [--repeats 5] [--models nano,smollm2] [--vllm PYTHON]
    python benchmarks/sampling.py --busy [--repeats 5] [--models nano,smollm2] [--rows 1,8,32]

1, 8 and 32 rows (1 × 1, 1 × 8 and 4 × 8 completions of 32 tokens), float32 on a CPU; no token ends a completion, so
every side computes the same number of tokens. All sides return the log-probs of what they sampled. The products are
those that every side needs, and nothing else: the linear layers for the prompts (what all prompts begin with once) and
for 31 of the 32 tokens of each row, and the head for each token; no attention, no choice of a token. ``packed`` are the
same products as the sampler computes them (``earnest.models.packed``): packed weights for several rows, the packing
included, and halves of the weights for one. The sides in this process take turns, and the median over the repeats
counts. vLLM runs in its own environment (`make vllm`) afterwards, with the same number of threads; without the
environment it is left out. ``--busy`` is for a machine with other work: tokens per second of CPU time in one thread,
without vLLM, printed and not written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from earnest.models import Policy

NEW = 32
CASES = {1: (1, 1), 8: (1, 8), 32: (4, 8)}  # rows: prompts, completions of each


def prompts_of(policy: Policy, count: int) -> list[list[int]]:
    from earnest.tasks import get_task

    return [list(policy.render(p.messages)) for p in get_task("sort").prompts("train", count, seed=0)]


def earnest(policy: Policy, prompts: list[list[int]], n: int) -> None:
    from earnest.models import SampleSpec, sample

    done = sample(policy, prompts, n, SampleSpec(max_new_tokens=NEW, stop_ids=()))
    assert all(len(c.tokens) == len(c.logprobs) == NEW for c in done)


def generate(policy: Policy, prompts: list[list[int]], n: int) -> None:
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[policy.pad_id] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out: Any = policy.model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        min_new_tokens=NEW,
        max_new_tokens=NEW,
        num_return_sequences=n,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=policy.pad_id,
    )
    tokens = out.sequences[:, longest:]
    torch.stack(out.logits, 1).log_softmax(-1).gather(-1, tokens[..., None])
    assert tokens.shape == (len(prompts) * n, NEW)


def products(policy: Policy, prompts: list[list[int]], n: int) -> None:
    """The matrix products without which no side can sample."""
    import torch
    from torch import nn

    rows, first, last = len(prompts) * n, min(prompts), max(prompts)  # what these two share, all share
    common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    read = common + sum(len(p) - common for p in prompts)
    head = policy.head.module
    body = [m for m in policy.model.modules() if isinstance(m, nn.Linear) and m is not head]
    with torch.no_grad():
        for tokens in [read] + [rows] * (NEW - 1):
            inputs = {m.in_features: torch.ones(tokens, m.in_features) for m in body}
            for module in body:
                module(inputs[module.in_features])
            policy.head.logits(torch.ones(rows, policy.head.width))


def packed(policy: Policy, prompts: list[list[int]], n: int) -> None:
    from earnest.models.packed import PackedWeights

    with PackedWeights(policy):
        products(policy, prompts, n)


SIDES: dict[str, Callable[[Policy, list[list[int]], int], None]] = {
    "earnest": earnest,
    "generate": generate,
    "products": products,
    "packed": packed,
}


def speed(
    repeats: int, sides: dict[str, Callable[[], None]], tokens: int, now: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Tokens per second of each side: the median over the repeats, after one turn to warm up."""
    clock: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, side in sides.items():
            began = now()
            side()
            if turn:
                clock[name].append(now() - began)
    return {name: tokens / statistics.median(spans) for name, spans in clock.items()}


def vllm_side(folder: str, prompts: list[list[int]], repeats: int) -> None:
    """In vLLM's environment: print its tokens per second by the number of rows."""
    from vllm import LLM, SamplingParams

    found = {}
    llm = LLM(folder, dtype="float32", max_model_len=256, enforce_eager=True, logprobs_mode="processed_logprobs")
    for rows, (count, n) in CASES.items():
        wanted = SamplingParams(n=n, max_tokens=NEW, min_tokens=NEW, ignore_eos=True, logprobs=0)
        given = [{"prompt_token_ids": p} for p in prompts[:count]]

        def side(given: Any = given, wanted: Any = wanted) -> None:
            llm.generate(given, wanted, use_tqdm=False)

        found[rows] = speed(repeats, {"vllm": side}, rows * NEW)["vllm"]
    print("RESULT " + json.dumps(found), flush=True)


def vllm(python: Path, folder: Path, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of vLLM, by the number of rows; empty without its environment."""
    if not python.exists():
        return {}
    given = json.dumps({"folder": str(folder), "prompts": prompts, "repeats": args.repeats})
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": str(args.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    done = subprocess.run(
        [str(python), __file__, "--side", given], capture_output=True, text=True, check=False, env=environment
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(f"the vLLM side failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="measure, and write --out")
    parser.add_argument("--busy", action="store_true", help="measure CPU time in one thread, and print it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", default="nano,smollm2")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--vllm", type=Path, default=Path(".venv-vllm/bin/python"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sampling.json"))
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        vllm_side(**json.loads(args.side))
        return
    if args.busy:
        measure(args)
        return
    if args.write:
        measure(args)
    print(table(json.loads(args.out.read_text())))


def table(made: dict[str, Any]) -> str:
    """The recorded speeds in markdown."""
    lines = [
        "| model | rows | earnest, tokens/s | `generate` | vLLM | products | packed products | products ÷ earnest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in made["results"]:
        found = line["tokens_per_second"]
        other, packs = (f"{found[side]:.0f}" if side in found else "-" for side in ("vllm", "packed"))
        lines.append(
            f"| {line['model']} | {line['rows']} | {found['earnest']:.0f} | {found['generate']:.0f} | {other} | "
            f"{found['products']:.0f} | {packs} | {found['products'] / found['earnest']:.2f} |"
        )
    return "\n".join(lines)


def measure(args: argparse.Namespace) -> None:
    import torch
    from transformers.utils import logging

    from earnest.models import load, places, smollm2

    torch.set_num_threads(1 if args.busy else args.threads)
    logging.set_verbosity_error()
    results = []
    for name in args.models.split(","):
        policy = load(name)
        folder = places.nano_folder() if name == "nano" else smollm2.folder()
        policy.model.generation_config.eos_token_id = None
        theirs = {} if args.busy else vllm(args.vllm, folder, prompts_of(policy, 4), args)
        for rows in map(int, args.rows.split(",")):
            count, n = CASES[rows]
            prompts = prompts_of(policy, count)
            before = os.getloadavg()[0]
            sides = {side: partial(run, policy, prompts, n) for side, run in SIDES.items()}
            found = speed(args.repeats, sides, rows * NEW, time.thread_time if args.busy else time.perf_counter)
            if theirs:
                found["vllm"] = float(theirs[str(rows)])
            ratios = {f"earnest/{other}": found["earnest"] / v for other, v in found.items() if other != "earnest"}
            line = {"model": name, "rows": rows, "tokens_per_second": found, "ratios": ratios, "load": before}
            results.append(line)
            print(
                f"{name:8s} {rows:2d} rows  "
                + "  ".join(f"{k} {v:.0f}" for k, v in found.items())
                + f" tokens/s; products/earnest {found['products'] / found['earnest']:.2f}; load {before:.1f}",
                flush=True,
            )
    if args.busy:
        return
    made = {"threads": args.threads, "repeats": args.repeats, "torch": torch.__version__, "results": results}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
