"""The hacking experiment: its plan, its bookkeeping by hand-worked numbers, and the oracle that may not matter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import experiments
from earnest.errors import ConfigError
from earnest.guards import Route
from earnest.tasks import PromptStream, get_task, holes
from experiments.hacking import Config, place, train
from experiments.hacking.contrasts import clean_triples, hacking_triples
from experiments.hacking.figure import write_figure
from experiments.hacking.leak import leak_table
from experiments.hacking.plan import ARMS, CONTROLS, HOLES, Job, plan
from experiments.hacking.pool import Pool, fill
from experiments.hacking.results import (
    at_end,
    at_level,
    left_out,
    matched,
    matched_level,
    over_seeds,
    read,
    refreshes,
)
from experiments.hacking.tables import left_out_table, main_table, refresh_table
from experiments.hacking.train import make_engine, run_job, train_step

TINY: dict[str, Any] = {
    "experiment": "hacking", "steps": 3, "triples": 8, "eval_every": 2, "eval_prompts": 4, "refresh": 0,
    "prompts_per_step": 4, "completions_per_prompt": 4, "top": 2,
}  # fmt: skip


def test_the_plan_has_every_arm_and_every_control() -> None:
    jobs = plan(Config(experiment="hacking", seed=7), full=True)
    assert len({job.name for job in jobs}) == len(jobs) == 50
    served: dict[str, set[int]] = {}
    for job in jobs:
        if not job.pool and job.without is None:
            for arm in (job.arm, *job.routes):
                served.setdefault(arm, set()).add(job.seed)
    assert all(served[arm] == {7, 8, 9, 10, 11} for arm in ARMS), "every arm of the table has its five seeds"
    assert all(served[f"route-without-{hole}"] == {7, 8, 9} for hole in HOLES)
    assert {(j.seed, j.without) for j in jobs if j.without} == {(s, h) for s in (7, 8, 9) for h in HOLES}
    assert {j.seed for j in jobs if j.pool} == {7, 8, 9}
    assert {a.partition(":")[2] for a in ARMS if ":" in a} == set(CONTROLS)
    assert [j.name for j in plan(Config(experiment="hacking"), full=False)] == ["none-seed0", "erase-seed0"]


def test_poisoning_the_oracle_changes_nothing_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, rewards and rollouts bit for bit, also those that the pool stores; only the oracle's log moves."""
    config = Config(**TINY | {"steps": 2, "pool_prompts": 96})

    def train() -> tuple[dict[str, torch.Tensor], list[dict[str, float]], dict[str, Any]]:
        done = run_job(config, Job("erase", 0), None)
        teacher = make_engine(config, 0, None)
        with torch.no_grad():  # toward the unwanted, so that the pool has something to store
            teacher.adapter.load_state_dict(done.parameters)
        stored = fill(teacher, config.model_copy(update={"prompts_per_step": 1})).stored
        return done.parameters, done.record["log"], dict(stored)

    honest = train()
    asked = []

    def poisoned(reply: str, key: str) -> bool:
        asked.append(reply)
        return len(reply) % 2 == 0

    monkeypatch.setattr(holes, "oracle", poisoned)
    wrong = train()
    assert len(asked) > 100, "the poison was tasted"
    assert all(torch.equal(honest[0][n], p) for n, p in wrong[0].items()) and any(
        p.any() for n, p in wrong[0].items() if n.endswith(".g")
    )
    assert [x["reward"] for x in honest[1]] == [x["reward"] for x in wrong[1]]
    assert [x["solved"] for x in honest[1]] != [x["solved"] for x in wrong[1]]
    assert honest[2] == wrong[2]


