"""Law MI: signals, padding and answers where nothing is supervised; each defect beside a correct twin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Step, StepError, audit
from earnest_audit.law import Law
from earnest_audit.laws import averages, coverage, masks
from earnest_audit.verdict import Finding
from tests.audit.laws.test_coverage import reward_step
from tests.audit.steps import (
    LENGTH,
    PROMPT,
    VOCABULARY,
    Tiny,
    distill_step,
    dpo_step,
    logprobs,
    policy_batch,
    policy_step,
    sequence_logprobs,
    sft_loss,
    sft_step,
    token_batch,
)

DTYPES = [torch.float32, torch.bfloat16]


Data = Mapping[str, Any]


ROLES = {"ids": "ids", "attention": "attention", "mask": "mask", "behaviour": "old"}


def outcomes(step: Step, law: Law = masks.LAW) -> dict[str, str]:
    return {f.subject: f.outcome for f in audit(step, laws=[law]).findings}


def clipped(ratio: Tensor, a: Tensor, by: float = 0.2) -> Tensor:
    return -torch.minimum(ratio * a, ratio.clamp(1 - by, 1 + by) * a)


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
    """verl #6362. Where the batch has none at masked tokens, to sum without the mask is not an error."""
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
    subject = "3 more columns of padding on the right"
    guessed = audit(Step(model=model, loss=loss, batch=batch, roles=roles), laws=[masks.LAW])
    found = {f.subject: f.outcome for f in guessed.findings}
    assert found[subject] == ("fails" if counted else "not declared"), "all of one width are padded together: a guess"
    assert any("prompt is padded with the rows" in note or "prompt, prompt_mask" in note for note in guessed.notes)
    declared = Step(model=model, loss=loss, batch=batch, roles=roles, wide=("completion", "completion_mask"))
    assert outcomes(declared)[subject] == ("fails" if counted else "holds")
    with pytest.raises(StepError, match="wide names 'completions'"):
        Step(model=model, loss=loss, batch=batch, roles=roles, wide=("completions",))


@pytest.mark.parametrize("by", ["tokens", "rows", "width", "at least one each"])
def test_columns_and_a_row_at_once_are_told_apart(by: str) -> None:
    """A mean over rows sees the silent row and no columns; one over the width sees columns. miles #2796: every silent
    row counts as a token."""

    def loss(model: nn.Module, batch: Data, **_: float) -> Tensor:
        mask = batch["mask"]
        each = clipped((logprobs(model, batch) - batch["old"]).exp(), batch["advantages"][:, None]) * mask
        if by == "tokens":
            return each.sum() / mask.sum()
        if by == "at least one each":
            return each.sum() / mask.sum(-1).clamp(min=1).sum()
        return (each.sum(-1) / (mask.shape[1] if by == "width" else mask.sum(-1).clamp(min=1))).mean()

    step = policy_step(loss)
    found = {f.subject: f for f in audit(step, laws=[masks.LAW]).findings}
    assert found["3 more columns of padding on the right"].outcome == ("fails" if by == "width" else "holds")
    assert found[masks.MASKED].outcome == ("fails" if by == "at least one each" else "holds")
    assert by != "width" or "wide=()" in found["3 more columns of padding on the right"].meaning
    assert found[masks.MASKED].expected == f"1× or {step.rows}/{step.rows + 1}×"


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
    found = outcomes(pair_step(dtype=dtype))
    assert found.pop(masks.ATTENDED) == "not applicable"  # no row ends with padding
    assert set(found.values()) == {"holds"} and len(found) == 4, found


def test_pairs_that_are_averaged_over_their_width() -> None:
    assert outcomes(pair_step("width"))["3 more columns of padding on the right"] == "fails"


def test_padding_that_pairs_attend_to() -> None:
    """pad = eos, and the forward pass is not told which is which."""
    found = outcomes(pair_step(attention=False))
    assert found["chosen where masked"] == found["rejected where masked"] == "fails", found


