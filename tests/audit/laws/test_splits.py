"""Law SE: rows that depend on each other, order, repetition and normalisers; each defect beside a correct twin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Metric, Setting, Step, audit
from earnest_audit.law import Law
from earnest_audit.laws import (
    liveness,
    masks,
    splits,
)
from earnest_audit.measure import fresh
from earnest_audit.verdict import Finding, Verdict
from tests.audit.steps import (
    Tiny,
    dpo_step,
    logprobs,
    policy_step,
    sequence_logprobs,
    sft_loss,
    sft_step,
    token_batch,
)

DTYPES = [torch.float32, torch.bfloat16]


Data = Mapping[str, Any]


PARTS = "whole = parts (uneven)"


def outcomes(step: Step) -> dict[str, str]:
    return {f.subject: f.outcome for f in audit(step, laws=[splits.LAW]).findings}


def mixed(policy: str, penalty: str) -> Callable[..., Tensor]:
    """A policy gradient and a penalty, each with its own mean: over tokens, over rows, or down the columns (wrong)."""

    def mean(x: Tensor, mask: Tensor, how: str) -> Tensor:
        if how == "tokens":
            return (x * mask).sum() / mask.sum()
        along = 1 if how == "rows" else 0
        return ((x * mask).sum(along) / mask.sum(along).clamp(min=1)).mean()

    def loss(model: nn.Module, batch: Data, beta: float, clip: float) -> Tensor:
        lp, mask, a = logprobs(model, batch), batch["mask"], batch["advantages"][:, None]
        ratio = (lp - batch["old"]).exp()
        gain = torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
        return mean(-gain, mask, policy) + beta * mean((lp - batch["ref"]) ** 2, mask, penalty)

    return loss


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("policy", "penalty"), [("rows", "tokens"), ("tokens", "rows")])
def test_two_terms_may_have_two_normalisers(policy: str, penalty: str, dtype: torch.dtype) -> None:
    assert outcomes(policy_step(mixed(policy, penalty), dtype=dtype))[PARTS] == "holds"


@pytest.mark.parametrize("penalty", ["columns", "tokens"])
def test_a_mean_over_the_wrong_axis_is_none_of_them(penalty: str) -> None:
    assert outcomes(policy_step(mixed("columns", penalty)))[PARTS] == "fails"


def pairs(coupled: bool) -> Callable[..., Tensor]:
    """A preference's mean over pairs beside a token-mean likelihood, as in RPO, CPO and ORPO."""

    def loss(model: nn.Module, batch: Data, beta: float) -> Tensor:
        total, sides = torch.zeros(()), []
        for side in ("chosen", "rejected"):
            each = logprobs(model, {"ids": batch[side], "attention": batch[f"{side}_attention"]})
            mask = batch[f"{side}_mask"]
            sides.append((each * mask).sum(-1) - batch[f"ref_{side}"])
            total = total if side == "rejected" else -(each * mask).sum() / mask.sum()
        margin = sides[0][:, None] - sides[1] if coupled else sides[0] - sides[1]  # [P, 1] against [P]
        return -F.logsigmoid(beta * margin).mean() + total

    return loss


@pytest.mark.parametrize("coupled", [False, True])
def test_a_likelihood_beside_a_preference(coupled: bool) -> None:
    assert outcomes(dpo_step(pairs(coupled)))[PARTS] == ("fails" if coupled else "not declared"), "no term is declared"


def test_rows_that_are_paired_with_their_neighbours() -> None:
    """KTO takes its reference point from answers to the neighbour's prompt."""

    def loss(model: nn.Module, batch: Data) -> Tensor:
        lp = model(batch["ids"], batch["attention"])[:, :-1].log_softmax(-1)
        labels = batch["labels"][:, 1:]
        rows = (lp.gather(-1, labels.clamp_min(0)[..., None])[..., 0] * (labels >= 0)).sum(-1)
        return -torch.sigmoid(0.1 * (rows - rows.roll(1).detach())).mean()

    found = outcomes(sft_step(loss, rows_interact=True))
    assert found["permuted rows"] == "not applicable", found