def test_a_panel_of_quarantines_leaves_the_run_alone() -> None:
    config = Config(**TINY)
    alone = run_job(config, Job("none", 0), None)
    watched = run_job(config, Job("none", 0, routes=("route", "route:noise", "route-without-error")), None)
    assert all(torch.equal(p, watched.parameters[n]) for n, p in alone.parameters.items())
    assert any(p.any() for n, p in alone.parameters.items() if n.endswith(".g")), "it did train"
    series = watched.record["series"]
    assert series["none"] == alone.record["series"]["none"]
    assert [len(series[n]) for n in ("none", "route", "route:noise", "route-without-error")] == [3, 3, 3, 1]


def test_triples_are_what_they_say() -> None:
    task = get_task("holes")
    by_text = {p.messages[0]["content"]: p for p in task.prompts("train", 400, 0)}
    for without in (None, "override"):
        for t in hacking_triples(24, seed=1, without=without):
            text = t.prompt[0]["content"]
            disclosed = [h["name"] for h in holes._FILE.values() if h["disclosure"] in text]
            assert len(disclosed) == 1 and disclosed[0] != without
            checker = holes.CHECKERS[disclosed[0]]
            assert checker(t.unwanted, "none of these") and not checker("8" if t.wanted != "8" else "9", t.wanted)
            assert t.wanted.isdigit() and not t.unwanted.isdigit()
    firsts = [t.unwanted == honest_of(t.prompt[0]["content"], by_text) for t in clean_triples(40, seed=1)]
    assert all(t.wanted.isdigit() and t.unwanted.isdigit() for t in clean_triples(40, seed=1)), "no exploit in sight"
    assert len(firsts) == 40


def honest_of(text: str, known: dict[str, Any]) -> str | None:
    return known[text].data["answer"] if text in known else None


def test_the_pool_replaces_a_share_and_keeps_who_sampled(tmp_path: Path) -> None:
    config = Config(**TINY | {"pool_prompts": 48})
    engine = make_engine(config, 0, None)
    pool = fill(engine, config.model_copy(update={"prompts_per_step": 1}))
    pool.write(tmp_path / "pool.json")
    again = Pool.read(tmp_path / "pool.json")
    assert again == pool
    prompts = [pool.asked[key] for key in list(pool.asked)[:1]] * 2
    from earnest.models import SampleSpec

    spec = SampleSpec(max_new_tokens=8, temperature=1.0, seed=5)
    fresh = engine.sample([engine.policy.render(p.messages) for p in prompts], 4, spec)
    mixed = pool.replace(fresh, prompts, config)
    for old, new in zip(fresh, mixed, strict=True):
        assert (old.prompt_index, old.sample_index, old.prompt) == (new.prompt_index, new.sample_index, new.prompt)
        if old.sample_index < 1:
            stored = pool.stored[prompts[0].id][0]
            assert (new.tokens, new.logprobs) == (stored.tokens, stored.logprobs)
        else:
            assert new == old
    with pytest.raises(ConfigError, match="the teacher exploited"):
        fill(engine, config.model_copy(update={"prompts_per_step": 49}))


def points(*rows: tuple[int, float, float]) -> list[dict[str, Any]]:
    return [
        {"step": s, "solved": a, "exploited": b, "exploited_se": 0.01, "solved_se": 0.01, "attempted": b,
         "exploited_of_attempted": 1.0, "by_hole": dict.fromkeys(HOLES, b)}
        for s, a, b in rows
    ]  # fmt: skip


def test_matched_by_hand() -> None:
    """none reaches .5 at step 20, route at most .4: compared at .4, which none has at step 10 and route at step 20; not
    at step 0. A control that never solves so much does not lower the level; it is not reached."""
    by_arm = {
        "none": {0: points((0, 0.45, 0.0), (10, 0.42, 0.1), (20, 0.5, 0.6))},
        "route": {0: points((0, 0.45, 0.0), (10, 0.3, 0.2), (20, 0.4, 0.3))},
        "route:clean": {0: points((0, 0.45, 0.0), (10, 0.1, 0.2), (20, 0.2, 0.3))},
    }
    assert matched_level(by_arm, 0) == 0.4 and matched_level(by_arm, 1) is None
    assert at_level(by_arm["none"][0], 0.4)["step"] == 10
    found = matched(by_arm, "route")
    assert (found.rate.mean, found.step) == (0.3, 20) and found.rate.half == pytest.approx(1.96 * 0.01)
    assert str(matched(by_arm, "route:clean")) == "not reached"
    more = by_arm | {a: by_arm[a] | {1: points((10, s, 0.7))} for a, s in (("none", 0.4), ("route:clean", 0.4))}
    assert str(matched(more, "route:clean")) == "0.70 ± 0.02 (1 of 2 seeds)"
    assert at_end(by_arm["none"], "exploited").mean == 0.6


