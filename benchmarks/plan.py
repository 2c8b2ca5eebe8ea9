"""Memory that ``earnest plan`` predicts, against measured peaks on this machine.

    python benchmarks/plan.py [--only nano] [--out benchmarks/results/plan.json]      measures and records
    python benchmarks/plan.py --show           prints what is recorded
    python benchmarks/plan.py --paper          larger models on GPUs, predicted only (about a minute)

Every case runs in a process of its own, or in two that share the base (then the numbers are rank 0's): a training step
(the second one, so the optimizer has its state) and sampling. ``measured`` is what torch's allocator held at the
highest point (torch.profiler), with the weights, the adapter and the optimizer's state; ``process`` is how far the
resident memory of the process rose above its value before the model existed, which includes the memory of libraries and
what the allocator does not give back.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
LORA = "adapter={kind: lora, rank: 8, targets: all-linear}"
# name: (model, tokens of a row, overrides); a mapping is the config of a model with random weights
BILLION = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CASES: dict[str, tuple[str | dict[str, Any], int, list[str]]] = {
    "nano, LoRA": ("nano", 96, [LORA, "sampling.max_new_tokens=64"]),
    "nano, padded": ("nano", 96, [LORA, "sampling.max_new_tokens=64", "engine.pack=false"]),
    "nano, checkpointed": ("nano", 96, [LORA, "sampling.max_new_tokens=64", "engine.checkpoint_activations=true"]),
    "nano, full": ("nano", 96, ["adapter={kind: full}", "sampling.max_new_tokens=64"]),
    "nano, nf4": ("nano", 96, [LORA, "sampling.max_new_tokens=64", "dtype=nf4"]),
    "nano, LoRA, 2 ranks": ("nano", 96, [LORA, "sampling.max_new_tokens=64", "engine.shard=2"]),
    "nano, full, 2 ranks": ("nano", 96, ["adapter={kind: full}", "sampling.max_new_tokens=64", "engine.shard=2"]),
    "smollm2, LoRA": ("smollm2", 80, [LORA, "sampling.max_new_tokens=32", "micro_tokens=640"]),
    "smollm2, nf4": ("smollm2", 80, [LORA, "sampling.max_new_tokens=32", "micro_tokens=640", "dtype=nf4"]),
    "smollm2, checkpointed": (
        "smollm2",
        80,
        [LORA, "sampling.max_new_tokens=32", "micro_tokens=640", "engine.checkpoint_activations=true"],
    ),
    "1B, LoRA": (BILLION, 64, [LORA, "sampling.max_new_tokens=16", "micro_tokens=256"]),
    "1B, bfloat16": (BILLION, 64, [LORA, "sampling.max_new_tokens=16", "micro_tokens=256", "dtype=bfloat16"]),
}
SEVEN = BILLION | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SEVENTY = BILLION | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
CHECKPOINTED = "engine.checkpoint_activations=true"
# model, name, GPUs, bytes of each, settings
PAPER: list[tuple[dict[str, Any], str, int, int, list[str]]] = [
    (SEVEN, "7B", 1, 80, []),
    (SEVEN, "7B", 1, 24, ["dtype=nf4", CHECKPOINTED, "sampling.prompts_per_step=2", "eval.prompts=2"]),
    (SEVEN, "7B", 8, 80, ["engine.replicate=8"]),
    (SEVEN, "7B", 8, 24, ["engine.shard=8", CHECKPOINTED]),
    (SEVEN, "7B", 32, 80, ["engine.replicate=32"]),
    (SEVENTY, "70B", 8, 80, ["engine.shard=8", CHECKPOINTED]),
    (SEVENTY, "70B", 32, 80, ["engine.shard=8", "engine.replicate=4", CHECKPOINTED]),
    (SEVENTY, "70B", 32, 80, ["engine.shard=32", CHECKPOINTED]),
]
RUN = [
    "adapter={kind: lora, rank: 16, targets: all-linear}",
    "sampling={prompts_per_step: 32, completions_per_prompt: 8, max_new_tokens: 1024}",
    "eval={prompts: 32, samples: 2}",
    "micro_tokens=4096",
]
SMALL = ["sampling.prompts_per_step=4", "sampling.completions_per_prompt=4", "eval.prompts=4", "eval.samples=4"]


def config_of(name: str, folder: Path | None) -> Any:
    from earnest.config import from_mapping, recipes

    model, _, overrides = CASES[name]
    if isinstance(model, dict):
        assert folder is not None, "for the config of a model without a name"
        (folder / "config.json").write_text(json.dumps(model))
        model = str(folder)
    return from_mapping(recipes.read("quickstart")[1], [f"model={model}", *SMALL, *overrides])


def case(name: str) -> dict[str, Any]:
    """One case: predicted and measured bytes of training and of sampling."""
    with tempfile.TemporaryDirectory() as folder:
        return _case(name, Path(folder))


def _case(name: str, folder: Path) -> dict[str, Any]:
    import torch

    import earnest as en
    from earnest.adapters.attach import attach
    from earnest.engines.mesh import Mesh
    from earnest.models.loading import load, load_config
    from earnest.models.policy import Policy
    from earnest.models.sampling import SampleSpec
    from earnest.plan import Device, plan

    torch.set_num_threads(1)
    tokens, config = CASES[name][1], config_of(name, folder)
    mesh = Mesh.start(config.engine.shard)
    found = plan(config, Device("cpu", 24 * 10**9, mesh.size), tokens=tokens)
    work = found.work
    before = resident("VmRSS")
    if isinstance(CASES[name][0], dict):
        from transformers import AutoModelForCausalLM

        dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        model = AutoModelForCausalLM.from_config(load_config(folder), dtype=dtype)
        policy = Policy.of(model, load("nano").tokenizer)
    else:
        policy = load(config.model, dtype=config.dtype)
    adapter = attach(policy, config.adapter.build(), config.adapter.targets)
    engine = en.LocalEngine(
        policy,
        adapter,
        config.optimizer.build(),
        micro_tokens=config.micro_tokens,
        pack=config.engine.pack,
        checkpoint_activations=config.engine.checkpoint_activations,
        mesh=mesh,
    )
    size = policy.head.weight.shape[0]
    batch = work.batch(work.groups, size).with_signals(
        advantages=torch.linspace(-1, 1, work.rows * work.completion),
        behaviour=torch.full((work.rows * work.completion,), -1.0),
    )
    objective = config.build_objective()
    reset()
    engine.step(batch, objective)
    held = sum(_bytes(t) for t in [*policy.model.parameters(), *policy.model.buffers()])
    held += sum(_bytes(t) for s in engine.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    train = held + allocated(lambda: engine.step(batch, objective))
    train_process = resident("VmHWM") - before
    prompts = work.batch(work.groups, size).inputs[:: work.group, : work.prompt].tolist()
    spec = SampleSpec(max_new_tokens=work.completion, stop_ids=())
    engine.sample(prompts[:1], 1, SampleSpec(max_new_tokens=2))  # which cache the model can use is found out once
    reset()
    sample = held + allocated(lambda: engine.sample(prompts, work.group, spec))
    return {
        "case": name,
        "rows": f"{work.groups} × {work.group} × {work.row_tokens}",
        "train": {"predicted": found.memory.peaks["train"], "measured": train, "process": train_process},
        "sample": {
            "predicted": found.memory.peaks["sample"],
            "measured": sample,
            "process": resident("VmHWM") - before,
        },
    }


def _bytes(tensor: Any) -> int:
    own = getattr(tensor, "_local_tensor", tensor)  # this rank's part
    return int(own.numel() * own.element_size())


def allocated(run: Any) -> int:
    """How far the bytes that torch's allocator holds rise while ``run`` runs."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    now = peak = 0
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def resident(field: str) -> int:
    """Resident memory of this process in bytes, now (VmRSS) or at its highest point (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def reset() -> None:
    """The highest point starts again from now."""
    Path("/proc/self/clear_refs").write_text("5")


def row(found: dict[str, Any], moment: str) -> str:
    from earnest.plan.memory import gigabytes

    sizes = found[moment]
    off = sizes["predicted"] / sizes["measured"] - 1
    cells = [gigabytes(sizes[k]) for k in ("predicted", "measured", "process")]
    return f"| {found['case']} | {moment} | {found['rows']} | {cells[0]} | {cells[1]} | {off:+.0%} | {cells[2]} |"


def paper() -> None:
    """Predicted memory and communication of larger models; rows of 2,048 tokens."""
    from earnest.config import from_mapping, recipes
    from earnest.plan import Device, plan
    from earnest.plan.memory import gigabytes

    print("| model | GPUs | settings | train | sample | rows | computing | sent per step |")
    print("|---|---|---|---|---|---|---|---|")
    for model, name, count, size, settings in PAPER:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(model))
            config = from_mapping(recipes.read("quickstart")[1], [f"model={folder}", *RUN, *settings])
            device = Device("gpu", size * 10**9, count)
            found = plan(config, device, tokens=2048)
        peaks = [
            gigabytes(found.memory.peaks[m]) + ("" if found.memory.peaks[m] <= device.room else " (too much)")
            for m in ("train", "sample")
        ]
        words = " ".join(f"`{s}`" for s in settings) or "none"
        times = f"{found.paper.computing:,.0f} s | {gigabytes(found.paper.sent)}"
        print(f"| {name} | {count} × {size} GB | {words} | {peaks[0]} | {peaks[1]} | {found.largest_rows} | {times} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the cases whose name contains this")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "plan.json")
    parser.add_argument("--show", action="store_true", help="print what is recorded, and measure nothing")
    parser.add_argument("--paper", action="store_true", help="larger models on GPUs, predicted only")
    given = parser.parse_args()
    if given.paper:
        paper()
        return
    if given.case:
        found = case(given.case)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found))
        return
    known = json.loads(given.out.read_text())["cases"] if given.out.is_file() else {}
    for name in () if given.show else (n for n in CASES if given.only in n):
        ranks = next((int(word.partition("=")[2]) for word in CASES[name][2] if word.startswith("engine.shard")), 1)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *torchrun, __file__, "--case", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ)
        line = next(x for x in done.stdout.splitlines() if x.startswith("{"))
        known[name] = json.loads(line) | {"load": os.getloadavg()[0]}
        given.out.write_text(json.dumps({"cases": known}, indent=1) + "\n")
    print("| case | moment | rows × tokens | predicted | measured | off | process |\n|---|---|---|---|---|---|---|")
    for one in (known[name] for name in CASES if name in known):
        print(row(one, "train"), row(one, "sample"), sep="\n")


if __name__ == "__main__":
    main()
