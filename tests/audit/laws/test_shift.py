"""Law CV-SHIFT: labels that are shifted against their inputs; each defect beside a correct twin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Step, audit
from earnest_audit.laws import coverage, shift
from tests.audit.steps import ROWS, Tiny, distill_loss, distill_step, logprobs, sft_step, token_batch

DTYPES = [torch.float32, torch.bfloat16]


Data = Mapping[str, Any]


def outcomes(step: Step) -> dict[str, str]:
    return {f.subject: f.outcome for f in audit(step, laws=[coverage.LAW, shift.LAW]).findings}


def left(labels: Tensor) -> Tensor:
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)


def shifting(model: nn.Module, batch: Data, labels: Tensor, by: int = 1) -> Tensor:
    """A library's loss, which shifts labels itself."""
    logits = model(batch["ids"], batch["attention"])
    logits, labels = (logits[:, :-by], labels[:, by:]) if by else (logits, labels)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def twice(model: nn.Module, batch: Data) -> Tensor:
    return shifting(model, batch, left(batch["labels"]))


def never(model: nn.Module, batch: Data) -> Tensor:
    return shifting(model, batch, batch["labels"], by=0)


def once(model: nn.Module, batch: Data) -> Tensor:
    return shifting(model, batch, batch["labels"])


def ahead_step(loss: Any, dtype: torch.dtype) -> Step:
    """Labels that stand where they are predicted, as data sets that shift by themselves have them."""
    step = sft_step(loss, dtype=dtype)
    return Step(model=step.model, loss=loss, batch={**step.batch, "labels": left(step.batch["labels"])},
                roles=step.roles)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("loss", [twice, never, once])
def test_labels_are_shifted_once(loss: Any, ahead: bool, dtype: torch.dtype) -> None:
    """A script that shifts what the model shifts again trains token t + 2; one that nobody shifts copies its input."""
    found = outcomes(ahead_step(loss, dtype) if ahead else sft_step(loss, dtype=dtype))
    shifts = {never: 0, once: 1, twice: 2}[loss] + ahead  # labels that stand ahead were shifted once already
    broken = {0: shift.PEEKING, 1: None, 2: shift.BEFORE, 3: shift.BEFORE}[shifts]
    assert found[broken] == "fails" if broken else set(found.values()) == {"holds"}, found


def masked_step(late: bool) -> Step:
    """A mask as wide as the ids that marks answers to their last token (OpenRLHF #973 applies such a mask late)."""
    model, batch = Tiny(), token_batch()
    batch["mask"] = torch.cat([torch.zeros(ROWS, 1), batch["mask"]], 1)

    def loss(model: nn.Module, batch: Data) -> Tensor:
        mask = batch["mask"][:, :-1] if late else batch["mask"][:, 1:]
        return -(logprobs(model, {k: batch[k] for k in ("ids", "attention")}) * mask).sum() / mask.sum()

    return Step(model=model, loss=loss, batch=batch, roles={k: k for k in batch}, family="sft")


@pytest.mark.parametrize("late", [False, True])
def test_a_mask_that_is_applied_one_late(late: bool) -> None:
    found = outcomes(masked_step(late))
    assert found[shift.PEEKING] == ("fails" if late else "holds"), found


def test_a_mask_that_may_mark_where_tokens_are_predicted_is_not_checked() -> None:
    step = masked_step(True)
    batch = dict(step.batch)
    last = batch["attention"].sum(-1) - 1
    batch["mask"] = batch["mask"].index_put((torch.arange(ROWS), last), torch.tensor(0.0))
    found = outcomes(Step(model=step.model, loss=step.loss, batch=batch, roles=step.roles, family="sft"))
    assert found[shift.PEEKING] == "not applicable" and shift.BEFORE not in found


@pytest.mark.parametrize("right", [False, True])
def test_a_students_logits_stand_beside_the_teachers(right: bool) -> None:
    def loss(model: nn.Module, batch: Data, **knobs: float) -> Tensor:
        def moved(ids: Tensor, attention: Tensor) -> Tensor:
            return model(ids, attention).roll(0 if right else 1, 1)

        return distill_loss(moved, batch, **knobs)  # type: ignore[arg-type]

    found = outcomes(distill_step(loss))
    assert (set(found.values()) == {"holds"}) == right, found


def likelihood_step(shifted: bool, last_marked: bool, family: Any) -> Step:
    """The likelihood of ids under a mask as wide as they are, with no labels."""
    batch = token_batch()
    batch["mask"] = torch.cat([torch.zeros(ROWS, 1), batch["mask"]], 1)
    if not last_marked:
        batch["mask"][torch.arange(ROWS), batch["attention"].sum(-1) - 1] = 0.0

    def loss(model: nn.Module, batch: Data) -> Tensor:
        logits = model(batch["ids"], batch["attention"]).log_softmax(-1)
        if shifted:
            return -(logprobs(model, batch) * batch["mask"][:, 1:]).sum() / batch["mask"][:, 1:].sum()
        own = logits.gather(-1, batch["ids"][..., None])[..., 0]
        return -(own * batch["mask"]).sum() / batch["mask"].sum()

    return Step(model=Tiny(), loss=loss, batch=batch, roles={k: k for k in batch}, family=family)