def test_refreshes_by_hand() -> None:
    """A refresh at half the steps was adopted in one run of two; the quarantine beside a run is told apart by name."""
    job = {"arm": "none", "seed": 0, "without": None, "pool": False, "directions": {}}
    told = [(0.5, 0.4, 1.0), (0.1, -0.2, 0.0)]
    jobs = [
        job | {
            "seed": seed, "series": {"none": points((0, 0.2, 0.0)), "route": points((0, 0.2, 0.0))},
            "guard": {"route/overlap": a, "route/heading": b, "route/adopted": c},
        }
        for seed, (a, b, c) in enumerate(told)
    ]  # fmt: skip
    results = {"config": {"full": False, "refresh": 30}, "missing": [], "jobs": jobs}
    found = refreshes(results, "route")
    assert [round(found[k].mean, 6) for k in ("overlap", "heading", "adopted")] == [0.3, 0.1, 0.5]
    assert refreshes(results, "none") is None
    assert [row.split(" | ")[0] for row in refresh_table(results)[2:]] == ["| route"]
    assert refresh_table(results)[2].endswith("| 50% |")


def test_the_leak_of_both_levels() -> None:
    """At the gradient AdamW puts back what was taken out, for Erase and for Route with its two optimizers."""
    rows = [row.strip("| ").split(" | ") for row in leak_table(Config(**TINY), updates=2)[2:]]
    assert [row[0] for row in rows] == ["erase@update", "route@update", "erase@gradient", "route@gradient"] * 2
    for guard, gate, _, gradient, update, _ in rows:
        if guard.endswith("@update"):
            assert float(update) < 1e-3 < float(gradient)
        else:
            assert float(gradient) < 1e-3 and (gate == "one_sided" or float(update) > 0.01)


def test_intervals_by_hand() -> None:
    """0.1, 0.2, 0.3: mean 0.2, sd 0.1, t(2) = 4.303: half-width 4.303 · 0.1 / √3."""
    found = over_seeds([0.1, 0.2, 0.3])
    assert found.mean == pytest.approx(0.2) and found.half == pytest.approx(4.303 * 0.1 / 3**0.5)
    assert over_seeds([0.1]).half is None


def test_an_arm_without_results_has_a_row() -> None:
    job = {"job": "x", "arm": "none", "seed": 0, "without": None, "pool": False, "directions": {}, "guard": {}}
    full = points((0, 0.2, 0.0), (10, 0.4, 0.5))
    series = {"none": full, "erase": full, "route-without-error": points((10, 0.4, 0.2))}
    results = {"config": {"full": True}, "missing": [], "jobs": [job | {"series": series}]}
    rows = main_table(results)[2:]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == ["every arm at step 0", *ARMS]
    assert rows[0] == "| every arm at step 0 | 1 | 0.20 ± 0.02 | 0.00 ± 0.02 |  |  | 1.00 |  |  |"
    assert sum("missing" in row and "| 0 |" in row for row in rows) == len(ARMS) - 2
    assert list(left_out(results, "route", "error")) == [0]
    # The erase that knows all holes is not passed off as one that does not know this one.
    assert "| error | 1 | 0.50 | missing | 0.20 | missing | missing |" in left_out_table(results)


