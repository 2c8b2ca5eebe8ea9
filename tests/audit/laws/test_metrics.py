"""Laws MR, MR-FORM, MR-MEAN and MR-PAIR: metrics that are averages over padding or rows, no definition of a KL,
constant, or reversed; each beside a correct one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Metric, Step, audit
from earnest_audit.facts import MetricKind
from earnest_audit.laws import at_reference, averages, definitions, metrics, pair_metrics
from tests.audit.steps import (
    Tiny,
    dpo_loss,
    dpo_step,
    grpo_loss,
    logprobs,
    policy_batch,
    policy_step,
    sequence_logprobs,
    sft_loss,
    sft_step,
)

Change = Callable[[Mapping[str, Any], dict[str, Tensor], Tensor], dict[str, Tensor]]


def logging(change: Change) -> Step:
    """The right step, with other metrics."""

    def loss(model: Any, batch: Mapping[str, Any], beta: float, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = grpo_loss(model, batch, beta, clip)
        return value, {**metrics, **change(batch, metrics, logprobs(model, batch))}

    return policy_step(loss)


def mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


POLICY: dict[str, tuple[Change, Change, str]] = {
    # TRL #6121: entropies of padded positions are in the mean
    "an entropy that counts padding": (
        lambda b, _, lp: {"entropy": mean(-lp, b["mask"])},
        lambda b, _, lp: {"entropy": (-lp * b["mask"]).mean()},
        "averages, 3 more columns of padding",
    ),
    "a sum that is logged as a mean": (
        lambda b, _, lp: {"old_logps": mean(b["old"], b["mask"])},
        lambda b, _, lp: {"old_logps": (b["old"] * b["mask"]).sum()},
        "averages, every row twice",
    ),
}


@pytest.mark.parametrize("name", POLICY)
def test_a_metric_of_a_policy(name: str) -> None:
    right, wrong, subject = POLICY[name]
    verdict = audit(logging(right))
    assert verdict.holds, str(verdict)
    assert ("MR-MEAN", subject) in {(f.law, f.subject) for f in audit(logging(wrong)).failures}


def gap(batch: Mapping[str, Any], lp: Tensor) -> Tensor:
    return batch["ref"] - lp


def by_row(batch: Mapping[str, Any], lp: Tensor, length: Tensor | int) -> Tensor:
    return (((lp - batch["old"]) * batch["mask"]).sum(-1) / length).exp().mean()


FORMS: dict[str, tuple[Change, Change]] = {
    # slime #2114 and others: the KL that is logged is to another policy, or half of one
    "kl": (
        lambda b, m, lp: {"kl": mean(gap(b, lp).exp() - gap(b, lp) - 1, b["mask"])},
        lambda b, m, lp: {"kl": mean((gap(b, lp) / 2).exp() - gap(b, lp) / 2 - 1, b["mask"])},
    ),
    "ratio": (
        lambda b, _, lp: {"ratio": by_row(b, lp, b["mask"].sum(-1))},
        lambda b, _, lp: {"ratio": by_row(b, lp, 2 * b["mask"].shape[-1])},
    ),
}


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_a_kl_or_a_ratio_is_one_of_its_definitions(name: str, wrong: bool) -> None:
    verdict = audit(logging(FORMS[name][wrong]))
    assert verdict.holds, str(verdict)
    assert (f"metric {name}, recomputed" in {f.subject for f in verdict.warnings}) == wrong, str(verdict)


def test_a_metric_over_the_tokens_that_are_kept_is_not_recomputed() -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float, clip: float) -> Any:
        keep = (logprobs(model, batch).detach() < -2.0).float() * batch["mask"]
        return grpo_loss(model, {**batch, "mask": keep}, beta, clip)

    verdict = audit(policy_step(loss, drops_tokens=True), laws=[metrics.LAW, definitions.LAW])
    assert verdict.holds and not any("recomputed" in f.subject for f in verdict.findings), str(verdict)


END = 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["whole", "row mean", "top", "from ids", "drawn", "drawn, row mean"])
def test_an_entropy_does_not_depend_on_the_sampled_tokens(form: str, dtype: torch.dtype) -> None:
    """ "drawn" is the defect; "row mean" and "top" are other right forms, "from ids" makes a mask of its own."""

    def loss(model: nn.Module, b: Mapping[str, Any], c: float) -> tuple[Tensor, dict[str, Tensor]]:
        full = model(b["ids"], b["attention"])[:, :-1].float().log_softmax(-1)
        lp, m = full.gather(-1, b["ids"][:, 1:, None])[..., 0], b["mask"]
        each = -lp if "drawn" in form else -(full.exp() * full).sum(-1)
        on = m * (b["ids"][:, 1:] != END) if form == "from ids" else m
        on = m * (each >= each[m.bool()].median()) if form == "top" else on
        bonus = ((each * on).sum(-1) / on.sum(-1)).mean() if "row mean" in form else mean(each, on)
        return -mean((lp - b["old"]).exp() * b["advantages"][:, None], m) - c * bonus, {"entropy": bonus}

    model = Tiny().to(dtype)
    roles = {"ids": "ids", "attention": "attention", "mask": "mask", "behaviour": "old", "advantages": "advantages"}
    step = Step(model, loss, policy_batch(model), roles, settings={"c": 0.01}, logprobs=logprobs,
                metrics={"entropy": Metric(weight="c", raises=True)})  # fmt: skip
    (row,) = audit(step, laws=[definitions.LAW]).findings
    assert row.outcome == ("warns" if "drawn" in form else "holds"), row


@pytest.mark.parametrize("of", ["sums", "means"])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("declared", [False, True])
def test_log_probs_of_the_side_they_are_named_for(declared: bool, swapped: bool, of: str) -> None:
    """LLaMA-Factory #6050."""
    names = ("first", "second") if declared else ("logps/chosen", "logps/rejected")
    kinds: tuple[MetricKind, MetricKind] = ("chosen log-probs", "rejected log-probs")

    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = sequence_logprobs(model, batch)
        if of == "means":
            chosen, rejected = chosen / batch["chosen_mask"].sum(-1), rejected / batch["rejected_mask"].sum(-1)
        logged = (rejected, chosen) if swapped else (chosen, rejected)
        value, found = dpo_loss(model, batch, beta)
        return value, found | {name: values.mean() for name, values in zip(names, logged, strict=True)}

    step = dpo_step(loss)
    step.metrics = {n: Metric(kind=kind) for n, kind in zip(names, kinds, strict=True)} if declared else {}
    found = audit(step, laws=[pair_metrics.LAW])
    whose = [f.outcome for f in found.findings if f.subject.endswith(", whose")]
    assert whose == [("fails" if declared else "warns") if swapped else "holds"] * 2, str(found)