@pytest.mark.parametrize("family", ["sft", None])
@pytest.mark.parametrize("last_marked", [True, False])
def test_a_likelihood_of_ids_that_are_not_shifted_fails(last_marked: bool, family: Any) -> None:
    """Logits at t are scored against ids at t, which the model has just read: the loss falls to 0 and nothing is
    learned. Ids are inputs and targets, so the embedded ids are changed apart from the targets."""
    found = outcomes(likelihood_step(False, last_marked, family))
    assert found[shift.PEEKING] == "fails", found
    right = outcomes(likelihood_step(True, last_marked, family))
    assert "fails" not in right.values(), right
    assert right[shift.PEEKING] == ("holds" if family is None or last_marked else "not applicable"), right


def test_the_shift_rows_are_never_missing_without_a_family() -> None:
    step = likelihood_step(True, True, None)
    model = nn.Linear(1, 1)

    def loss(_: nn.Module, batch: Data) -> Tensor:  # the model embeds nothing, so inputs and targets are inseparable
        return (model.weight * batch["mask"].mean()).sum()

    blind = Step(model=model, loss=loss, batch=step.batch, roles=step.roles)
    found = {f.subject: f.outcome for f in audit(blind, laws=[shift.LAW]).findings}
    assert found == {shift.BEFORE: "not declared", shift.PEEKING: "not declared"}


def by_ids(model: nn.Module, batch: Data) -> Tensor:
    """Labels only say where; ids say what."""
    on = batch["labels"][:, 1:] != -100
    return -(logprobs(model, {k: batch[k] for k in ("ids", "attention")}) * on).sum() / on.sum()


def test_labels_that_only_mark_positions() -> None:
    found = outcomes(sft_step(by_ids))
    assert found["every supervised position"] == "holds", found
    assert "fails" not in found.values(), found


def test_labels_that_only_mark_positions_do_not_hide_a_lost_end() -> None:
    def cut(model: nn.Module, batch: Data) -> Tensor:
        ends = torch.arange(batch["labels"].shape[1]) == batch["labels"].shape[1] - 1
        return by_ids(model, {**batch, "labels": torch.where(ends, -100, batch["labels"])})

    assert outcomes(sft_step(cut))["every supervised position"] == "fails"


def test_one_key_for_ids_and_labels() -> None:
    ids = token_batch()["ids"].clamp(min=1)

    def loss(model: nn.Module, batch: Data) -> Tensor:
        return -logprobs(model, batch).mean()

    step = Step(model=Tiny(), loss=loss, batch={"ids": ids}, roles={"ids": "ids", "labels": "ids"}, all_supervised=True)
    assert "fails" not in outcomes(step).values()


def test_a_mask_beside_labels_that_stand_in_place() -> None:
    """One narrower than they are: aligned with the shifted targets."""
    step = sft_step()
    batch = {**step.batch, "mask": (step.batch["labels"][:, 1:] != -100).float()}

    def loss(model: nn.Module, batch: Data) -> Tensor:
        labels = torch.where(batch["mask"] != 0, batch["labels"][:, 1:], -100)
        logits = model(batch["ids"], batch["attention"])[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    found = outcomes(Step(model=step.model, loss=loss, batch=batch, roles={**step.roles, "mask": "mask"}))
    assert set(found.values()) == {"holds"}, found


@pytest.mark.parametrize(("family", "outcome"), [("sft", "fails"), (None, "not declared")])
def test_a_mask_that_is_shifted_by_one_never_holds(family: Any, outcome: str) -> None:
    """The mask marks tokens and is used where they predict. Without a family it may be meant so."""
    step = likelihood_step(True, True, family)
    step.batch["mask"][0, step.batch["attention"][0].sum() - 1] = 0.0

    def loss(model: nn.Module, batch: Data) -> Tensor:
        return -(logprobs(model, batch) * batch["mask"][:, :-1]).sum() / batch["mask"][:, :-1].sum()

    shifted = Step(model=step.model, loss=loss, batch=step.batch, roles=step.roles, family=family)
    (row,) = [f for f in audit(shifted, laws=[shift.LAW]).findings if f.subject == shift.PEEKING]
    assert row.outcome == outcome and (outcome != "fails" or "the mask is shifted by one" in row.meaning), str(row)


def test_a_model_that_is_not_given_the_ids() -> None:
    """Its two arguments are swapped: it embeds none of the ids, so the batch's own are changed."""

    def loss(model: nn.Module, batch: Data) -> Tensor:
        return shifting(model, {**batch, "ids": batch["attention"], "attention": batch["ids"]}, batch["labels"])

    assert outcomes(sft_step(loss))[shift.BEFORE] == "fails"


@pytest.mark.parametrize(("by", "outcome"), [(1, "holds"), (2, "fails")])
def test_labels_that_are_the_token_after_the_next_one(by: int, outcome: str) -> None:
    """Windows (x, y) of one text, as pre-training loops cut them: no declared place shows the shift but the values."""
    text = torch.randint(1, 23, (ROWS, 14), generator=torch.Generator().manual_seed(0))
    batch = {"ids": text[:, :12], "labels": text[:, by : by + 12]}

    def loss(model: nn.Module, batch: Data) -> Tensor:
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())

    found = outcomes(Step(Tiny(), loss, batch, {k: k for k in batch}, all_supervised=True))
    assert found[shift.BEFORE] == outcome, found
