"""The gradient of one batch with padded and with packed rows: seconds, computed tokens, largest difference.

    python benchmarks/packing.py [--model smollm2] [--repeat 2] [--out benchmarks/results/packing.json]

ragged    rows of 32 to 512 tokens that fill half of the padded batch, nothing in common
group     4 prompts of 35 tokens × 8 completions of 32: each prompt is computed once
LoRA r = 8 on q_proj and v_proj, fp32, AdamW is not part of the time. The layouts take turns; the minimum counts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

RAGGED = (512, 352, 256, 128, 32)


def measure(name: str, repeat: int) -> dict[str, Any]:
    import torch

    import earnest as en
    from earnest.signals import Batch

    policy = en.load(name)
    g = torch.Generator().manual_seed(0)
    limit = min(512, policy.positions or 512)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, policy.head.weight.shape[0], (n,), generator=g).tolist()

    ragged = [min(n, limit) for n in RAGGED]
    prompts = [tokens(35) for _ in range(4)]
    batches = {
        "ragged": Batch.from_rows([tokens(8) for _ in ragged], [tokens(n - 7) for n in ragged], role="demonstration"),
        "group": Batch.from_rows(
            [p for p in prompts for _ in range(8)], [tokens(32) for _ in range(32)], role="demonstration"
        ),
    }
    adapter = en.attach(policy, en.LoRA(rank=8), targets=("q_proj", "v_proj"))
    engines = {
        layout: en.LocalEngine(policy, adapter, pack=layout == "packed", micro_tokens=4096)
        for layout in ("padded", "packed")
    }
    found: dict[str, Any] = {}
    for kind, batch in batches.items():
        seconds: dict[str, list[float]] = {layout: [] for layout in engines}
        gradients, computed = {}, {}
        for _ in range(repeat):
            for layout, engine in engines.items():
                start = time.perf_counter()
                gradients[layout] = engine.gradients(batch, en.SFT())
                seconds[layout].append(time.perf_counter() - start)
                computed[layout] = sum(p.computed for p in engine.layouts.cut(batch, engine.micro_tokens))
        off = max(
            float((gradients["packed"][n] - g).norm() / g.norm()) for n, g in gradients["padded"].items() if g.any()
        )
        best = {layout: min(clock) for layout, clock in seconds.items()}
        found[kind] = {
            "fill": sum(batch.lengths) / batch.inputs.numel(),
            "seconds": best,
            "computed_tokens": computed,
            "speedup": best["padded"] / best["packed"],
            "gradient_difference": off,
        }
    return found


def table(result: dict[str, Any]) -> str:
    """A markdown table."""
    lines = [
        f"| {result['model']}, {result['threads']} thread(s) | fill | padded | packed | tokens | faster | gradient |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, m in result["batches"].items():
        s, c = m["seconds"], m["computed_tokens"]
        lines.append(
            f"| {kind} | {m['fill']:.0%} | {s['padded']:.1f} s | {s['packed']:.1f} s "
            f"| {c['padded']:,} → {c['packed']:,} | {m['speedup']:.2f}× | {m['gradient_difference']:.1g} apart |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/packing.json"))
    args = parser.parse_args()
    import torch

    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    torch.set_num_threads(threads)
    result = {"model": args.model, "threads": threads, "batches": measure(args.model, args.repeat)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