@pytest.mark.parametrize("name", ["token_accuracy", "truncated_fraction", "ratio_mean", "hit_rate"])
@pytest.mark.parametrize("declared", [False, True])
def test_a_share_or_a_ratio_is_not_constant(declared: bool, name: str) -> None:
    changes: tuple[Change, Change] = (
        lambda b, m, lp: {name: m["clip_fraction"]},
        lambda b, m, lp: {name: torch.ones(())},
    )
    for constant, change in enumerate(changes):
        step = logging(change)
        step.metrics = {name: Metric(kind="share")} if declared else {}
        rows = {f.subject: f.outcome for f in audit(step, laws=[metrics.LAW]).findings if f.expected == "it moves"}
        assert rows[f"metric {name}"] == (("fails" if declared else "warns") if constant else "holds")


@pytest.mark.parametrize(("name", "expected"), [("ratio", "fails"), ("prob_ratio", "warns"), ("my_ratio", None)])
def test_a_ratio_is_1_for_the_policy_that_sampled(name: str, expected: str | None) -> None:
    changes: tuple[Change, Change] = (
        lambda b, m, lp: {name: mean((lp - b["old"]).exp(), b["mask"])},
        lambda b, m, lp: {name: 2 * mean((lp - b["old"]).exp(), b["mask"])},
    )
    for change, outcome in zip(changes, (expected and "holds", expected), strict=True):
        step = logging(change)
        rows = {f.subject: f.outcome for f in audit(step, laws=[metrics.LAW]).findings}
        assert rows.get(f"metric {name}, policy unchanged") == outcome


def test_a_share_of_rows_that_differ_is_not_constant() -> None:
    step = logging(lambda b, m, lp: {"truncated_fraction": (b["mask"].sum(-1) > 7).float().mean()})
    assert not audit(step, laws=[metrics.LAW]).warnings


