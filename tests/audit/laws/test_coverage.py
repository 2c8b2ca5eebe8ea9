"""Law CV: supervised tokens that have no gradient, and tokens that may have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Step, Verdict, audit
from earnest_audit.law import Law
from earnest_audit.laws import (
    coverage,
    masks,
)
from tests.audit.steps import (
    Tiny,
    grpo_loss,
    logprobs,
    policy_batch,
    policy_step,
    sft_step,
    token_batch,
)

Data = Mapping[str, Any]


def outcomes(step: Step, law: Law = masks.LAW) -> dict[str, str]:
    return {f.subject: f.outcome for f in audit(step, laws=[law]).findings}


def clipped(ratio: Tensor, a: Tensor, by: float = 0.2) -> Tensor:
    return -torch.minimum(ratio * a, ratio.clamp(1 - by, 1 + by) * a)


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
    assert ("fails" in outcomes(reward_step(place), masks.LAW).values()) == (place == "first")


@pytest.mark.parametrize("place", ["first", "last"])
def test_pairs_beyond_a_hinge_are_left_out(place: str) -> None:
    """Some pairs have no gradient by design, and the others are still judged."""
    step = reward_step(place, margin=0.2)
    assert audit(step).holds == (place == "last")
    assert ("fails" in outcomes(step, masks.LAW).values()) == (place == "first")


@pytest.mark.parametrize("declared", [False, True])
def test_a_loss_may_drop_tokens_where_that_is_declared(declared: bool) -> None:
    def loss(model: nn.Module, batch: Data, beta: float, clip: float) -> Tensor:
        lp, mask = logprobs(model, batch), batch["mask"]
        kept = mask * (torch.arange(mask.shape[1]) < mask.shape[1] - 1)
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


EVERY = "every supervised position"


def outcomes_ordinary(verdict: Verdict) -> dict[str, str]:
    return {f.subject: f.outcome for f in verdict.findings}


def with_advantages(values: list[float], loss: Any = grpo_loss) -> Step:
    """GRPO without its penalty, which has a gradient of its own."""
    step = policy_step(lambda m, b, **knobs: loss(m, b, **{**knobs, "beta": 0.0}))
    step.batch = {**step.batch, "advantages": torch.tensor(values)}
    return step


def without_the_last(model: nn.Module, batch: Mapping[str, Any], **knobs: Any) -> Any:
    """The last supervised token of every row is lost."""
    mask: Tensor = batch["mask"]
    last = mask.cumsum(-1) == mask.sum(-1, keepdim=True)
    return grpo_loss(model, {**batch, "mask": mask * ~last}, **knobs)


@pytest.mark.parametrize(
    ("advantages", "loss", "outcome"),
    [
        ([0.0, 0.0, 0.7, -1.2, 0.0], grpo_loss, "holds"),
        ([0.0, 0.0, 0.0, 0.0, 0.0], grpo_loss, "not applicable"),
        ([0.0, 0.0, 0.7, -1.2, 0.0], without_the_last, "fails"),
    ],
)
def test_rows_of_advantage_zero_are_left_out(advantages: list[float], loss: Any, outcome: str) -> None:
    verdict = audit(with_advantages(advantages, loss), laws=[coverage.LAW])
    assert outcomes_ordinary(verdict).get(EVERY, "not applicable") == outcome, str(verdict)


DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


def outcome(step: Step, law: Law, subject: str) -> str | None:
    found = {f.subject: f.outcome for f in audit(step, laws=[law]).findings}
    return found.get(subject)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("marks", "used", "expected"),
    [
        ("tokens", "tokens", "holds"),
        ("tokens", "places", "fails"),  # torchtitan #2755: one off, the last answer token is untaught
        ("places", "places", "holds"),
        ("whole rows", "tokens", "holds"),
        ("whole rows", "places", "holds"),
        ("targets", "targets", "holds"),
    ],
)
def test_every_token_that_a_mask_marks_has_a_gradient(marks: str, used: str, expected: str, dtype: torch.dtype) -> None:
    def loss(model: nn.Module, batch: Data) -> Tensor:
        mask = {"tokens": batch["mask"][:, 1:], "places": batch["mask"][:, :-1], "targets": batch["mask"]}[used]
        return -(logprobs(model, batch) * mask).sum() / mask.sum()

    model, batch = Tiny().to(dtype), token_batch()
    narrow = batch["mask"]
    wide = {
        "tokens": F.pad(narrow, (1, 0)), "places": F.pad(narrow, (0, 1)), "whole rows": batch["attention"].float(),
        "targets": narrow,
    }  # fmt: skip
    batch["mask"] = wide[marks]
    roles: dict[Any, str] = {"ids": "ids", "attention": "attention", "mask": "mask"}
    step = Step(model=model, loss=loss, batch=batch, roles=roles, all_supervised=True, family="sft")
    assert outcome(step, coverage.LAW, "every supervised position") == expected


@pytest.mark.parametrize("cut", [False, True])
def test_capped_tokens_are_not_missing_where_no_log_probs_are_declared(cut: bool) -> None:
    """Ratios far beyond a cap have no slope under either sign; inside it a last token that is cut off is seen."""

    def loss(model: nn.Module, batch: Data) -> Tensor:
        ratio = (logprobs(model, batch) - batch["old"]).exp().clamp(max=2.0)
        mask = batch["mask"].clone()
        if cut:
            mask[:, -1] = 0
        return -(ratio * batch["advantages"][:, None] * mask).sum() / mask.sum()

    step = policy_step(grpo_loss)
    roles = {r: k for r, k in step.roles.items() if r != "reference"}
    found = outcomes(Step(step.model, loss, step.batch, roles), coverage.LAW)
    assert found["every supervised position"] == ("fails" if cut else "holds")
    capped = {**step.batch, "old": step.batch["old"] - 6.0 * step.batch["mask"]}
    found = outcomes(Step(step.model, loss, capped, roles), coverage.LAW)
    assert found == {"coverage": "not applicable"}, "no token has a gradient: see GL"


def turns(mask: Tensor, kept: str) -> Tensor:
    """The mask with a tool's tokens left out, and, of what is ``kept``, one turn alone."""
    place = torch.arange(mask.shape[1])
    mask = mask * ((place < 5) | (place > 6))
    return mask * {"all": place >= 0, "first": place < 5, "last": place > 6}[kept]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("family", ["sft", "policy gradient"])
