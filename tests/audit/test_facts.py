"""Setting and Metric: declared facts are what the laws read, and a guess is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Metric, Setting, Step, StepError, audit
from earnest_audit.errors import nearest
from earnest_audit.facts import MetricKind
from earnest_audit.laws import clipping, direction, inputs, knobs, liveness, metrics, on_policy
from tests.audit.steps import distill_step, policy_step, sft_loss, sft_step

LAWS = [knobs.LAW, on_policy.LAW, clipping.LAW, metrics.LAW, direction.LAW]


def declared(clip: str = "clip") -> Step:
    step = policy_step()
    return Step(
        step.model, lambda m, b, beta, **other: step.loss(m, b, beta=beta, clip=other[clip]), step.batch, step.roles,
        settings={"beta": Setting(0.04, "weight"), clip: Setting(0.2, "clip")},
        metrics={"kl": Metric(low=0.0, weight="beta"), "clip_fraction": Metric(0.0, 1.0)},
        logprobs=step.logprobs, family="policy gradient",
    )  # fmt: skip


@pytest.mark.parametrize("clip", ["clip", "bound_of_mine"])
def test_declared_facts_are_checked_whatever_their_names(clip: str) -> None:
    """A clip that has an unusual name was never checked as one."""
    rows = {f.subject: f.outcome for f in audit(declared(clip), laws=LAWS).findings}
    assert rows[f"clip {clip} at ratio 1"] == rows["clip: inside the clip range"] == rows["term kl"] == "holds"
    assert "fails" not in rows.values()


def test_a_guess_is_printed_and_a_declaration_is_none() -> None:
    given = policy_step()
    assert any("guessed from names: clip is a clip" in note for note in audit(given, laws=[knobs.LAW]).notes)
    assert not any("guessed" in note for note in audit(declared(), laws=[knobs.LAW]).notes)


def test_guesses_of_metrics_are_printed_and_declarations_are_not() -> None:
    step = policy_step()
    text = "kl is a kl to the reference, clip_fraction is a clipped share, approx_kl is a kl to the sampler"
    assert f"guessed from names: {text}; metrics={{name: Metric(kind=…)}} declares it" in audit(step).notes
    step.metrics = {n: Metric(kind="share" if n == "clip_fraction" else "kl to the sampler")
                    for n in ("kl", "clip_fraction", "approx_kl")}  # fmt: skip
    assert not any("Metric(kind" in note for note in audit(step, laws=[metrics.LAW]).notes)


@pytest.mark.parametrize("kind", [None, "clipped share"])
def test_a_metrics_kind_is_read_whatever_its_name(kind: MetricKind | None) -> None:
    step = policy_step()

    def loss(model: nn.Module, batch: Mapping[str, Any], **settings: Any) -> tuple[Tensor, dict[str, Any]]:
        return step.loss(model, batch, **settings)[0], {"outside": 0.0}

    given = replace(step, loss=loss, metrics={"outside": Metric(kind=kind, moves=False)})
    found = {f.subject for f in audit(given, laws=[clipping.LAW]).failures}
    assert found == ({"clip: every token's is outside, already done"} if kind else set())


def test_what_is_read_from_roles_and_values_is_printed_once() -> None:
    def guesses(step: Step) -> list[str]:
        return [n.removeprefix("guessed from ") for n in audit(step, laws=[]).notes if n.startswith("guessed from")]

    step = sft_step()
    assert guesses(step) == ['roles: the family is "sft"; family="…" declares it',
                             "values: labels stand where their tokens stand"]  # fmt: skip
    assert guesses(replace(step, family="sft", roles={"labels": "labels"}, wide=["labels"])) == []
    ahead = {**step.batch, "labels": F.pad(step.batch["labels"][:, 1:], (0, 1), value=-100)}
    assert "values: labels stand where they are predicted" in guesses(replace(step, batch=ahead))
    marked = replace(step, batch={**step.batch, "shown": (step.batch["labels"] >= 0).long()})
    assert "values: shown is a mask, 0 in padding; a role or masks=(…) declares it" in guesses(marked)
    assert not any("shown is a mask" in note for note in guesses(replace(marked, masks=["shown"])))
    assert "values: the teacher gives logits" in guesses(distill_step())


def test_facts_fill_the_fields_that_the_laws_read() -> None:
    step = policy_step()
    settings = {"beta": Setting(0.04, "weight"), "clip": Setting(0.2, "clip"), "c": Setting(0.1, "weight"),
                "n": Setting(8, "inert"), "mode": Setting("a", modes=("b", "c"), twins=frozenset({("a", "b")})),
                "alpha": Setting(0.5, pure=1.0)}  # fmt: skip
    facts = {"kl": Metric(weight="beta"), "h": Metric(weight="beta", raises=True), "n": Metric(moves=False),
             "nll": Metric(weight=1.0), "r": Metric(neutral=1.0)}  # fmt: skip
    made = Step(step.model, step.loss, step.batch, step.roles, settings=settings, metrics=facts)
    assert made.weights == {"kl": "beta", "h": "beta"} and made.fixed == ["nll"]
    assert made.knobs == {"beta": 0.04, "clip": 0.2, "c": 0.1, "n": 8, "alpha": 0.5} and made.pure == {"alpha": 1.0}
    assert made.options == {"mode": ("a", "b", "c")} and made.switches == ["c"] and made.clips == ["clip"]


def test_an_unknown_kind_is_an_error() -> None:
    step = policy_step()
    with pytest.raises(StepError, match="unknown kind 'clipp'"):
        Step(step.model, step.loss, step.batch, settings={"clip": Setting(0.2, "clipp")})  # type: ignore[arg-type]
    with pytest.raises(StepError, match=r"metric 'kl' is of an unknown kind 'margins': .*'margin'"):
        Step(step.model, step.loss, step.batch, metrics={"kl": Metric(kind="margins")})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "meant"),
    [("clipping", "'clip'"), ("clip higher", "'clip high'"), ("clp", "'clip'"), ("lr_schedul", "'lr_schedule'"),
     ("zeta", "known: clip, clip high, lr, lr_schedule.")],
)  # fmt: skip
def test_an_unknown_name_gets_the_one_that_was_meant(written: str, meant: str) -> None:
    assert meant in nearest(written, ["lr", "clip high", "lr_schedule", "clip"])


def test_an_optimizer_class_is_refused() -> None:
    with pytest.raises(StepError, match=r"optimizer=AdamW is a class: give AdamW\(model.parameters\(\), …\)"):
        replace(sft_step(), optimizer=torch.optim.AdamW)  # type: ignore[arg-type]


def test_clipped_parameters_may_come_from_a_generator() -> None:
    step = sft_step()
    step = replace(step, clipped=step.model.parameters())  # type: ignore[arg-type]
    found = {f.subject: f.outcome for f in audit(step, laws=[liveness.LAW]).findings}
    assert found["the clipped parameters"] == "holds"


def test_a_loss_in_place_of_the_model_is_refused() -> None:
    step = sft_step()
    with pytest.raises(StepError, match=r"give audit\(model, loss, batch\) in this order"):
        audit(step.loss, step.model, step.batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("own", [False, True])
def test_a_loss_that_is_not_repeatable_is_noted(own: bool) -> None:
    draws = torch.Generator().manual_seed(1)

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        value = sft_loss(model, batch)[0]
        return value * (1 + torch.rand((), generator=draws)) if own else value

    notes = audit(sft_step(loss), laws=[inputs.LAW]).notes
    assert any("not repeatable" in note for note in notes) == own


def test_a_gradient_that_is_nan_is_left_to_law_gl() -> None:
    step = sft_step(lambda model, batch: sft_loss(model, batch)[0] * torch.nan)
    found = audit(step, laws=[liveness.LAW, inputs.LAW])
    assert {f.law for f in found.failures} == {"GL"}
