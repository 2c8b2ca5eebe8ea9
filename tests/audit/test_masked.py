"""Signals, padding and answers where nothing is supervised, each defect beside its right twin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest.audit import Step, audit
from earnest.audit.law import Law
from earnest.audit.laws import coverage, masks
from tests.audit.steps import PROMPT, VOCABULARY, Tiny, dpo_step, logprobs, policy_batch, policy_step, token_batch

DTYPES = [torch.float32, torch.bfloat16]
Data = Mapping[str, Any]
ROLES = {"ids": "ids", "attention": "attention", "mask": "mask", "behaviour": "old"}


def outcomes(step: Step, law: Law = masks.LAW) -> dict[str, str]:
    return {f.subject: f.outcome for f in audit(step, laws=[law]).findings}


def clipped(ratio: Tensor, a: Tensor, by: float = 0.2) -> Tensor:
    return -torch.minimum(ratio * a, ratio.clamp(1 - by, 1 + by) * a)


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_one_advantage_a_row_that_is_summed_over_padding(masked: bool, dtype: torch.dtype) -> None:
    """AReaL #1346: a sequence objective that adds up its row's advantages where nothing was sampled, too."""
    model = Tiny().to(dtype)
    batch = policy_batch(model)
    batch["advantages"] = batch["advantages"][:, None].expand(-1, batch["mask"].shape[1]).clone()

    def loss(model: nn.Module, batch: Data) -> Tensor:
        mask, count = batch["mask"], batch["mask"].sum(-1).clamp(min=1)
        ratio = (((logprobs(model, batch) - batch["old"]) * mask).sum(-1) / count).exp()
        a = (batch["advantages"] * mask if masked else batch["advantages"]).sum(-1) / count
        on = (mask.sum(-1) > 0).float()
        return (clipped(ratio, a) * on).sum() / on.sum()

    step = Step(model=model, loss=loss, batch=batch, roles={**ROLES, "advantages": "advantages"})
    found = [f.outcome for f in audit(step, laws=[masks.LAW]).findings if "advantages" in f.subject]
    assert found == ["holds" if masked else "fails"]


@pytest.mark.parametrize("paid", ["everywhere", "where supervised"])
@pytest.mark.parametrize("masked", [False, True])
def test_rewards_of_masked_tokens(masked: bool, paid: str) -> None:
    """verl #6362. Where the batch has none at masked tokens, to sum without the mask is no fault."""
    model = Tiny()
    batch = {k: v for k, v in policy_batch(model).items() if k != "advantages"}
    rewards = torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(4))
    batch["rewards"] = rewards if paid == "everywhere" else rewards * batch["mask"]

    def loss(model: nn.Module, batch: Data) -> Tensor:
        total = (batch["rewards"] * batch["mask"] if masked else batch["rewards"]).sum(-1)
        a = (total - total.mean())[:, None]
        each = clipped((logprobs(model, batch) - batch["old"]).exp(), a) * batch["mask"]
        return each.sum() / batch["mask"].sum()

    step = Step(model=model, loss=loss, batch=batch, roles={**ROLES, "rewards": "rewards"}, family="policy gradient",
                rows_interact=True)  # fmt: skip
    failed = {f.subject for f in audit(step, laws=[masks.LAW]).failures}
    assert failed == ({"rewards where masked"} if paid == "everywhere" and not masked else set())


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [5, 6], ids=["one narrower", "as wide"])
@pytest.mark.parametrize("counted", [False, True])
def test_prompts_that_are_as_wide_as_completions_by_accident(counted: bool, prompt: int) -> None:
    model, rng = Tiny(), torch.Generator().manual_seed(0)
    batch = {
        "prompt": torch.randint(1, VOCABULARY, (5, prompt), generator=rng),
        "completion": torch.randint(1, VOCABULARY, (5, 6), generator=rng),
        "prompt_mask": (torch.arange(prompt)[None] >= torch.tensor([0, 1, 2, 0, 1])[:, None]).long(),
        "completion_mask": (torch.arange(6)[None] < torch.tensor([6, 4, 5, 3, 6])[:, None]).long(),
        "advantages": torch.tensor([1.0, -0.7, 0.3, -1.2, 0.8]),
    }

    def loss(model: nn.Module, batch: Data) -> Tensor:
        ids = torch.cat([batch["prompt"], batch["completion"]], 1)
        shown = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        logits = model(ids, shown)[:, batch["prompt"].shape[1] - 1 : -1]
        lp = logits.log_softmax(-1).gather(-1, batch["completion"][..., None])[..., 0]
        mask = batch["completion_mask"]
        total = mask.numel() if counted else mask.sum()
        return -(lp * batch["advantages"][:, None] * mask).sum() / total

    roles = {"ids": "completion", "mask": "completion_mask", "advantages": "advantages"}
    found = outcomes(Step(model=model, loss=loss, batch=batch, roles=roles))
    assert found["3 more columns of padding on the right"] == ("fails" if counted else "holds")


