"""Every adapter on one model, each with its own learning rate: held-out NLL, parameters, step time, bytes.

    python benchmarks/adapters_nano.py [--model nano] [--seeds 3] [--steps 60] [--out FILE.json]
    python benchmarks/adapters_nano.py --table [--out FILE.json]        the table of an earlier run

The job is supervised: the answers of a task's training prompts. The learning rate of each variant is chosen on a
validation part from a grid around its default (×0.3, ×1, ×3, and on by 3 while the best is at an end), then the seeds
are run anew and scored on held-out prompts. The control is the adapter frozen at initialization, which is the base. The
spread is the standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import earnest as en
from earnest.adapters.conformance import subjects
from earnest.adapters.variant import Variant, get_variant

RANK8 = {"lora", "pissa", "dora", "delora", "hra", "eva"}


def variants() -> dict[str, Variant]:
    """One of each kind, rank 8 where there is a rank."""
    out: dict[str, Variant] = {}
    for label, (name, settings) in subjects().items():
        settings = settings | ({"rank": 8} if name in RANK8 else {"rank": 64} if name == "vera" else {})
        out[label] = get_variant(name, **settings)
    return out


def rows_of(policy: Any, task: str, split: str, count: int) -> list[tuple[list[int], int]]:
    """(ids, length of the prompt) of prompts with their right answers."""
    from earnest.tasks import get_task

    out = []
    for prompt in get_task(task).prompts(split, count, seed=0):
        head = list(policy.render(prompt.messages))
        answer = policy.tokenizer(str(prompt.data["answer"]), add_special_tokens=False)["input_ids"]
        out.append((head + list(answer), len(head)))
    return out


def nll(model: nn.Module, rows: list[tuple[list[int], int]]) -> Tensor:
    """Mean negative log-likelihood of the answers' tokens."""
    width = max(len(ids) for ids, _ in rows)
    inputs = torch.zeros(len(rows), width, dtype=torch.long)
    mask, attention = torch.zeros(len(rows), width), torch.zeros(len(rows), width, dtype=torch.long)
    for i, (ids, start) in enumerate(rows):
        inputs[i, : len(ids)], mask[i, start : len(ids)], attention[i, : len(ids)] = torch.tensor(ids), 1.0, 1
    logits = model(input_ids=inputs, attention_mask=attention).logits[:, :-1]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), inputs[:, 1:].flatten(), reduction="none")
    weight = mask[:, 1:].flatten()
    return (loss * weight).sum() / weight.sum()


def train(
    model: nn.Module, variant: Variant, lr: float, seed: int, steps: int, data: Any, score: Any
) -> dict[str, float]:
    calibration = None
    if variant.wants_calibration():
        calibration = [torch.tensor([ids]) for ids, _ in data[:32]]
    adapter = en.attach(model, variant, targets="all-linear", calibration=calibration, seed=seed)
    groups = [{"params": adapter.decay_parameters()}, {"params": adapter.no_decay_parameters(), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, weight_decay=0.01)
    rng = torch.Generator().manual_seed(seed)
    clock = []
    for _ in range(steps):
        picked = [data[i] for i in torch.randint(0, len(data), (16,), generator=rng).tolist()]
        start = time.process_time()
        optimizer.zero_grad()
        nll(model, picked).backward()
        nn.utils.clip_grad_norm_(adapter.parameters(), 1.0)
        optimizer.step()
        clock.append(time.process_time() - start)
    with torch.no_grad():
        value = float(nll(model, score))
    facts = {"nll": value, "parameters": adapter.report.trainable, "step_ms": 1e3 * min(clock)}
    facts["bytes"] = 4 * (adapter.report.trainable + adapter.report.frozen)
    adapter.detach()
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--task", default="sort")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", nargs="+", default=None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/adapters_nano.json"))
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.out.read_text())))
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    policy = en.load(args.model)
    data = rows_of(policy, args.task, "train", 512)
    fit, valid, held = data[:448], data[448:], rows_of(policy, args.task, "heldout", 128)
    with torch.no_grad():
        control = float(nll(policy.model, held))
    rows: list[dict[str, Any]] = []
    found = {"control": control, "rows": rows, "args": {k: str(v) for k, v in vars(args).items()}}
    for label, variant in variants().items():
        if args.only and label not in args.only:
            continue
        grid = tune(policy.model, variant, args.steps, fit, valid)
        lr = min(grid, key=lambda v: grid[v])
        runs = [train(policy.model, variant, lr, seed, args.steps, fit, held) for seed in range(args.seeds)]
        scores = [r["nll"] for r in runs]
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        rows.append(
            {"adapter": label, "lr": lr, "nll": statistics.mean(scores), "spread": spread, "runs": runs, "grid": grid}
        )
        print(f"{label}: {rows[-1]['nll']:.3f} ± {spread:.3f} at {lr:.1e}", flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def tune(model: nn.Module, variant: Variant, steps: int, fit: Any, valid: Any) -> dict[float, float]:
    """Validation NLL by learning rate; the grid is extended up or down while its last value is the best."""
    grid: dict[float, float] = {}

    def ask(factor: float) -> None:
        value = train(model, variant, factor * variant.lr, 1000, steps, fit, valid)["nll"]
        grid[factor * variant.lr] = value if value == value else float("inf")

    def best() -> float:
        return min(grid, key=lambda v: grid[v])

    low, high = 0.3, 10 / 3
    for factor in (low, 1.0, high):
        ask(factor)
    while len(grid) < 8 and best() in (min(grid), max(grid)):
        if best() == max(grid):
            high *= 10 / 3
            ask(high)
        else:
            low *= 0.3
            ask(low)
    return grid


def table(found: dict[str, Any]) -> str:
    lines = ["| adapter | parameters | lr | held-out NLL | step, CPU ms | bytes |", "|---|---|---|---|---|---|"]
    lines.append(f"| control (frozen) | 0 | | {found['control']:.3f} | | 0 |")
    for row in found["rows"]:
        first = row["runs"][0]
        score = f"{row['nll']:.3f} ± {row['spread']:.3f}"
        cost = f"{min(r['step_ms'] for r in row['runs']):.0f} | {first['bytes']:,}"
        lines.append(f"| {row['adapter']} | {first['parameters']:,} | {row['lr']:.1e} | {score} | {cost} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
