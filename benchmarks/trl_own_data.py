"""SFT, DPO, KTO and GRPO on the same rows beside TRL, in one process: loss curves and step times, as JSON.

    python benchmarks/trl_own_data.py [--steps 20] [--out benchmarks/results/trl_own_data.json]
    python benchmarks/trl_own_data.py --table          the table of --out

Both train a LoRA of rank 8 on the attention projections of nano in float32 with AdamW (no decay, no warm-up, constant
rate, gradient norm clipped to 1), from the same initial adapter weights, on the same batches in the same order. For
GRPO the completions are sampled, so only the first loss is comparable; SFT, DPO and KTO are compared step by step.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset as HFDataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed

import earnest as en
from earnest.data.dataset import DataSettings
from earnest.models.places import nano_folder
from earnest.rollouts import collect
from earnest.runs.own_data import OwnData
from earnest.tasks import get_task

TARGETS = ("q_proj", "v_proj")
RANK, ALPHA, LR, BATCH, COMPLETIONS, NEW_TOKENS = 8, 16.0, 1e-3, 8, 8, 8


def rows(kind: str, count: int) -> list[dict[str, Any]]:
    """Numbers to sort, with the columns that the objective needs; a wrong answer has the digits in falling order."""
    made = []
    for i, puzzle in enumerate(get_task("sort").prompts("train", count, seed=0)):
        prompt, right = puzzle.messages[-1]["content"], puzzle.data["answer"]
        wrong = right[::-1]
        row: dict[str, Any] = {"prompt": prompt, "completion": right}
        if kind == "dpo":
            row = {"prompt": prompt, "chosen": right, "rejected": wrong}
        if kind == "kto":
            row = {"prompt": prompt, "completion": right if i % 2 else wrong, "label": bool(i % 2)}
        if kind == "grpo":
            row = {"prompt": prompt, "answer": right}
        made.append(row)
    return made


class Times(TrainerCallback):
    """The seconds of each step of TRL's trainer."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def engine() -> en.LocalEngine:
    policy = en.load("nano", device="cpu")
    adapter = en.attach(policy, en.LoRA(rank=RANK, alpha=ALPHA), targets=TARGETS, seed=0)
    return en.LocalEngine(policy, adapter, en.AdamW(lr=LR, weight_decay=0.0), max_grad_norm=1.0)


TERMS: dict[str, Callable[[], Any]] = {"sft": en.SFT, "dpo": en.DPO, "kto": en.KTO, "grpo": en.GRPO}


def earnest_file(kind: str, file: Path, steps: int) -> dict[str, Any]:
    """Our steps on the file's rows in their order."""
    made, term = engine(), TERMS[kind]()
    data = OwnData.load(DataSettings(train=str(file), heldout=0.0), made.policy, lambda _: None)
    losses, seconds = [], []
    for step in range(steps):
        start = time.perf_counter()
        examples = [data.dataset.at("train", step * BATCH + i) for i in range(BATCH)]
        batch = collect(made, None, [], 1, objective=en.Objective.of(term), given=data._rows(examples)).batch
        losses.append(made.step(batch, term).loss)
        seconds.append(time.perf_counter() - start)
    return {"loss": losses, "seconds": seconds}


def earnest_grpo(file: Path, steps: int) -> dict[str, Any]:
    """Our steps on prompts of the file, graded by the equality with the answer."""
    made, term = engine(), en.GRPO()
    task = get_task("graded", {"train": str(file), "heldout": 0.0, "grade": "exact"})
    losses, seconds, rewards = [], [], []
    for step in range(steps):
        start = time.perf_counter()
        spec = en.SampleSpec(max_new_tokens=NEW_TOKENS, temperature=1.0, seed=step)
        found = collect(made, task, task.prompts("train", 1, step), COMPLETIONS, spec, objective=en.Objective.of(term))
        losses.append(made.step(found.batch, term).loss)
        seconds.append(time.perf_counter() - start)
        rewards.append(found.reward)
    return {"loss": losses, "seconds": seconds, "reward": rewards}


def plain(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """A row with the rendered prompt as text. TRL adds the end token itself; given conversations, it would also train
    the line break that the chat template writes after the end of a turn, which no sampler samples."""
    asked = [{"role": "user", "content": row["prompt"]}]
    return row | {"prompt": tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)}


