"""Law MI-LENGTH: rows that are divided by more than their supervised tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from earnest_audit import Step, audit
from earnest_audit.law import Law
from earnest_audit.laws import (
    row_length,
)
from tests.audit.steps import (
    Tiny,
    logprobs,
    sft_step,
)

Data = Mapping[str, Any]


def outcome(step: Step, law: Law, subject: str) -> str | None:
    found = {f.subject: f.outcome for f in audit(step, laws=[law]).findings}
    return found.get(subject)


@pytest.mark.parametrize(
    ("divided", "dtype", "expected"),
    [
        ("by the whole row", torch.float32, "fails"),  # in bf16 three tokens are too few to be told
        ("by the answer", torch.float32, "holds"),
        ("by the answer", torch.bfloat16, "holds"),
        ("by all answers", torch.float32, "holds"),
        ("by all answers", torch.bfloat16, "holds"),
    ],
)
def test_a_row_is_not_divided_by_its_prompt(divided: str, dtype: torch.dtype, expected: str) -> None:
    def loss(model: nn.Module, batch: Data) -> Tensor:
        on = (batch["labels"][:, 1:] != -100).float()
        lp = logprobs(model, batch) * on
        if divided == "by all answers":
            return -lp.sum() / on.sum()
        size = batch["attention"].sum(-1) if divided == "by the whole row" else on.sum(-1).clamp(min=1)
        return -(lp.sum(-1) / size).mean()

    assert outcome(sft_step(loss, dtype=dtype), row_length.LAW, row_length.SUBJECT) == expected


def test_a_model_that_attends_to_later_tokens_is_not_checked() -> None:
    class Both(Tiny):
        def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
            x = self.embed(ids)
            seen = torch.ones_like(ids) if attention is None else attention
            mean = (x * seen[..., None]).sum(1, keepdim=True) / seen.sum(1)[:, None, None]
            return self.head(torch.tanh(x + self.out(mean)))

    step = sft_step()
    step.model = Both()
    step.optimizer = None
    assert outcome(step, row_length.LAW, row_length.SUBJECT) == "not applicable"
