"""Law PAIR: preferences beside other terms, losses that weigh each answer by itself, signs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Metric, Setting, Step, audit
from earnest_audit.laws import (
    metrics,
    pairs,
)
from earnest_audit.verdict import Finding
from tests.audit.steps import (
    dpo_loss,
    dpo_step,
    sequence_logprobs,
)

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


IDENTICAL, ALIKE = "identical pairs", "at the reference every pair has the same weight"


NLL = "nll"


def rows(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {f.subject: f.outcome for f in findings}


def judged(step: Step) -> dict[str, str]:
    return rows(audit(step, laws=[pairs.LAW]).findings)


def ratios(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    chosen, rejected = sequence_logprobs(model, batch)
    return chosen - batch["ref_chosen"], rejected - batch["ref_rejected"]


def averages(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    chosen, rejected = sequence_logprobs(model, batch)
    return chosen / batch["chosen_mask"].sum(-1), rejected / batch["rejected_mask"].sum(-1)


def pair_step(loss: Any, *, referred: bool = True, **more: Any) -> Step:
    """``dpo_step`` with another loss and other declarations."""
    step = dpo_step(loss, dtype=more.pop("dtype", torch.float32))
    step.metrics = {}
    if not referred:
        step.roles = {r: k for r, k in step.roles.items() if "reference" not in r}
        step.batch = {k: v for k, v in step.batch.items() if "ref" not in k}
    for name, value in more.items():
        setattr(step, name, value)
    step.__post_init__()
    return step


def with_nll(model: nn.Module, batch: Mapping[str, Any], beta: float, alpha: float, less: float = 0.0) -> Any:
    """DPO plus a mean over the chosen answers' tokens (RPO); ``less`` of the rejected side's own log-prob counts."""
    chosen, rejected = ratios(model, batch)
    nll = -sequence_logprobs(model, batch)[0].sum() / batch["chosen_mask"].sum()
    margin = chosen - (rejected - less * sequence_logprobs(model, batch)[1])
    return -F.logsigmoid(beta * margin).mean() + alpha * nll, {NLL: nll}


@pytest.mark.parametrize("dtype", DTYPES)
def test_declared_terms_are_off_while_pairs_are_judged(dtype: torch.dtype) -> None:
    step = pair_step(with_nll, dtype=dtype, settings={"beta": 0.1, "alpha": 1.0}, metrics={NLL: Metric(weight="alpha")})
    found = judged(step)
    assert found[IDENTICAL] == "holds" and found[ALIKE] == "holds"


def test_an_undeclared_weight_must_be_declared_and_a_broken_side_is_no_weight() -> None:
    def halved(model: nn.Module, batch: Mapping[str, Any], beta: float, alpha: float) -> Any:
        return with_nll(model, batch, beta, alpha, less=0.5)

    settings = {"settings": {"beta": 0.1, "alpha": 1.0}}
    found = audit(pair_step(with_nll, **settings), laws=[pairs.LAW]).findings
    (row,) = [f for f in found if f.subject == IDENTICAL]
    assert row.outcome == "not declared" and 'settings={"alpha": Setting(1, "weight")}' in row.meaning
    assert judged(pair_step(halved, **settings))[IDENTICAL] == "fails"
    assert judged(pair_step(halved, **settings, metrics={NLL: Metric(weight="alpha")}))[IDENTICAL] == "fails"


def orpo(model: nn.Module, batch: Mapping[str, Any], lam: float, sft: float = 1.0) -> Any:
    chosen, rejected = averages(model, batch)
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    nll, ratio = -chosen.mean(), -F.logsigmoid(odds).mean()
    return sft * nll + lam * ratio, {NLL: nll, "or": ratio}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_preference_may_be_the_term_and_the_likelihood_the_rest(dtype: torch.dtype) -> None:
    def one_sided(model: nn.Module, batch: Mapping[str, Any], lam: float) -> Any:
        chosen, rejected = averages(model, batch)
        ratio = -F.logsigmoid(2 * chosen - rejected).mean()
        return -chosen.mean() + lam * ratio, {"or": ratio}

    declared: dict[str, Any] = {"referred": False, "settings": {"lam": 0.1}, "logprobs": averages, "dtype": dtype}
    declared["metrics"] = {"or": Metric(weight="lam")}
    assert judged(pair_step(orpo, **declared))[IDENTICAL] == "holds"
    assert judged(pair_step(one_sided, **declared))[IDENTICAL] == "fails"
    assert judged(pair_step(orpo, **{**declared, "metrics": {}}))[IDENTICAL] == "not declared"
    assert judged(pair_step(one_sided, **{**declared, "metrics": {}}))[IDENTICAL] == "fails"
    unnamed = {**declared, "metrics": {}, "settings": {"lam": Setting(0.1, "weight")}}
    assert judged(pair_step(orpo, **unnamed))[IDENTICAL] == "holds"
    assert judged(pair_step(one_sided, **unnamed))[IDENTICAL] == "fails"


def test_terms_that_are_the_whole_loss_add_up_to_it() -> None:
    """mlx-lm-lora #65: ORPO without its likelihood, which is logged all the same."""

    def without(model: nn.Module, batch: Mapping[str, Any], lam: float) -> Any:
        return orpo(model, batch, lam, sft=0.0)

    for loss, outcome in ((orpo, "holds"), (without, "fails")):
        step = pair_step(
            loss,
            referred=False,
            settings={"lam": 0.1},
            logprobs=averages,
            metrics={"or": Metric(weight="lam"), NLL: Metric(weight=1.0)},
        )
        assert rows(audit(step, laws=[metrics.LAW]).findings)["the sum of the terms"] == outcome


