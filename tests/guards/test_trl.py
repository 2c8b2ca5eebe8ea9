"""A guard inside real TRL trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

import earnest as en
from earnest.guards import DirectionGuard, Directions, Erase, GuardError, Route
from earnest.guards.callback import STATE, GuardCallback
from tests.guards.conftest import DELTA_S

SETTINGS = {
    "per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 0.02, "weight_decay": 0.1, "max_grad_norm": 1e-3,
    "report_to": [], "use_cpu": True, "save_strategy": "no", "logging_steps": 2, "disable_tqdm": True, "seed": 0,
    "lr_scheduler_type": "linear",
}  # fmt: skip


def policy_of(tiny: Path) -> tuple[en.Policy, en.Adapter]:
    policy = en.load(tiny)
    return policy, en.attach(policy, en.AntiPaSTO(**DELTA_S), targets=("q_proj", "v_proj"), seed=0)


def sft(
    tiny: Path, out: Path, guard: DirectionGuard | None, resume: Path | None = None, **settings: Any
) -> tuple[en.Adapter, list[dict[str, float]], list[Any]]:
    from trl import SFTConfig, SFTTrainer

    policy, adapter = policy_of(tiny)
    rows = [
        {"prompt": [{"role": "user", "content": f"say {i}"}], "completion": [{"role": "assistant", "content": f"{i}!"}]}
        for i in range(24)
    ]
    callback = GuardCallback(guard, adapter) if guard is not None else None
    trainer = SFTTrainer(
        model=policy.model,
        args=SFTConfig(output_dir=str(out), max_length=64, **SETTINGS | settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=policy.tokenizer,
        callbacks=[callback] if callback else None,
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return adapter, callback.reports if callback else [], trainer.state.log_history


def grpo(tiny: Path, out: Path, guard: DirectionGuard | None) -> tuple[en.Adapter, list[dict[str, float]]]:
    from trl import GRPOConfig, GRPOTrainer

    policy, adapter = policy_of(tiny)
    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(16)]
    callback = GuardCallback(guard, adapter) if guard is not None else None

    def shouting(completions: list[Any], **_: Any) -> list[float]:
        return [float(sum(ord(c) for c in x[0]["content"]) % 7) for x in completions]

    trainer = GRPOTrainer(
        model=policy.model,
        reward_funcs=shouting,
        args=GRPOConfig(
            output_dir=str(out), num_generations=4, max_completion_length=6, beta=0.0, **SETTINGS | {"max_steps": 3}
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=policy.tokenizer,
        callbacks=[callback] if callback else None,
    )
    trainer.train()
    return adapter, callback.reports if callback else []


@pytest.mark.filterwarnings("ignore")
def test_sft(tiny: Path, tmp_path: Path, directions: Directions) -> None:
    route, at_gradient = Route(directions, gate="two_sided"), Route(directions, gate="two_sided", at="gradient")
    free, _, _ = sft(tiny, tmp_path / "free", None)
    routed, reports, log = sft(tiny, tmp_path / "route", route)
    erased, erasing, _ = sft(tiny, tmp_path / "erase", Erase(directions, gate="two_sided"))
    _, leaking, _ = sft(tiny, tmp_path / "gradient", at_gradient)
    assert len(reports) == 6 and reports[-1]["quarantine"] > 0
    for n, p in free.named_parameters().items():
        assert torch.equal(p, routed.named_parameters()[n]), "TRL with Route is TRL"
    assert any(not torch.equal(p, erased.named_parameters()[n]) for n, p in free.named_parameters().items())
    assert all(r["leak_update"] < 1e-6 < r["leak_gradient"] for r in [*reports, *erasing])
    assert all(r["leak_gradient"] < 1e-6 < 1e-3 < r["leak_update"] for r in leaking)
    assert any("guard/quarantine" in line for line in log)
    total = {n: p.detach().clone() for n, p in routed.named_parameters().items()}
    with route.ablated():
        assert any(not torch.equal(total[n], p) for n, p in routed.named_parameters().items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("at", ["update", "gradient"])
def test_a_resumed_trainer_continues_with_adapter_and_quarantine(
    tiny: Path, tmp_path: Path, directions: Directions, at: str
) -> None:
    """Three steps, a checkpoint, three steps in new objects: bit-equal to six steps without an interruption."""
    guards = [Route(directions, gate="two_sided", at=at) for _ in range(2)]  # type: ignore[arg-type]
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole, reports, _ = sft(tiny, tmp_path / "run", guards[0], **saving)
    again, later, _ = sft(tiny, tmp_path / "run", guards[1], tmp_path / "run" / "checkpoint-3", **saving)
    assert later == reports[3:]
    assert all(torch.equal(p, again.named_parameters()[n]) for n, p in whole.named_parameters().items())
    mine, other = guards[0].state_dict(), guards[1].state_dict()
    assert sorted(mine) == sorted(other) and all(torch.equal(mine[k], other[k]) for k in mine)
    (tmp_path / "run" / "checkpoint-3" / STATE).unlink()
    with pytest.raises(GuardError, match=r"the trainer resumes, and .* cannot be read"):
        sft(tiny, tmp_path / "run", Route(directions), tmp_path / "run" / "checkpoint-3", **saving)


@pytest.mark.filterwarnings("ignore")
def test_grpo(tiny: Path, tmp_path: Path, directions: Directions) -> None:
    free, _ = grpo(tiny, tmp_path / "free", None)
    routed, reports = grpo(tiny, tmp_path / "route", Route(directions))
    assert len(reports) == 3 and reports[-1]["quarantine"] > 0
    assert all(torch.equal(p, routed.named_parameters()[n]) for n, p in free.named_parameters().items())


@pytest.mark.filterwarnings("ignore")
def test_trainable_parameters_outside_the_guard_are_refused(tiny: Path, tmp_path: Path, directions: Directions) -> None:
    from transformers import Trainer, TrainingArguments

    policy, adapter = policy_of(tiny)
    policy.model.lm_head.weight.requires_grad_(True)
    trainer = Trainer(
        policy.model,
        TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True),
        train_dataset=Dataset.from_list([{"input_ids": [6, 7, 8], "labels": [6, 7, 8]}]),
        callbacks=[GuardCallback(Erase(directions), adapter)],
    )
    with pytest.raises(GuardError, match="lm_head"):
        trainer.train()
