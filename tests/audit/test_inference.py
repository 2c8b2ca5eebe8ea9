"""Roles that are guessed by perturbation: right on the four families, printed as guesses, and never from names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Step, StepError, audit, infer
from earnest_audit.laws import pairs
from tests.audit.steps import STEPS, Tiny, grpo_loss, logprobs, policy_batch, policy_step, sft_step


def renamed(step: Step) -> tuple[Any, dict[str, Tensor], dict[str, str]]:
    """The step's loss on a batch whose keys are meaningless and in another order, and key -> declared role."""
    names = {key: f"k{number}" for number, key in enumerate(sorted(step.batch, reverse=True))}

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        return step.loss(model, {key: batch[name] for key, name in names.items()}, **step.knobs)

    return loss, {names[key]: step.batch[key] for key in names}, {names[key]: role for role, key in step.roles.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", STEPS)
def test_every_role_of_the_families_is_found_without_names(family: str, dtype: torch.dtype) -> None:
    step = STEPS[family](dtype=dtype)
    loss, batch, truth = renamed(step)
    inferred = infer(step.model, loss, batch)
    found = {key: role for role, key in inferred.roles.items()}
    assert {key: found.get(key) for key in truth} == truth, "\n".join(map(str, inferred.inferred))


def test_audit_of_a_model_prints_its_guesses_and_checks_what_follows() -> None:
    step = policy_step()
    loss, batch, truth = renamed(step)
    right = audit(step.model, loss, batch, quick=True)
    assert right.holds and sum(note.startswith("guessed: ") for note in right.notes) == len(batch), str(right)

    def wrong(model: nn.Module, changed: Mapping[str, Any]) -> Any:
        """The mask is read and the mean is over the padded width."""
        value, metrics = loss(model, changed)
        mask = changed[next(key for key, role in truth.items() if role == "mask")]
        return value * mask.sum() / mask.numel(), metrics

    assert "MI" in {f.law for f in audit(step.model, wrong, batch).failures}


def test_settings_in_the_signature_of_the_loss_are_offered() -> None:
    step = policy_step()

    def loss(model: nn.Module, batch: Mapping[str, Any], clip: float = 0.2, name: str = "a", hard: bool = True) -> Any:
        return step.loss(model, batch, **{**step.knobs, "clip": clip})

    found = audit(step.model, loss, step.batch)
    assert "the loss has settings that are not declared: settings={'clip': 0.2} declares them" in found.notes
    assert [f.outcome for f in found.findings if f.law == "PG-CLIP"] == ["not declared"]
    assert str(found).endswith(f"{found.summary}\n")
    assert found.summary.startswith(f"{found.counts['holds']} hold, 0 fail,")
    declared = audit(step.model, loss, step.batch, quick=True, settings={"clip": 0.2})
    assert not any("settings that are not declared" in note for note in declared.notes)


def test_a_declared_role_is_not_guessed_again() -> None:
    step = policy_step()
    loss, batch, truth = renamed(step)
    keys = {role: key for key, role in truth.items()}
    inferred = infer(step.model, loss, batch, roles={"reference": keys["behaviour"]})
    assert inferred.roles["reference"] == keys["behaviour"]
    assert keys["behaviour"] not in {guess.key for guess in inferred.inferred}


def test_rewards_and_weights_and_unread_tensors() -> None:
    model = Tiny()
    batch = policy_batch(model) | {"unread": torch.randn(5), "weights": torch.rand(5) + 2.0}
    batch["rewards"] = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0])
    batch["group"] = torch.tensor([3, 3, 3, 5, 5])
    del batch["advantages"]

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        rewards, group = batch["rewards"], batch["group"]
        same = (group[:, None] == group).float()
        advantages = rewards - same @ rewards / same.sum(1)
        return grpo_loss(model, {**batch, "advantages": advantages * batch["weights"]}, 0.04, 0.2)

    inferred = infer(model, loss, batch)
    guesses = {guess.key: guess for guess in inferred.inferred}
    assert guesses["rewards"].role == "rewards" and guesses["group"].role == "group"
    assert guesses["weights"].role == "weights" and "unread" not in guesses
    assert guesses["old"].role == "behaviour" and guesses["ref"].role == "reference"
    assert "no role was found for unread" in inferred.remarks
    assert any(remark.startswith("guessed: rewards is rewards (sure: a constant added") for remark in inferred.remarks)


def test_the_model_and_the_batch_are_left_alone() -> None:
    step = policy_step()
    loss, batch, _ = renamed(step)
    before = {n: p.detach().clone() for n, p in step.model.named_parameters()}
    kept = {key: t.clone() for key, t in batch.items()}
    infer(step.model, loss, batch)
    assert all(p.equal(before[n]) and p.grad is None for n, p in step.model.named_parameters())
    assert all(t.equal(kept[key]) for key, t in batch.items())
    assert not any(m._forward_hooks for m in step.model.modules())