def pairs(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Step:
    def loss(model: Any, batch: Mapping[str, Any], beta: float) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = dpo_loss(model, batch, beta)
        return value, {**metrics, **change(metrics)}

    return dpo_step(loss)


@pytest.mark.parametrize(
    ("wrong", "subject"),
    [
        (lambda m: {"accuracy": 1 - m["accuracy"]}, "metric accuracy, which side"),
        (lambda m: {"margin": -m["margin"]}, "metric margin, which side"),
    ],
    ids=["accuracy", "margin"],
)
def test_which_side_is_right(wrong: Any, subject: str) -> None:
    rows = {f.subject: f.outcome for f in audit(pairs(lambda m: {})).findings}
    assert rows["metric accuracy, which side"] == rows["metric margin, which side"] == "holds"
    assert [f.subject for f in audit(pairs(wrong)).failures] == [subject]


def test_a_sum_beside_a_loss_that_is_a_sum_is_legitimate() -> None:
    def loss(model: Any, batch: Mapping[str, Any], beta: float, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = grpo_loss(model, batch, beta, clip)
        count = batch["mask"].sum()
        return value * count, {**metrics, "kl": metrics["kl"] * count}

    verdict = audit(policy_step(loss))
    assert not [f for f in verdict.failures if f.subject.startswith("averages")], str(verdict)


def test_hinge_pairs_with_equal_costs_are_not_checked() -> None:
    def loss(model: Any, batch: Mapping[str, Any], beta: float) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = dpo_loss(model, batch, beta)
        return F.relu(value - 1e6) + 0 * value, metrics

    subjects = {f.subject for f in audit(dpo_step(loss)).findings}
    assert not any("which side" in s for s in subjects)
    assert torch.is_grad_enabled()


def test_a_metric_may_stand_still_only_where_that_is_declared() -> None:
    def counted(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        return sft_loss(model, batch)[0], {"rows": len(batch["ids"])}

    for moves in (False, True):
        step = sft_step(counted, metrics={"rows": Metric(0, moves=moves)})
        assert bool(audit(step, laws=[metrics.LAW]).failures) == moves


@pytest.mark.parametrize("moves", [False, True])
def test_values_that_differ_by_rounding_are_one_value(moves: bool) -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        value = sft_loss(model, batch)[0]
        return value, {"share": 0.3 + (1e-3 if moves else 1e-8) * value.detach().double()}

    (row,) = [f for f in audit(sft_step(loss, metrics={"share": Metric()}), laws=[metrics.LAW]).findings
              if f.expected == "it moves"]  # fmt: skip
    assert row.outcome == ("holds" if moves else "fails") and " … " in row.measured


def test_a_declared_neutral_value_must_be_declared() -> None:
    step = policy_step()
    loss = step.loss

    def odd(model: nn.Module, batch: Mapping[str, Any], **knobs: Any) -> Any:
        value, logged = loss(model, batch, **knobs)
        return value, {**logged, "drift": logged["approx_kl"] + 0.5}

    for expected in (0.5, 0.0):
        step.loss, step.metrics = odd, {"drift": Metric(neutral=expected)}
        failures = {f.subject for f in audit(step, laws=[metrics.LAW]).failures}
        assert ("metric drift, policy unchanged" in failures) == (expected == 0.0)


Data = Mapping[str, Any]


def test_log_probs_that_are_stored_in_16_bits() -> None:
    """The ratio of an unchanged policy is 1 only as exactly as its log-probs were kept."""

    def loss(model: nn.Module, batch: Data, beta: float, clip: float) -> Any:
        value, metrics = grpo_loss(model, batch, beta, clip)
        ratio = (logprobs(model, batch) - batch["old"]).exp()
        return value, metrics | {"ratio": (ratio * batch["mask"]).sum() / batch["mask"].sum()}

    step = policy_step(loss)
    step.batch = {**step.batch, "old": step.batch["old"].bfloat16()}
    (row,) = [f for f in audit(step, laws=[metrics.LAW]).findings if f.subject == "metric ratio, policy unchanged"]
    assert row.outcome == "holds", row


@pytest.mark.parametrize("percent", [False, True])
def test_a_declared_share_stays_between_0_and_1(percent: bool) -> None:
    step = policy_step()

    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float, clip: float) -> tuple[Tensor, dict[str, Any]]:
        value, found = grpo_loss(model, batch, beta, clip)
        share = (batch["old"] < -2).float().mean()
        return value, {"kl": found["kl"], "stale/fraction": 100 * share if percent else share}

    step.loss, step.metrics = loss, {"stale/fraction": (0.0, 1.0)}
    failures = {f.subject for f in audit(step, laws=[metrics.LAW]).failures}
    assert failures == ({"metric stale/fraction"} if percent else set())


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("real", "expected"), [(True, "holds"), (False, "fails")])
def test_an_accuracy_that_is_1_for_every_policy_because_rejected_answers_are_longer(
    real: bool, expected: str, stacked: bool
) -> None:
    """``stacked``: as in TRL, the chosen rows and then the rejected ones in one tensor."""
    given = dpo_step()
    apart = {k: given.batch[k] for k in ("chosen", "rejected")}
    apart |= {f"{side}_mask": given.batch[f"{side}_mask"] * 0 + n for side, n in (("chosen", 0.1), ("rejected", 0.8))}

    def together(batch: Mapping[str, Any]) -> dict[str, Tensor]:
        sides = {"ids": ("chosen", "rejected"), "mask": ("chosen_mask", "rejected_mask")}
        return {key: torch.cat([batch[side] for side in own]) for key, own in sides.items()}

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        rows = batch if stacked else together(batch)
        chosen, rejected = (logprobs(model, rows) * rows["mask"]).sum(-1).chunk(2)
        accuracy = (chosen > rejected).float().mean()
        return -F.logsigmoid(chosen - rejected).mean(), {"accuracy": accuracy if real else torch.ones(())}

    batch, roles = (together(apart), {}) if stacked else (apart, {k: k for k in apart})
    step = Step(given.model, loss, batch, roles, family="preference", metrics={"accuracy": Metric(0.0, 1.0)})
    rows = {f.expected: f.outcome for f in audit(step, laws=[metrics.LAW]).findings if f.subject == "metric accuracy"}
    assert rows["it moves"] == expected


@pytest.mark.parametrize(
    ("logged", "factor", "expected"),
    [
        (("rewards/chosen", "rewards/rejected", "rewards/margins"), 1.0, "holds"),
        (("rewards/chosen", "rewards/rejected", "rewards/margins"), 0.1, "fails"),
        (("chosen_reward", "rejected_reward", "margin"), 0.1, "warns"),  # a name that does not say of what
        (("chosen_reward", "rejected_reward", "score_margin"), 0.1, None),
    ],
)
def test_a_margin_is_the_difference_of_its_pair(logged: tuple[str, ...], factor: float, expected: str | None) -> None:
    """tinker-cookbook #172: β was applied twice."""

    def loss(model: Any, batch: Mapping[str, Any], beta: float) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = (beta * (lp - batch[f"ref_{side}"]) for lp, side in
                            zip(sequence_logprobs(model, batch), ("chosen", "rejected"), strict=True))  # fmt: skip
        values = chosen.mean(), rejected.mean(), factor * (chosen - rejected).mean()
        return -F.logsigmoid(chosen - rejected).mean(), dict(zip(logged, values, strict=True))

    step = dpo_step(loss)
    step.metrics = {}
    found = {f.subject: f.outcome for f in audit(step, laws=[pair_metrics.LAW]).findings}
    assert found.get(f"metric {logged[-1]}, the difference") == expected


@pytest.mark.parametrize("factor", [1.0, 0.1])
def test_a_declared_margin_is_the_difference_that_it_is_declared_of(factor: float) -> None:
    def loss(model: Any, batch: Mapping[str, Any], beta: float) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = sequence_logprobs(model, batch)
        found = {"a": chosen.mean(), "b": rejected.mean(), "gap": factor * (chosen - rejected).mean()}
        return dpo_loss(model, batch, beta)[0], found

    step = dpo_step(loss)
    step.metrics = {"gap": Metric(kind="margin", of=("a", "b"))}
    found = {f.subject: f.outcome for f in audit(step, laws=[pair_metrics.LAW]).findings}
    assert found["metric gap, the difference"] == ("holds" if factor == 1.0 else "fails")


@pytest.mark.parametrize("average", [None, False])
def test_a_sum_may_be_declared(average: bool | None) -> None:
    step = logging(lambda b, m, lp: {"old_logps": (b["old"] * b["mask"]).sum()})
    step.metrics = {"old_logps": Metric(average=average)}
    assert bool(audit(step, laws=[averages.LAW]).failures) == (average is None)


@pytest.mark.parametrize("of", ["tokens", "rows", "whole rows"])
@pytest.mark.parametrize("seed", range(2))
def test_a_kl_per_token_that_is_weighed_by_its_row(seed: int, of: str) -> None:
    """TRL #6594. A KL of whole rows is not one per token, and is not judged."""

    def loss(model: Any, batch: Mapping[str, Any], beta: float, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
        lp, mask, a = logprobs(model, batch), batch["mask"], batch["advantages"][:, None]
        gap, ref = lp - batch["old"], batch["ref"] - lp
        row = ((gap * mask).sum(-1) / mask.sum(-1)).exp()[:, None]
        kl = (ref.exp() - ref - 1) * (gap.exp() if of == "tokens" else row)
        if of == "whole rows":
            kl = ((ref * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)).square() * row
        kl = mean(kl.expand_as(mask), mask)
        return -mean(torch.minimum(row * a, row.clamp(1 - clip, 1 + clip) * a), mask) + beta * kl, {"kl": kl}

    found = {f.subject: f.outcome for f in audit(policy_step(loss, seed=seed), laws=[at_reference.LAW]).findings}
    assert found["term kl at the reference"] == "holds"
    expected = {"tokens": "holds", "rows": "warns", "whole rows": None}[of]
    assert found.get("term kl, some tokens at the reference") == expected


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("at", ["labels", "tokens"])
def test_an_entropy_at_the_labels_positions(at: str, seed: int) -> None:
    """TRL #5620: an average over all real tokens, of unshifted logits, reads ids after the last label."""

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        logs = model(batch["ids"], batch["attention"]).log_softmax(-1)
        entropy = -(logs.exp() * logs).sum(-1)
        on = (batch["labels"][:, 1:] != -100).float()
        found = mean(entropy[:, :-1], on) if at == "labels" else mean(entropy, batch["attention"])
        return sft_loss(model, batch)[0], {"entropy": found}

    verdict = audit(sft_step(loss, seed=seed), laws=[averages.LAW])
    assert not verdict.failures and len(verdict.warnings) == (at == "tokens"), str(verdict)


@pytest.mark.parametrize("masked", [True, False])
def test_an_entropy_of_pairs_that_counts_padding(masked: bool) -> None:
    """TRL #6809, beside a preference."""

    def loss(model: Any, batch: Mapping[str, Any], beta: float) -> tuple[Tensor, dict[str, Tensor]]:
        value, logged = dpo_loss(model, batch, beta)
        logs = model(batch["chosen"], batch["chosen_attention"])[:, :-1].log_softmax(-1)
        entropy = -(logs.exp() * logs).sum(-1)
        return value, {**logged, "entropy": mean(entropy, batch["chosen_mask"]) if masked else entropy.mean()}

    found = {f.subject: f.outcome for f in audit(dpo_step(loss), laws=[averages.LAW]).findings}
    assert found["averages, 3 more columns of padding"] == ("holds" if masked else "fails")


@pytest.mark.parametrize("seed", [4, 9])
@pytest.mark.parametrize("reversed_", [False, True])
def test_an_accuracy_of_sums_beside_a_loss_of_averages(reversed_: bool, seed: int) -> None:
    """Long chosen answers beside short ones: at these seeds no pair of the first state agrees by chance, and some of a
    later one does. A reversed accuracy agrees in none."""
    draw, shown = torch.Generator().manual_seed(seed), torch.ones(4, 9, dtype=torch.long)
    batch: dict[str, Tensor] = {side: torch.randint(1, 19, (4, 9), generator=draw) for side in ("chosen", "rejected")}
    batch |= {"chosen_mask": torch.ones(4, 8), "rejected_mask": (torch.arange(8) < 3).float().repeat(4, 1)}
    batch |= {"chosen_attention": shown, "rejected_attention": shown.clone()}

    def loss(model: nn.Module, b: Data) -> Any:
        chosen, rejected = sequence_logprobs(model, b)
        margin = chosen / b["chosen_mask"].sum(-1) - rejected / b["rejected_mask"].sum(-1)
        ahead = margin < 0 if reversed_ else chosen > rejected
        return -F.logsigmoid(margin).mean(), {"accuracy": ahead.float().mean()}

    step = Step(model=Tiny(seed), loss=loss, batch=batch, roles={key: key for key in batch})
    (row,) = [f for f in audit(step, laws=[pair_metrics.LAW]).findings if f.subject.endswith("which side")]
    assert row.outcome == ("fails" if reversed_ else "holds") and " of 3 " not in row.measured, row.measured
