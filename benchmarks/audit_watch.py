"""What does the watch cost in a training loop?

    python -m benchmarks.audit_watch [--width 512] [--rows 12] [--steps 120] [--out benchmarks/results/audit_watch.json]

At the default size a step takes half a second or more on one thread, like a real step. Both sides are in one run: the
time inside the watch's calls (all synchronous) against the rest of the loop, once without terms and once with two.
The watch measures the first four updates and every tenth, and the gradient of each term once in 200 updates, so its
share is smaller in a longer run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from earnest_audit import watch
from earnest_audit.watching.watcher import Watch


def model_of(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(512, width), *blocks, nn.Linear(width, 512))


def measure(width: int, layers: int, rows: int, steps: int, terms: int) -> dict[str, Any]:
    model = model_of(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inside = 0.0
    with watch(model, optimizer) as w:
        _timed(w)
        times: list[float] = []
        for _ in range(steps):
            begin = time.perf_counter()
            ids = torch.randint(0, 512, (rows, 33))
            logits = model(ids[:, :-1])
            likelihood = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            entropy = -0.01 * torch.distributions.Categorical(logits=logits).entropy().mean()
            loss = likelihood + entropy
            if terms:
                w.terms({"likelihood": likelihood, "entropy": entropy})
            loss.backward()
            w.step(loss, {"loss": loss}, mask=torch.ones(rows, 32), advantages=torch.randn(rows))
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - begin)
        inside = SPENT[0]
    total = sum(times)
    return {
        "steps": steps,
        "terms": terms,
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_seconds": statistics.median(times),
        "watch_share": inside / (total - inside),
        "holds": w.verdict().holds,
    }


SPENT = [0.0]


def _timed(w: Watch) -> None:
    """Count the time inside the watch's calls. They are synchronous, so this is the whole cost."""
    SPENT[0] = 0.0
    for name in ("terms", "step", "before_update", "after_update"):
        own = getattr(w, name)

        def call(*args: Any, _own: Any = own, **kwargs: Any) -> None:
            begin = time.perf_counter()
            try:
                _own(*args, **kwargs)
            finally:
                SPENT[0] += time.perf_counter() - begin

        setattr(w, name, call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/audit_watch.json"))
    parser.add_argument("--table", action="store_true", help="print a markdown table from --out instead of running")
    args = parser.parse_args()
    if args.table:
        found = json.loads(args.out.read_text())
    else:
        torch.set_num_threads(1)
        found = [measure(args.width, args.layers, args.rows, args.steps, terms) for terms in (0, 2)]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    print("| parameters | terms | updates | seconds a step | the watch's share |\n|---|---|---|---|---|")
    for one in found:
        print(
            f"| {one['parameters'] / 1e6:.0f} M | {one['terms'] or 'not given'} | {one['steps']} "
            f"| {one['step_seconds']:.2f} | {one['watch_share']:.1%} |"
        )


if __name__ == "__main__":
    main()
