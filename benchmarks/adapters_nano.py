"""Every adapter on one model, each with its own learning rate: held-out NLL, parameters, step time, bytes.

    python benchmarks/adapters_nano.py [--model nano] [--seeds 3] [--steps 60] [--out FILE.json]

The job is supervised: the answers of a task's training prompts. The learning rate of each variant is chosen on a
validation part from a grid around its default (×0.3, ×1, ×3, ×10), then the seeds are run anew and scored on held-out
prompts. The control is the adapter frozen at birth, which is the base. Spread is the standard deviation over seeds.
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
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    policy = en.load(args.model)
    data = rows_of(policy, args.task, "train", 512)
    fit, valid, held = data[:448], data[448:], rows_of(policy, args.task, "heldout", 128)
    with torch.no_grad():
        control = float(nll(policy.model, held))
    print("| adapter | parameters | lr | held-out NLL | step, CPU ms | bytes |\n|---|---|---|---|---|---|")
    print(f"| control (frozen) | 0 | – | {control:.3f} | – | 0 |", flush=True)
    rows = []
    for label, variant in variants().items():
        if args.only and label not in args.only:
            continue
        grid = {f * variant.lr: 0.0 for f in (0.3, 1.0, 3.0, 10.0)}
        for lr in grid:
            grid[lr] = train(policy.model, variant, lr, 1000, args.steps, fit, valid)["nll"]
        lr = min(grid, key=lambda v: grid[v] if grid[v] == grid[v] else float("inf"))
        runs = [train(policy.model, variant, lr, seed, args.steps, fit, held) for seed in range(args.seeds)]
        scores = [r["nll"] for r in runs]
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        rows.append(
            {"adapter": label, "lr": lr, "nll": statistics.mean(scores), "spread": spread, "runs": runs, "grid": grid}
        )
        print(
            f"| {label} | {runs[0]['parameters']:,} | {lr:.1e} | {statistics.mean(scores):.3f} ± {spread:.3f} | "
            f"{min(r['step_ms'] for r in runs):.0f} | {runs[0]['bytes']:,} |",
            flush=True,
        )
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(
            json.dumps({"control": control, "rows": rows, "args": vars(args)}, indent=2, default=str) + "\n"
        )


if __name__ == "__main__":
    main()