@pytest.mark.parametrize("kept", ["all", "first", "last"])
def test_every_turn_has_a_gradient(kept: str, family: Any, seed: int) -> None:
    """ms-swift #7838: one turn alone is trained; no single token shows that, because alone each is in that turn."""

    def loss(model: nn.Module, batch: Data) -> Tensor:
        mask, lp = turns(batch["mask"], kept), logprobs(model, batch)
        if not bool((mask > 0).any()):
            mask = batch["mask"]
        each = -lp if family == "sft" else clipped((lp - batch["old"]).exp(), batch["advantages"][:, None])
        return (each * mask).sum() / mask.sum()

    model = Tiny(seed)
    batch = policy_batch(model, seed)
    batch["mask"] = turns(batch["mask"], "all")
    roles: dict[Any, str] = {"ids": "ids", "attention": "attention", "mask": "mask"}
    roles |= {} if family == "sft" else {"behaviour": "old", "advantages": "advantages"}
    found = outcomes(Step(model, loss, batch, roles, family=family, seed=seed), coverage.LAW)
    assert found[EVERY] == ("holds" if kept == "all" else "fails")


@pytest.mark.parametrize("cut", [False, True])
def test_answers_beside_their_prompts(cut: bool) -> None:
    """The mask marks an answer's first token, which the prompt predicts."""

    def loss(model: nn.Module, batch: Data) -> Tensor:
        ids, mask = torch.cat([batch["prompt"], batch["answer"]], 1), batch["answer_mask"].clone()
        lp = logprobs(model, {"ids": ids})[:, -mask.shape[1] :]
        mask[:, 3] *= not cut
        return -(lp * batch["advantages"][:, None] * mask).sum() / mask.sum()

    ids, shown = token_batch()["ids"], (token_batch()["attention"])[:, 4:].float()
    batch = {"prompt": ids[:, :4], "answer": ids[:, 4:], "answer_mask": shown, "advantages": torch.linspace(-1, 2, 5)}
    roles: dict[Any, str] = {"ids": "answer", "mask": "answer_mask", "advantages": "advantages"}
    assert outcomes(Step(Tiny(), loss, batch, roles), coverage.LAW)[EVERY] == ("fails" if cut else "holds")


