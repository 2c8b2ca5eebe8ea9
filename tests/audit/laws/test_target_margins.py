"""Law PAIR-TARGET: target margins that are added instead of subtracted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Step, audit
from earnest_audit.law import Law
from earnest_audit.laws import (
    targets,
)
from tests.audit.steps import (
    dpo_step,
    sequence_logprobs,
)

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


Data = Mapping[str, Any]


def outcome(step: Step, law: Law, subject: str) -> str | None:
    found = {f.subject: f.outcome for f in audit(step, laws=[law]).findings}
    return found.get(subject)


def _margins(model: nn.Module, batch: Data) -> Tensor:
    chosen, rejected = sequence_logprobs(model, batch)
    return (chosen - batch["ref_chosen"]) - (rejected - batch["ref_rejected"])


def _simpo(sign: float) -> Any:
    def loss(model: nn.Module, batch: Data, beta: float, gamma: float) -> Tensor:
        chosen, rejected = sequence_logprobs(model, batch)
        gap = chosen / batch["chosen_mask"].sum(-1) - rejected / batch["rejected_mask"].sum(-1)
        return -F.logsigmoid(beta * gap - sign * gamma).mean()

    return loss


def _unreferred(loss: Any, dtype: torch.dtype = torch.float32, **more: Any) -> Step:
    step = dpo_step(loss, dtype=dtype)
    step.metrics = {}
    step.roles = {r: k for r, k in step.roles.items() if "reference" not in r}
    step.batch = {k: v for k, v in step.batch.items() if not k.startswith("ref")}
    for name, value in more.items():
        setattr(step, name, value)
    step.__post_init__()
    return step


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sign", "expected"), [(1.0, "holds"), (-1.0, "fails")])
def test_a_target_margin_is_taken_off(sign: float, expected: str, dtype: torch.dtype) -> None:
    step = _unreferred(_simpo(sign), dtype, knobs={"beta": 2.0, "gamma": 0.5})
    assert outcome(step, targets.LAW, "a larger gamma") == expected


def test_a_square_past_its_target_and_a_focal_exponent_are_legitimate() -> None:
    def square(model: nn.Module, batch: Data, beta: float, offset: float) -> Tensor:
        return (beta * _margins(model, batch) + 7 - offset).square().mean()  # past its target by 7

    def focal(model: nn.Module, batch: Data, beta: float, gamma: float) -> Tensor:
        p = (beta * _margins(model, batch)).sigmoid()
        return (-((1 - p) ** gamma) * p.log()).mean()

    step = dpo_step(square)
    step.knobs, step.metrics = {"beta": 0.1, "offset": 1.0}, {}
    assert outcome(step, targets.LAW, "a larger offset") == "holds"
    step = dpo_step(focal)
    step.knobs, step.metrics = {"beta": 0.1, "gamma": 2.0}, {}
    assert outcome(step, targets.LAW, "a larger gamma") in (None, "holds")


@pytest.mark.parametrize(("sign", "expected"), [(1.0, "holds"), (-1.0, "fails")])
def test_margins_of_the_batch_are_taken_off(sign: float, expected: str) -> None:
    """A reward model's margins, one per pair."""

    def loss(model: nn.Module, batch: Data, beta: float) -> Tensor:
        return -F.logsigmoid(beta * _margins(model, batch) - sign * batch["won_by"]).mean()

    step = dpo_step(loss)
    step.metrics = {}
    step.batch = {**step.batch, "won_by": torch.tensor([0.5, 1.0, 0.2, 0.7, 0.1])}
    step.roles = {**step.roles, "margin": "won_by"}
    verdict = audit(step)
    assert {f.subject: f.outcome for f in verdict.findings}["a larger won_by"] == expected
    assert verdict.holds is (expected == "holds"), str(verdict)


def test_margins_may_be_whole_numbers() -> None:
    def loss(model: nn.Module, batch: Data, beta: float) -> Tensor:
        return -F.logsigmoid(beta * _margins(model, batch) - batch["won_by"]).mean()

    step = dpo_step(loss)
    step.metrics = {}
    step.batch = {**step.batch, "won_by": torch.tensor([1, 2, 1, 3, 1])}
    step.roles = {**step.roles, "margin": "won_by"}
    verdict = audit(step)
    assert verdict.holds and not verdict.errors, str(verdict)
