"""Laws PG-RATIO and PG-CLIP: ratios, sampler corrections and clips; each defect beside a correct twin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from earnest_audit import Setting, Step, Verdict, audit
from earnest_audit.law import Law
from earnest_audit.laws import (
    clipping,
    knobs,
    on_policy,
    ratio,
)
from tests.audit.steps import (
    Tiny,
    logprobs,
    policy_batch,
    policy_step,
)

LAWS = [on_policy.LAW, ratio.LAW, clipping.LAW]


DTYPES = (torch.float32, torch.bfloat16)


ROLES = {"ids": "ids", "attention": "attention", "mask": "mask", "behaviour": "old", "advantages": "advantages"}


def failures(verdict: Verdict) -> set[str]:
    """Failures and warnings: law PG-RATIO fails only where both samplers are declared."""
    return {f.subject for f in verdict.strict().failures}


def outcomes(verdict: Verdict) -> dict[str, str]:
    return {f.subject: f.outcome for f in verdict.findings}


def mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()


def clipped(r: Tensor, a: Tensor, clip: float, pick: Any = torch.minimum) -> Tensor:
    return -pick(r * a, r.clamp(1 - clip, 1 + clip) * a)


def step(loss: Any, knobs: dict[str, Any], dtype: torch.dtype = torch.float32, **more: Any) -> Step:
    model = Tiny().to(dtype)
    batch = policy_batch(model)
    batch["rollout"] = (batch["old"] - 0.03).clamp(max=-1e-3) * batch["mask"]
    roles = more.pop("roles", ROLES)
    return Step(model=model, loss=loss, batch={**batch, **more.pop("batch", {})}, roles=roles, settings=knobs,
                logprobs=logprobs, **more)  # fmt: skip


def decoupled(how: str) -> Any:
    def loss(model: nn.Module, b: Mapping[str, Any], clip: float, cap: float) -> Tensor:
        lp, a = logprobs(model, b).float(), b["advantages"][:, None]
        top = lp.detach() if how == "current over rollout" else b["old"]  # slime #179
        gap = top - b["rollout"]
        w = (-gap if how == "upside down" else gap).exp().clamp(max=cap)
        if how == "self-normalised":
            w = w / mean(w, b["mask"])
        below = b["rollout" if how == "counted twice" else "old"]
        pick = torch.maximum if how == "swapped" else torch.minimum
        return mean(w * clipped((lp - below).exp(), a, clip, pick), b["mask"])

    return loss


TWO = {**ROLES, "behaviour": "rollout", "proximal": "old"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("how", "seen"),
    [
        ("right", set()),
        ("self-normalised", set()),
        ("current over rollout", {"the ratio's power"}),
        ("upside down", {"the correction's power"}),
        ("counted twice", {"the correction's power"}),
        ("swapped", {"clip: outside, already done", "clip: outside, to be undone"}),
    ],
)
def test_a_correction_for_the_sampler(how: str, seen: set[str], dtype: torch.dtype) -> None:
    """The clip is judged beside the correction too, whose weight once hid the ratio's slope."""
    made = step(decoupled(how), {"clip": 0.2, "cap": 2.0}, dtype, roles=TWO, rows_interact=how == "self-normalised")
    verdict = audit(made, laws=LAWS)
    assert failures(verdict) == {f.subject for f in verdict.failures} == seen, str(verdict)  # not only warnings
    found = outcomes(verdict)
    clip = "clip" if how == "self-normalised" else "clip: outside, to be undone"
    assert {"the ratio's power", "the correction's power", clip} <= found.keys()
    assert found["the correction's power"] != "not applicable"
    assert (found[clip] == "not applicable") == (how == "self-normalised")


def cispo(squared: bool) -> Any:
    def loss(model: nn.Module, b: Mapping[str, Any], eps_high: float) -> Tensor:
        lp = logprobs(model, b)
        r = (lp - b["old"]).exp()
        return -mean(r.clamp(max=1 + eps_high).detach() * b["advantages"][:, None] * (r if squared else lp), b["mask"])

    return loss


