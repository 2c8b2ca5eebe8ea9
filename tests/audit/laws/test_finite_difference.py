"""Law FD: when the value is taken to be the loss of the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Metric, Setting, Step, audit
from earnest_audit.laws import finite_difference
from earnest_audit.verdict import Finding
from tests.audit.steps import ROWS, Tiny, distill_step, token_batch


def rows(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {f.subject: f.outcome for f in findings}


def mean(values: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return (values * batch["mask"]).sum() / batch["mask"].sum()


def both(model: nn.Module, batch: Mapping[str, Any], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    student = model(batch["ids"], batch["attention"])[:, :-1] / temperature
    return student.log_softmax(-1), (batch["teacher"] / temperature).log_softmax(-1)


def step_of(loss: Any, **more: Any) -> Step:
    step = distill_step(loss, dtype=more.pop("dtype", torch.float32))
    step.settings = {}
    for name, value in more.items():
        setattr(step, name, value)
    step.__post_init__()
    return step


def test_a_teacher_that_is_made_in_the_step_has_to_be_declared_for_FD() -> None:
    def from_a_hint(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        student = model(batch["ids"], batch["attention"])[:, :-1].log_softmax(-1)
        hinted = torch.cat([batch["hint"], batch["ids"]], 1)
        teacher = model(hinted)[:, 3:-1].log_softmax(-1).detach()
        return mean((teacher.exp() * (teacher - student)).sum(-1), batch)

    batch = {**token_batch(), "hint": torch.arange(3 * ROWS).reshape(ROWS, 3) % 20 + 1}
    roles = {k: k for k in ("ids", "attention", "mask")}
    for declared, outcome in ((None, "not declared"), (True, "fails"), (False, "not applicable")):
        step = Step(Tiny(), from_a_hint, batch, roles, family="divergence", value_is_loss=declared)
        assert [f.outcome for f in audit(step, laws=[finite_difference.LAW]).findings] == [outcome]


def test_the_declared_teacher_is_taken_as_given() -> None:
    def kl(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        student, teacher = both(model, batch)
        return mean(F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1), batch)

    found = rows(audit(step_of(kl), laws=[finite_difference.LAW]).findings)
    assert found == {"loss along its own gradient": "holds"}


def test_a_loss_that_hides_its_slope_in_its_last_bit_is_not_accused() -> None:
    """A large constant beside the loss: below an fp32 loss's own resolution, and not a float64 one's."""

    def far(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        student, teacher = both(model, batch)
        return mean(F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1), batch) + 5e7

    assert rows(audit(step_of(far), laws=[finite_difference.LAW]).findings) == {"loss along its own gradient": "holds"}


@pytest.mark.parametrize("detached", [False, True])
def test_a_float64_copy_that_rounds_to_fp32_is_taken_to_be_exact_to_a_unit_of_it(detached: bool) -> None:
    """As with a norm that computes in fp32: a unit of the loss over the step is more than a twentieth of the slope."""
    outcomes = []
    for seed in range(6):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        model[2].bias.data.fill_(1.0 if detached else 0.1)

        def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
            square = model(batch["x"]).float().square()
            return (1000 + square + (square.detach() if detached else 0)).mean()

        step = Step(model, loss, {"x": 1 + torch.rand(2, 3)}, value_is_loss=True)
        (row,) = audit(step, laws=[finite_difference.LAW]).findings
        outcomes.append(row.outcome)
    assert outcomes == ["fails" if detached else "holds"] * 6


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_light_term_is_checked_by_itself(whole: bool, named: bool) -> None:
    """A penalty whose second factor is detached: half of its slope, at a thousandth of the loss."""

    def loss(model: nn.Module, batch: Mapping[str, Any], z: float) -> Any:
        student, teacher = both(model, batch)
        size = model(batch["ids"], batch["attention"])[:, :-1].logsumexp(-1)
        penalty = mean(size * (size if whole else size.detach()), batch)
        kl = mean(F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1), batch)
        return kl + z * penalty, {"penalty": penalty}

    declared = {"metrics": {"penalty": Metric(weight="z")}} if named else {}
    step = replace(step_of(sum), loss=loss, settings={"z": Setting(1e-3, "weight")}, **declared)
    found = rows(audit(step, laws=[finite_difference.LAW]).findings)
    assert found.pop(f"term {'penalty' if named else 'z'} along its own gradient") == ("holds" if whole else "fails")
    assert found == {"loss along its own gradient": "holds"}
