"""Single laws on single faults: the clipped set, the sign of a part, padding on the left, and reasons for every row
that does not apply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from earnest.audit import Step, audit
from earnest.audit.laws import coverage, documents, liveness, masks, metrics, shadow, splits
from earnest.audit.verdict import Finding
from tests.audit.steps import LENGTH, Tiny, policy_step, sft_loss, sft_step


def outcomes(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {f.subject: f.outcome for f in findings}


# --- GL: what is clipped ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left_out", "outcome"), [(0, "holds"), (1, "fails"), (None, "not declared")])
def test_the_clipped_set_is_what_is_trained(left_out: int | None, outcome: str) -> None:
    step = sft_step(max_grad_norm=1e-3)
    step.clipped = None if left_out is None else list(step.model.parameters())[left_out:]
    found = outcomes(audit(step, laws=[liveness.LAW]).findings)
    assert found["the clipped parameters"] == outcome and found["the optimizer's parameters"] == "holds"


def test_clipping_what_is_not_the_models_is_seen() -> None:
    step = sft_step(max_grad_norm=1.0)
    step.clipped = list(Tiny(1).parameters())  # made before the model was replaced
    (failure,) = audit(step, laws=[liveness.LAW]).failures
    assert failure.subject == "the clipped parameters" and "that are not the model's" in failure.measured


# --- SE: no part counts against itself --------------------------------------------------------------------------------


def test_a_part_that_counts_against_itself_is_seen() -> None:
    """The whole is g₁ - g₂, exactly a combination of its parts, with a weight below 0."""

    def turned(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        rows = len(batch["ids"])
        parts = [sft_loss(model, {k: v[r : r + 1] for k, v in batch.items()})[0] for r in range(rows)]
        sign = [1.0 if rows < 5 or r < 1 else -1.0 for r in range(rows)]
        return torch.stack([p * s for p, s in zip(parts, sign, strict=True)]).sum()

    found = outcomes(audit(sft_step(turned), laws=[splits.LAW]).findings)
    assert found["whole = parts (uneven)"] == "fails"
    assert outcomes(audit(sft_step(), laws=[splits.LAW]).findings)["whole = parts (uneven)"] == "holds"


@pytest.mark.parametrize("seed", range(4))
def test_a_part_without_a_gradient_is_no_fault(seed: int) -> None:
    """All advantages of the first rows are 0: the whole is the other part alone."""
    step = policy_step(seed=seed)
    step.batch["advantages"][:2] = 0.0  # type: ignore[index]
    step.knobs = {"beta": 0.0, "clip": 0.2}
    assert outcomes(audit(step, laws=[splits.LAW]).findings)["whole = parts (uneven)"] == "holds"


# --- MI: padding on the left ------------------------------------------------------------------------------------------


class Placed(Tiny):
    """With absolute positions: counted from the first real token, or from the first column."""

    def __init__(self, from_padding: bool) -> None:
        super().__init__(0)
        self.place = nn.Embedding(LENGTH + 8, self.embed.embedding_dim)
        self.from_padding = from_padding

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        assert attention is not None
        columns = torch.arange(ids.shape[1]).expand_as(ids)
        places = columns if self.from_padding else (attention.cumsum(-1) - 1).clamp_min(0)
        return super().forward(ids, attention, documents) + self.place(places) @ self.head.weight.T


def placed_step(side: str, from_padding: bool) -> Step:
    step, model = sft_step(), Placed(from_padding)
    batch = {k: v.clone() for k, v in step.batch.items()}
    if side == "left":  # every row is moved to the right end; what follows a pad is no target
        for key, fill in (("ids", 0), ("attention", 0), ("labels", -100)):
            for row, width in enumerate(step.batch["attention"].sum(-1).tolist()):
                batch[key][row] = torch.cat([torch.full((LENGTH - width,), fill), step.batch[key][row, :width]])
    return Step(model=model, loss=sft_loss, batch=batch, roles=step.roles)


@pytest.mark.parametrize(
    ("side", "from_padding", "outcome"),
    [("left", False, "holds"), ("left", True, "fails"), ("right", True, "not applicable")],
)
def test_positions_that_count_padding_are_seen(side: str, from_padding: bool, outcome: str) -> None:
    found = outcomes(audit(placed_step(side, from_padding), laws=[masks.LAW]).findings)
    assert found["3 more columns of padding on the left"] == outcome
    assert found["3 more columns of padding on the right"] == "holds"


# --- what does not apply says why -------------------------------------------------------------------------------------


def test_every_row_that_does_not_apply_has_its_reason() -> None:
    verdict = audit(policy_step(), laws=[masks.LAW, documents.LAW, coverage.LAW, shadow.LAW])
    reasons = {f.subject: f.measured for f in verdict.findings if f.outcome == "not applicable"}
    assert reasons == {
        "3 more columns of padding on the left": "no row of this batch begins with padding",
        "confident outputs": "the behaviour's log-probs belong to the policy as it is",
    }
    assert outcomes(verdict.findings)["another document in the packed row"] == "not declared", "nothing was said of it"
    coupled = audit(sft_step(rows_interact=True), laws=[masks.LAW]).findings
    assert outcomes(coupled)["a fully masked row"] == "not applicable"


# --- MR: what may stand still, and what is neutral --------------------------------------------------------------------


def test_a_metric_may_stand_still_only_where_that_is_declared() -> None:
    def counted(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        return sft_loss(model, batch)[0], {"rows": len(batch["ids"])}

    for still in (frozenset({"rows"}), frozenset[str]()):
        step = sft_step(counted, metrics={"rows": (0, None)}, still=still)
        assert bool(audit(step, laws=[metrics.LAW]).failures) == (not still)


def test_a_declared_neutral_value_is_asked_for() -> None:
    step = policy_step()
    loss = step.loss

    def odd(model: nn.Module, batch: Mapping[str, Any], **knobs: Any) -> Any:
        value, logged = loss(model, batch, **knobs)
        return value, {**logged, "drift": logged["approx_kl"] + 0.5}

    for expected in (0.5, 0.0):
        step.loss, step.neutral = odd, {"drift": expected}
        failures = {f.subject for f in audit(step, laws=[metrics.LAW]).failures}
        assert ("metric drift, policy unchanged" in failures) == (expected == 0.0)


def half_detached(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Reports twice what it descends."""
    loss, _ = sft_loss(model, batch)
    return loss + loss.detach()


def by_place(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Rows weigh by where they stand in the batch."""
    logits = model(batch["ids"], batch["attention"])[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    each = -logits.gather(-1, labels.clamp_min(0)[..., None])[..., 0].float() * (labels >= 0)
    weight = torch.linspace(0.2, 1.8, labels.shape[0])
    return (each.sum(1) * weight).sum() / (labels >= 0).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("loss", "law"), [(half_detached, "FD"), (by_place, "SE")], ids=["reports twice", "weighs by place"]
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_coarse_dtype_does_not_hide_a_gross_fault(loss: Any, law: str, dtype: torch.dtype, seed: int) -> None:
    """What may differ follows from what was measured in bf16, not from a multiple of its eps that lets all pass."""
    assert law in {f.law for f in audit(sft_step(loss, dtype=dtype, seed=seed)).failures}