@pytest.mark.parametrize("by", ["tokens", "rows", "width"])
def test_columns_and_a_row_at_once_are_told_apart(by: str) -> None:
    """A mean over rows sees the silent row and no columns; one over the width sees columns."""

    def loss(model: nn.Module, batch: Data, **_: float) -> Tensor:
        mask = batch["mask"]
        each = clipped((logprobs(model, batch) - batch["old"]).exp(), batch["advantages"][:, None]) * mask
        if by == "tokens":
            return each.sum() / mask.sum()
        return (each.sum(-1) / (mask.shape[1] if by == "width" else mask.sum(-1).clamp(min=1))).mean()

    found = outcomes(policy_step(loss))
    assert found["3 more columns of padding on the right"] == ("fails" if by == "width" else "holds")
    assert found[masks.SILENT] == "holds"


# --- pairs ------------------------------------------------------------------------------------------------------------


def turned(row: Tensor, width: int, fill: int) -> Tensor:
    return torch.cat([torch.full((len(row) - width,), fill), row[:width]])


def pair_step(average: str = "answer", attention: bool = True, dtype: torch.dtype = torch.float32) -> Step:
    """SimPO-like: averages over the answer, or over the whole width; the attention mask reaches the model or not."""
    step = dpo_step(dtype=dtype)
    batch = {k: v for k, v in step.batch.items() if not k.startswith("ref_")}
    for side in ("chosen", "rejected"):  # rows end with the width: padding is on the left, and so could be seen
        moved = batch[f"{side}_attention"].sum(-1)
        for key, fill in ((side, 0), (f"{side}_attention", 0)):
            batch[key] = torch.stack([turned(r, int(n), fill) for r, n in zip(batch[key], moved, strict=True)])
        at, lengths = torch.arange(1, batch[side].shape[1])[None], moved[:, None]
        batch[f"{side}_mask"] = (at >= batch[side].shape[1] - lengths + PROMPT).float()

    def loss(model: nn.Module, batch: Data) -> Tensor:
        sides = []
        for side in ("chosen", "rejected"):
            mask = batch[f"{side}_mask"]
            row = {"ids": batch[side], **({"attention": batch[f"{side}_attention"]} if attention else {})}
            total = mask.sum(-1).clamp(min=1) if average == "answer" else mask.shape[1]
            sides.append((logprobs(model, row) * mask).sum(-1) / total)
        return -F.logsigmoid(2.0 * (sides[0] - sides[1])).mean()

    return Step(model=step.model, loss=loss, batch=batch, roles={k: k for k in batch})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_right_pair_holds(dtype: torch.dtype) -> None:
    step = pair_step(dtype=dtype)
    found = outcomes(step) | outcomes(step, coverage.LAW)
    assert set(found.values()) == {"holds"} and len(found) == 4, found


def test_pairs_that_are_averaged_over_their_width() -> None:
    assert outcomes(pair_step("width"))["3 more columns of padding on the right"] == "fails"