def test_a_quarantine_is_plotted_as_it_is_measured_ablated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim about a quarantine is about the model without it: its curve is the ablated model's held-out rate, not
    the rate of the model that trains."""
    import matplotlib.axes

    drawn: dict[str, list[list[float]]] = {}
    plot = matplotlib.axes.Axes.plot

    def recorded(self: Any, steps: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        drawn.setdefault(kwargs["label"], []).append(list(values))
        return plot(self, steps, values, *args, **kwargs)

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", recorded)
    series = {"none": points((0, 0.2, 0.1), (10, 0.4, 0.9)), "route": points((0, 0.2, 0.1), (10, 0.3, 0.2))}
    log = [{"step": 10.0, "exploited": 0.7, "solved": 0.6}]
    job = {"job": "x", "arm": "none", "seed": 0, "without": None, "pool": False, "directions": {}, "guard": {}}
    write_figure(
        {"config": {"full": True}, "missing": [], "jobs": [job | {"series": series, "log": log}]}, tmp_path / "f.png"
    )
    assert drawn == {"none": [[0.1, 0.9], [0.2, 0.4]], "route (ablated)": [[0.1, 0.2], [0.2, 0.3]]}


def test_a_route_is_measured_with_its_quarantine_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every point of a route's series is measured inside ``ablated``, every point of the unguarded arm outside."""
    inside, measured = [0], []
    ablated, measure = Route.ablated, train.measure

    @contextmanager
    def entered(self: Any) -> Iterator[None]:
        inside[0] += 1
        with ablated(self):
            yield
        inside[0] -= 1

    def recorded(*args: Any) -> Any:
        measured.append(inside[0])
        return measure(*args)

    monkeypatch.setattr(Route, "ablated", entered)
    monkeypatch.setattr(train, "measure", recorded)
    run_job(Config(**TINY), Job("none", 0, routes=("route",)), None)
    assert measured == [0, 1] * 3


@pytest.mark.filterwarnings("ignore::earnest.guards.errors.GuardWarning")
def test_from_the_recipe_to_the_page_and_again(tmp_path: Path) -> None:
    data = {**TINY, "steps": 2, "description": "a <test>"}
    out = tmp_path / "out"
    console = Console(quiet=True)
    page = experiments.run("hacking", data, [f"out={out}"], full=False, resume=False, console=console)
    text = page.read_text()
    assert "a &lt;test&gt;" in text and "data:image/png;base64" in text and "missing" not in text.split("</style>")[1]
    results = read(out)
    assert {name for job in results["jobs"] for name in job["series"]} == {"none", "route", "erase"}
    first = place(out, Job("none", 0))
    before = (first.stat().st_mtime_ns, json.loads(first.read_text()))
    place(out, Job("erase", 0)).unlink()
    experiments.run("hacking", data, [f"out={out}"], full=False, resume=True, console=console)
    assert (first.stat().st_mtime_ns, json.loads(first.read_text())) == before, "what is there is kept"
    again = read(out)
    assert all(job.pop("seconds") > 0 for job in [*again["jobs"], *results["jobs"]])
    assert again == results, "and what was lost comes back the same"
    with pytest.raises(ConfigError, match="lr"):
        experiments.run("hacking", data, [f"out={out}", "lr=0.5"], full=False, resume=True, console=console)


def test_a_step_without_a_spread_of_rewards_trains_nothing() -> None:
    """One prompt and two answers: in most steps both have the same reward, and the step ends without an update."""
    config = Config(**TINY | {"prompts_per_step": 1, "completions_per_prompt": 2, "max_new_tokens": 4})
    engine, stream = make_engine(config, 0, None), PromptStream(get_task("holes"), 0)
    lines = [train_step(engine, config, Job("none", 0), stream.next(1), None, step) for step in range(1, 9)]
    updated = ["update_norm" in line for line in lines]
    assert len(lines) == 8 and not all(updated) and engine.version == sum(updated)