@pytest.mark.parametrize("cut", [False, True])
def test_a_critic_whose_clipped_values_have_no_gradient(cut: bool) -> None:
    def loss(model: nn.Module, batch: Data) -> Tensor:
        mask = batch["mask"].clone()
        mask[:, 4] *= not cut
        now, old = model(batch["ids"], batch["attention"])[:, :-1, 0], batch["values"]
        bounded = old + (now - old).clamp(-0.2, 0.2)
        each = torch.maximum((now - batch["returns"]) ** 2, (bounded - batch["returns"]) ** 2)
        return (each * mask).sum() / mask.sum()

    model, batch = Tiny(), token_batch()
    with torch.no_grad():
        now = model(batch["ids"], batch["attention"])[:, :-1, 0]
    batch |= {"values": now - 1, "returns": now - 0.5}
    batch["returns"][:, 4::2] += 1.0  # beyond the range, on the return's side
    batch["returns"][0, 5] = now[0, 5]
    roles: dict[Any, str] = {k: k for k in ("ids", "attention", "mask", "values", "returns")}
    assert outcomes(Step(model, loss, batch, roles), coverage.LAW)[EVERY] == ("fails" if cut else "holds")


@pytest.mark.parametrize("cut", [False, True])
def test_a_token_that_is_certain_has_no_gradient_by_design(cut: bool) -> None:
    class Constrained(Tiny):
        def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
            found = super().forward(ids, attention, documents).clone()
            only = F.one_hot(ids[:, 6], found.shape[-1]).bool()
            found[:, 5] = found[:, 5].masked_fill(~only, -torch.inf)  # one legal token
            return found

    def loss(model: nn.Module, batch: Data) -> Tensor:
        mask = batch["mask"].clone()
        mask[:, 7] *= not cut
        return -(logprobs(model, batch) * mask).sum() / mask.sum()

    roles: dict[Any, str] = {k: k for k in ("ids", "attention", "mask")}
    step = Step(Constrained(), loss, token_batch(), roles, family="sft")
    assert outcomes(step, coverage.LAW)[EVERY] == ("fails" if cut else "holds")


def test_a_row_of_a_sample_of_positions_has_the_number_of_all() -> None:
    """Where the model is called for one row at a time, no output has all rows."""

    def loss(model: nn.Module, batch: Data) -> Tensor:
        rows = zip(batch["ids"], batch["attention"], batch["labels"], strict=True)
        each = [F.cross_entropy(model(ids[None], shown[None])[0, :-1], labels[1:], reduction="sum")
                for ids, shown, labels in rows]  # fmt: skip
        return torch.stack(each).sum() / (batch["labels"] != -100).sum()

    step = sft_step(loss)
    count = int((step.batch["labels"] != -100).sum())
    found = {f.subject: f for f in audit(step, laws=[coverage.LAW]).findings}
    assert coverage.POSITIONS not in found, "a sample is not every position"
    assert found[coverage.SAMPLE].measured == f"3 of {count} tried alone, 3 matter"


