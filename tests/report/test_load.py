"""Reading a run folder: every value arrives, every fault is named, and what may be missing is said and not fatal."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from earnest.report import ReportError, load, render
from tests.report import folders

DOCUMENT = Path(__file__).parents[2] / "docs" / "run-folder.md"


def examples() -> dict[str, list[Any]]:
    """The JSON of docs/run-folder.md by the heading above it."""
    found: dict[str, list[Any]] = {}
    heading = ""
    for part in re.split(r"^(## .*)$", DOCUMENT.read_text(encoding="utf-8"), flags=re.M):
        if part.startswith("## "):
            heading = part[3:].strip()
        else:
            found.setdefault(heading, []).extend(
                json.loads(block) for block in re.findall(r"```json\n(.*?)```", part, re.S)
            )
    return found


def test_the_documented_examples_load_as_documented(tmp_path):
    page = examples()
    folder = folders.make(tmp_path)
    folders.write_json(folder / "run.json", page["run.json"][0])
    folders.write_lines(folder / "metrics.jsonl", page["metrics.jsonl"])
    folders.write_lines(folder / "samples.jsonl", page["samples.jsonl"])
    folders.write_json(folder / "verdict.json", page["verdict.json"][0])
    run = load(folder)

    assert (run.header.task, run.header.model.name, run.header.model.version, run.header.seed) == (
        "sort",
        "nano",
        "1.0",
        0,
    )
    (step,) = run.steps
    assert step.reward is not None
    assert (step.step, step.version, step.reward.mean, step.reward.sd, step.reward.n) == (1, 1, 0.41, 0.49, 64)
    assert (step.loss, step.grad_norm, step.update_norm, step.lr) == (0.0132, 0.82, 0.0061, 0.001)
    term = step.terms["grpo"]
    assert (term.weight, term.loss, term.share, term.ran) == (1.0, 0.0132, 1.0, "grpo(clip=0.2, over=sequences)")
    assert term.surrogate and term.metrics == {"clip_high": 0.02, "ratio_max": 1.31}
    assert step.learned_nothing is None and step.tokens == 608
    assert step.metrics["entropy"] == 1.2
    assert step.seconds == {"sample": 0.8, "train": 0.6}
    (evaluation,) = run.evaluations
    assert (evaluation.reward, evaluation.se, evaluation.prompts, evaluation.n) == (0.5, 0.25, 3, 12)
    assert evaluation.means == (0.0, 0.75, 0.75)
    (sample,) = run.samples
    assert (sample.phase, sample.prompt[0].content, sample.completion, sample.correct) == (
        "before",
        "sort 3 1 2",
        "1 3 2",
        False,
    )
    assert run.verdict is not None
    assert [check.outcome for check in run.verdict.checks] == ["holds", "holds"]
    assert run.verdict.holds


def test_a_whole_run_has_no_gaps_and_pairs_its_samples(tmp_path):
    run = load(folders.make(tmp_path))
    assert run.gaps == ()
    assert len(run.steps) == 60
    assert [event.text for event in run.events] == ["started", "finished"]
    assert len(run.pairs) == 8
    for before, after in run.pairs:
        assert before is not None
        assert after is not None
        assert (before.phase, after.phase) == ("before", "after")
        assert before.prompt == after.prompt


def test_a_tool_call_in_a_prompt_is_shown(tmp_path):
    folder = folders.make(tmp_path, steps=1)
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "clock"}]}
    row = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    folders.write_lines(folder / "samples.jsonl", [{**row, "prompt": [*row["prompt"], call]}])
    run = load(folder)
    assert run.samples[0].prompt[1].text == '{"tool_calls": [{"name": "clock"}]}'


def evaluation(step: int, **changes: Any) -> dict[str, Any]:
    line = {"kind": "eval", "step": step, "version": step, "reward": 0.5, "se": 0.3, "prompts": 3, "n": 3}
    return {**line, **changes}


def test_gain_pairs_every_prompt_with_itself(tmp_path):
    """Differences 1, 0, 0.5: mean 0.5, sd 0.5, so s.e. 0.5/√3. Without the means: √(0.3² + 0.4²) = 0.5."""
    folder = folders.make(tmp_path, steps=1)
    before = evaluation(0, reward=0.5, means=[0.0, 1.0, 0.5])
    after = evaluation(1, reward=1.0, se=0.4, means=[1.0, 1.0, 1.0])
    folders.write_lines(folder / "metrics.jsonl", [before, after])
    change = load(folder).change
    assert change is not None
    assert change.paired
    assert change.gain == 0.5
    assert change.se == pytest.approx(0.5 / math.sqrt(3))

    del after["means"]
    folders.write_lines(folder / "metrics.jsonl", [before, after])
    change = load(folder).change
    assert change is not None
    assert not change.paired
    assert change.se == pytest.approx(0.5)


def test_folders_that_are_no_run(tmp_path):
    with pytest.raises(
        ReportError, match=r"nowhere: there is no such folder; give the folder that `earnest run` printed"
    ):
        load(tmp_path / "nowhere")
    with pytest.raises(ReportError, match=r"is empty\. Give the folder that `earnest run` printed"):
        load(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ReportError, match=r"is no run folder: it has no run\.json"):
        load(tmp_path)
    with pytest.raises(ReportError, match="is a file"):
        load(tmp_path / "notes.txt")
    folders.make(tmp_path / "quickstart-1")
    with pytest.raises(ReportError, match="Runs inside it: quickstart-1"):
        load(tmp_path)
    folders.write_json(tmp_path / "quickstart-1" / "run.json", folders.header(1, format="earnest-run/9"))
    with pytest.raises(ReportError, match="'earnest-run/9'; this version of earnest reads 'earnest-run/1'"):
        load(tmp_path / "quickstart-1")


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        (
            "metrics.jsonl",
            {"kind": "stop", "step": 1},
            "metrics.jsonl, line 1: kind: must be 'step' or 'eval', got 'stop'",
        ),
        ("metrics.jsonl", evaluation(-1), "step: must be at least 0, got -1"),
        ("metrics.jsonl", evaluation(1, reward="high"), "reward: must be a number, got 'high'"),
        ("metrics.jsonl", evaluation(1, reward=True), "reward: must be a number, got True"),
        ("metrics.jsonl", evaluation(1, means=[1, None]), "means.1: must be a number, got None"),
        ("metrics.jsonl", {"kind": "step", "step": 1, "version": 1}, "metrics.jsonl, line 1 .*: terms: is required"),
        (
            "metrics.jsonl",
            {"kind": "step", "step": 1, "version": 1, "terms": {"grpo": {"weight": 1, "loss": 0}}},
            "metrics.jsonl, line 1 .*: terms.grpo.ran: is required",
        ),
        (
            "samples.jsonl",
            {"phase": "later"},
            "samples.jsonl, line 1 .*: phase: must be 'before', 'after' or 'train', got 'later'",
        ),
        (
            "verdict.json",
            {"holds": True, "checks": [1], "step": 0},
            "verdict.json .*: checks.0: must be a mapping of keys to values, got 1",
        ),
        ("environment.json", [], "environment.json: must be a JSON object"),
    ],
)
def test_a_wrong_field_is_named_with_its_file_and_line(tmp_path, name, line, message):
    folder = folders.make(tmp_path, steps=2)
    (folder / name).write_text(json.dumps(line) + "\n")
    with pytest.raises(ReportError, match=message):
        load(folder)


def test_only_an_incomplete_last_line_is_left_out_and_it_is_reported(tmp_path):
    folder = folders.make(tmp_path, steps=3)
    metrics = folder / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole + '{"kind": "step", "st')
    run = load(folder)
    assert len(run.steps) == 3
    assert "The last line of metrics.jsonl is torn" in run.gaps[0]
    metrics.write_text('{"kind": "step", "st\n' + whole)
    with pytest.raises(ReportError, match=r"metrics\.jsonl, line 1: not JSON"):
        load(folder)


def test_repairs_are_reported(tmp_path):
    folder = folders.make(tmp_path, steps=2)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    twice = {**rows[1], "grad_norm": math.nan, "loss": 7.0}
    folders.write_lines(folder / "metrics.jsonl", [*rows, twice])
    folders.write_json(folder / "verdict.json", {**folders.verdict(fail=True), "holds": True})
    run = load(folder)
    assert run.steps[0].loss == 7.0, "the later line counts"
    assert run.steps[0].grad_norm is None
    text = " ".join(run.gaps)
    assert "1 step lines twice; the later line counts" in text
    assert "1 numbers were NaN or infinite" in text
    assert "verdict.json has holds = True, but 5 of its checks hold and 1 fail" in text


def test_what_an_unfinished_run_lacks_is_listed(tmp_path):
    folders.write_json(
        tmp_path / "run.json", folders.header(40, status="interrupted", reason="SIGINT after step 0", steps_done=0)
    )
    run = load(tmp_path)
    assert list(run.gaps) == [
        "The run was interrupted after 0 of 40 steps (SIGINT after step 0); it can be resumed.",
        "No step is recorded yet.",
        "No held-out evaluation is recorded.",
        "No samples before and after training are recorded.",
        "There is no verdict yet: the step of this run has not been checked.",
        "There is no config.yaml: the settings of this run are not known.",
        "There is no environment.json: versions and machine are not known.",
    ]
    page = render(run)
    for gap in run.gaps:
        assert gap in page


def test_a_finished_run_without_a_verdict_was_not_checked(tmp_path):
    folder = folders.make(tmp_path, steps=1)
    (folder / "verdict.json").unlink()
    assert "The step was not checked (check=false)." in load(folder).gaps


def test_text_that_is_not_utf8_is_named(tmp_path):
    folder = folders.make(tmp_path, steps=1)
    (folder / "config.yaml").write_bytes(b"model: \xff")
    with pytest.raises(ReportError, match=r"config\.yaml: not UTF-8 \(byte 7\)"):
        load(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_any_value_anywhere_is_drawn_or_refused_in_a_sentence(tmp_path, data):
    """One field of one file becomes any JSON: the page is made, or a ReportError says why; nothing else is raised."""
    folder = folders.make(tmp_path, steps=2)
    name = data.draw(
        st.sampled_from(["run.json", "environment.json", "verdict.json", "metrics.jsonl", "samples.jsonl"])
    )
    texts = (folder / name).read_text(encoding="utf-8")
    rows = [json.loads(line) for line in texts.splitlines()] if name.endswith("l") else [json.loads(texts)]
    owner = data.draw(st.sampled_from(rows))
    key = data.draw(st.sampled_from(sorted(owner)))
    while isinstance(owner[key], dict) and owner[key] and data.draw(st.booleans()):
        owner = owner[key]
        key = data.draw(st.sampled_from(sorted(owner)))
    owner[key] = data.draw(JSON)
    (folders.write_lines if name.endswith("l") else lambda path, one: folders.write_json(path, one[0]))(
        folder / name, rows
    )
    try:
        result = render(load(folder))
    except ReportError as error:
        result = str(error)
    assert result.startswith("<!doctype html>") or len(result.splitlines()) == 1
