"""earnest's adapters against PEFT's on the same layers: time, bytes kept for backward, overhead per call, attach time.

    python benchmarks/adapters.py [--quick] [--only lora dora] [--clock cpu] [--out benchmarks/results/adapters.json]
    python benchmarks/adapters.py --table benchmarks/results/adapters.json        the table of an earlier run

Both sides run in one process, alternating, and the smallest of several times counts; the ratio is PEFT ÷ earnest, so
above 1 is in earnest's favour. A layer is 2048², 512 tokens, r = 32, fp32, forward + backward with a gradient for the
input as in the middle of a model. If PEFT has no such method, the table names the method that is compared. "Adapter
alone" is the time minus that of the bare layer. On a CPU, ratios near 1 are noise.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

warnings.filterwarnings("ignore")

import peft  # noqa: E402

from earnest.adapters import (  # noqa: E402
    EVA,
    HRA,
    IA3,
    IA3FF,
    OFT,
    ROAD,
    AntiPaSTO,
    DeLoRA,
    DoRA,
    LoRA,
    PiSSA,
    Variant,
    VeRA,
    attach,
)  # fmt: skip


def methods(rank: int) -> dict[str, tuple[Variant, Callable[[list[str]], Any], str]]:
    """Name -> (ours, PEFT's config for targets, what PEFT's side is)."""
    lora = lambda t, **k: peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=t, **k)  # noqa: E731
    a = 2.0 * rank
    return {
        "lora": (LoRA(rank, a), lora, "LoRA"),
        "pissa": (PiSSA(rank, a, niter=2), lambda t: lora(t, init_lora_weights="pissa_niter_2"), "PiSSA"),
        "dora": (DoRA(rank, a), lambda t: lora(t, use_dora=True), "DoRA"),
        "delora": (DeLoRA(rank), lambda t: peft.DeloraConfig(r=rank, target_modules=t), "DeLoRA, B = 0"),
        "delora (zero)": (DeLoRA(rank, 8.0, "zero"), lambda t: peft.DeloraConfig(r=rank, target_modules=t), "DeLoRA"),
        "ia3": (IA3(), lambda t: peft.IA3Config(target_modules=t, feedforward_modules=[]), "IA3"),
        "ia3_ff": (IA3FF(), lambda t: peft.IA3Config(target_modules=t, feedforward_modules=t), "IA3, feedforward"),
        "hra": (HRA(rank), lambda t: peft.HRAConfig(r=rank, target_modules=t), "HRA"),
        "eva": (EVA(rank, a), lora, "LoRA (EVA after its init)"),
        "antipasto": (AntiPaSTO(rank, 4, niter=2), lora, "LoRA of the same rank"),
        "road": (ROAD(), lambda t: peft.RoadConfig(variant="road_1", target_modules=t), "RoAd"),
        "oft": (OFT(32), lambda t: peft.OFTConfig(oft_block_size=32, target_modules=t), "OFT, 5-term series"),
        "vera": (VeRA(256), lambda t: peft.VeraConfig(r=256, target_modules=t), "VeRA"),
    }  # fmt: skip


CLOCK: Callable[[], float] = time.perf_counter


class Layer(nn.Module):
    """One linear layer as a model, with the token ids of calibration as its input rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width, bias=False)
        self.table = nn.Embedding(64, width)

    def forward(self, x: Tensor | None = None, input_ids: Tensor | None = None) -> Tensor:
        out: Tensor = self.proj(self.table(input_ids) if x is None else x)
        return out


def calibration() -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.arange(64)[None]}]


def ours(model: nn.Module, variant: Variant, targets: list[str]) -> nn.Module:
    adapter = attach(
        model, variant, targets=targets, calibration=calibration() if variant.wants_calibration() else None
    )
    perturb(adapter.parameters())
    return model


def theirs(model: nn.Module, config: Any) -> nn.Module:
    wrapped = peft.get_peft_model(model, config)
    perturb([p for p in wrapped.parameters() if p.requires_grad])
    return wrapped


def perturb(parameters: list[nn.Parameter]) -> None:
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in parameters:
            p.add_(1e-3 * torch.randn(p.shape, generator=rng))


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of distinct storages kept for backward, the model's own parameters and buffers left out."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(t)  # so that no address is used twice
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    return sum(kept.values())