@pytest.mark.parametrize(("family", "law"), [("sft", "NLL"), ("policy gradient", "PG-ONPOLICY")])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_flipped_sign_is_seen_without_a_function_for_log_probs(family: str, law: str, sign: int) -> None:
    """The log-probs are read from the logits that the model computes while the loss runs."""
    step = STEPS[family]()
    loss, batch, _ = renamed(step)
    verdict = audit(step.model, lambda model, changed: sign * loss(model, changed)[0], batch)
    rows = [f for f in verdict.findings if f.law == law and "cosine" in f.measured]
    assert [f.outcome for f in rows] == ["holds" if sign > 0 else "fails"], str(verdict)
    assert not verdict.failures or sign < 0, str(verdict)


def test_labels_of_minus_one_are_ignored_labels() -> None:
    """nanochat's: they count as not supervised, and the verdict prints the guess."""
    step = sft_step()
    labels = step.batch["labels"]
    batch = {**step.batch, "labels": torch.where(labels == -100, -1, labels)}

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        logits = model(batch["ids"], batch["attention"])[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-1)

    verdict = audit(step.model, loss, batch)
    assert verdict.holds, str(verdict)
    assert any("labels is labels (likely" in n and "-1 marks what is not supervised" in n for n in verdict.notes)
    share = next(f for f in verdict.findings if f.subject == "supervised share")
    assert share.outcome == "holds" and not share.measured.startswith("100 %"), share.measured


def test_wrong_calls_have_a_way_out() -> None:
    step = policy_step()
    with pytest.raises(StepError, match="'logprob' is not a declaration of a step: did you mean 'logprobs'"):
        audit(step.model, step.loss, step.batch, logprob=logprobs)
    with pytest.raises(StepError, match="the batch is a tuple: give a dict of tensors"):
        audit(step.model, step.loss, (step.batch["ids"],))  # type: ignore[arg-type]
    with pytest.raises(StepError, match=r"a model alone cannot be audited: give audit\(model, loss, batch\)"):
        audit(step.model)
    with pytest.raises(
        StepError, match=r"audit\(Step\(…\)\) takes nothing beside the Step: give the loss and the batch to Step"
    ):
        audit(step, logprobs)
    with pytest.raises(StepError, match=r"give clip_low, final to Step\(…\)"):
        audit(step, clip_low=0.2, final=1)


def test_the_way_out_of_a_guess_is_named_where_there_was_one() -> None:
    step = sft_step()
    for roles in ({}, step.roles):
        notes = infer(step.model, step.loss, step.batch, roles=roles).remarks
        assert any("instead of guessing" in note for note in notes) == (not roles)


class Placed(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(12, 16)

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        shown = torch.ones_like(ids) if attention is None else attention
        places: Tensor = self.places((shown.cumsum(-1) - 1).clamp(min=0))
        return super().forward(ids, attention, documents) + self.head(places)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("right", [True, False])
def test_each_answers_attention_is_found_in_whichever_calls(right: bool, together: bool) -> None:
    """Positions that are counted from the attention are embedded in a call that the ids do not reach."""
    step = STEPS["preference"]()
    model, sides = Placed(), ("chosen", "rejected")
    step.batch["rejected_attention"][:2, 5:] = 0
    step.batch["rejected_mask"][:2, 4:] = 0

    def loss(_: nn.Module, batch: Mapping[str, Any]) -> Any:
        b = {**batch, "chosen_attention": batch["a"], "rejected_attention": batch["b"]}
        if not together:
            sums = [(logprobs(model, {"ids": b[s], "attention": b[f"{s}_attention"]}) * b[f"{s}_mask"]).sum(-1)
                    for s in sides]  # fmt: skip
        else:
            ids, shown, mask = (torch.cat([b[s + end] for s in sides]) for end in ("", "_attention", "_mask"))
            sums = list((logprobs(model, {"ids": ids, "attention": shown}) * mask).sum(-1).chunk(2))
        gap = sums[0] - b["ref_chosen"] - (1.0 if right else 0.95) * (sums[1] - b["ref_rejected"])
        return -F.logsigmoid(0.1 * gap).mean()

    names = {"chosen_attention": "a", "rejected_attention": "b"}
    verdict = audit(model, loss, {names.get(k, k): v for k, v in step.batch.items()}, laws=[pairs.LAW])
    guesses = {note.partition(" (")[0] for note in verdict.notes}
    assert guesses >= {f"guessed: {k} is {role}" for role, k in names.items()}
    (row,) = [f for f in verdict.findings if f.subject == "identical pairs"]
    assert row.outcome == ("holds" if right else "fails"), str(verdict)