def trl(kind: str, steps: int, out: Path) -> dict[str, Any]:
    """TRL's trainer on the same rows, with our adapter's initial weights."""
    import trl as library

    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(nano_folder())
    model = AutoModelForCausalLM.from_pretrained(nano_folder(), dtype=torch.float32)
    names = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "grpo": "GRPO"}
    shared: dict[str, Any] = {
        "output_dir": str(out), "max_steps": steps, "per_device_train_batch_size": BATCH, "learning_rate": LR,
        "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0, "logging_steps": 1, "use_cpu": True,
        "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 0, "bf16": False, "fp16": False,
        "gradient_checkpointing": False, "dataloader_pin_memory": False,
    }  # fmt: skip
    more: dict[str, Any] = {}
    if kind == "grpo":
        given = rows(kind, steps * BATCH)
        data = HFDataset.from_list(
            [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in given]
        )

        def reward(completions: Any, answer: list[str], **_: Any) -> list[float]:
            return [float(c[-1]["content"].strip() == a) for c, a in zip(completions, answer, strict=True)]

        shared |= {
            "num_generations": COMPLETIONS,
            "max_completion_length": NEW_TOKENS,
            "beta": 0.0,
            "loss_type": "grpo",
        }
        more["reward_funcs"] = reward
    else:
        data = HFDataset.from_list([plain(row, tokenizer) for row in rows(kind, steps * BATCH)])
        shared |= {"train_sampling_strategy": "sequential"}
        if kind == "sft":
            shared |= {"completion_only_loss": True}
    config = getattr(library, f"{names[kind]}Config")(**shared)
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), lora_dropout=0.0, task_type="CAUSAL_LM")
    times = Times()
    trainer = getattr(library, f"{names[kind]}Trainer")(
        model=model, args=config, train_dataset=data, processing_class=tokenizer, peft_config=lora, callbacks=[times],
        **more,
    )  # fmt: skip
    ours = engine().adapter.state_dict()
    copied = 0
    with torch.no_grad():  # the same A; B is 0 in both
        for name, p in trainer.model.named_parameters():
            if "lora_A" in name:
                place = name.split("model.", 2)[-1].split(".lora_A")[0]
                match = [
                    value
                    for key, value in ours.items()
                    if key.endswith("A") and place in key and value.shape == p.shape
                ]
                if len(match) == 1:
                    p.copy_(match[0])
                    copied += 1
    trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    found: dict[str, Any] = {"loss": [line["loss"] for line in logs], "seconds": times.seconds, "copied_A": copied}
    if kind == "grpo":
        found["reward"] = [line.get("reward") for line in logs]
    return found


def median(values: list[float]) -> float:
    ordered = sorted(values[1:] or values)  # the first step warms up
    return ordered[len(ordered) // 2]


def table(results: dict[str, Any]) -> str:
    """A markdown table: the losses at the first and the last step, their largest distance, and the step times."""
    lines = [
        "| objective | loss, first → last | TRL's loss | difference | ms per step, earnest and TRL | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for kind in ("sft", "dpo", "kto", "grpo"):
        if kind not in results:
            continue
        both = [results[kind][side] for side in ("earnest", "trl")]
        ends = [f"{abs(side['loss'][0]):.4f} → {abs(side['loss'][-1]):.4f}" for side in both]
        ours, theirs = (median(side["seconds"]) for side in both)
        lines.append(
            f"| {kind} | {ends[0]} | {ends[1]} | {results[kind]['largest_difference']:.1e} "
            f"| {ours * 1000:.0f} and {theirs * 1000:.0f} | {theirs / ours:.2f}× |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kinds", default="sft,dpo,kto,grpo")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "trl_own_data.json")
    parser.add_argument("--table", action="store_true", help="print the table of --out instead of running")
    given = parser.parse_args()
    if given.table:
        print(table(json.loads(given.out.read_text())))
        return
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "steps": given.steps, "batch": BATCH, "threads": 1, "load": os.getloadavg()[0], "trl": version("trl"),
    }  # fmt: skip
    for kind in given.kinds.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "rows.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows(kind, given.steps * BATCH)))
            ours = earnest_grpo(file, given.steps) if kind == "grpo" else earnest_file(kind, file, given.steps)
            theirs = trl(kind, given.steps, Path(scratch) / "trl")
        apart = max((abs(a - b) for a, b in zip(ours["loss"], theirs["loss"], strict=False)), default=float("nan"))
        results[kind] = {"earnest": ours, "trl": theirs, "largest_difference": apart}
        ends = ", ".join(f"{ours['loss'][i]:.4f} and {theirs['loss'][i]:.4f}" for i in (0, -1))
        steps = f"{median(ours['seconds']):.3f} s and {median(theirs['seconds']):.3f} s"
        print(f"{kind}: first and last loss {ends}; largest difference {apart:.2g}; median step {steps}")
    given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