def in_rows(form: str) -> Any:
    """Weights of whole rows: a geometric mean, a product, and a soft gate; and a loss without any."""

    def loss(model: nn.Module, b: Mapping[str, Any], tau: float) -> Tensor:
        lp, m, a = logprobs(model, b), b["mask"], b["advantages"]
        gap = (lp - b["old"]) * m
        if form == "mean":
            return -(a * (gap.sum(-1) / m.sum(-1)).exp()).mean() * tau
        if form == "product":
            return -(a * gap.sum(-1).exp().clamp(max=tau)).mean()
        if form == "soft":
            return -mean(torch.sigmoid(tau * (gap.exp() - 1)) * 4 / tau * a[:, None], m)
        return -mean(a[:, None] * lp, m) * tau

    return loss


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_squared_ratio_is_seen_and_other_weights_are_not(dtype: torch.dtype) -> None:
    assert failures(audit(step(cispo(True), {"eps_high": 0.28}, dtype), laws=LAWS)) == {"the ratio's power"}
    assert audit(step(cispo(False), {"eps_high": 0.28}, dtype), laws=LAWS).holds
    for form in ("mean", "product", "soft", "none"):
        verdict = audit(step(in_rows(form), {"tau": 3.0 if form == "product" else 1.05}, dtype), laws=LAWS)
        assert verdict.holds, str(verdict)
        expected = "not applicable" if form == "product" else "holds"
        assert outcomes(verdict)["the ratio's power"] == expected, str(verdict)


def test_a_product_over_rows_of_one_length_is_no_power() -> None:
    mask = torch.zeros_like(policy_batch(Tiny())["mask"])
    mask[:, 2:5] = 1
    product = step(in_rows("product"), {"tau": 3.0}, batch={"mask": mask})
    assert outcomes(audit(product, laws=[ratio.LAW]))["the ratio's power"] == "not applicable"


def late(model: nn.Module, b: Mapping[str, Any], clip: float, **_: Any) -> Tensor:
    """The right values, and the gradient of the neighbours' log-probs: a second shift."""
    lp = logprobs(model, b)
    other = lp.roll(1, dims=-1)
    return mean(clipped((other + (lp - other).detach() - b["old"]).exp(), b["advantages"][:, None], clip), b["mask"])


def regression(model: nn.Module, b: Mapping[str, Any], tau: float) -> Tensor:
    """(A - τ·log ratio)² a row: its slope by A is not what multiplies ∇lp."""
    gap = ((logprobs(model, b) - b["old"]) * b["mask"]).sum(-1)
    return 0.5 * (b["advantages"] - tau * gap).square().mean()


def test_a_regression_on_the_advantages_is_legitimate() -> None:
    assert audit(step(regression, {"tau": 0.5}), laws=[on_policy.LAW, ratio.LAW]).holds
    turned = step(lambda m, b, tau: regression(m, b, -tau), {"tau": 0.5})
    assert "descending the loss raises Σ A·lp" in failures(audit(turned, laws=[on_policy.LAW]))


def with_entropy(fault: str, weight: float) -> Any:
    """An entropy bonus whose weight is a constant of the code: it is in the loss, and no declaration says so."""

    def loss(model: nn.Module, b: Mapping[str, Any], clip: float) -> Tensor:
        full = model(b["ids"], b["attention"])[:, :-1].float().log_softmax(-1)
        lp, a = full.gather(-1, b["ids"][:, 1:, None])[..., 0], b["advantages"][:, None]
        if fault == "late":  # the right values, and the gradient of the neighbours' log-probs
            lp = lp.roll(1, dims=-1) + (lp - lp.roll(1, dims=-1)).detach()
        r = (lp - b["old"]).exp()
        others = {"squared": -r * r.detach() * a, "ignored": -r, "turned": r * a}
        each = others.get(fault, clipped(r, a, clip))
        return mean(each + weight * (full.exp() * full).sum(-1), b["mask"])

    return loss


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("", set()),
        ("late", {on_policy.THROUGH}),
        ("squared", {"the ratio's power"}),
        ("turned", {"descending the loss raises Σ A·lp"}),
        ("ignored", {"descending the loss raises Σ A·lp"}),
    ],
)
def test_a_term_that_is_not_declared_is_taken_off_first(fault: str, seen: set[str], dtype: torch.dtype) -> None:
    weight = 0.01 if dtype == torch.float32 else 1.0  # so that it is above the dtype's resolution
    verdict = audit(step(with_entropy(fault, weight), {"clip": 0.2}, dtype), laws=[on_policy.LAW, ratio.LAW])
    assert seen <= failures(verdict) and bool(seen) == bool(failures(verdict)), str(verdict)
    if not fault:
        assert outcomes(verdict)[on_policy.THROUGH] == outcomes(verdict)["the ratio's power"] == "holds"


