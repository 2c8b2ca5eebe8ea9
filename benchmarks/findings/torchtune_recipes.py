"""torchtune 0.6.1: the distillation recipe divides by the tokens twice, and LoRA recipes restart their schedule. Needs
torchtune's environment:

python benchmarks/audit_released.py --library torchtune
PYTHONPATH=.:src:earnest-audit/src .peers/torchtune/bin/python benchmarks/findings/torchtune_recipes.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.released import recipes
from earnest_audit import audit

LORA, DISTILLATION = "lora_finetune_single_device", "knowledge_distillation_single_device"
STEP = "            self.global_step = self.epochs_run * self._steps_per_epoch"
CORRECTED = {
    STEP: STEP[4:],  # out of the branch of ``max_steps_per_epoch``
    ") * class_loss + self._kd_ratio * kd_loss\n                current_loss.backward()": (
        ") * class_loss + self._kd_ratio * kd_loss\n                (current_loss * current_num_tokens).backward()"
    ),
}


def failures() -> dict[str, set[str]]:
    things = dict(recipes.torchtune_recipes())
    named = [f"{DISTILLATION}: update", f"{LORA}: resume", f"{DISTILLATION}: resume"]
    return {name: {f.subject for f in audit(things[name]()).failures} for name in named}


def rates(folder: Path) -> tuple[float, float]:
    """The learning rate after two epochs, and what the run has that resumes there."""
    first = recipes.configured(LORA, folder / "run")
    resume = recipes.resume_of(LORA, folder / "run")
    resume.run(first, 2)
    resume.save(first, folder / "run")
    resumed = resume.load(None, folder / "run")
    return first._optimizer.param_groups[0]["lr"], resumed._optimizer.param_groups[0]["lr"]


broken = failures()
with tempfile.TemporaryDirectory() as folder:
    print("learning rate before the save, and after the load:", *rates(Path(folder)))
recipes.CHANGES.update(CORRECTED)
fixed = failures()
print("as released:", broken, "corrected:", fixed, sep="\n")
assert all(broken.values()) and not any(fixed.values())