def sppo(c: Tensor, r: Tensor, beta: float) -> Tensor:
    return (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2


def nca(c: Tensor, r: Tensor, beta: float) -> Tensor:
    return -F.logsigmoid(beta * c) - 0.5 * F.logsigmoid(-beta * c) - 0.5 * F.logsigmoid(-beta * r)


def bco(c: Tensor, r: Tensor, beta: float) -> Tensor:
    centre = (beta * (c + r) / 2).mean().detach()
    return -F.logsigmoid(beta * c - centre) - F.logsigmoid(-(beta * r - centre))


def of(form: Callable[[Tensor, Tensor, float], Tensor]) -> Any:
    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float) -> Tensor:
        return form(*ratios(model, batch), beta).mean()

    return loss


@pytest.mark.parametrize("form", [sppo, nca, bco])
def test_each_answer_by_itself_must_be_declared(form: Any) -> None:
    (row,) = [f for f in audit(pair_step(of(form)), laws=[pairs.LAW]).failures if f.subject == IDENTICAL]
    assert "pairwise=False" in row.meaning
    found = judged(pair_step(of(form), pairwise=False))
    assert found[IDENTICAL] == "not applicable" and "fails" not in found.values()


def test_a_margin_beyond_its_target_is_drawn_back_legitimately() -> None:
    """IPO far beyond 1/2τ narrows most margins; at the reference it widens all."""

    def ipo(model: nn.Module, batch: Mapping[str, Any], beta: float, sign: float = 1.0) -> Tensor:
        chosen, rejected = ratios(model, batch)
        return (sign * (chosen - rejected) - 1 / (2 * beta)).square().mean()

    def turned(model: nn.Module, batch: Mapping[str, Any], beta: float) -> Tensor:
        return ipo(model, batch, beta, sign=-1.0)

    for loss, outcome, there in ((ipo, "holds", "+1"), (turned, "fails", "-1")):
        step = pair_step(loss, settings={"beta": 5.0})
        step.batch = {**step.batch, "ref_chosen": step.batch["ref_chosen"] - 20.0}
        (found,) = (f for f in audit(step, laws=[pairs.LAW]).findings if f.subject == "descending widens the margin")
        assert found.outcome == outcome and f", {there} at the reference" in found.measured, found


@pytest.mark.parametrize("role", [None, "weights"])
def test_pairs_with_weights_of_their_own(role: str | None) -> None:
    def weighed(model: nn.Module, batch: Mapping[str, Any], beta: float) -> Tensor:
        chosen, rejected = ratios(model, batch)
        return -(batch["weights"] * F.logsigmoid(beta * (chosen - rejected))).mean()

    step = pair_step(weighed)
    step.batch = {**step.batch, "weights": torch.tensor([0.1, 3.0, 0.2, 5.0, 1.0])}
    if role is not None:
        step.roles = {**step.roles, role: "weights"}
    assert judged(step)[ALIKE] == ("holds" if role else "fails")