def test_padding_that_pairs_attend_to() -> None:
    """pad = eos, and the forward pass is not told which is which."""
    found = outcomes(pair_step(attention=False))
    assert found["chosen where masked"] == found["rejected where masked"] == "fails", found


def reward_step(place: str, margin: float | None = None) -> Step:
    """A reward model that reads its score at the last token, or in front of the first that looks like padding."""
    model, batch = Tiny(), {}
    for seed, side in enumerate(("chosen", "rejected")):
        rows = token_batch(50 * seed)
        rows["ids"][0, 2] = 0  # an end-of-turn in the prompt has the padding's id
        batch |= {side: rows["ids"], f"{side}_attention": rows["attention"]}

    def loss(model: nn.Module, batch: Data) -> Tensor:
        scores = []
        for side in ("chosen", "rejected"):
            ids, shown = batch[side], batch[f"{side}_attention"]
            last = shown.sum(-1) - 1
            if place == "first":
                last = torch.where((ids == 0).any(-1), (ids == 0).long().argmax(-1), ids.shape[1]) - 1
            scores.append(model(ids, shown)[torch.arange(len(ids)), last, 0])
        gap = scores[0] - scores[1]
        return -F.logsigmoid(gap).mean() if margin is None else (margin - gap).relu().mean()

    return Step(model=model, loss=loss, batch=batch, roles={k: k for k in batch})


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_score_that_is_read_in_front_of_the_first_end(place: str) -> None:
    """transformers #35352."""
    found = outcomes(reward_step(place), coverage.LAW)
    assert found[coverage.ANSWERS] == ("holds" if place == "last" else "fails")


@pytest.mark.parametrize("declared", [False, True])
def test_a_mask_without_a_role_is_padded_as_one(declared: bool) -> None:
    """The score is read where the attention mask ends; answers have masks of their own."""
    step = reward_step("last")
    batch = {**step.batch, **{f"{s}_mask": step.batch[f"{s}_attention"] for s in ("chosen", "rejected")}}
    roles = {k: k for k in batch if declared or not k.endswith("attention")}
    found = outcomes(Step(model=step.model, loss=step.loss, batch=batch, roles=roles))
    assert found["3 more columns of padding on the right"] == "holds"


def test_pairs_beyond_a_hinge_are_left_out() -> None:
    found = audit(reward_step("last", margin=-0.2), laws=[coverage.LAW]).findings[0]
    assert found.outcome == "holds" and "do not pull are left out" in found.measured, found


# --- tokens that a loss leaves out ------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [False, True])
def test_a_loss_may_drop_tokens_where_that_is_declared(declared: bool) -> None:
    def loss(model: nn.Module, batch: Data, beta: float, clip: float) -> Tensor:
        lp, mask = logprobs(model, batch), batch["mask"]
        kept = mask * (lp.detach() < lp.detach()[mask != 0].quantile(0.3))
        each = clipped((lp - batch["old"]).exp(), batch["advantages"][:, None], clip) + beta * (lp - batch["ref"]) ** 2
        return (each * kept).sum() / mask.sum()

    (found,) = (f for f in audit(policy_step(loss, rows_interact=True, drops_tokens=declared), laws=[coverage.LAW])
                .findings if f.subject == "every supervised position")  # fmt: skip
    assert found.outcome == ("holds" if declared else "fails")
    assert declared or "drops_tokens=True" in found.meaning


def test_rows_without_a_supervised_token_are_counted() -> None:
    step = policy_step()
    batch = {**step.batch, "mask": step.batch["mask"].clone()}
    batch["mask"][:2] = 0
    found = audit(Step(model=step.model, loss=lambda m, b: step.loss(m, b, beta=0.0, clip=0.2), batch=batch,
                       roles=step.roles), laws=[coverage.LAW]).findings[0]  # fmt: skip
    assert "2 of 5 rows have none" in found.measured and found.outcome == "holds"
