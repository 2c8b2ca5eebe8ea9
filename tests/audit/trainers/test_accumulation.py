"""Under accumulation a loss that receives the number of items must read it: the trainer does not divide then."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from earnest_audit import AuditCallback, WatchWarning
from tests.audit.trainers.cases import TRAINERS, plain

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


def loss_func(reads: bool) -> Any:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits, wanted = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        if not reads:  # Soup #720, transformers #37766: a mean, whatever the number
            return F.cross_entropy(logits, wanted, ignore_index=-100)
        return F.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum") / num_items_in_batch

    return loss


def rows(make: Any, folder: Path, func: Any = None, micro: int = 2) -> dict[str, str]:
    callback = AuditCallback(quick=True)
    trainer = make(
        folder, 0, torch.float32, [callback], max_steps=1, gradient_accumulation_steps=micro,
        per_device_train_batch_size=2,
    )  # fmt: skip
    if func is not None:
        trainer.compute_loss_func = func
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WatchWarning)
        trainer.train()
    return {f.subject: f.outcome for f in callback.verdict().findings}


def test_a_loss_that_does_not_read_the_number_is_seen(tmp_path: Path) -> None:
    assert rows(plain, tmp_path, loss_func(False))["num_items_in_batch"] == "fails"
    assert rows(plain, tmp_path, loss_func(True))["num_items_in_batch"] == "holds"
    assert rows(plain, tmp_path)["num_items_in_batch"] == "holds", "the model's own loss"
    assert "num_items_in_batch" not in rows(plain, tmp_path, loss_func(False), micro=1), (
        "one micro-batch: a mean will do"
    )


SLOW = [pytest.param(n, marks=() if n in ("SFT", "GRPO") else pytest.mark.slow) for n in TRAINERS]


@pytest.mark.parametrize("name", SLOW)
def test_released_trainers_raise_nothing_under_accumulation(name: str, tmp_path: Path) -> None:
    assert rows(TRAINERS[name], tmp_path).get("num_items_in_batch") != "fails"
