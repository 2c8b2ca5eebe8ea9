"""The pages of evidence: their tables are the stored results, and the monitor's numbers are right by hand."""

from __future__ import annotations

import json
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from experiments.evidence import onset
from experiments.evidence.jobs import RESULTS, gather

PAGES = {"learn": "learn", "replicas": "replicas", "layout": "replicas", "route": "guards", "onset": "guards"}


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_a_page_shows_the_stored_results(name: str) -> None:
    """Every table that the results give stands on the page, cell by cell; a page of older results fails."""
    module: Any = import_module(f"experiments.evidence.{name}")
    page = (Path("docs/evidence") / f"{PAGES.get(name, name)}.md").read_text(encoding="utf-8")
    for table in module.tables(json.loads((RESULTS / f"{name}.json").read_text())["jobs"]):
        assert table in page, f"`python -m scripts.docs.tables evidence.{name}` updates docs/evidence"


def test_a_finished_job_is_kept_and_only_the_named_ones_are_trained(tmp_path: Path) -> None:
    made: list[str] = []

    def job(name: str) -> Any:
        return lambda: made.append(name) or {"value": len(made)}

    jobs = {name: job(name) for name in ("a1", "a2", "b1")}
    first = gather(jobs, tmp_path, "a")
    assert made == ["a1", "a2"] and first["missing"] == ["b1"]
    again = gather(jobs, tmp_path, "")
    assert made == ["a1", "a2", "b1"] and not again["missing"]
    assert [r["value"] for r in again["jobs"]] == [1, 2, 3]


def test_a_job_in_the_stored_results_is_not_trained_again(tmp_path: Path) -> None:
    """On a new machine ``out`` is empty; the stored results are all that is left of earlier sessions."""
    trained: list[str] = []
    jobs = {name: partial(lambda name: trained.append(name) or {"value": 1}, name) for name in ("a", "b")}
    found = gather(jobs, tmp_path, "", [{"job": "a", "value": 7}, {"job": "of an old design", "value": 9}])
    assert trained == ["b"]
    assert [(r["job"], r["value"]) for r in found["jobs"]] == [("a", 7), ("b", 1)]


def test_the_onset_by_hand() -> None:
    """Means of three steps: 0, 0.1, 0.2 → 0.1; then 0.1, 0.2, 0.3 → 0.2, the first of at least 0.15."""
    log = [{"exploited": rate} for rate in (0.0, 0.1, 0.2, 0.3, 0.0)]
    record = {"kind": "hacking", "seed": 0, "log": log}
    assert onset.onset(record) == 3 and onset.labels(record) == [False, False, False, True, True]
    assert onset.onset(record | {"kind": "honest"}) is None


def test_the_auc_by_hand() -> None:
    """Of 2 · 2 pairs three are in order and one is a tie."""
    assert onset.auc([1.0, 3.0, 1.0, 0.0], [True, True, False, False]) == pytest.approx(3.5 / 4)
