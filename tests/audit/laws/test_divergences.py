"""Law DIV-ZERO: mixed-in likelihoods, swapped mixture weights, forward and reverse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from earnest_audit import Metric, Setting, Step, audit
from earnest_audit.laws import identical
from earnest_audit.verdict import Finding
from tests.audit.steps import distill_step

IDENTICAL = "identical distributions"


DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


def rows(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {f.subject: f.outcome for f in findings}


def judged(step: Step) -> dict[str, str]:
    return rows(audit(step, laws=[identical.LAW]).findings)


def mean(values: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return (values * batch["mask"]).sum() / batch["mask"].sum()


def both(model: nn.Module, batch: Mapping[str, Any], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    student = model(batch["ids"], batch["attention"])[:, :-1] / temperature
    return student.log_softmax(-1), (batch["teacher"] / temperature).log_softmax(-1)


def likelihood(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    student, _ = both(model, batch)
    return mean(-student.gather(-1, batch["ids"][:, 1:, None])[..., 0], batch)


def step_of(loss: Any, **more: Any) -> Step:
    step = distill_step(loss, dtype=more.pop("dtype", torch.float32))
    step.settings = {}
    for name, value in more.items():
        setattr(step, name, value)
    step.__post_init__()
    return step


def hinton(model: nn.Module, batch: Mapping[str, Any], alpha: float, temperature: float, hot: bool = False) -> Tensor:
    """α·T²·KL + (1-α)·likelihood; ``hot`` forgets the student's temperature."""
    student, teacher = both(model, batch, temperature)
    if hot:
        student = both(model, batch)[0]
    kl = mean((teacher.exp() * (teacher - student)).sum(-1), batch) * temperature**2
    return alpha * kl + (1 - alpha) * likelihood(model, batch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hot", [False, True])
def test_a_likelihood_that_is_mixed_in_must_be_declared(hot: bool, dtype: torch.dtype) -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any], alpha: float, temperature: float) -> Tensor:
        return hinton(model, batch, alpha, temperature, hot)

    settings: dict[str, Any] = {"alpha": 0.5, "temperature": 2.0}
    found = audit(step_of(loss, settings=settings, dtype=dtype), laws=[identical.LAW]).findings
    (row,) = [f for f in found if f.subject == IDENTICAL]
    assert row.outcome == "fails" and "Setting(value, pure=…)" in row.meaning, row
    pure = step_of(loss, settings=settings | {"alpha": Setting(0.5, pure=1.0)}, dtype=dtype)
    assert judged(pure)[IDENTICAL] == ("fails" if hot else "holds")


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_every_term_has_a_weight_one_of_them_is_the_divergence(dtype: torch.dtype) -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any], kd: float, ce: float, wrong: float = 0.0) -> Any:
        student, teacher = both(model, batch)
        kl = mean((teacher.exp() * (teacher - (1 - wrong) * student)).sum(-1), batch)
        nll = likelihood(model, batch)
        return kd * kl + ce * nll, {"kl": kl, "ce": nll}

    def broken(model: nn.Module, batch: Mapping[str, Any], kd: float, ce: float) -> Any:
        student, teacher = both(model, batch)
        kl = mean((teacher.exp() * (teacher - student.roll(1, -1))).sum(-1), batch)
        nll = likelihood(model, batch)
        return kd * kl + ce * nll, {"kl": kl, "ce": nll}

    terms = {"kl": Metric(weight="kd"), "ce": Metric(weight="ce")}
    declared: dict[str, Any] = {"settings": {"kd": 0.5, "ce": 0.5}, "metrics": terms, "dtype": dtype}
    assert judged(step_of(loss, **declared))[IDENTICAL] == "holds"
    assert judged(step_of(broken, **declared))[IDENTICAL] == "fails"


def test_a_cross_entropy_keeps_the_teachers_entropy() -> None:
    def soft(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        student, teacher = both(model, batch)
        return mean(-(teacher.exp() * student).sum(-1), batch)

    assert judged(step_of(soft))[IDENTICAL] == "holds"


def jsd(model: nn.Module, batch: Mapping[str, Any], alpha: float, outer: Any = None, scale: float = 1.0) -> Tensor:
    student, teacher = both(model, batch)
    mixture = torch.logaddexp(student + torch.tensor(1 - alpha).log(), teacher + torch.tensor(alpha).log())
    share = alpha if outer is None else outer(alpha)
    to_teacher = (teacher.exp() * (teacher - mixture)).sum(-1)
    to_student = (student.exp() * (student - mixture)).sum(-1)
    return scale * mean(share * to_teacher + (1 - share) * to_student, batch)


def skew(model: nn.Module, batch: Mapping[str, Any], alpha: float) -> Tensor:
    return jsd(model, batch, alpha, outer=lambda _: 1.0)


def scaled(model: nn.Module, batch: Mapping[str, Any], alpha: float) -> Tensor:
    return jsd(model, batch, alpha, scale=9.0)


def swapped(model: nn.Module, batch: Mapping[str, Any], alpha: float) -> Tensor:
    return jsd(model, batch, alpha, outer=lambda a: 1 - a)


def amari(model: nn.Module, batch: Mapping[str, Any], alpha: float) -> Tensor:
    student, teacher = both(model, batch)
    overlap = (alpha * teacher + (1 - alpha) * student).exp().sum(-1)
    return mean((1 - overlap) / (alpha * (1 - alpha)), batch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("loss", "outcome"), [
    (jsd, "holds"), (skew, "holds"), (scaled, "holds"), (amari, "holds"), (swapped, "fails"),
])  # fmt: skip
def test_only_swapped_weights_grow_towards_both_ends(loss: Any, outcome: str, dtype: torch.dtype) -> None:
    found = judged(step_of(loss, settings={"alpha": 0.3}, dtype=dtype))
    assert found["a mixture's weight alpha"] == outcome and found[IDENTICAL] == "holds"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["setting", "forward kl"])
@pytest.mark.parametrize("turned", [False, True])
def test_forward_and_reverse_are_told_apart(turned: bool, kind: Any, dtype: torch.dtype) -> None:
    """twinkle #112 and aprender #2153: the two are swapped. A kind that is guessed from names only warns."""
    names = ("forward_kl", "reverse_kl") if kind == "setting" else ("a", "b")

    def loss(model: nn.Module, batch: Mapping[str, Any], temperature: float, side: str = names[0]) -> Tensor:
        student, teacher = both(model, batch, temperature)
        if (side == names[0]) == turned:
            student, teacher = teacher, student
        return mean((teacher.exp() * (teacher - student)).sum(-1), batch)

    settings = {"side": Setting(names[0], kind, modes=names[1:]), "temperature": 1.5}
    verdict = audit(step_of(loss, settings=settings, dtype=dtype), laws=[identical.LAW])
    (row,) = [f for f in verdict.findings if f.subject.startswith("option side")]
    assert row.outcome == ("holds" if not turned else "warns" if kind == "setting" else "fails"), row.measured
    assert any("side is a forward kl" in note for note in verdict.notes) == (kind == "setting")


@pytest.mark.parametrize("wrong", [False, True])
def test_a_divergence_that_is_one_term_with_a_weight_is_judged_by_it(wrong: bool) -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any], coef: float) -> Tensor:
        student, teacher = both(model, batch)
        gap = teacher - (student.mul(2).log_softmax(-1) if wrong else student)
        return coef * mean((teacher.exp() * gap).sum(-1), batch)

    found = judged(step_of(loss, settings={"coef": Setting(1.0, "weight")}))
    assert found[IDENTICAL] == ("fails" if wrong else "holds") and found["different distributions"] == "holds"