@pytest.mark.parametrize("cut", [False, True])
def test_clipped_tokens_are_not_missing_where_the_step_makes_its_own_advantages(cut: bool) -> None:
    """Neither advantages nor log-probs are declared: negated rewards show which tokens have a slope."""

    def loss(model: nn.Module, batch: Data, clip: float) -> Tensor:
        advantages = batch["rewards"] - batch["rewards"].mean()
        mask = batch["mask"].clone()
        if cut:
            mask[:, -1] = 0
        ratio = (logprobs(model, batch) - batch["old"]).exp()
        return (clipped(ratio, advantages[:, None], clip) * mask).sum() / mask.sum()

    model = Tiny()
    batch = {**policy_batch(model), "rewards": torch.tensor([1.0, 0.0, 0.5, -1.0, 2.0])}
    batch["old"][:, -2] -= 1.5 * (batch["rewards"] > 0.5)  # ratios beyond the clip, in rows of a good reward
    roles: dict[Any, str] = {"ids": "ids", "mask": "mask", "behaviour": "old", "rewards": "rewards"}
    step = Step(model, loss, batch, roles, settings={"clip": 0.2}, rows_interact=True)
    assert outcome(step, coverage.LAW, EVERY) == ("fails" if cut else "holds")


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(("pessimistic", "last"), [(True, True), (True, False), (False, True)])
def test_clipped_tokens_are_told_from_missing_ones_where_the_step_refuses_wide_clips(
    declared: bool, pessimistic: bool, last: bool
) -> None:
    """A clip without a minimum takes the gradient of a token under both signs of its advantage."""

    def loss(model: nn.Module, batch: Data, clip: float) -> Tensor:
        if not 0 <= clip < 1:
            raise ValueError("clip must be in [0, 1)")
        a, mask = (batch["rewards"] - batch["rewards"].mean())[:, None], batch["mask"].clone()
        if not last:
            mask[:, -1] = 0
        ratio = (logprobs(model, batch) - batch["old"]).exp()
        each = clipped(ratio, a, clip) if pessimistic else -ratio.clamp(1 - clip, 1 + clip) * a
        return (each * mask).sum() / mask.sum()

    model = Tiny()
    batch = {**policy_batch(model), "rewards": torch.tensor([1.0, 0.0, 0.5, -1.0, 2.0])}
    batch["old"][:, -2] -= 1.5 * (batch["rewards"] > 0.5)
    roles: dict[Any, str] = {"ids": "ids", "mask": "mask", "behaviour": "old"}
    roles |= {"rewards": "rewards"} if declared else {}
    step = Step(model, loss, batch, roles, settings={"clip": 0.2}, rows_interact=True)
    right = pessimistic and last
    assert outcome(step, coverage.LAW, EVERY) == ("not declared" if not declared else "holds" if right else "fails")


@pytest.mark.parametrize("cut", [False, True])
def test_answers_that_branch_off_one_prompt_share_its_last_output(cut: bool) -> None:
    """Prefix grouping: the prompt's last output predicts the first token of every answer, so fewer outputs than tokens
    have a gradient. ``cut``: an answer's last token is left out of the loss and counted."""

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place, self.head = nn.Embedding(20, 8), nn.Embedding(8, 8), nn.Linear(8, 20)

        def forward(self, ids: Tensor, places: Tensor) -> Tensor:
            return self.head((self.embed(ids) + self.place(places)).tanh())

    source = torch.tensor([0, 0, 1, 2, 3, 2, 5])  # two answers of two tokens behind a prompt of three

    def loss(model: nn.Module, batch: Data) -> Tensor:
        lp = model(batch["ids"], batch["places"]).log_softmax(-1)[:, source]
        taken = batch["mask"] * (torch.arange(len(source)) < len(source) - 1) if cut else batch["mask"]
        return -(lp.gather(-1, batch["ids"][..., None])[..., 0] * taken).sum() / batch["mask"].sum()

    torch.manual_seed(0)
    mask = torch.tensor([0.0, 0, 0, 1, 1, 1, 1]).expand(3, -1)
    batch = {
        "ids": torch.randint(20, (3, 7)),
        "places": torch.tensor([0, 1, 2, 3, 4, 3, 4]).expand(3, -1),
        "mask": mask,
    }
    step = Step(
        model=Placed(), loss=loss, batch=batch, roles={"ids": "ids", "positions": "places", "mask": "mask"},
        family="sft", wide=(),
    )  # fmt: skip
    found = outcomes(step, coverage.LAW)
    assert found.get("every supervised position", "holds") == ("fails" if cut else "holds"), found


def test_prompts_that_are_supervised_on_purpose_are_declared() -> None:
    step = sft_step()
    step.batch = {**step.batch, "labels": torch.where(step.batch["attention"] == 1, step.batch["ids"], -100)}
    (row,) = audit(step, laws=[coverage.LAW]).failures
    assert row.subject == "supervised share" and "all_supervised=True" in row.meaning
