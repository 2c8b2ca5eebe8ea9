"""AdvantageEstimator: each defect fails the row that is about it; correct twins hold."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from earnest.signals.advantages import Estimator, advantages
from earnest_audit import (
    AdvantageEstimator,
    SubjectError,
    Verdict,
    audit,
)


def failures(verdict: Verdict) -> set[str]:
    return {f.subject for f in verdict.failures}


def each(rewards: Tensor, groups: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """``fn`` of a row's group, for every row."""
    return torch.stack([fn(rewards[groups == g]) for g in groups])


def standardised(constant: float) -> Callable[[Tensor, Tensor], Tensor]:
    def fn(r: Tensor, g: Tensor) -> Tensor:
        return (r - each(r, g, torch.mean)) / (each(r, g, lambda x: x.std(correction=0)) + constant)

    return fn


@pytest.mark.parametrize(("constant", "seen"), [(1e-4, set()), (1e-6, set()), (1e-8, {"equal rewards"})])
def test_equal_rewards_that_round_are_no_signal(constant: float, seen: set[str]) -> None:
    """NeMo-RL #4158: the rounding of a mean, divided by the rounding of a spread, is ±1."""
    graded = AdvantageEstimator(standardised(constant), "free", values=(0.7, 0.1))
    assert failures(audit(graded)) == seen
    unsaid = audit(AdvantageEstimator(standardised(constant), "free"))
    assert unsaid.holds, "0 and 1 do not round"
    (row,) = (f for f in unsaid.findings if f.subject == "equal rewards")
    assert row.outcome == ("not declared" if seen else "holds")


def test_a_division_by_zero_is_seen_whatever_the_values() -> None:
    verdict = audit(AdvantageEstimator(standardised(0.0), "free", values=(0.0, 1.0)))
    assert failures(verdict) == {"equal rewards"}


