"""Runs with a teacher, a reference and pairs: what the objective asks for is supplied, and resumes bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from earnest.config import from_mapping, load_file
from earnest.errors import ConfigError
from earnest.rollouts import teacher_prompts
from earnest.runs import resume, start
from earnest.runs.collect import BatchSource
from earnest.runs.setup import build
from earnest.signals import with_teacher
from tests.runs.tiny import recipe, tiny_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


def lines(folder: Path) -> list[dict]:
    return [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines() if '"kind": "step"' in x]


ALL = [
    {"kind": "grpo"},
    {"kind": "sdpo", "weight": 0.5, "support": "full"},
    {"kind": "simpo", "weight": 0.1},
    {"kind": "kl_barrier", "tau": 0.05},
    {"kind": "reference_kl", "weight": 0.1},
]


@pytest.mark.parametrize(
    "teacher", [{"kind": "live"}, {"kind": "base"}, {"kind": "ema", "mix": 0.3}, {"kind": "trust_region"}]
)
def test_all_channels_run_with_every_teacher(tmp_path: Path, model: Path, teacher: dict) -> None:
    path = recipe(tmp_path / "r.yaml", model, objective=ALL, teacher=teacher, steps=2, out=str(tmp_path / "out"))
    start("test", load_file(path), Console(quiet=True))
    (first, last) = lines(tmp_path / "out")
    assert set(first["terms"]) | set(first["idle"]) == {t["kind"] for t in ALL}
    assert "full_gjs" in first["terms"]["sdpo"]["ran"] and 0 < first["terms"]["sdpo"]["metrics"]["coverage"] <= 1
    assert last["terms"]["sdpo"]["loss"] > 0
    assert ("outer/ema_residual" in last["metrics"]) == (teacher["kind"] == "ema")


def test_a_teacher_prompt_has_the_feedback_on_its_own_attempt() -> None:
    """On nano, from grader to loss: where no sibling succeeded the feedback alone teaches, each row its own."""
    settings = {
        "model": "nano",
        "task": "sort",
        "objective": [{"kind": "sdpo"}],
        "adapter": {"kind": "lora"},
        "steps": 1,
    }
    sampling = {"prompts_per_step": 3, "completions_per_prompt": 4, "max_new_tokens": 16, "temperature": 1.5}
    setup = build(from_mapping({**settings, "sampling": sampling}), lambda _: None)
    collected = BatchSource(setup).next(0)
    alone = [replace(a, grade=replace(a.grade, correct=False)) for a in collected.attempts]
    failed = [i for i, a in enumerate(alone) if a.grade.feedback]
    prompts = teacher_prompts(setup.policy, alone, len(collected.batch))  # no attempt succeeded
    texts = [None if t is None else setup.policy.decode(t) for t in prompts]
    assert failed and [i for i, t in enumerate(texts) if t is not None] == failed
    for i in failed:
        assert alone[i].grade.feedback in (texts[i] or "") and "correct solution" not in (texts[i] or "")
    assert len({alone[i].grade.feedback for i in failed}) > 1, "all got the same feedback"
    batch = with_teacher(setup.engine, collected.batch, prompts)
    report = setup.engine.step(batch, setup.objective)
    assert report.terms["sdpo"].value > 0 and report.update.gradient_norm > 0
    assert report.terms["sdpo"].metrics["rows_left_out"] == len(alone) - len(failed)


def test_an_ema_teacher_resumes_bit_for_bit(tmp_path: Path, model: Path) -> None:
    """The average is part of the checkpoint: two steps and a resume for two more equal four."""
    shared = {"objective": ALL[:2], "teacher": {"kind": "ema"}, "steps": 4}
    start("test", load_file(recipe(tmp_path / "a.yaml", model, out=str(tmp_path / "a"), **shared)), Console(quiet=True))
    start(
        "test",
        load_file(recipe(tmp_path / "b.yaml", model, out=str(tmp_path / "b"), **shared | {"steps": 2})),
        Console(quiet=True),
    )
    resume(tmp_path / "b", ["steps=4"], Console(quiet=True))
    a, b = lines(tmp_path / "a"), lines(tmp_path / "b")
    assert [x["terms"]["sdpo"]["loss"] for x in a] == [x["terms"]["sdpo"]["loss"] for x in b]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher": {"kind": "live", "mix": 0.5}}, "no meaning"),
        ({"teacher": {"kind": "emma"}}, "teacher.kind"),
        ({"teacher": {"kind": "base"}}, "no term reads the base teacher"),
    ],
)
def test_a_teacher_that_could_do_nothing_is_refused(tmp_path: Path, model: Path, changes: dict, words: str) -> None:
    path = recipe(tmp_path / "r.yaml", model, out=str(tmp_path / "out"), **changes)
    with pytest.raises(ConfigError, match=words):
        start("test", load_file(path), Console(quiet=True))
