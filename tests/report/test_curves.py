"""What is drawn equals what was recorded, also after thinning."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earnest.report import curves, load
from tests.report import folders


def test_running_mean_by_hand():
    pairs = [(1.0, 0.0), (2.0, 3.0), (3.0, 6.0), (4.0, 0.0)]
    assert curves.running_mean(pairs, 3) == [(1.0, 1.5), (2.0, 3.0), (3.0, 3.0), (4.0, 3.0)]
    assert curves.running_mean(pairs, 1) == pairs


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=curves.POINTS))
def test_a_short_series_is_drawn_as_it_is(ys):
    thin = curves.thin("x", "line", [(float(i), y) for i, y in enumerate(ys)])
    assert list(thin.y) == ys
    assert thin.lo == thin.hi == ()
    assert curves.thinned(len(ys)) == ""


@given(st.integers(curves.POINTS + 1, 5 * curves.POINTS), st.integers(0, 10**6))
def test_a_long_series_keeps_its_extremes_and_its_mean(count, seed):
    dice = random.Random(seed)
    ys = [dice.gauss(0, 1) for _ in range(count)]
    thin = curves.thin("x", "line", [(float(i), y) for i, y in enumerate(ys)])
    assert len(thin.x) == len(thin.y) == curves.POINTS
    assert list(thin.x) == sorted(set(thin.x))
    assert (min(thin.lo), max(thin.hi)) == (min(ys), max(ys))
    assert all(lo - 1e-9 <= y <= hi + 1e-9 for lo, y, hi in zip(thin.lo, thin.y, thin.hi, strict=True))
    edges = [round(i * count / curves.POINTS) for i in range(curves.POINTS + 1)]
    for i, (start, end) in enumerate(itertools.pairwise(edges)):
        assert (thin.lo[i], thin.hi[i]) == (min(ys[start:end]), max(ys[start:end]))
        assert thin.y[i] == pytest.approx(sum(ys[start:end]) / (end - start))
    assert f"{count:,} steps drawn as {curves.POINTS} means" in curves.thinned(count)


def test_reward_chart_has_every_evaluation_with_its_error_bar(tmp_path):
    run = load(folders.make(tmp_path, steps=100))
    chart = curves.reward_chart(run)
    assert chart is not None
    held = next(series for series in chart.series if series.label == "held-out")
    assert list(held.x) == [e.step for e in run.evaluations]
    for series_value, low, high, e in zip(held.y, held.lo, held.hi, run.evaluations, strict=True):
        assert (series_value, high - low) == (e.reward, pytest.approx(2 * 0.021))
    raw = next(series for series in chart.series if series.style == "faint")
    assert list(raw.y) == [step.reward.mean for step in run.steps if step.reward]
    assert "the mean over 5 steps" in chart.note
    rows = {row[0]: row for row in chart.table.rows}
    assert {float(e.step) for e in run.evaluations} <= set(rows)
    assert {0.0, 100.0} <= set(rows)
    assert rows[0.0][1] is None, "there is no training reward before the first step"
    assert f"{len(rows)} of 101 steps" in chart.table.note
    assert (chart.floor, chart.ceiling) == (0.0, 1.0)


def test_shares_stack_to_one_and_keep_the_colours_of_their_terms(tmp_path):
    run = load(folders.make(tmp_path))
    chart = curves.share_chart(run)
    assert chart is not None
    assert [(series.label, series.colour) for series in chart.series] == [("grpo", 0), ("sdpo", 1)]
    for parts in zip(*(series.y for series in chart.series), strict=True):
        assert sum(parts) == pytest.approx(1)
    assert [(c.title, c.series[0].colour) for c in curves.loss_charts(run)] == [("grpo: loss", 0), ("sdpo: loss", 1)]
    marked = [
        s.model_copy(update={"terms": {**s.terms, "grpo": s.terms["grpo"].model_copy(update={"surrogate": True})}})
        for s in run.steps
    ]
    shown = curves.loss_charts(replace(run, steps=tuple(marked)))
    assert [c.title for c in shown] == ["sdpo: loss"], "the value of a surrogate means nothing"
    speed = replace(run, steps=tuple(s.model_copy(update={"tokens": 700, "seconds": {"a": 1.0}}) for s in run.steps))
    assert [p.pairs[0][1] for p in curves.metric_points(speed) if p.title == "tokens per second"] == [700.0]
    assert curves.share_chart(load(folders.make(tmp_path / "one", terms=1))) is None


def test_shares_are_drawn_only_where_they_were_measured(tmp_path):
    rows = [folders.step_line(step, 6, random.Random(step)) for step in range(1, 7)]
    for row in rows:
        if row["step"] % 3:
            for term in row["terms"].values():
                term["share"] = None
    folder = folders.make(tmp_path, steps=6)
    folders.write_lines(folder / "metrics.jsonl", rows)
    chart = curves.share_chart(load(folder))
    assert chart is not None
    assert chart.series[0].x == (3.0, 6.0)
    assert chart.note.startswith("Measured on 2 of 6 steps.")


def test_every_number_of_a_step_is_a_curve_or_a_constant(tmp_path):
    run = load(folders.make(tmp_path))
    charts, still = curves.metric_charts(run)
    assert [chart.title for chart in charts] == [
        "gradient norm",
        "update norm",
        "grpo: clip_fraction",
        "grpo: ratio_max",
        "sdpo: covered_mass",
        "entropy",
        "groups_without_spread",
        "seconds: sample",
        "seconds: train",
    ]
    never = [("learning rate", 0.001), ("grpo: dropped_tokens", 0.0), ("grader_errors", 0.0), ("micro-batches", 1.0)]
    assert sorted((one.title, one.value) for one in still if one.exact) == sorted(never)
    assert all(one.exact for one in still)
    colours = {chart.title: chart.series[0].colour for chart in charts}
    assert [colours[name] for name in ("grpo: ratio_max", "sdpo: covered_mass", "entropy")] == [0, 1, -1]
    norm = charts[0].series[0]
    assert list(norm.y) == [step.grad_norm for step in run.steps]


def test_rounding_is_not_drawn_as_if_it_were_movement(tmp_path):
    """A ratio of 1 ± 1e−7 filled a whole chart; 1 ± 1e−3 is movement, and so is anything around 0."""
    folder = folders.make(tmp_path, steps=3)
    rows = [folders.step_line(step, 3, random.Random(step)) for step in (1, 2, 3)]
    for row in rows:
        row["metrics"] = {"ratio": 1 + 1e-7 * row["step"], "kl": 1e-9 * row["step"], "moves": 1 + 1e-3 * row["step"]}
    folders.write_lines(folder / "metrics.jsonl", rows)
    charts, still = curves.metric_charts(load(folder))
    assert [(one.title, one.exact) for one in still if one.title == "ratio"] == [("ratio", False)]
    assert {"kl", "moves"} <= {chart.title for chart in charts}


def test_two_metrics_of_one_name_stay_apart(tmp_path):
    """A term's metric "a: b" and the loop's metric of that very name are two curves, not one with two values a step."""
    folder = folders.make(tmp_path, steps=3)
    rows = [folders.step_line(step, 3, random.Random(step)) for step in (1, 2, 3)]
    for row in rows:
        row["terms"]["grpo"]["metrics"] = {"x": row["step"]}
        row["metrics"] = {"grpo: x": 10 * row["step"], "gradient norm": -row["step"]}
    folders.write_lines(folder / "metrics.jsonl", rows)
    charts, _ = curves.metric_charts(load(folder))
    found = [(chart.title, chart.series[0].y) for chart in charts]
    assert ("grpo: x", (1.0, 2.0, 3.0)) in found
    assert ("grpo: x", (10.0, 20.0, 30.0)) in found
    assert ("gradient norm", (-1.0, -2.0, -3.0)) in found
    assert len({chart.key for chart in charts}) == len(charts)