def left_out(spread_of_others: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Leave-one-out mean; divided by the group's spread, or by that of the others (NeMo-RL #1518)."""

    def fn(r: Tensor, g: Tensor) -> Tensor:
        out = torch.zeros_like(r)
        for i in range(len(r)):
            others = g == g[i]
            others[i] = False
            if int(others.sum()) < 2:
                continue
            spread = r[others].std() if spread_of_others else r[g == g[i]].std()
            out[i] = (r[i] - r[others].mean()) / (spread + 1e-6)
        return out

    return fn


def test_a_spread_of_the_others_explodes_and_is_seen() -> None:
    """The mean's law is asked apart from the division's: declared as a row's own, only the explosion is left."""
    assert audit(AdvantageEstimator(left_out(False), "free")).holds
    assert audit(AdvantageEstimator(left_out(False), "free", scaled_over="row")).holds
    seen = audit(AdvantageEstimator(left_out(True), "free", scaled_over="row"))
    assert failures(seen) == {"one right answer among wrong ones"}
    turned = audit(AdvantageEstimator(lambda r, g: -left_out(False)(r, g), "free", scaled_over="row"))
    assert failures(turned) == {"the right answer stands above the wrong ones"}


@pytest.mark.parametrize("squares", [False, True])
def test_a_spread_that_is_a_difference_of_rounded_squares_is_seen(squares: bool) -> None:
    """NeMo-RL #4158: the others' rewards are all 0.95, and E[x²] - E[x]² of them is 2e-7 in float32, not 0."""

    def fn(r: Tensor, g: Tensor) -> Tensor:
        others = (g[:, None] == g[None, :]).to(r) - torch.eye(len(r))
        n = others.sum(1)
        mean = others @ r / n
        variance = others @ r.square() / n - mean.square()
        exact = torch.stack([r[row > 0].double().var(correction=0) for row in others]).to(r)
        spread = (variance if squares else exact).clamp(min=0).sqrt()
        return torch.where(spread < (0 if squares else 1e-6), r - mean, (r - mean) / spread.clamp(min=1e-6))

    seen = audit(AdvantageEstimator(fn, "free", scaled_over="row", size=8))
    assert ("one right answer among wrong ones" in failures(seen)) == squares


def over_the_batch(r: Tensor, g: Tensor, centre: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
    """The group's mean and the batch's spread, as TRL's scale_rewards="batch"."""
    mean = each(r, g, torch.mean) if centre is None else centre(r, g)
    return (r - mean) / (r.std(correction=0) + 1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_a_division_by_the_batch_is_legitimate_where_it_is_declared(seed: int) -> None:
    assert audit(AdvantageEstimator(over_the_batch, "free", scaled_over="batch", seed=seed)).holds
    assert "shift of one group" in failures(audit(AdvantageEstimator(over_the_batch, "free", seed=seed)))
    wrong = AdvantageEstimator(
        lambda r, g: over_the_batch(r, g, lambda r, g: each(r, g, torch.mean) * 0.9 + 0.1 * r.mean()), "free",
        scaled_over="batch", seed=seed,
    )  # fmt: skip
    assert {"shift of one group", "sum over a group"} <= failures(audit(wrong))


def missing(how: str) -> Callable[[Tensor, Tensor], Tensor]:
    """TRL #6365's kin: a NaN reward that is counted as 0 in the baseline of the others."""

    def fn(r: Tensor, g: Tensor) -> Tensor:
        there = ~r.isnan()
        if how == "raises" and not bool(there.all()):
            raise ValueError("a reward is missing")
        if how == "spreads":
            return r - each(r, g, torch.mean)
        if how == "leaves the group out":
            return torch.nan_to_num(r - each(r, g, torch.mean))
        known = there.float() if how == "left out" else torch.ones_like(r)
        mean = each(torch.nan_to_num(r), g, torch.sum) / each(known, g, torch.sum).clamp(min=1)
        return torch.where(there, r - mean, 0.0)

    return fn


@pytest.mark.parametrize("how", ["left out", "leaves the group out", "spreads", "raises", "becomes 0"])
def test_a_missing_reward_is_no_number(how: str) -> None:
    seen = failures(audit(AdvantageEstimator(missing(how), "equal")))
    assert seen == ({"a missing (NaN) reward"} if how == "becomes 0" else set())


def by_place(r: Tensor, _: Tensor, across: bool = False) -> Tensor:
    """Groups of four that stand together; the defect takes every third row instead."""
    x = r.view(4, -1).T if across else r.view(-1, 4)
    x = (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-4)
    return (x.T if across else x).flatten()


@pytest.mark.parametrize("seed", range(3))
def test_groups_by_place_are_permuted_by_place(seed: int) -> None:
    assert audit(AdvantageEstimator(by_place, "free", interleaved=False, seed=seed)).holds
    wrong = audit(AdvantageEstimator(lambda r, g: by_place(r, g, True), "free", interleaved=False, seed=seed))
    assert {"group locality", "permuted rows"} <= failures(wrong)
    ramp = torch.linspace(0.5, 1.5, 12)  # weights by place: rows of a group are not treated alike
    assert "permuted rows" in failures(
        audit(AdvantageEstimator(lambda r, g: by_place(r, g) * ramp[: len(r)], "free", interleaved=False, seed=seed))
    )


def test_a_row_that_is_missing_must_not_move_the_other_groups() -> None:
    """Cut by place without a word where a group is not full; refusing it (as ``by_place`` does) is not an error."""

    def fn(r: Tensor, g: Tensor) -> Tensor:
        return by_place(r, g) if len(r) % 4 == 0 else (r - r.mean()) / (r.std() + 1e-4)

    assert "groups of unequal size" in failures(audit(AdvantageEstimator(fn, "free", interleaved=False)))
    for right in (by_place, standardised(1e-4)):
        rows = {f.subject: f.outcome for f in audit(AdvantageEstimator(right, "free", interleaved=False)).findings}
        assert rows["groups of unequal size"] == ("not applicable" if right is by_place else "holds")


def test_one_group_is_enough() -> None:
    verdict = audit(AdvantageEstimator(lambda r, g: r - each(r, g, torch.mean), "equal", groups=1, size=8))
    assert verdict.holds, str(verdict)
    seen = failures(audit(AdvantageEstimator(lambda r, g: r - each(r, g, torch.max), "equal", groups=1, size=8)))
    assert seen == {"sum over a group"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_of_16_bits_are_judged_as_such(dtype: torch.dtype) -> None:
    """A wrong baseline is seen there as well."""
    for seed in range(6):
        fn = AdvantageEstimator(lambda r, g: (r := r.to(dtype)) - each(r, g, torch.mean), "equal", seed=seed)
        assert audit(fn).holds, str(audit(fn))
    wrong = AdvantageEstimator(lambda r, _: (r := r.to(dtype)) - r.mean(), "equal")
    assert "shift of one group" in failures(audit(wrong))


@pytest.mark.parametrize("seed", range(3))
def test_medians_and_divisions_by_the_mean_can_be_declared(seed: int) -> None:
    def median(r: Tensor, g: Tensor) -> Tensor:
        return r - each(r, g, torch.median)

    assert audit(AdvantageEstimator(median, "equal", baseline="other", seed=seed)).holds
    assert failures(audit(AdvantageEstimator(median, "equal", seed=seed))) == {"sum over a group"}
    tiled = AdvantageEstimator(lambda r, g: median(r, g.roll(1)), "equal", baseline="other", seed=seed)
    assert "shift of one group" in failures(audit(tiled))

    def over_mean(r: Tensor, g: Tensor) -> Tensor:
        mean = each(r, g, torch.mean)
        return (r - mean) / (mean + 1e-6)

    assert audit(AdvantageEstimator(over_mean, "free", scaled_over="mean", seed=seed)).holds
    assert "shift of one group" in failures(audit(AdvantageEstimator(over_mean, "free", seed=seed)))
    for wrong in (lambda r, g: over_mean(r, g.roll(1)), lambda r, g: (r - each(r, g, torch.mean)) / r.mean()):
        seen = failures(audit(AdvantageEstimator(wrong, "free", scaled_over="mean", seed=seed)))
        assert {"shift of one group", "group locality"} & seen, seen


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("group", {"scale": "free"}),
        ("batch", {"scale": "free", "scaled_over": "batch"}),
        ("none", {"scale": "equal"}),
        ("leave_one_out", {"scale": "equal"}),
    ],
)
def test_our_own_estimators_hold(name: Estimator, declared: dict[str, Any]) -> None:
    """They refuse groups of one row and missing rewards, which is not an error."""
    verdict = audit(AdvantageEstimator(lambda r, g: advantages(r, g, name).values, **declared))
    assert verdict.holds, str(verdict)
    turned = AdvantageEstimator(lambda r, g: advantages(r.roll(1), g, name).values, **declared)
    assert not audit(turned).holds, "rewards of the neighbouring rows"


OTHERS: list[Tensor] = []


def graded(r: Tensor, g: Tensor) -> Tensor:
    """Takes rewards of right and wrong, and notes what else it is given: an error could be taken for a refusal."""
    if not bool(((r == 0) | (r == 1)).all()):
        OTHERS.append(r)
    return standardised(1e-4)(r, g)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("declared", [{}, {"over": "batch"}, {"scaled_over": "batch"}, {"interleaved": False}], ids=str)
def test_no_other_rewards_are_drawn_than_the_declared_ones(declared: dict[str, Any], size: int) -> None:
    def fn(r: Tensor, g: Tensor) -> Tensor:
        one = torch.zeros_like(g) if "over" in declared else g
        return graded(r, one) if "scaled_over" not in declared else over_the_batch(r + 0 * graded(r, g), g)

    OTHERS.clear()
    for seed in range(4):
        verdict = audit(AdvantageEstimator(fn, "free", values=(0, 1), size=size, seed=seed, **declared))
        assert verdict.holds and not OTHERS, f"{verdict}{OTHERS}"


def test_faults_are_seen_among_declared_values_too() -> None:
    for wrong in (
        lambda r, g: graded(r, g.roll(1)),
        lambda r, g: -graded(r, g),
        lambda r, g: graded(r, g) + 0.1 * r.mean(),
        lambda r, g: r - r.mean(),
    ):
        assert failures(audit(AdvantageEstimator(wrong, "free", values=(0, 1))))
    with pytest.raises(ValueError, match="two different"):
        audit(AdvantageEstimator(graded, "free", values=(1.0,)))


@pytest.mark.parametrize("values", [(0.0, 100.0), (-1.0, 1.0), (0.0, 0.5, 1.0), (-10.0, -1.0)], ids=str)
@pytest.mark.parametrize("size", [3, 4, 8])
def test_rewards_of_any_size_may_be_declared(values: tuple[float, ...], size: int) -> None:
    def centred(r: Tensor, g: Tensor) -> Tensor:
        return r - each(r, g, torch.mean)

    cases: list[tuple[Any, dict[str, Any]]] = [
        (centred, {"scale": "equal"}),
        (standardised(1e-6), {"scale": "free"}),
        (left_out(False), {"scale": "free", "scaled_over": "row"}),
        (lambda r, g: r - each(r, g, torch.max), {"scale": "equal", "baseline": "other"}),
    ]
    for seed in range(3):
        for fn, declared in cases:
            verdict = audit(AdvantageEstimator(fn, values=values, size=size, seed=seed, **declared))
            assert not verdict.failures, str(verdict)


SIGN = "the right answer stands above the wrong ones"


def test_the_only_right_answer_is_pushed_up() -> None:
    """Negated, or without its sign: shifts still do nothing, and the policy learns what is wrong."""

    def centred(r: Tensor, g: Tensor, baseline: Callable[[Tensor], Tensor] = torch.mean) -> Tensor:
        return r - each(r, g, baseline)

    assert failures(audit(AdvantageEstimator(lambda r, g: -centred(r, g), "equal"))) == {SIGN}
    assert SIGN in failures(audit(AdvantageEstimator(lambda r, g: centred(r, g).abs(), "equal", baseline="other")))
    below = AdvantageEstimator(lambda r, g: centred(r, g) + each(r, g, torch.std), "equal", baseline="other")
    assert failures(audit(below)) == {SIGN}, "a baseline below every reward"
    for baseline in (torch.max, torch.min, torch.median):
        right = AdvantageEstimator(lambda r, g, b=baseline: centred(r, g, b), "equal", baseline="other")
        assert audit(right).holds
    for kept in ((0.0, None), (None, 0.0)):  # only what is right, or only what is wrong, is trained on
        half = AdvantageEstimator(lambda r, g, k=kept: centred(r, g).clamp(*k), "equal", baseline="other")
        assert audit(half).holds

    def filtered(r: Tensor, g: Tensor) -> Tensor:
        """Groups with less than three right answers of eight are too hard, and left out."""
        return torch.where(each((r > 0.5).float(), g, torch.mean) < 0.3, 0.0, centred(r, g))

    verdict = audit(AdvantageEstimator(filtered, "equal", values=(0, 1), size=8))
    assert verdict.holds and {f.outcome for f in verdict.findings if f.subject == SIGN} == {"not applicable"}


NAMED = "other names of the groups"


def test_groups_may_have_any_names() -> None:
    def scattered(r: Tensor, g: Tensor, most: int | None = None, modulo: int | None = None) -> Tensor:
        """Sums by name, in a table of ``most`` names (or as many as there are)."""
        g = g % modulo if modulo is not None else g
        n = int(g.max()) + 1 if most is None else most
        count = torch.zeros(n).index_add(0, g, torch.ones_like(r))
        return r - (torch.zeros(n).index_add(0, g, r) / count.clamp(min=1))[g]

    def looped(r: Tensor, g: Tensor) -> Tensor:
        out = torch.zeros_like(r)
        for i in range(len(g.unique())):
            out[g == i] = r[g == i] - r[g == i].mean() if bool((g == i).any()) else 0.0
        return out

    assert audit(AdvantageEstimator(scattered, "equal")).holds
    refuses = audit(AdvantageEstimator(lambda r, g: scattered(r, g, 3), "equal"))
    assert refuses.holds and {f.outcome for f in refuses.findings if f.subject == NAMED} == {"not applicable"}
    assert failures(audit(AdvantageEstimator(looped, "equal"))) == {NAMED}
    hashed = AdvantageEstimator(lambda r, g: scattered(r, torch.where(g < 99, g, g // 2), None, 64), "equal")
    assert failures(audit(hashed)) == {NAMED}


def test_an_estimator_leaves_its_rewards_alone() -> None:
    def written(r: Tensor, g: Tensor) -> Tensor:
        r -= each(r, g, torch.mean)
        return r

    assert failures(audit(AdvantageEstimator(written, "equal"))) == {"the inputs afterwards"}
    assert audit(AdvantageEstimator(written, "equal", in_place=True)).holds
    assert audit(AdvantageEstimator(lambda r, g: written(r.clone(), g), "equal")).holds


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("constant", [1e-8, 1e-6, 1e-4])
def test_advantages_with_the_usual_constants_hold(constant: float, seed: int) -> None:
    def grouped(rewards: Tensor, groups: Tensor, leak: float = 0.0) -> Tensor:
        out = torch.zeros_like(rewards)
        for g in groups.unique():
            mine = rewards[groups == g]
            out[groups == g] = (mine - mine.mean() + leak * rewards.mean()) / (mine.std(correction=0) + constant)
        return out

    assert audit(AdvantageEstimator(grouped, "free", seed=seed)).holds
    leaky = audit(AdvantageEstimator(lambda r, g: grouped(r, g, 0.01), "free", seed=seed))
    assert "shift of one group" in {f.subject for f in leaky.failures}


@pytest.mark.parametrize("values", [(0.1, 0.7), (Fraction(0), Fraction(1, 3)), {0.0: "wrong", 1.0: "right"}.keys()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_values_are_numbers_of_any_kind_in_any_default_dtype(dtype: torch.dtype, values: Any) -> None:
    torch.set_default_dtype(dtype)
    try:
        right = audit(AdvantageEstimator(standardised(1e-4), "free", values=values))
        leaky = AdvantageEstimator(lambda r, _: (r - r.mean()) / (r.std() + 1e-4), "free", values=values)
        assert not right.failures and "group locality" in failures(audit(leaky))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.may_not_be_checked
def test_an_estimator_that_raises_was_not_checked() -> None:
    """Rows in another order are not an edit that it may refuse; other names of groups are."""

    def raising(r: Tensor, g: Tensor, where: Callable[[Tensor], bool]) -> Tensor:
        if where(g):
            raise IndexError("index 7 is out of bounds")
        return standardised(1e-4)(r, g)

    def names(g: Tensor) -> bool:
        return int(g.max()) >= 100

    def order(g: Tensor) -> bool:
        return len(g) == 12 and not bool((g[:-1] <= g[1:]).all())

    refuses = audit(AdvantageEstimator(lambda r, g: raising(r, g, names), "free", interleaved=False))
    assert refuses.holds and refuses.strict().holds
    broken = audit(AdvantageEstimator(lambda r, g: raising(r, g, order), "free", interleaved=False))
    assert not broken.strict().holds and "could not be checked" in str(broken)

    def nothing(r: Tensor, g: Tensor) -> Any:
        return None if r.max() > 4 else standardised(1e-4)(r, g)

    with pytest.raises(SubjectError, match="returned None"):
        audit(AdvantageEstimator(nothing, "free"))
