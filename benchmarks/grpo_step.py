"""The same GRPO job in TRL's GRPOTrainer and in earnest, one process after the other: steps per second and peak memory.

    python benchmarks/grpo_step.py [--steps 20] [--model nano] [--out benchmarks/results/grpo_step.json]
    python benchmarks/grpo_step.py --model smollm2 --steps 5 --vllm --out benchmarks/results/grpo_step_smollm2.json

Same model, same prompts, 4 prompts × 8 completions of exactly 32 tokens (end-of-turn switched off on both
sides), LoRA r = 8 on q_proj and v_proj, AdamW at one learning rate, one update per batch, clip 0.2, no reference model,
fp32, the same number of threads. With a small model on a CPU, overhead is most of the time. TRL samples with
transformers' ``generate``, its default; with ``--vllm`` a third process is TRL with vLLM inside it (``vllm_mode``
"colocate"), with Python and vLLM of .venv-vllm and the other packages of .venv (`make vllm` makes it). TRL can give
vLLM's CPU build new weights only if its layers read them (VLLM_LIVE_WEIGHTS, envs/repair_vllm.py). The time of sampling
is also measured apart; the rest of a step is rewards, the policy's log-probs, the loss and the update.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

PROMPTS, COMPLETIONS, TOKENS, RANK, LR, WARMUP = 4, 8, 32, 8, 1e-4, 3
NAMES = {"trl": "TRL's GRPOTrainer", "trl-vllm": "TRL's GRPOTrainer, vLLM", "earnest": "earnest"}
VLLM = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
VLLM_SETTINGS = {"VLLM_LIVE_WEIGHTS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


def reward_of(text: str) -> float:
    """A cheap reward with variance inside a group, the same on both sides."""
    return (len(set(text)) % 7) / 7


def folder_of(model: str) -> Path:
    from earnest.models import places, smollm2

    return places.nano_folder() if model == "nano" else smollm2.folder()


def run_earnest(steps: int, model: str) -> dict[str, Any]:
    import torch

    import earnest as en
    from earnest.rollouts import batch_of
    from earnest.signals import with_advantages
    from earnest.tasks import get_task

    torch.set_num_threads(threads())
    policy = en.load(model)
    policy.eos_ids = frozenset()
    adapter = en.attach(policy, en.LoRA(rank=RANK), targets=("q_proj", "v_proj"))
    engine = en.LocalEngine(policy, adapter, en.AdamW(lr=LR), max_grad_norm=1.0)
    prompts = [policy.render(p.messages) for p in get_task("sort").prompts("train", PROMPTS * (steps + WARMUP), seed=0)]
    clock: list[float] = []
    sampling: list[float] = []
    tokens = 0
    for step in range(steps + WARMUP):
        start = time.perf_counter()
        mine = prompts[step * PROMPTS : (step + 1) * PROMPTS]
        rollouts = engine.sample(mine, COMPLETIONS, en.SampleSpec(max_new_tokens=TOKENS, seed=step))
        sampling.append(time.perf_counter() - start)
        rewards = [reward_of(policy.decode(r.tokens)) for r in rollouts]
        batch = with_advantages(batch_of(rollouts), rewards)
        engine.step(batch, en.GRPO(clip=0.2))
        tokens += sum(len(r.tokens) for r in rollouts) if step >= WARMUP else 0
        clock.append(time.perf_counter() - start)
    return measured(clock[WARMUP:], sampling[WARMUP:], tokens)


def run_trl(steps: int, name: str, vllm: bool = False) -> dict[str, Any]:
    import tempfile

    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from earnest.tasks import get_task

    torch.set_num_threads(threads())
    folder = str(folder_of(name))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = get_task("sort").prompts("train", PROMPTS * (steps + WARMUP), seed=0)
    data = Dataset.from_list([{"prompt": [dict(m) for m in p.messages]} for p in prompts])
    lengths: list[int] = []

    def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [reward_of(c[0]["content"]) for c in completions]

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.marks: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.marks.append(time.perf_counter())

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            self.marks.append(time.perf_counter())

    clock = Clock()
    sampler: dict[str, Any] = {"generation_kwargs": {"min_new_tokens": TOKENS, "eos_token_id": None}}
    if vllm:
        sampler = {
            "generation_kwargs": {"ignore_eos": True}, "use_vllm": True, "vllm_mode": "colocate",
            "vllm_max_model_length": 256,
        }  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        args = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=PROMPTS * COMPLETIONS,
            num_generations=COMPLETIONS,
            max_completion_length=TOKENS,
            max_steps=steps + WARMUP,
            learning_rate=LR,
            lr_scheduler_type="constant",
            beta=0.0,
            loss_type="grpo",
            epsilon=0.2,
            temperature=1.0,
            **sampler,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_steps=10_000,
            disable_tqdm=True,
            dataloader_num_workers=0,
            seed=0,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
            callbacks=[clock],
        )
        sampling: list[float] = []
        generate = trainer._generate

        def timed(*given: Any, **more: Any) -> Any:
            began = time.perf_counter()
            try:
                return generate(*given, **more)
            finally:
                sampling.append(time.perf_counter() - began)

        trainer._generate = timed
        trainer.train()
    # From one step's beginning to the next one's: generation, scoring, loss, update.
    spans = [b - a for a, b in zip(clock.marks, clock.marks[1:], strict=False)]
    return measured(spans[WARMUP:], sampling[WARMUP:], sum(lengths[WARMUP * PROMPTS * COMPLETIONS :]))


def measured(clock: list[float], sampling: list[float], tokens: int) -> dict[str, Any]:
    ordered = sorted(clock)
    assert len(sampling) == len(clock)
    return {
        "steps": len(clock),
        "median_seconds": ordered[len(ordered) // 2],
        "min_seconds": ordered[0],
        "median_sampling_seconds": statistics.median(sampling),
        "median_training_seconds": statistics.median(c - s for c, s in zip(clock, sampling, strict=True)),
        "steps_per_second": len(clock) / sum(clock),
        "completion_tokens": tokens,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", choices=("nano", "smollm2"), default="nano")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/grpo_step.json"))
    parser.add_argument("--table", action="store_true", help="print the table of --out instead of running")
    parser.add_argument("--vllm", action="store_true", help="TRL with vLLM, too")
    parser.add_argument("--side", choices=tuple(NAMES), help=argparse.SUPPRESS)
    parser.add_argument("--packages", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        sys.path += [args.packages] if args.packages else []
        trl = args.side != "earnest"
        result = (
            run_trl(args.steps, args.model, args.side == "trl-vllm") if trl else run_earnest(args.steps, args.model)
        )
        print("RESULT " + json.dumps(result))
        return
    if args.table:
        print(table(json.loads(args.out.read_text())))
        return
    sides: dict[str, dict[str, Any]] = {}
    for side in NAMES:
        vllm = side == "trl-vllm"
        if vllm and not args.vllm:
            continue
        words = ["--side", side, "--steps", str(args.steps), "--model", args.model]
        words += ["--packages", sysconfig.get_path("purelib")] if vllm else []
        python, environment = (VLLM, os.environ | VLLM_SETTINGS) if vllm else (sys.executable, os.environ)
        done = subprocess.run(
            [python, __file__, *words], capture_output=True, text=True, check=False, env=dict(environment)
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            sys.exit(f"the {side} side failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        sides[side] = json.loads(lines[-1].removeprefix("RESULT "))
        print(
            f"{side:8s} {sides[side]['steps_per_second']:.2f} steps/s, median {sides[side]['median_seconds']:.3f} s, "
            f"of which sampling {sides[side]['median_sampling_seconds']:.3f} s, "
            f"peak {sides[side]['peak_rss_mb']:.0f} MB, {sides[side]['completion_tokens']} completion tokens"
        )
    assert len({side["completion_tokens"] for side in sides.values()}) == 1, "not the same job"
    ratio = compared(sides["trl"], sides["earnest"])
    more = {"ratio_vllm": compared(sides["trl-vllm"], sides["earnest"])} if args.vllm else {}
    machine = {
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "threads": threads(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"model": args.model, "sides": sides, "ratio": ratio, **more, "machine": machine}
    result |= {"load": os.getloadavg()[0]}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


def compared(trl: dict[str, Any], earnest: dict[str, Any]) -> dict[str, float]:
    return {
        "steps_per_second": earnest["steps_per_second"] / trl["steps_per_second"],
        "peak_memory": trl["peak_rss_mb"] / earnest["peak_rss_mb"],
        "sampling": trl["median_sampling_seconds"] / earnest["median_sampling_seconds"],
        "training": trl["median_training_seconds"] / earnest["median_training_seconds"],
    }


def table(result: dict[str, Any]) -> str:
    """A markdown table of both sides and their ratio."""
    model = result.get("model", "nano")
    lines = [f"| GRPO step, {model}, CPU | steps/s | median step | peak memory |", "|---|---|---|---|"]
    for side, m in result["sides"].items():
        numbers = f"{m['steps_per_second']:.2f} | {m['median_seconds']:.3f} s | {m['peak_rss_mb']:.0f} MB"
        lines.append(f"| {NAMES[side]} | {numbers} |")
    for key, name in (("ratio", "ratio"), ("ratio_vllm", "ratio to TRL with vLLM")):
        if key in result:
            ratio = result[key]
            lines.append(f"| {name} | {ratio['steps_per_second']:.2f}× | | {ratio['peak_memory']:.2f}× less |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
