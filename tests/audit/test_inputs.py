"""What must matter, what must not, and what may sleep: labels that only say where, weights of 0, packed rows, knobs
that are inert or act in one mode only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest.audit import Step, StepError, audit
from earnest.audit.laws import inputs, knobs, likelihood, reads
from earnest.audit.verdict import Finding
from tests.audit.steps import LENGTH, Tiny, logprobs, policy_step, sft_loss, sft_step, token_batch


def rows(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {f.subject: f.outcome for f in findings}


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_labels_may_say_where_and_the_ids_what() -> None:
    def where_only(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        on = (batch["labels"][:, 1:] != -100).float()
        return -(logprobs(model, batch) * on).sum() / on.sum()

    def everywhere(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        on = batch["attention"][:, 1:].float()
        return -(logprobs(model, batch) * on).sum() / on.sum()

    for loss, outcome in ((where_only, "holds"), (everywhere, "fails")):
        assert rows(audit(sft_step(loss), laws=[inputs.LAW]).findings)["input labels (labels)"] == outcome


@pytest.mark.parametrize("deaf", [False, True])
def test_a_term_of_weight_0_is_woken_before_its_input_is_judged(deaf: bool) -> None:
    step = policy_step()
    step.knobs = {"beta": 0.0, "clip": 0.2}
    if deaf:
        own = step.loss
        step.loss = lambda model, batch, **k: own(model, {**batch, "ref": batch["ref"] * 0 - 1.0}, **k)
    found = rows(audit(step, laws=[inputs.LAW]).findings)
    assert found["input reference (ref)"] == ("fails" if deaf else "holds")


class Placed(Tiny):
    def __init__(self, deaf: bool) -> None:
        super().__init__()
        self.place, self.deaf = nn.Embedding(LENGTH, self.embed.embedding_dim), deaf

    def placed(self, ids: Tensor, attention: Tensor, positions: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1]).expand_as(ids) if self.deaf else positions
        return self(ids, attention) + self.place(at) @ self.head.weight.T


@pytest.mark.parametrize("deaf", [False, True])
def test_positions_that_are_dropped_on_the_way_are_seen(deaf: bool) -> None:
    def loss(model: Placed, batch: Mapping[str, Any]) -> Tensor:
        logits = model.placed(batch["ids"], batch["attention"], batch["positions"])[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)

    step = sft_step()
    batch = {**step.batch, "positions": torch.arange(LENGTH).repeat(len(step.batch["ids"]), 1)}
    roles = {**step.roles, "positions": "positions"}
    found = rows(audit(Step(Placed(deaf), loss, batch, roles), laws=[inputs.LAW]).findings)
    assert found["input positions (positions)"] == ("fails" if deaf else "holds")


def test_every_documents_context_is_changed_in_a_packed_row() -> None:
    """The first document's answer is silent here, as an advantage of 0 makes it: the second one's prompt must count."""
    rng = torch.Generator().manual_seed(0)
    on = torch.tensor([[0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]]).float()
    batch = {
        "ids": torch.randint(1, 23, (1, LENGTH), generator=rng),
        "mask": on,
        "weights": on * (torch.arange(12) > 6),
    }

    def second_only(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        documents = (torch.arange(LENGTH)[None] >= 6).long()
        lp = model(batch["ids"], None, documents)[:, :-1].log_softmax(-1)
        picked = lp.gather(-1, batch["ids"][:, 1:, None])[..., 0]
        return -(picked * batch["mask"][:, 1:] * batch["weights"][:, 1:]).sum()

    step = Step(Tiny(), second_only, batch, {"ids": "ids", "mask": "mask", "weights": "weights"})
    assert rows(audit(step, laws=[inputs.LAW]).findings)["input ids (ids)"] == "holds"


def test_what_is_neither_declared_nor_read_is_said() -> None:
    step = sft_step()
    step.batch = {**step.batch, "position_ids": step.batch["ids"] * 0}
    (row,) = audit(step, laws=[reads.LAW]).findings
    assert row.subject == "not read: position_ids" and row.outcome == "not applicable"
    for whole in (lambda b: {**b}, dict, lambda b: b | {}, lambda b: b.copy()):
        step.loss = lambda model, batch, whole=whole: sft_loss(model, whole(batch))
        assert not audit(step, laws=[reads.LAW]).findings, "who copies the batch may read all of it"


# --- knobs ------------------------------------------------------------------------------------------------------------


def chunked(model: nn.Module, batch: Mapping[str, Any], chunk: int, means: bool) -> Tensor:
    logits = model(batch["ids"], batch["attention"])[:, :-1].flatten(0, 1)
    labels = batch["labels"][:, 1:].flatten()
    parts = zip(logits.split(chunk), labels.split(chunk), strict=True)
    sums = [(F.cross_entropy(x, y, ignore_index=-100, reduction="sum"), (y != -100).sum()) for x, y in parts]
    if means:  # NeMo-Automodel #3804: means of chunks are averaged
        return torch.stack([s / n for s, n in sums if n > 0]).mean()
    return torch.stack([s for s, _ in sums]).sum() / (labels != -100).sum()


@pytest.mark.parametrize("chunk", [16, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("means", [False, True])
def test_what_is_declared_inert_must_not_matter(means: bool, chunk: int, dtype: torch.dtype) -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any], chunk: int) -> Tensor:
        return chunked(model, batch, chunk, means)

    step = sft_step(loss, knobs={"chunk": chunk}, inert=("chunk",), dtype=dtype)
    assert rows(audit(step, laws=[knobs.LAW]).findings)["knob chunk"] == ("fails" if means else "holds")


def test_an_inert_knob_has_to_be_a_knob() -> None:
    with pytest.raises(StepError, match=r"inert knob 'chunks' is no knob: .*'chunk'"):
        sft_step(knobs={"chunk": 4}, inert=("chunks",))
    with pytest.raises(StepError, match="one text"):
        sft_step(knobs={"chunk": 4}, inert="chunk")


def test_a_knob_of_another_mode_does_not_apply() -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any], smooth: float, dead: float, how: str) -> Tensor:
        logits = model(batch["ids"], batch["attention"])[:, :-1].flatten(0, 1)
        share = smooth if how == "smooth" else 0.0
        return F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=-100, label_smoothing=share)

    step = sft_step(loss, knobs={"smooth": 0.1, "dead": 0.1}, options={"how": ("plain", "smooth")})
    found = rows(audit(step, laws=[knobs.LAW]).findings)
    assert found["knob smooth"] == "not applicable" and found["knob dead"] == "fails"


# --- likelihoods ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("detached", [True, False])
def test_a_weight_that_is_not_detached_pushes_unlikely_labels_down(detached: bool, dtype: torch.dtype) -> None:
    def dft(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        lp, on = logprobs(model, batch), (batch["labels"][:, 1:] != -100).float()
        weight = lp.exp().detach() if detached else lp.exp()
        return -(weight * lp * on).sum() / on.sum()

    step = sft_step(dft, logprobs=logprobs, value_is_loss=not detached, dtype=dtype)
    (row,) = audit(step, laws=[likelihood.LAW]).findings
    assert row.outcome == ("holds" if detached else "fails"), row.measured


def test_regularisers_and_masks_in_place_are_no_fault() -> None:
    def regularised(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        logits = model(batch["ids"], batch["attention"])[:, :-1]
        on = batch["mask"]
        each = F.cross_entropy(logits.transpose(1, 2), batch["ids"][:, 1:], reduction="none", label_smoothing=0.2)
        return ((each + 1e-2 * logits.logsumexp(-1).square()) * on).sum() / on.sum()

    batch = token_batch()
    step = Step(Tiny(), regularised, batch, {k: k for k in batch}, family="sft", logprobs=logprobs)
    assert [f.outcome for f in audit(step, laws=[likelihood.LAW]).findings] == ["holds"]
