"""What a run really writes is what the report reads: no gap, no contradiction, the same numbers."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from earnest.config import load_file
from earnest.report import load
from earnest.runs import start, verdicts
from earnest.runs.lifecycle import Finished
from earnest_audit import Finding, Verdict
from tests.runs.tiny import recipe, tiny_folder

STEPS = 3
HOLDS = Finding("GL", "term grpo", "gradient norm 1", "above 0", "holds", "What a failure would mean.")
FAILS = Finding("GL", "term reinforce", "gradient norm 0", "above 0", "fails", "It trains nothing.")
APART = Finding("GL", "term sft", "weight 0", "computed", "not applicable", "Weight 0: not computed.")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two terms, the gradient's shares measured on each step. The audit has its own tests: here its file counts."""
    place = tmp_path_factory.mktemp("real")
    model = tiny_folder(place / "tiny")
    objective = [{"kind": "grpo"}, {"kind": "reinforce", "weight": 0.5}]
    path = recipe(place / "recipe.yaml", model, objective=objective, steps=STEPS, shares_every=1, check=False)
    done = start("test", load_file(path, [f"out={place / 'run'}"]), Console(file=io.StringIO()))
    verdicts.write(done.folder, Verdict((HOLDS, FAILS, APART)), step=0, seconds=0.1)
    return done


def test_a_real_run_has_no_gap(finished: Finished):
    run = load(finished.folder)
    assert run.gaps == ()
    assert [step.step for step in run.steps] == [1, 2, 3]
    assert [evaluation.step for evaluation in run.evaluations] == [0, 2, 3]
    assert (run.header.status, run.header.steps_done, run.header.model.version) == ("finished", STEPS, "local folder")
    assert run.verdict is not None
    assert [(check.subject, check.outcome, check.detail) for check in run.verdict.checks] == [
        ("term grpo", "holds", ""),
        ("term reinforce", "fails", "It trains nothing."),
    ]
    assert run.verdict.not_applicable == 1
    assert run.pairs
    assert all(before is not None and after is not None for before, after in run.pairs)


def test_the_report_and_the_run_agree_on_the_gain(finished: Finished):
    change = load(finished.folder).change
    assert change is not None
    assert change.paired
    assert (change.before.reward, change.after.reward) == (finished.before, finished.after)
    assert (change.gain, change.se) == (pytest.approx(finished.gain), pytest.approx(finished.gain_se))


def test_terms_and_shares_arrive(finished: Finished):
    for step in load(finished.folder).steps:
        assert len(step.terms) == 2
        shares = [term.share for term in step.terms.values() if term.share is not None]
        assert len(shares) == 2
        assert step.grad_norm is not None
        assert sum(shares) == pytest.approx(1 if step.grad_norm > 0 else 0)
        assert all(term.ran for term in step.terms.values())


def test_the_page_was_made_by_the_run(finished: Finished):
    page = Path(finished.report).read_text(encoding="utf-8")
    assert "Share of each term in the gradient" in page
    assert "gradient norm" in page
    assert "style/volume" in page
