"""Law IG: inputs that the gradient must depend on, and the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Step, audit, edits
from earnest_audit.laws import (
    inputs,
    knobs,
    liveness,
    masks,
)
from earnest_audit.verdict import Finding, Verdict
from tests.audit.laws.test_pairs import pair_step
from tests.audit.steps import (
    LENGTH,
    Tiny,
    dpo_step,
    logprobs,
    policy_step,
    sequence_logprobs,
    sft_loss,
    sft_step,
    token_batch,
)


def rows(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {f.subject: f.outcome for f in findings}


def test_labels_may_mark_positions_and_ids_be_the_targets() -> None:
    def where_only(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        on = (batch["labels"][:, 1:] != -100).float()
        return -(logprobs(model, batch) * on).sum() / on.sum()

    def everywhere(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        on = batch["attention"][:, 1:].float()
        return -(logprobs(model, batch) * on).sum() / on.sum()

    for loss, outcome in ((where_only, "holds"), (everywhere, "fails")):
        assert rows(audit(sft_step(loss), laws=[inputs.LAW]).findings)["input labels (labels)"] == outcome


@pytest.mark.parametrize("deaf", [False, True])
def test_a_term_of_weight_0_is_activated_before_its_input_is_judged(deaf: bool) -> None:
    step = policy_step()
    step.settings = {"beta": 0.0, "clip": 0.2}
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


def test_labels_that_are_shifted_before_packing_have_their_context_in_their_document() -> None:
    """The last token of a document has no label, and is not the context of the next document."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 23, (2, LENGTH), generator=rng)
    documents = (torch.arange(LENGTH)[None] >= 6).long().repeat(2, 1)
    labels = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1).where(
        torch.arange(LENGTH) % 6 < 5, torch.tensor(-100)
    )

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        logits = model(batch["ids"], None, batch["documents"])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    batch = {"ids": ids, "labels": labels, "documents": documents}
    step = Step(Tiny(), loss, batch, {k: k for k in batch})
    assert rows(audit(step, laws=[inputs.LAW]).findings)["input ids (ids)"] == "holds"


def test_what_is_neither_declared_nor_read_is_reported() -> None:
    step = sft_step()
    step.batch = {**step.batch, "position_ids": step.batch["ids"] * 0}
    assert rows(audit(step, laws=[inputs.LAW]).findings)["never read: position_ids"] == "warns"
    assert "Declare the role of position_ids" in str(audit(step, laws=[inputs.LAW])), "a line below the table"
    for whole in (lambda b: {**b}, dict, lambda b: b | {}, lambda b: b.copy()):
        step.loss = lambda model, batch, whole=whole: sft_loss(model, whole(batch))
        found = rows(audit(step, laws=[inputs.LAW]).findings)
        assert "never read: position_ids" not in found, "who copies the batch may read all of it"


def test_the_sentence_on_ids_says_which_tokens_were_changed() -> None:
    """Labels that are not shifted, without attention: the prompt does not matter, the supervised tokens do."""
    model, batch = nn.Sequential(nn.Embedding(23, 8), nn.Linear(8, 23)), sft_step().batch

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    rows = {f.subject: f for f in audit(Step(model, loss, batch, {"ids": "ids", "labels": "labels"}),
                                        laws=[inputs.LAW]).findings}  # fmt: skip
    context = rows["context in ids (ids)"]
    assert context.outcome == "warns" and "in the tokens before the supervised ones" in context.measured
    assert "labels that are not shifted" in context.meaning and "at all" not in context.meaning
    assert rows["input ids (ids)"].outcome == "holds"


def test_ids_that_the_loss_does_not_read_fail() -> None:
    model, batch = nn.Sequential(nn.Embedding(23, 8), nn.Linear(8, 23)), sft_step().batch

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        logits = model(torch.ones_like(batch["ids"]))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    verdict = audit(Step(model, loss, batch, {"ids": "ids", "labels": "labels"}), laws=[inputs.LAW])
    assert [f.subject for f in verdict.failures] == ["input ids (ids)"], str(verdict)


def measured(verdict: Verdict) -> dict[str, str]:
    return {f.subject: f.measured for f in verdict.findings}


@pytest.mark.parametrize("wide", [False, True])
def test_off_policy_advantages_have_both_signs_in_every_draw(wide: bool) -> None:
    """verl's clipped share of tokens with positive advantages is 0 in every state that has none."""
    for seed in range(64):
        step = policy_step(seed=seed)
        if wide:
            step.batch["advantages"] = step.batch["advantages"][:, None] * step.batch["mask"]
        taken = edits.off_policy(step)["advantages"] * (step.batch["mask"] if wide else 1)
        assert bool((taken > 0).any()) and bool((taken < 0).any()), seed