@pytest.mark.parametrize("declared", [False, True])
def test_a_mask_without_a_role_is_padded_as_one(declared: bool) -> None:
    """The score is read where the attention mask ends; answers have masks of their own."""
    step = reward_step("last")
    batch = {**step.batch, **{f"{s}_mask": step.batch[f"{s}_attention"] for s in ("chosen", "rejected")}}
    roles = {k: k for k in batch if declared or not k.endswith("attention")}
    found = outcomes(Step(model=step.model, loss=step.loss, batch=batch, roles=roles))
    assert found["3 more columns of padding on the right"] == "holds"


def outcomes_laws(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {f.subject: f.outcome for f in findings}


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
    found = outcomes_laws(audit(placed_step(side, from_padding), laws=[masks.LAW]).findings)
    assert found["3 more columns of padding on the left"] == outcome
    assert found["3 more columns of padding on the right"] == "holds"


DTYPES_OUTSIDERS = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


def outcome(step: Step, law: Law, subject: str) -> str | None:
    found = {f.subject: f.outcome for f in audit(step, laws=[law]).findings}
    return found.get(subject)


@pytest.mark.parametrize("dtype", DTYPES_OUTSIDERS)
@pytest.mark.parametrize("last", ["attended", "in the row"])
def test_a_reward_is_read_at_the_last_token_that_is_there(last: str, dtype: torch.dtype) -> None:
    """A reward model, declared by attention alone: where the reward is read, padding must not matter."""

    class Reward(Tiny):
        def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
            return super().forward(ids, attention)[..., 0]

    def loss(model: nn.Module, batch: Data) -> Tensor:
        scores = []
        for side in ("chosen", "rejected"):
            rewards, shown = model(batch[side], batch[f"{side}_attention"]), batch[f"{side}_attention"]
            at = shown.sum(-1) - 1 if last == "attended" else torch.full_like(shown[:, 0], shown.shape[1] - 1)
            scores.append(rewards.gather(1, at[:, None])[:, 0])
        return -F.logsigmoid(scores[0] - scores[1]).mean()

    model = Reward().to(dtype)
    batch = {}
    for side, seed in (("chosen", 0), ("rejected", 50)):
        rows = token_batch(seed)
        batch |= {side: rows["ids"], f"{side}_attention": rows["attention"]}
    roles: dict[Any, str] = {key: key for key in batch}
    step = Step(model=model, loss=loss, batch=batch, roles=roles)
    verdict = audit(step, laws=[masks.LAW])
    assert verdict.holds is (last == "attended"), str(verdict)
    assert any(f.subject.startswith("3 more columns") and f.outcome != "not declared" for f in verdict.findings)


@pytest.mark.parametrize("dtype", DTYPES_OUTSIDERS)
def test_a_mask_of_tokens_beside_a_teacher_as_wide(dtype: torch.dtype) -> None:
    """The mask marks tokens, and what the teacher says of a token stands one place before it."""

    def loss(model: nn.Module, batch: Data) -> Tensor:
        student = model(batch["ids"], batch["attention"])[:, :-1].log_softmax(-1)
        teacher, mask = batch["teacher"][:, :-1].log_softmax(-1), batch["mask"][:, 1:]
        return ((teacher.exp() * (teacher - student)).sum(-1) * mask).sum() / mask.sum()

    step = distill_step(loss, dtype=dtype)
    wide = torch.cat([torch.zeros(len(step.batch["mask"]), 1), step.batch["mask"]], 1)
    with torch.no_grad():
        teacher = Tiny(9)(step.batch["ids"], step.batch["attention"])
    step.batch = {**step.batch, "mask": wide, "teacher": teacher}
    step.settings = {}
    step.student = lambda m, b: m(b["ids"], b["attention"])
    verdict = audit(step)
    assert verdict.holds, str(verdict)


def test_a_term_with_a_mask_of_its_own_declares_it() -> None:
    """A likelihood of a tool's tokens beside the policy gradient."""
    model = Tiny()
    batch = policy_batch(model)
    batch["tool"] = 1 - batch["mask"]

    def loss(model: nn.Module, batch: Data) -> Tensor:
        now = logprobs(model, batch)
        surrogate = clipped((now - batch["old"]).exp(), batch["advantages"][:, None]) * batch["mask"]
        return surrogate.sum() / batch["mask"].sum() - 0.1 * (now * batch["tool"]).sum() / batch["tool"].sum()

    given: Any = {"model": model, "loss": loss, "batch": batch, "roles": {**ROLES, "advantages": "advantages"}}
    assert outcomes(Step(**given, masks=("tool",)))[masks.MASKED] == "holds"
    assert outcomes(Step(**given))[masks.MASKED] == "fails"
    with pytest.raises(StepError, match="masks names 'tools'"):
        Step(**given, masks=("tools",))


def test_integers_without_a_role_are_a_guess_in_the_padding() -> None:
    """Tokens of a tree are weighed by how many rows have their node: a node that is repeated in the padding counts."""

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        _, where, count = batch["node"].unique(return_inverse=True, return_counts=True)
        weight = ((batch["labels"] >= 0) / count[where].float())[:, 1:]
        targets = batch["labels"][:, 1:].clamp_min(0)
        lp = model(batch["ids"], batch["attention"])[:, :-1].log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        return -(lp * weight).sum() / weight.sum()

    step = sft_step(loss, rows_interact=True)
    step.batch = {**step.batch, "node": torch.arange(step.batch["ids"].numel()).reshape(step.batch["ids"].shape) // 2}
    rows = {f.subject: f.outcome for f in audit(step, laws=[masks.LAW]).findings}
    assert rows["3 more columns of padding on the right"] == "not declared"


@pytest.mark.parametrize("declared", [False, True])
def test_a_row_without_a_token_may_give_nan_where_no_row_is_without(declared: bool) -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        on = (batch["labels"][:, 1:] >= 0).float()
        targets = batch["labels"][:, 1:].clamp_min(0)
        lp = model(batch["ids"], batch["attention"])[:, :-1].log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        return -((lp * on).sum(-1) / on.sum(-1)).mean()

    step = sft_step(loss, empty_rows=not declared)
    assert bool(audit(step, laws=[masks.LAW, coverage.LAW]).failures) == (not declared)


@pytest.mark.parametrize("wide", [None, ("input_ids", "responses", "response_mask", "old")])
@pytest.mark.parametrize("counted", [False, True])
def test_answers_beside_prompt_and_answer(counted: bool, wide: Any) -> None:
    """verl's layout: the ids are [B, P + R], all else is [B, R] and is padded with them."""

    def loss(model: nn.Module, batch: Data) -> Tensor:
        mask, width = batch["response_mask"], batch["responses"].shape[1]
        logits = model(batch["input_ids"])[:, -width - 1 : -1]
        lp = logits.log_softmax(-1).gather(-1, batch["responses"][..., None])[..., 0]
        each = clipped((lp - batch["old"]).exp(), batch["advantages"][:, None]) * mask
        return each.sum() / (mask.numel() if counted else mask.sum())

    model = Tiny()
    rows = policy_batch(model)
    batch = {"input_ids": rows["ids"], "responses": rows["ids"][:, 4:], "response_mask": rows["mask"][:, 3:],
             "old": rows["old"][:, 3:], "advantages": rows["advantages"]}  # fmt: skip
    roles: dict[Any, str] = {"ids": "input_ids", "mask": "response_mask", "behaviour": "old",
                             "advantages": "advantages"}  # fmt: skip
    found = outcomes(Step(model, loss, batch, roles, wide=wide))
    assert found["3 more columns of padding on the right"] == ("fails" if counted else "holds"), found


@pytest.mark.parametrize("by", ["attention", "ids", "nothing"])
def test_padding_is_checked_where_the_loss_makes_its_mask(by: str) -> None:
    """By the attention mask, or by the padding's id; a mean over everything counts padding."""

    def loss(model: nn.Module, batch: Data) -> tuple[Tensor, dict[str, Tensor]]:
        shown = {"attention": batch["attention"], "ids": batch["ids"] != 0, "nothing": torch.ones_like(batch["ids"])}
        on = shown[by][:, 1:].float()
        lp = logprobs(model, batch)
        return -(lp * on).sum() / on.sum(), {"kl": (lp.exp() * on).sum() / on.sum()}

    roles: dict[Any, str] = {"ids": "ids", "attention": "attention"}
    batch = {k: token_batch()[k] for k in roles}
    found = {
        f.subject: f.outcome for f in audit(Step(Tiny(), loss, batch, roles), laws=[masks.LAW, averages.LAW]).findings
    }
    right = "fails" if by == "nothing" else "holds"
    assert found["3 more columns of padding on the right"] == found["averages, 3 more columns of padding"] == right


def test_more_padding_is_not_checked_where_nothing_is_ever_padded() -> None:
    step = sft_step()
    rows = {f.subject: f.outcome for f in audit(replace(step, wide=()), laws=[masks.LAW]).findings}
    assert rows["more padding"] == "not applicable" and not any("columns of padding" in subject for subject in rows)


@pytest.mark.parametrize(
    ("divided", "dtype", "expected"),
    [
        ("by the whole row", torch.float32, "warns"),
        ("by the whole row", torch.bfloat16, "warns"),
        ("by the answer", torch.float32, "holds"),
        ("by the answer", torch.bfloat16, "holds"),
        ("by all answers", torch.float32, "holds"),
        ("by all answers", torch.bfloat16, "holds"),
    ],
)
def test_a_row_is_not_divided_by_its_prompt(divided: str, dtype: torch.dtype, expected: str) -> None:
    def loss(model: nn.Module, batch: Data) -> Tensor:
        on = (batch["labels"][:, 1:] != -100).float()
        lp = logprobs(model, batch) * on
        if divided == "by all answers":
            return -lp.sum() / on.sum()
        size = batch["attention"].sum(-1) if divided == "by the whole row" else on.sum(-1).clamp(min=1)
        return -(lp.sum(-1) / size).mean()

    assert outcomes(sft_step(loss, dtype=dtype))[masks.ATTENDED] == expected


def test_a_model_that_attends_to_later_tokens_is_not_checked() -> None:
    class Both(Tiny):
        def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
            x = self.embed(ids)
            seen = torch.ones_like(ids) if attention is None else attention
            mean = (x * seen[..., None]).sum(1, keepdim=True) / seen.sum(1)[:, None, None]
            return self.head(torch.tanh(x + self.out(mean)))

    assert outcomes(replace(sft_step(), model=Both(), optimizer=None))[masks.ATTENDED] == "not applicable"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_a_pair_without_a_token(masked: bool, dtype: torch.dtype) -> None:
    """Weights without a role that stand in for the mask: a pair whose masks are 0 is still learned."""

    def loss(model: nn.Module, batch: Data, beta: float) -> Tensor:
        sides = []
        for side in ("chosen", "rejected"):
            row = {"ids": batch[side], "attention": batch[f"{side}_attention"]}
            weight = batch[f"{side}_weight"] * (batch[f"{side}_mask"] if masked else 1)
            sides.append((logprobs(model, row) * weight).sum(-1))
        return -F.logsigmoid(beta * (sides[0] - sides[1])).mean()

    step = dpo_step(loss, dtype=dtype)
    weights = {f"{side}_weight": 0.5 + step.batch[f"{side}_mask"] / 2 for side in ("chosen", "rejected")}
    weights = {k: w * step.batch[k.replace("weight", "mask")] for k, w in weights.items()}
    found = outcomes(replace(step, batch={**step.batch, **weights}, metrics={}))
    assert found[masks.MASKED] == ("holds" if masked else "fails"), found


def test_the_content_of_a_masked_pair_where_terms_have_counts_of_their_own() -> None:
    """A mean over pairs beside one over tokens: one more pair changes their ratio, and what stands in it nothing."""

    def loss(model: nn.Module, batch: Data, beta: float) -> Tensor:
        chosen, rejected = sequence_logprobs(model, batch)
        return -F.logsigmoid(beta * (chosen - rejected)).mean() - chosen.sum() / batch["chosen_mask"].sum()

    assert outcomes(replace(dpo_step(loss), metrics={}))[masks.MASKED] == "holds"