@pytest.mark.parametrize(("power", "outcome"), [(0.5, "holds"), (2.0, "fails")])
def test_a_normaliser_is_applied_once(power: float, outcome: str) -> None:
    """Twice as many rows: up to twice the gradient, never less than it. A root of the count is a choice."""

    def loss(model: nn.Module, batch: Data) -> Tensor:
        logits, labels = model(batch["ids"], batch["attention"])[:, :-1], batch["labels"][:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return total / (labels >= 0).sum().float().pow(power)

    found = outcomes(sft_step(loss))
    assert found.get("every row twice", "holds") == outcome, found


def test_a_baseline_that_leaves_one_out_sees_the_groups_size() -> None:
    step = policy_step()
    batch = {k: torch.cat([v, v[:1]]) for k, v in step.batch.items() if k != "advantages"}
    batch |= {"rewards": torch.tensor([1.0, 0.0, 1.0, 0.0, 0.5, 0.2]), "group": torch.tensor([0, 0, 0, 1, 1, 1])}

    def loss(model: nn.Module, batch: Data) -> Tensor:
        rewards, same = batch["rewards"], (batch["group"][:, None] == batch["group"]).float()
        a = (rewards - (same @ rewards - rewards) / (same.sum(1) - 1))[:, None]
        ratio = (logprobs(model, batch) - batch["old"]).exp()
        return -(ratio * a * batch["mask"]).sum() / batch["mask"].sum()

    roles = {r: k for r, k in step.roles.items() if r not in ("advantages", "reference")}
    found = outcomes(Step(model=step.model, loss=loss, batch=batch, roles={**roles, "rewards": "rewards",
                          "group": "group"}, family="policy gradient"))  # fmt: skip
    assert found["every row twice"] == "not applicable" and "fails" not in found.values(), found


RIGHT = "3 more columns of padding on the right"


def measured(verdict: Verdict) -> dict[str, str]:
    return {f.subject: f.measured for f in verdict.findings}


def on(model: nn.Module, loss: Any = sft_loss, **more: Any) -> Step:
    step = sft_step()
    return Step(model=model, loss=loss, batch=step.batch, roles=step.roles, **more)


def test_a_step_that_samples_is_not_checked_for_rows() -> None:
    def noisy(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        logits = model(batch["ids"], batch["attention"])[:, :-1]
        logits = logits * torch.rand(logits.shape)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

    verdict = audit(on(Tiny(), noisy), laws=[liveness.LAW, splits.LAW, masks.LAW])
    assert verdict.holds, str(verdict)
    found = measured(verdict)
    for subject in ("permuted, repeated or cut rows", RIGHT):
        assert found[subject] == "the step is random"


def nested_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Rows are weighed by what lists, arrays and nested dicts say, and all of them are written into."""
    weights = [row["w"] for row in batch["meta"]]
    total = torch.tensor(weights) * torch.from_numpy(batch["array"]) * batch["deep"]["inner"]["t"]
    total = total * torch.tensor([float(len(name)) for name in batch["names"]])
    batch["deep"]["inner"]["t"] += 1
    batch["array"] += 1
    batch["meta"].append({"w": 0.0})
    mask = (batch["labels"][:, 1:] != -100).float()
    return -(total[:, None] * logprobs(model, batch) * mask).sum() / mask.sum()


def test_lists_arrays_and_nested_dicts_go_with_their_rows() -> None:
    step = sft_step()
    batch = {
        **step.batch,
        "meta": [{"w": 0.5 + r} for r in range(5)],
        "array": np.linspace(1, 2, 5, dtype=np.float32),
        "names": ("a", "bb", "ccc", "dd", "e"),
        "deep": {"inner": {"t": torch.linspace(2, 1, 5)}, "text": "five5"},
    }
    before = fresh(batch)
    verdict = audit(
        Step(model=step.model, loss=nested_loss, batch=batch, roles=step.roles, value_is_loss=True),
        laws=[splits.LAW, masks.LAW],
    )
    assert verdict.holds, str(verdict)
    assert batch["meta"] == before["meta"] and np.array_equal(batch["array"], before["array"])
    assert batch["deep"]["inner"]["t"].equal(before["deep"]["inner"]["t"])
    assert measured(verdict)["permuted, and every row twice"].startswith("1×")


def outcomes_laws(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {f.subject: f.outcome for f in findings}


def test_a_part_that_counts_against_itself_is_seen() -> None:
    """The whole is g₁ - g₂, exactly a combination of its parts, with a weight below 0."""

    def turned(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        rows = len(batch["ids"])
        parts = [sft_loss(model, {k: v[r : r + 1] for k, v in batch.items()})[0] for r in range(rows)]
        sign = [1.0 if rows < 5 or r < 1 else -1.0 for r in range(rows)]
        return torch.stack([p * s for p, s in zip(parts, sign, strict=True)]).sum()

    found = outcomes_laws(audit(sft_step(turned), laws=[splits.LAW]).findings)
    assert found["whole = parts (uneven)"] == "fails"
    assert outcomes_laws(audit(sft_step(), laws=[splits.LAW]).findings)["whole = parts (uneven)"] == "holds"


@pytest.mark.parametrize("seed", range(4))
def test_a_part_without_a_gradient_is_legitimate(seed: int) -> None:
    """All advantages of the first rows are 0: the whole is the other part alone."""
    step = policy_step(seed=seed)
    step.batch["advantages"][:2] = 0.0  # type: ignore[index]
    step.settings = {"beta": 0.0, "clip": 0.2}
    assert outcomes_laws(audit(step, laws=[splits.LAW]).findings)["whole = parts (uneven)"] == "holds"


DTYPES_OUTSIDERS = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


def outcome(step: Step, law: Law, subject: str) -> str | None:
    found = {f.subject: f.outcome for f in audit(step, laws=[law]).findings}
    return found.get(subject)


def _margins(model: nn.Module, batch: Data) -> Tensor:
    chosen, rejected = sequence_logprobs(model, batch)
    return (chosen - batch["ref_chosen"]) - (rejected - batch["ref_rejected"])


SINGLE = {
    "sigmoid": lambda m: -F.logsigmoid(m).mean(),
    "hinge": lambda m: (1 - m).relu().mean(),
    "square": lambda m: (m - 1).square().mean(),
    "lets go on either side": lambda m: (1 - m.sigmoid()).mean(),
}


@pytest.mark.parametrize("dtype", DTYPES_OUTSIDERS)
@pytest.mark.parametrize("form", SINGLE)
def test_each_pair_by_itself(form: str, dtype: torch.dtype) -> None:
    def loss(model: nn.Module, batch: Data, beta: float) -> Tensor:
        return SINGLE[form](beta * _margins(model, batch))

    step = dpo_step(loss, dtype=dtype)
    step.metrics = {}
    verdict = audit(step, laws=[splits.LAW])
    assert verdict.holds, str(verdict)


def _unreferred(loss: Any, dtype: torch.dtype = torch.float32, **more: Any) -> Step:
    step = dpo_step(loss, dtype=dtype)
    step.metrics = {}
    step.roles = {r: k for r, k in step.roles.items() if "reference" not in r}
    step.batch = {k: v for k, v in step.batch.items() if not k.startswith("ref")}
    for name, value in more.items():
        setattr(step, name, value)
    step.__post_init__()
    return step


@pytest.mark.parametrize("layout", ["halves", "neighbours"])
def test_pairs_that_are_stacked_belong_together_by_declaration(layout: str) -> None:
    def loss(model: nn.Module, batch: Data, beta: float) -> Tensor:
        lp = (logprobs(model, batch) * batch["mask"]).sum(-1) - batch["ref"]
        a, b = lp.chunk(2) if layout == "halves" else (lp[::2], lp[1::2])
        return -F.logsigmoid(beta * (a - b)).mean()

    model, rows = Tiny(), token_batch(0)
    batch = {k: torch.cat([v, v.flip(0)])[:8] for k, v in rows.items()}
    batch["ids"] = (
        torch.randint(1, 20, batch["ids"].shape, generator=torch.Generator().manual_seed(3)) * batch["attention"]
    )
    with torch.no_grad():
        batch["ref"] = (logprobs(Tiny(5), batch) * batch["mask"]).sum(-1)
    roles: dict[Any, str] = {"ids": "ids", "attention": "attention", "mask": "mask", "reference": "ref"}
    found = {}
    for declared in (True, False):
        step = Step(model=model, loss=loss, batch=batch, roles=roles, settings={"beta": 0.1}, rows_interact=declared)
        found[declared] = outcome(step, splits.LAW, "permuted rows")
    assert found == {True: "not applicable", False: "fails"}


def test_terms_with_normalisers_of_their_own_are_sums_of_parts_each_by_itself() -> None:
    """ORPO: the likelihood is a mean over the tokens that attention shows, the odds are one per pair."""

    def loss(model: nn.Module, batch: Data, lam: float) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = sequence_logprobs(model, batch)
        gap = chosen / batch["chosen_mask"].sum(-1) - rejected / batch["rejected_mask"].sum(-1)
        shown = batch["chosen_attention"][:, 1:]
        row = {"ids": batch["chosen"], "attention": batch["chosen_attention"]}
        odds = -F.logsigmoid(gap).mean()
        return -(logprobs(model, row) * shown).sum() / shown.sum() + lam * odds, {"odds": odds}

    weighed = _unreferred(loss, settings={"lam": 0.3}, metrics={"odds": Metric(weight="lam")})
    without_metric = _unreferred(loss, settings={"lam": Setting(0.3, "weight")})
    for step in (weighed, without_metric):
        assert outcome(step, splits.LAW, "whole = parts (uneven)") == "holds"


@pytest.mark.parametrize("fault", [False, True])
def test_terms_that_all_have_a_weight_and_a_value_that_leaves_the_divergence_alone(fault: bool) -> None:
    """A likelihood is a mean over targets, a divergence one over the tokens that attention shows. Both weights are
    declared, one also as what switches the other term off: each is checked by itself."""
    step = sft_step()
    shown = torch.arange(12)[None] < torch.arange(5, 5 + step.rows)[:, None]

    def loss(model: nn.Module, batch: Data, task: float, kd: float) -> Tensor:
        logs, on = model(batch["ids"]).log_softmax(-1), batch["shown"].float()
        nll = -logs[:, :-1].gather(-1, batch["ids"][:, 1:, None])[..., 0]
        far = (batch["teacher"].softmax(-1) * (batch["teacher"].log_softmax(-1) - logs)).sum(-1)
        likelihood = (nll * on[:, 1:]).sum() / on[:, 1:].sum() * (nll.mean() if fault else 1.0)
        return task * likelihood + kd * (far * on).sum() / on.sum()

    ids = step.batch["ids"]
    teacher = torch.randn(*ids.shape, 23, generator=torch.Generator().manual_seed(0))
    settings = {"task": Setting(0.5, "weight", pure=0.0), "kd": Setting(0.4, "weight")}
    made = Step(step.model, loss, {"ids": ids, "shown": shown.long(), "teacher": teacher},
                {"ids": "ids", "attention": "shown", "teacher": "teacher"}, settings=settings)  # fmt: skip
    assert outcome(made, splits.LAW, "whole = parts (uneven)") == ("fails" if fault else "holds")


@pytest.mark.parametrize("twice", [False, True])
def test_one_packed_row_is_doubled_where_its_reduction_is_declared(twice: bool) -> None:
    """unsloth-zoo #1066: boundaries are subtracted from a count that does not have them."""
    step = sft_step()

    def loss(model: nn.Module, batch: Data) -> Tensor:
        logits, labels = model(batch["ids"])[:, :-1], batch["labels"][:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return total / ((labels != -100).sum() - (2 if twice else 0))

    one = {k: v[:1] for k, v in step.batch.items() if k in ("ids", "labels")}
    roles = {"ids": "ids", "labels": "labels"}
    found = outcomes(Step(model=step.model, loss=loss, batch=one, roles=roles, reduction="mean"))
    assert found["every row twice"] == ("fails" if twice else "holds")
    assert "every row twice" not in outcomes(Step(model=step.model, loss=loss, batch=one, roles=roles))


@pytest.mark.parametrize(("fault", "expected"), [(None, "warns"), ("in the term", "fails"), ("beside it", "fails")])
def test_a_term_of_several_means_over_undeclared_counts(fault: str | None, expected: str) -> None:
    """The depths of a multi-token prediction, each a mean over the targets that no image precedes. That is right, and
    looks like rows that are coupled inside the term: it warns where no signal could be broadcast over the rows."""
    image, step = 3, sft_step()

    def loss(model: nn.Module, batch: Data, weight: float) -> Tensor:
        ids, mask = batch["ids"], batch["mask"]
        logs = model(ids).log_softmax(-1)
        extra: Any = 0.0
        for depth in (2, 3):
            on = mask[:, depth:] * (ids[:, 1 : 1 - depth] != image)
            lp = logs[:, :-depth].gather(-1, ids[:, depth:, None])[..., 0]
            extra = extra - (lp * on).sum() / on.sum()
        lp = logs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        if fault == "in the term":  # [B, 1] beside [B]
            extra = extra + ((lp.mean(-1, keepdim=True) - batch["scores"]) ** 2).mean()
        mean = (lp * mask[:, 1:]).sum() / mask[:, 1:].sum()
        return weight * extra - (mean * lp.sum(-1).exp().mean() if fault == "beside it" else mean)

    ids = step.batch["ids"].clone()
    ids[0, 2:4], ids[2, 5] = image, image
    batch = {"ids": ids, "mask": (ids != image).float(), "scores": torch.arange(float(len(ids)))}
    roles: dict[Any, str] = {"ids": "ids", "mask": "mask"} | ({"returns": "scores"} if fault == "in the term" else {})
    settings = {"weight": Setting(0.3, "weight")}
    found = outcomes(Step(model=step.model, loss=loss, batch=batch, roles=roles, settings=settings))
    assert found[PARTS] == expected, found


def test_a_whitening_without_a_declaration_fails_with_the_way_out() -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float, clip: float) -> Tensor:
        a = batch["advantages"]
        a, lp = ((a - a.mean()) / a.std())[:, None], logprobs(model, batch)
        each = lp.square() - (lp - batch["old"]).exp() * a  # the first part is not scaled
        return (each * batch["mask"]).sum() / batch["mask"].sum()

    step = replace(policy_step(loss), metrics={})
    rows = {f.subject: f for f in audit(step, laws=[splits.LAW, masks.LAW]).failures}
    assert set(rows) == {splits.TWICE, masks.MASKED}, rows
    assert all("rows_interact=True" in row.meaning for row in rows.values())
    assert audit(replace(step, rows_interact=True), laws=[splits.LAW, masks.LAW]).holds
