"""Law PG-ENTROPY: an entropy bonus from the sampled tokens fails, others do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from earnest_audit import Raises, Step, audit
from earnest_audit.laws import entropy
from tests.audit.steps import Tiny, logprobs, policy_batch

END = 7


def step(form: str, dtype: torch.dtype) -> Step:
    """ "drawn" is the defect; "row mean" and "top" are other right forms, "from ids" makes a mask of its own."""

    def loss(model: nn.Module, b: Mapping[str, Any], ent_coef: float) -> tuple[Tensor, dict[str, Tensor]]:
        full = model(b["ids"], b["attention"])[:, :-1].float().log_softmax(-1)
        lp, m = full.gather(-1, b["ids"][:, 1:, None])[..., 0], b["mask"]
        each = -lp if "drawn" in form else -(full.exp() * full).sum(-1)
        on = m * (b["ids"][:, 1:] != END) if form == "from ids" else m
        if form == "top":
            on = m * (each >= each[m.bool()].median())
        bonus = (each * on).sum() / on.sum()
        if "row mean" in form:
            bonus = ((each * on).sum(-1) / on.sum(-1)).mean()
        surrogate = -((lp - b["old"]).exp() * b["advantages"][:, None] * m).sum() / m.sum()
        return surrogate - ent_coef * bonus, {"entropy": bonus}

    model = Tiny().to(dtype)
    batch = policy_batch(model)
    last = (batch["mask"][0] != 0).nonzero()[-1] + 1
    batch["ids"][0, last] = END
    roles = {"ids": "ids", "attention": "attention", "mask": "mask", "behaviour": "old", "advantages": "advantages"}
    return Step(model=model, loss=loss, batch=batch, roles=roles, knobs={"ent_coef": 0.01}, logprobs=logprobs,
                terms={"entropy": Raises("ent_coef")})  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("form", "outcome"),
    [
        ("whole", "holds"),
        ("row mean", "holds"),
        ("top", "holds"),
        ("from ids", "not applicable"),
        ("drawn", "fails"),
        ("drawn, row mean", "fails"),
    ],
)
def test_an_entropy_does_not_depend_on_the_sampled_tokens(form: str, outcome: str, dtype: torch.dtype) -> None:
    verdict = audit(step(form, dtype), laws=[entropy.LAW])
    (row,) = verdict.findings
    assert row.outcome == outcome, str(verdict)
    if outcome == "holds":
        assert verdict.cost < 4, "one look beside the reading that there is, and the noise"
