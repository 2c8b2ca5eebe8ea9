"""Law NLL: weights that are not detached; regularisers are not errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Step, audit
from earnest_audit.laws import likelihood
from earnest_audit.limits import AWAY, NEAR, beside
from tests.audit.steps import Tiny, logprobs, sft_step, token_batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("detached", [True, False])
def test_a_weight_that_is_not_detached_pushes_unlikely_labels_down(detached: bool, dtype: torch.dtype) -> None:
    def dft(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        lp, on = logprobs(model, batch), (batch["labels"][:, 1:] != -100).float()
        weight = lp.exp().detach() if detached else lp.exp()
        return -(weight * lp * on).sum() / on.sum()

    step = sft_step(dft, logprobs=logprobs, value_is_loss=not detached, dtype=dtype)
    (row,) = audit(step, laws=[likelihood.LAW]).findings
    assert row.outcome == ("holds" if detached else "fails"), row.measured


def test_regularisers_and_masks_in_place_are_legitimate() -> None:
    def regularised(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        logits = model(batch["ids"], batch["attention"])[:, :-1]
        on = batch["mask"]
        each = F.cross_entropy(logits.transpose(1, 2), batch["ids"][:, 1:], reduction="none", label_smoothing=0.2)
        return ((each + 1e-2 * logits.logsumexp(-1).square()) * on).sum() / on.sum()

    batch = token_batch()
    step = Step(Tiny(), regularised, batch, {k: k for k in batch}, family="sft", logprobs=logprobs)
    assert [f.outcome for f in audit(step, laws=[likelihood.LAW]).findings] == ["holds"]


@pytest.mark.parametrize("value", [-0.0012, 0.0012, 0.97, -0.49999, -0.50001, 0.049999, 1e-9])
@pytest.mark.parametrize("limit", [0.0, AWAY, NEAR])
def test_a_printed_cosine_is_on_the_side_of_the_limit_that_its_row_reports(value: float, limit: float) -> None:
    assert (float(beside(value, limit)) > limit) == (value > limit)


def test_the_expected_cosine_is_the_limit_that_is_used() -> None:
    (row,) = audit(sft_step(logprobs=logprobs), laws=[likelihood.LAW]).findings
    assert row.expected == f"above {AWAY:g}"
