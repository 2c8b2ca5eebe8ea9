"""The gradient of one batch with padded rows, with packed rows, and with TRL's padding-free rows.

    python benchmarks/packing.py [--model smollm2] [--repeat 2] [--out benchmarks/results/packing.json]
    python benchmarks/packing.py --show          prints what is recorded

ragged    rows of 32 to 512 tokens that fill half of the padded batch, nothing in common
group     4 prompts of 35 tokens × 8 completions of 32: packed rows compute each prompt once
trl       DataCollatorForLanguageModeling(padding_free=True), the loss of SFTTrainer, PEFT's LoRA, torch's attention
LoRA r = 8 on q_proj and v_proj, fp32, AdamW is not part of the time. The layouts take turns; the minimum counts.
``peak`` is what torch's allocator held above the weights at the highest point of one more pass.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
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
    with tempfile.TemporaryDirectory() as folder:
        flat = padding_free(en.load(name), adapter.save(folder))
    found: dict[str, Any] = {}
    for kind, batch in batches.items():
        runs = {layout: partial(engine.gradients, batch, en.SFT()) for layout, engine in engines.items()}
        runs["trl"] = partial(flat, batch)
        seconds: dict[str, list[float]] = {layout: [] for layout in runs}
        gradients: dict[str, dict[str, torch.Tensor]] = {}
        computed = {"trl": sum(batch.lengths) + len(batch)}
        for _ in range(repeat):
            for layout, run in runs.items():
                start = time.perf_counter()
                gradients[layout] = run()
                seconds[layout].append(time.perf_counter() - start)
        for layout, engine in engines.items():
            computed[layout] = sum(p.computed for p in engine.layouts.cut(batch, engine.micro_tokens))
        norms = [sum(float(g.square().sum()) for g in gradients[layout].values()) ** 0.5 for layout in runs]
        assert abs(norms[2] / norms[0] - 1) < 1e-3, f"TRL's gradient has the norm {norms[2]}, not {norms[0]}"
        off = max(
            float((gradients["packed"][n] - g).norm() / g.norm()) for n, g in gradients["padded"].items() if g.any()
        )
        best = {layout: min(clock) for layout, clock in seconds.items()}
        found[kind] = {
            "fill": sum(batch.lengths) / batch.inputs.numel(),
            "seconds": best,
            "computed_tokens": computed,
            "speedup": best["padded"] / best["packed"],
            "peak": {layout: peak(run) for layout, run in runs.items()},
            "gradient_difference": off,
        }
    return found


def padding_free(policy: Any, adapter: Path) -> Callable[[Any], dict[str, Any]]:
    """The gradient of a batch as TRL's SFTTrainer computes it with padding_free=True, by PEFT's LoRA in a folder."""
    import torch
    from peft import PeftModel
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    model = PeftModel.from_pretrained(policy.model, adapter, is_trainable=True)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    collate = DataCollatorForLanguageModeling(pad_token_id=policy.pad_id, padding_free=True)

    def gradients(batch: Any) -> dict[str, torch.Tensor]:
        examples = []
        for row, length in enumerate(batch.lengths):
            own = batch.row == row
            labels = torch.full((length + 1,), -100)
            labels[batch.position[own] + 1] = batch.token_target[own]
            ids = torch.cat([batch.inputs[row, :length], labels[-1:]])
            examples.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
        given = collate(examples)
        model.zero_grad()
        count = (given["labels"] != -100).sum()
        model(**given, num_items_in_batch=count, use_cache=False).loss.backward()  # as SFTTrainer calls it
        return {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}

    return gradients


def peak(run: Callable[[], Any]) -> int:
    """How far the bytes that torch's allocator holds rise while ``run`` runs."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    now = highest = 0
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest


def table(result: dict[str, Any]) -> str:
    """A markdown table."""
    lines = [
        f"| {result['model']}, {result['threads']} thread(s) | fill | layout | time | tokens | peak "
        "| padded / this | gradient |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = {"padded": "padded", "packed": "packed", "trl": "TRL, padding-free"}
    for kind, m in result["batches"].items():
        for layout, seconds in m["seconds"].items():
            off = f"{m['gradient_difference']:.1g} from padded" if layout == "packed" else ""
            lines.append(
                f"| {kind} | {m['fill']:.0%} | {names[layout]} | {seconds:.1f} s | {m['computed_tokens'][layout]:,} "
                f"| {m['peak'][layout] / 1e6:,.0f} MB | {m['seconds']['padded'] / seconds:.2f}× | {off} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/packing.json"))
    parser.add_argument("--show", action="store_true", help="print what is recorded, and measure nothing")
    args = parser.parse_args()
    if args.show:
        print(table(json.loads(args.out.read_text())))
        return
    import torch

    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    torch.set_num_threads(threads)
    result = {"model": args.model, "threads": threads, "batches": measure(args.model, args.repeat)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