def test_a_gradient_that_is_nan_off_policy_is_reported_once() -> None:
    model, batch = Tiny(), token_batch()
    with torch.no_grad():
        batch["ref"] = (logprobs(model, batch) - 0.5) * batch["mask"]

    def rooted(model: nn.Module, batch: Mapping[str, Any], beta: float) -> Tensor:
        now, mask = logprobs(model, batch), batch["mask"]
        gap = torch.where(mask != 0, now - batch["ref"], 1.0)
        return (((gap.sqrt() * beta) - now) * mask).sum() / mask.sum()

    roles = {"ids": "ids", "attention": "attention", "mask": "mask", "reference": "ref"}
    step = Step(model=model, loss=rooted, batch=batch, roles=roles, settings={"beta": 0.1})
    verdict = audit(step, laws=[liveness.LAW, inputs.LAW, knobs.LAW, masks.LAW])
    assert [(f.law, f.measured) for f in verdict.failures] == [("IG", "not finite off-policy")]
    assert [f.law for f in verdict.findings if f.measured == "not finite off-policy"] == ["IG", "KG", "MI"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("ignored", [False, True])
def test_rewards_may_be_integers(dtype: torch.dtype, ignored: bool) -> None:
    """A baseline hides what is added to every row alike; groups of two hide it within the group."""
    batch = token_batch()
    batch = {k: v[:4] for k, v in batch.items()} | {"rewards": torch.tensor([1, 0, 0, 1]).to(dtype)}

    def reinforce(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        rewards = torch.tensor([1.0, 0, 0, 1]) if ignored else batch["rewards"].float()
        pairs = rewards.reshape(-1, 2)
        advantages = (pairs - pairs.mean(-1, keepdim=True)).flatten()[:, None]
        return -(advantages * logprobs(model, batch) * batch["mask"]).sum() / batch["mask"].sum()

    roles = {"ids": "ids", "mask": "mask", "rewards": "rewards"}
    verdict = audit(Step(model=Tiny(), loss=reinforce, batch=batch, roles=roles), laws=[inputs.LAW])
    assert bool(verdict.failures) == ignored, str(verdict)


def ratios(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    chosen, rejected = sequence_logprobs(model, batch)
    return chosen - batch["ref_chosen"], rejected - batch["ref_rejected"]


def averages(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    chosen, rejected = sequence_logprobs(model, batch)
    return chosen / batch["chosen_mask"].sum(-1), rejected / batch["rejected_mask"].sum(-1)


def of(form: Callable[[Tensor, Tensor, float], Tensor]) -> Any:
    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float) -> Tensor:
        return form(*ratios(model, batch), beta).mean()

    return loss


def hinge(model: nn.Module, batch: Mapping[str, Any], beta: float, deaf: bool = False) -> Tensor:
    chosen, rejected = sequence_logprobs(model, batch)
    right = batch["ref_rejected"] * (0 if deaf else 1)
    return torch.relu(1 - beta * (chosen - batch["ref_chosen"] - rejected + right)).mean()


@pytest.mark.parametrize(("beta", "deaf"), [(0.1, False), (0.01, False), (0.1, True)])
def test_a_hinge_depends_on_its_reference_beyond_its_corner(beta: float, deaf: bool) -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float) -> Tensor:
        return hinge(model, batch, beta, deaf)

    found = rows(audit(pair_step(loss, settings={"beta": beta}), laws=[inputs.LAW]).findings)
    assert found["input reference_chosen (ref_chosen)"] == "holds"
    assert found["input reference_rejected (ref_rejected)"] == ("fails" if deaf else "holds")


def test_masks_that_are_never_read_are_seen() -> None:
    def unmasked(model: nn.Module, batch: Mapping[str, Any], beta: float) -> Tensor:
        whole = {**batch, **{f"{s}_mask": batch[f"{s}_attention"][:, 1:].float() for s in ("chosen", "rejected")}}
        chosen, rejected = averages(model, whole)
        return -F.logsigmoid(beta * (chosen - rejected)).mean()

    found = rows(audit(pair_step(unmasked, referred=False), laws=[inputs.LAW]).findings)
    assert found["input chosen_mask (chosen_mask)"] == found["input rejected_mask (rejected_mask)"] == "fails"
    found = rows(audit(pair_step(of(lambda c, r, b: -F.logsigmoid(b * (c - r)))), laws=[inputs.LAW]).findings)
    assert found["input chosen_mask (chosen_mask)"] == "holds"


@pytest.mark.parametrize("training", [True, False])
def test_a_reference_in_train_mode_is_seen(training: bool) -> None:
    step, inner = dpo_step(), Tiny(5)
    outer = nn.Sequential(nn.Dropout(0.1)).train(training)

    def says() -> Tensor:
        row = {"ids": step.batch["chosen"], "attention": step.batch["chosen_attention"]}
        return outer(logprobs(inner, row)).sum(-1)

    step.reference = says
    found = rows(audit(step, laws=[inputs.LAW]).findings)
    assert found["the reference policy"] == "holds"
    assert found["the reference policy, drawn again"] == ("fails" if training else "holds")


def test_an_attention_mask_with_one_token_per_row_is_not_judged() -> None:
    """None of its tokens can be hidden."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

        def forward(self, ids: Tensor, attention: Tensor) -> Tensor:
            return self.head(torch.tanh((self.embed(ids) * attention[..., None]).cumsum(1)))[:, -1]

    ids = torch.zeros(6, 4, dtype=torch.long)
    ids[:, 0] = torch.arange(1, 7)
    batch = {"ids": ids, "attention": (ids > 0).long(), "target": torch.arange(6)}
    loss = lambda model, batch: F.cross_entropy(model(batch["ids"], batch["attention"]), batch["target"])  # noqa: E731
    step = Step(Last(), loss, batch, {"ids": "ids", "attention": "attention"})
    assert not audit(step, laws=[inputs.LAW]).failures


@pytest.mark.parametrize("clipped", [True, False])
def test_what_a_value_clip_hides_near_the_old_values_is_seen_far_away(clipped: bool) -> None:
    """With a clipped value loss at the new value, old values within the clip range do not matter."""

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        now = model(batch["x"])[..., 0]
        near = batch["old"] + (now - batch["old"]).clamp(-0.2, 0.2) if clipped else now
        return torch.maximum((now - batch["returns"]) ** 2, (near - batch["returns"]) ** 2).mean()

    model = nn.Linear(3, 1)
    x = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
    old = model(x)[..., 0].detach()
    batch = {"x": x, "old": old + 0.01, "returns": old + 1.0}
    step = Step(model, loss, batch, {"values": "old", "returns": "returns"})
    failed = {f.subject for f in audit(step, laws=[inputs.LAW]).failures}
    assert failed == (set() if clipped else {"input values (old)"})