def alternate(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Smallest seconds of each, measured in turns."""
    best = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    gc.disable()
    try:
        for _ in range(repeats):
            for name, run in runs.items():
                start = CLOCK()
                run()
                best[name] = min(best[name], CLOCK() - start)
    finally:
        gc.enable()
    return best


def backward_of(model: nn.Module, x: Tensor, g: Tensor) -> Callable[[], None]:
    parameters = [p for p in model.parameters() if p.requires_grad]

    def run() -> None:
        x.grad = None
        for p in parameters:
            p.grad = None
            p.detach().mul_(1.0)  # an optimizer step happens between two of them: nothing may be cached across
        model(x).backward(g)

    return run


def times(row: dict[str, Any]) -> str:
    return f"earnest {row['earnest_ms']:8.1f} ms  peft {row['peft_ms']:8.1f} ms"


def layer_table(names: list[str], width: int, tokens: int, rank: int, repeats: int) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        variant, config, what = methods(rank)[name]
        torch.manual_seed(0)
        base = Layer(width)
        sides = {"earnest": ours(Layer(width), variant, ["proj"]), "peft": theirs(Layer(width), config(["proj"]))}
        x, g = torch.randn(1, tokens, width, requires_grad=True), torch.randn(1, tokens, width)
        kept = {side: saved_bytes(model, x) for side, model in sides.items()}
        for p in base.parameters():
            p.requires_grad_(False)
        runs = {side: backward_of(model, x, g) for side, model in sides.items()} | {"base": backward_of(base, x, g)}
        best = alternate(runs, repeats)
        extra = {side: max(best[side] - best["base"], 1e-6) for side in sides}
        rows.append({
            "variant": name, "peft": what, "base_ms": 1e3 * best["base"], "earnest_ms": 1e3 * best["earnest"],
            "peft_ms": 1e3 * best["peft"], "ratio": best["peft"] / best["earnest"],
            "ratio_of_adapter_cost": extra["peft"] / extra["earnest"],
            "earnest_saved_mib": kept["earnest"] / 2**20, "peft_saved_mib": kept["peft"] / 2**20,
            "ratio_saved": kept["peft"] / kept["earnest"],
        })  # fmt: skip
        row = rows[-1]
        say(f"layer    {name:14s} {times(row)}  base {row['base_ms']:7.1f} ms  ×{row['ratio']:.2f} "
            f"(adapter alone ×{row['ratio_of_adapter_cost']:.2f})  saved ×{row['ratio_saved']:.1f}")  # fmt: skip
    return rows


def small_llama(width: int, blocks: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=1024, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=blocks,
        num_attention_heads=8, num_key_value_heads=8,
    ))  # fmt: skip


def model_table(
    names: list[str], width: int, blocks: int, tokens: int, rank: int, repeats: int
) -> list[dict[str, Any]]:
    rows = []
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    ids = torch.randint(0, 1024, (4, tokens // 4))
    for name in names:
        variant, config, what = methods(rank)[name]
        sides = {"earnest": small_llama(width, blocks), "peft": small_llama(width, blocks)}
        sides = {"earnest": ours(sides["earnest"], variant, targets), "peft": theirs(sides["peft"], config(targets))}

        def step(model: nn.Module) -> Callable[[], None]:
            parameters = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(parameters, lr=1e-5)

            def run() -> None:
                optimizer.zero_grad()
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()

            return run

        best = alternate({side: step(model) for side, model in sides.items()}, repeats)
        rows.append({
            "variant": name, "peft": what, "earnest_ms": 1e3 * best["earnest"], "peft_ms": 1e3 * best["peft"],
            "ratio": best["peft"] / best["earnest"],
        })  # fmt: skip
        say(f"model    {name:14s} {times(rows[-1])}  ×{rows[-1]['ratio']:.2f}")
    return rows


def call_table(names: list[str], repeats: int) -> list[dict[str, Any]]:
    """Overhead of one call with one token through a 64×64 layer, over the bare layer."""
    rows, inner = [], 200
    for name in names:
        variant, config, _ = methods(8)[name]
        if isinstance(variant, VeRA):
            variant = VeRA(8)
        sides = {
            "earnest": ours(Layer(64), variant, ["proj"]),
            "peft": theirs(Layer(64), config(["proj"])),
            "base": Layer(64),
        }
        x = torch.randn(1, 1, 64)
        row: dict[str, Any] = {"variant": name}
        for mode in ("sampling", "training"):

            def calls(model: nn.Module, mode: str = mode, x: Tensor = x) -> Callable[[], None]:
                def run() -> None:
                    with torch.set_grad_enabled(mode == "training"):
                        for _ in range(inner):
                            model(x)

                return run

            best = alternate({s: calls(m) for s, m in sides.items()}, repeats)
            over = {s: 1e6 * (best[s] - best["base"]) / inner for s in ("earnest", "peft")}
            row |= {f"earnest_us_{mode}": over["earnest"], f"peft_us_{mode}": over["peft"],
                    f"ratio_{mode}": over["peft"] / max(over["earnest"], 1e-3)}  # fmt: skip
        rows.append(row)
        say(f"one call {name:14s} sampling {row['earnest_us_sampling']:6.0f} µs vs {row['peft_us_sampling']:6.0f} µs  "
            f"training {row['earnest_us_training']:6.0f} µs vs {row['peft_us_training']:6.0f} µs")  # fmt: skip
    return rows


def attach_times(layers: int, width: int, repeats: int) -> dict[str, Any]:
    """A model of many linear layers: attach against get_peft_model, LoRA of rank 32."""

    def many() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    names = [str(i) for i in range(layers)]
    best = {"earnest": float("inf"), "peft": float("inf"), "detach": float("inf")}
    for _ in range(repeats):
        model = many()
        start = time.perf_counter()
        adapter = attach(model, LoRA(32), targets=names)
        best["earnest"] = min(best["earnest"], time.perf_counter() - start)
        start = time.perf_counter()
        adapter.detach()
        best["detach"] = min(best["detach"], time.perf_counter() - start)
        model = many()
        start = time.perf_counter()
        peft.get_peft_model(model, peft.LoraConfig(r=32, target_modules=names))
        best["peft"] = min(best["peft"], time.perf_counter() - start)
    say(f"attach to {layers} layers: " + ", ".join(f"{side} {seconds:.3f} s" for side, seconds in best.items()))
    return {"layers": layers, "width": width, "earnest_s": best["earnest"], "peft_s": best["peft"],
            "detach_s": best["detach"], "ratio": best["peft"] / best["earnest"]}  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """One row per variant; × is PEFT ÷ earnest."""
    models = {r["variant"]: r for r in result["model"]}
    calls = {r["variant"]: r for r in result["call"]}
    lines = [
        "| variant | PEFT's side | layer × | what it adds × | bytes kept × | small model × | sampling call, µs "
        "| training call, µs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["layer"]:
        name, added = row["variant"], row["ratio_of_adapter_cost"]
        call = calls[name]
        both = [f"{call[f'earnest_us_{m}']:.0f} / {call[f'peft_us_{m}']:.0f}" for m in ("sampling", "training")]
        # A few ms of a hundred: if either side is below the noise, the ratio means nothing.
        added = f"{added:.1f}" if min(row["earnest_ms"], row["peft_ms"]) > 1.06 * row["base_ms"] else "–"
        lines.append(
            f"| {name} | {row['peft']} | {row['ratio']:.2f} | {added} | {row['ratio_saved']:.2f} | "
            f"{models[name]['ratio']:.2f} | {both[0]} | {both[1]} |"
        )
    return "\n".join(lines)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    every = list(methods(32))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: checks that it runs; the numbers mean nothing"
    )
    parser.add_argument("--only", nargs="+", choices=every, default=every, help="these variants")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a machine with other jobs")
    parser.add_argument("--tables", nargs="+", choices=("layer", "model", "call", "attach"), default=None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of this earlier result, and run nothing")
    args = parser.parse_args()
    if args.table is not None:
        print(table(json.loads(args.table.read_text(encoding="utf-8"))))
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    global CLOCK
    CLOCK = time.process_time if args.clock == "cpu" else time.perf_counter  # cpu: single-threaded runs only
    quick = args.quick
    wanted = args.tables or ("layer", "model", "call", "attach")
    repeats = 1 if quick else args.repeats
    result: dict[str, Any] = {
        "environment": {"torch": torch.__version__, "peft": peft.__version__, "threads": torch.get_num_threads(),
                        "platform": platform.platform(), "cores": os.cpu_count(), "quick": quick, "clock": args.clock},
    }  # fmt: skip
    width, tokens, rank = (256, 64, 8) if quick else (2048, 512, 32)
    small, blocks = (64, 2) if quick else (512, 4)
    tables: dict[str, Callable[[], Any]] = {
        "layer": lambda: layer_table(args.only, width, tokens, rank, repeats),
        "model": lambda: model_table(args.only, small, blocks, tokens, rank, repeats),
        "call": lambda: call_table(args.only, 1 if quick else 2 * repeats),
        "attach": lambda: attach_times(30 if quick else 300, 64 if quick else 256, 1 if quick else 3),
    }
    result |= {name: tables[name]() for name in wanted}
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        say(f"written: {args.out}")


if __name__ == "__main__":
    main()