@pytest.mark.parametrize("declared", ["sums", "averages"])
@pytest.mark.parametrize("seed", range(2))
def test_references_in_another_unit_than_the_log_probs(seed: int, declared: str) -> None:
    """IPO of averages with stored sums: right where the loss divides both; ``logprobs`` is what it compares."""

    def ipo(divided: bool) -> Any:
        def loss(model: nn.Module, batch: Mapping[str, Any], beta: float) -> Tensor:
            counts = [batch[f"{side}_mask"].sum(-1) if divided else 1 for side in ("chosen", "rejected")]
            (c, r), (n, m) = averages(model, batch), counts
            gap = (c - batch["ref_chosen"] / n) - (r - batch["ref_rejected"] / m)
            return (gap - 1 / (2 * beta)).square().mean()

        given = dpo_step(loss, seed=seed)
        given.metrics, given.settings = {}, {"beta": 0.5}
        given.logprobs = sequence_logprobs if declared == "sums" else averages
        return given

    verdict = audit(ipo(True), laws=[pairs.LAW])
    assert any("the references are in the unit of logprobs" in n for n in verdict.notes) == (declared == "averages")
    (row,) = [f for f in verdict.findings if f.subject == ALIKE]
    assert row.outcome == ("holds" if declared == "averages" else "not declared")
    assert declared == "averages" or "(over the lengths)" in row.meaning
    assert judged(ipo(False))[ALIKE] == "fails"


def test_a_smoothed_half_with_a_wrong_sign_is_seen() -> None:
    def smoothed(sign: float, target: float) -> Any:
        def loss(model: nn.Module, batch: Mapping[str, Any], beta: float, label_smoothing: float) -> Tensor:
            chosen, rejected = ratios(model, batch)
            x = beta * (chosen - rejected) - target
            return -((1 - label_smoothing) * F.logsigmoid(x) + sign * label_smoothing * F.logsigmoid(-x)).mean()

        return pair_step(loss, settings={"beta": 0.1, "label_smoothing": 0.1})

    subject = "swapped answers at 1 - label_smoothing"
    assert judged(smoothed(1.0, 0.0))[subject] == "holds"
    assert judged(smoothed(1.0, 0.5))[subject] == "holds", "a target margin is not an error"
    assert judged(smoothed(-1.0, 0.0))[subject] == "fails"


