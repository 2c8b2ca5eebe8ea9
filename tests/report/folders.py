"""Run folders with realistic numbers, written by the rules of docs/run-folder.md and by nothing of earnest.report."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

CONFIG = """\
model: nano
adapter:
  kind: lora
  rank: 8
  targets: [q_proj, v_proj]
task: sort
objective:
  - {kind: grpo, weight: 1.0, clip: 0.2}
  - {kind: sdpo, weight: 0.5, alpha: 0.5, top_k: 100}
optimizer: {kind: adamw, lr: 0.001, betas: [0.9, 0.999], eps: 1.0e-08, weight_decay: 0.0}
steps: 60
seed: 3
"""

ENVIRONMENT = {
    "earnest": "0.1.0",
    "python": "3.11.2",
    "platform": "Linux-6.1-x86_64",
    "device": "cpu",
    "dtype": "float32",
    "threads": 2,
    "packages": {"torch": "2.13.0", "transformers": "5.22.2", "safetensors": "0.8.0"},
    "git": {"commit": "88def89", "dirty": False},
}


def header(steps: int, **changes: Any) -> dict[str, Any]:
    return {
        "format": "earnest-run/1",
        "recipe": "quickstart",
        "task": "sort",
        "model": {"name": "nano", "version": "1.0"},
        "adapter": "lora(rank=8) on q_proj, v_proj",
        "objective": "1 × grpo + 0.5 × sdpo",
        "seed": 3,
        "steps": steps,
        "status": "finished",
        "reason": None,
        "started": "2026-01-02T03:04:05Z",
        "updated": "2026-01-02T03:05:25Z",
        "steps_done": steps,
        "seconds": 80.2,
        **changes,
    }


def step_line(step: int, total: int, dice: random.Random, terms: int = 2) -> dict[str, Any]:
    progress = 1 - math.exp(-3 * step / max(total, 2))
    mean = 0.38 + 0.45 * progress + dice.gauss(0, 0.045)
    share = 0.6 + 0.2 * progress + dice.gauss(0, 0.02)
    grpo: dict[str, Any] = {
        "kind": "grpo",
        "weight": 1.0,
        "loss": dice.gauss(0, 0.012),
        "share": share if terms == 2 else 1.0,
        "ran": "grpo(clip=0.2, over=tokens)",
        "metrics": {
            "clip_fraction": abs(dice.gauss(0.03, 0.015)),
            "ratio_max": 1 + abs(dice.gauss(0.3, 0.1)),
            "dropped_tokens": 0,
        },
    }
    sdpo: dict[str, Any] = {
        "kind": "sdpo",
        "weight": 0.5,
        "loss": 0.21 * math.exp(-2 * progress) + abs(dice.gauss(0, 0.01)),
        "share": 1 - share,
        "ran": "topk_gjs(alpha=0.5, k=100, tail)",
        "metrics": {"covered_mass": 0.991 + dice.gauss(0, 0.002)},
    }
    return {
        "kind": "step",
        "step": step,
        "version": step,
        "reward": {"mean": min(1.0, max(0.0, mean)), "sd": 0.48, "n": 64},
        "loss": grpo["loss"] + 0.5 * sdpo["loss"],
        "terms": {"grpo": grpo, "sdpo": sdpo} if terms == 2 else {"grpo": grpo},
        "skipped": ["kl_barrier"],
        "grad_norm": 0.8 * math.exp(dice.gauss(0, 0.25)),
        "update_norm": 0.006 * math.exp(dice.gauss(0, 0.1)),
        "passes": "one",
        "micro_batches": 1,
        "lr": 0.001,
        "metrics": {
            "entropy": 1.3 - 0.7 * progress + dice.gauss(0, 0.03),
            "groups_without_spread": dice.randrange(0, 6) / 8,
            "grader_errors": 0,
        },
        "seconds": {"sample": 0.8 + dice.random() * 0.1, "train": 0.5 + dice.random() * 0.1},
    }


def eval_line(step: int, total: int, dice: random.Random) -> dict[str, Any]:
    reward = 0.37 + 0.44 * (1 - math.exp(-3 * step / max(total, 2))) + dice.gauss(0, 0.012)
    return {
        "kind": "eval",
        "step": step,
        "version": step,
        "reward": reward,
        "se": 0.021,
        "prompts": 64,
        "n": 256,
        "correct": reward - 0.01,
    }


def samples(total: int, dice: random.Random) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for phase, step, skill in (("before", 0, 0.35), ("after", total, 0.8)):
        for index in range(8):
            numbers = random.Random(index).sample(range(100), 5)
            answer = sorted(numbers)
            right = random.Random(f"{phase}{index}").random() < skill
            if not right:
                answer[1], answer[2] = answer[2], answer[1]
            lines.append(
                {
                    "phase": phase,
                    "step": step,
                    "version": step,
                    "prompt_id": f"sort/heldout/{index}",
                    "sample": 0,
                    "prompt": [{"role": "user", "content": f"sort {' '.join(map(str, numbers))}"}],
                    "completion": " ".join(map(str, answer)),
                    "reward": 1.0 if right else 0.0,
                    "correct": right,
                    "feedback": "" if right else f"{answer[1]} and {answer[2]} are in the wrong order.",
                    "tokens": 10,
                }
            )
    for step in (1, total):
        lines.append(
            {
                **lines[0],
                "phase": "train",
                "step": step,
                "version": step,
                "prompt_id": f"sort/train/{dice.randrange(1000)}",
            }
        )
    return lines


def verdict(fail: bool = False) -> dict[str, Any]:
    def check(
        subject: str, measured: str, expected: str, outcome: str = "holds", detail: str = "", law: str = "GL"
    ) -> dict[str, str]:
        return {
            "law": law,
            "subject": subject,
            "measured": measured,
            "expected": expected,
            "outcome": outcome,
            "detail": detail,
        }

    dead = "The term sdpo adds nothing to the gradient: it trains nothing."
    checks = [
        check("term grpo", "gradient norm 0.82, 73% of the sum", "above 0"),
        check("term sdpo", "gradient norm 0, 0% of the sum", "above 0", "fails", dead)
        if fail
        else check("term sdpo", "gradient norm 0.31, 27% of the sum", "above 0"),
        check("16 trainable parameters", "16 got a gradient", "all 16 within 2 steps"),
        check("16 trainable parameters", "16 changed their bits", "all 16 within 2 steps"),
        check("39 other tensors", "0 moved", "none"),
        check("knob grpo.clip", "gradient changed by 1.2e−3", "more than 0", law="KNOB"),
    ]
    return {"holds": not fail, "step": 0, "seconds": 0.4, "not_applicable": 1, "checks": checks}


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1), encoding="utf-8")


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def make(folder: Path, steps: int = 60, terms: int = 2, fail: bool = False, **changes: Any) -> Path:
    """A whole, finished run of ``steps`` steps; ``changes`` go into run.json."""
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(7)
    every = max(1, steps // 6)
    rows: list[dict[str, Any]] = [eval_line(0, steps, dice)]
    for step in range(1, steps + 1):
        rows.append(step_line(step, steps, dice, terms))
        if step % every == 0 or step == steps:
            rows.append(eval_line(step, steps, dice))
    write_json(folder / "run.json", header(steps, **changes))
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    write_json(folder / "environment.json", ENVIRONMENT)
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(folder / "samples.jsonl", samples(steps, dice))
    write_json(folder / "verdict.json", verdict(fail))
    (folder / "events.log").write_text(
        "2026-01-02T03:04:05Z info started\n2026-01-02T03:05:25Z info finished\n", encoding="utf-8"
    )
    return folder