def thresholded(model: nn.Module, b: Mapping[str, Any], clip: float, threshold: float, fault: str = "") -> Tensor:
    """Rows of negative advantage that have gone far from the sampler are left out."""
    m, lp, a = b["mask"], logprobs(model, b), b["advantages"]
    far = ((b["old"] - lp) * m).sum(-1) / m.sum(-1).clamp(min=1)
    keep = ~((far > threshold) & (a < 0)) if fault != "clamped" else a > 0
    bound = 0.02 if fault == "bound" else clip
    r = (lp - b["old"]).exp()
    each = -torch.minimum(r * a[:, None], r.clamp(1 - bound, 1 + clip) * a[:, None])
    return mean(each * keep[:, None], m)


@pytest.mark.parametrize("fault", ["", "clamped", "bound"])
def test_a_threshold_that_removes_rows_is_not_the_clip(fault: str) -> None:
    knobs = {"clip": 0.2, "threshold": 0.1 if fault != "bound" else 1.0}
    declared = {"drops_tokens": not fault}
    made = step(lambda m, b, **k: thresholded(m, b, fault=fault, **k), knobs, **declared)
    verdict = audit(made, laws=[clipping.LAW])
    assert ("clip: inside the clip range" in failures(verdict)) == bool(fault), str(verdict)
    if not fault:
        (row,) = verdict.findings
        assert row.outcome == "not applicable" and "by declaration" in row.measured


Data = Mapping[str, Any]


def outcome(step: Step, law: Law, subject: str) -> str | None:
    found = {f.subject: f.outcome for f in audit(step, laws=[law]).findings}
    return found.get(subject)


@pytest.mark.parametrize("counted", [1, 2])
def test_a_product_over_rows_of_unequal_length_has_no_single_power(counted: int) -> None:
    """The correction for the sampler as a product over the row; twice the weight of each token is still seen."""

    def of_rows(model: nn.Module, batch: Data) -> Tensor:
        lp, mask, a = logprobs(model, batch), batch["mask"], batch["advantages"][:, None]
        weight = (((batch["proximal"] - batch["old"]) * mask).sum(-1, keepdim=True)).exp().clamp(max=50.0)
        return -(weight * (lp - batch["proximal"]).exp() * a * mask).sum() / mask.sum()

    def of_tokens(model: nn.Module, batch: Data) -> Tensor:
        lp, mask, a = logprobs(model, batch), batch["mask"], batch["advantages"][:, None]
        weight = (2 * (batch["proximal"] - batch["old"])).exp()
        return -(weight * (lp - batch["proximal"]).exp() * a * mask).sum() / mask.sum()

    step = policy_step(of_rows if counted == 1 else of_tokens)
    step.settings, step.metrics = {}, {}
    lengths = torch.tensor([8, 7, 8, 7, 7])
    attention = (torch.arange(12)[None] < 4 + lengths[:, None]).long()
    mask = (attention[:, 1:] * (torch.arange(1, 12)[None] >= 4)).float()
    step.batch = {**step.batch, "attention": attention, "mask": mask, "proximal": step.batch["old"] * 1.01}
    step.batch.pop("ref")
    step.roles = {r: k for r, k in step.roles.items() if r != "reference"} | {"proximal": "proximal"}
    found = {f.subject: f for f in audit(step, laws=[ratio.LAW]).findings}["the correction's power"]
    assert found.outcome == ("not applicable" if counted == 1 else "fails"), found