def test_pairs_that_were_right_stay_right() -> None:
    verdict = audit(dpo_step(dpo_loss))
    assert verdict.holds, str(verdict)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_reference_that_holds_both_answers_is_made_equal_with_its_pair(mixed: bool) -> None:
    """The reference's log-probs stacked as [pairs, 2] under the role reference, in a loss that bends each side's
    log-ratio before it compares them (f-DPO). A side that is divided by the other's length is still seen."""
    step = dpo_step()
    both = torch.stack([step.batch["ref_chosen"], step.batch["ref_rejected"]], dim=1)
    batch = {**{k: v for k, v in step.batch.items() if not k.startswith("ref_")}, "ref": both}

    def loss(model: nn.Module, given: Mapping[str, Any], beta: float) -> Tensor:
        gaps = torch.stack(sequence_logprobs(model, given), dim=1) - given["ref"]
        bent = torch.sinh(0.05 * gaps) * (torch.tensor([1.0, 0.5]) if mixed else 1.0)
        return -F.logsigmoid(beta * (bent[:, 0] - bent[:, 1])).mean()

    roles = {r: k for r, k in step.roles.items() if not r.startswith("reference")} | {"reference": "ref"}
    stacked = Step(step.model, loss, batch, roles, settings={"beta": 0.1}, logprobs=sequence_logprobs)
    assert judged(stacked)[IDENTICAL] == ("fails" if mixed else "holds")


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("names", [("chosen_read", "rejected_read"), ("seen_w", "seen_l")], ids=str)
def test_attention_that_belongs_to_neither_answer_must_be_declared(names: tuple[str, str], right: bool) -> None:
    """A role pairs it, or a name does, which the verdict lists; where neither does, nothing is accused."""
    step = dpo_step()
    step.batch["rejected_attention"][:, :2] = 0
    keys = dict(zip(("chosen_attention", "rejected_attention"), names, strict=True))

    def loss(model: nn.Module, given: Mapping[str, Any], beta: float) -> Any:
        batch = {**given, **{key: given[name] for key, name in keys.items()}}
        value, metrics = dpo_loss(model, batch, beta)
        return value + (0.0 if right else 0.3 * sequence_logprobs(model, batch)[0].mean()), metrics

    batch = {keys.get(key, key): value for key, value in step.batch.items()}
    plain = Step(step.model, loss, batch, step.roles, settings={"beta": 0.1})
    verdict = audit(plain, laws=[pairs.LAW])
    (row,) = [f for f in verdict.findings if f.subject == IDENTICAL]
    named = "chosen_read" in names
    assert row.outcome == ("not declared" if not named else "holds" if right else "fails")
    way = 'roles={"chosen_attention": …, "rejected_attention": …}, or masks, for seen_w, seen_l'
    assert named or way in row.meaning
    assert any("chosen_read and rejected_read belong to the two answers" in note for note in verdict.notes) == named
    declared = Step(step.model, loss, batch, {**step.roles, **keys}, settings={"beta": 0.1})
    verdict = audit(declared, laws=[pairs.LAW])
    assert rows(verdict.findings)[IDENTICAL] == ("holds" if right else "fails")
    assert not any("the two answers" in note for note in verdict.notes)


def simpo(sign: float) -> Any:
    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float, gamma: float) -> Tensor:
        chosen, rejected = averages(model, batch)
        return -F.logsigmoid(beta * (chosen - rejected) - sign * gamma).mean()

    return loss


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_target_margin_is_taken_off(sign: float, declared: bool, dtype: torch.dtype) -> None:
    """A kind that is guessed from a name only warns."""
    gamma = Setting(0.5, "target") if declared else 0.5
    step = pair_step(simpo(sign), referred=False, dtype=dtype, settings={"beta": 2.0, "gamma": gamma})
    assert judged(step)["a larger gamma"] == ("holds" if sign > 0 else "fails" if declared else "warns")


def test_a_square_past_its_target_and_a_focal_exponent_are_legitimate() -> None:
    def margins(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        chosen, rejected = ratios(model, batch)
        return chosen - rejected

    def square(model: nn.Module, batch: Mapping[str, Any], beta: float, offset: float) -> Tensor:
        return (beta * margins(model, batch) + 7 - offset).square().mean()  # past its target by 7

    def focal(model: nn.Module, batch: Mapping[str, Any], beta: float, gamma: float) -> Tensor:
        p = (beta * margins(model, batch)).sigmoid()
        return (-((1 - p) ** gamma) * p.log()).mean()

    assert judged(pair_step(square, settings={"beta": 0.1, "offset": 1.0}))["a larger offset"] == "holds"
    found = judged(pair_step(focal, settings={"beta": 0.1, "gamma": 2.0}))
    assert found["a larger gamma"] in ("not applicable", "holds")


@pytest.mark.parametrize("won_by", [[0.5, 1.0, 0.2, 0.7, 0.1], [1, 2, 1, 3, 1]], ids=["floats", "whole"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_margins_of_the_batch_are_taken_off(sign: float, won_by: list[float]) -> None:
    """A reward model's margins, one per pair."""

    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float) -> Tensor:
        chosen, rejected = ratios(model, batch)
        return -F.logsigmoid(beta * (chosen - rejected) - sign * batch["won_by"]).mean()

    step = pair_step(loss)
    step.batch = {**step.batch, "won_by": torch.tensor(won_by)}
    step.roles = {**step.roles, "margin": "won_by"}
    verdict = audit(step)
    assert {f.subject: f.outcome for f in verdict.findings}["a larger won_by"] == ("holds" if sign > 0 else "fails")
    assert verdict.holds is (sign > 0), str(verdict)