@pytest.mark.parametrize("of", ["product", "mean", "tokens"])
@pytest.mark.parametrize("right", [True, False])
def test_a_clip_of_a_rows_ratio(right: bool, of: str) -> None:
    """RLOO's ratio of whole answers leaves the clip at once where every token is at its edge; GSPO's does not."""

    def loss(model: nn.Module, batch: Data, clip: float) -> Tensor:
        a, mask = batch["advantages"], batch["mask"]
        gap = (logprobs(model, batch) - batch["old"]) * mask
        ratio = {"product": gap.sum(-1), "mean": gap.sum(-1) / mask.sum(-1), "tokens": gap}[of].exp()
        pick = torch.minimum if right else torch.maximum
        a = a[:, None] if of == "tokens" else a
        return -(pick(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a) * (mask if of == "tokens" else 1)).mean()

    step = policy_step(loss)
    step.batch = {k: v for k, v in step.batch.items() if k != "ref"}
    step.roles = {r: k for r, k in step.roles.items() if r != "reference"}
    step.settings, step.metrics = {"clip": 0.2}, {}
    verdict = audit(step, laws=[clipping.LAW, knobs.LAW])
    assert verdict.holds is right, str(verdict)
    assert {f.subject for f in verdict.findings} >= {"clip: inside the clip range", "clip: outside, to be undone"}


@pytest.mark.parametrize("given", [Setting(None, "bound"), Setting(3.0, "bound", modes=(None, 5.0))], ids=str)
def test_a_bound_may_be_none_or_have_modes(given: Setting) -> None:
    def loss(model: nn.Module, b: Data, clip: float, cap: float | None) -> Tensor:
        r, a = (logprobs(model, b) - b["old"]).exp(), b["advantages"][:, None]
        worst = a.abs().mul(-(cap or 1e9)).where(a < 0, a - 1e9)
        return mean(-torch.maximum(-clipped(r, a, clip), worst), b["mask"])

    verdict = audit(step(loss, {"clip": 0.2, "cap": given}), laws=LAWS)
    assert verdict.holds and not verdict.errors and len(verdict.findings) > 6, str(verdict)


@pytest.mark.parametrize("how", ["whitened", "right"])
def test_whitened_advantages_are_named_as_a_cause(how: str) -> None:
    def loss(model: nn.Module, b: Data, clip: float) -> Tensor:
        a = b["advantages"]
        a = (a - a.mean()) / a.std() if how == "whitened" else a
        return mean(clipped((logprobs(model, b) - b["old"]).exp(), a[:, None], clip), b["mask"])

    rows = audit(step(loss, {"clip": 0.2}), laws=[ratio.LAW]).warnings
    assert bool(rows) == (how == "whitened") and all("rows_interact=True" in f.meaning for f in rows)


@pytest.mark.parametrize("name", ["clip_ratio", "policy/clip_frac"])
@pytest.mark.parametrize("counts", ["less", "moved", "more", "clipped", "values"])
def test_the_clipped_share_where_every_token_is_past_its_bound(counts: str, name: str) -> None:
    """TRL #3032 counted the tokens whose unclipped term is the smaller one; others look at the clipped ratio."""

    def loss(model: nn.Module, b: Mapping[str, Any], clip: float) -> Any:
        r, a = (logprobs(model, b) - b["old"]).exp(), b["advantages"][:, None]
        bound = r.clamp(1 - clip, 1 + clip)
        here = {"less": bound * a < r * a, "moved": (r - 1).abs() > clip, "more": bound * a > r * a,
                "clipped": bound > 1 + clip + 1e-6, "values": r < 0}[counts]  # fmt: skip
        logged = "critic/clip_ratio" if counts == "values" else name
        return mean(clipped(r, a, clip), b["mask"]), {logged: mean(here.float(), b["mask"])}

    found = {f.subject for f in audit(step(loss, {"clip": 0.2}), laws=[clipping.LAW]).failures}
    wrong = counts in ("more", "clipped")
    assert found == ({"clip: every token's is outside, already done"} if wrong else set())
