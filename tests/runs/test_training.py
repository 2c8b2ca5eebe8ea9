"""``en.train``: the loop of ``earnest run`` on Python objects, among them ones that no recipe can name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console

import earnest as en
from earnest.errors import CheckpointError, ConfigError
from earnest.objectives.policy_gradient import Clipped
from earnest.objectives.view import View
from earnest.runs import resume
from earnest.signals import BaseTeacher, EMATeacher
from earnest.tasks import Grade, Prompt
from tests.runs.tiny import tiny_folder

QUIET = Console(quiet=True)
SMALL: dict[str, Any] = {
    "sampling": {"prompts_per_step": 2, "completions_per_prompt": 4, "max_new_tokens": 4},
    "eval": {"every": 1, "prompts": 4, "samples": 2},
    "console": QUIET,
}


class Vowels:
    """A task of one's own: the more vowels the better."""

    name, description = "vowels", "a reward for vowels"

    def prompts(self, split: str, count: int, seed: int) -> list[Prompt]:
        return [Prompt(f"{split} {i}", ({"role": "user", "content": f"{split} {seed + i}"},), {}) for i in range(count)]

    def grade(self, prompt: Prompt, completion: str) -> Grade:
        return Grade(sum(c in "aeiou" for c in completion) + 0.01 * len(completion), "more vowels", False)


@dataclass(frozen=True, kw_only=True)
class Mine(Clipped):
    """A term of one's own that is not registered."""

    kind: ClassVar[str] = "mine"
    over: ClassVar[str] = "tokens"

    def reduce(self, view: View, values: torch.Tensor) -> torch.Tensor:
        return view.token_mean(values)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., en.LocalEngine]:
    folder = tiny_folder(tmp_path_factory.mktemp("tiny"))

    def engine(**more: Any) -> en.LocalEngine:
        policy = en.load(folder)
        return en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=2), seed=0), en.AdamW(lr=1e-2), **more)

    return engine


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in x.items() if k != "seconds"} for x in found if x["kind"] == kind]


def test_a_task_and_a_term_of_ones_own_get_a_run_folder(make: Callable[..., en.LocalEngine], tmp_path: Path) -> None:
    engine = make()
    done = en.train(engine, Vowels(), Mine() + 0.1 * en.ReferenceKL(), steps=3, out=tmp_path / "run", **SMALL)
    assert [line["step"] for line in lines(done.folder, "step")] == [1, 2, 3]
    assert [line["step"] for line in lines(done.folder, "eval")] == [0, 1, 2, 3]
    assert set(lines(done.folder, "step")[0]["terms"]) == {"mine", "reference_kl"}
    assert engine.version == 3 and done.prompts == 4
    assert done.report.read_text().count("vowels") and (done.adapter / "adapter_model.safetensors").exists()
    verdict = json.loads((done.folder / "verdict.json").read_text())
    assert verdict["holds"] is True
    with pytest.raises(CheckpointError, match="holds a run"):
        en.train(engine, Vowels(), Mine(), steps=3, out=tmp_path / "run", **SMALL)


def test_a_python_run_continues_bit_for_bit_with_the_same_objects_only(
    make: Callable[..., en.LocalEngine], tmp_path: Path
) -> None:
    whole = en.train(make(), Vowels(), en.GRPO(), steps=3, out=tmp_path / "whole", **SMALL)
    en.train(make(), Vowels(), en.GRPO(), steps=1, out=tmp_path / "parts", **SMALL)
    with pytest.raises(ConfigError, match=r"en\.train\(…, out="):
        resume(tmp_path / "parts", ["steps=3"], QUIET)
    with pytest.raises(CheckpointError, match="another objective"):
        en.train(make(), Vowels(), en.DAPO(), steps=3, out=tmp_path / "parts", resume=True, **SMALL)
    with pytest.raises(ConfigError, match="seed: a resumed run keeps"):
        en.train(make(), Vowels(), en.GRPO(), steps=3, seed=5, out=tmp_path / "parts", resume=True, **SMALL)
    parts = en.train(make(), Vowels(), en.GRPO(), steps=3, out=tmp_path / "parts", resume=True, **SMALL)
    assert lines(parts.folder, "step") == lines(whole.folder, "step")
    assert parts.after == whole.after


@pytest.mark.parametrize(
    ("objective", "more", "words"),
    [
        (en.GRPO(), {"sampling": {"completions_per_prompt": 1}}, "at least 2, got 1"),
        (en.GRPO(), {"evall": {}}, "evall"),
        (en.GRPO(), {"resume": True}, "give the folder"),
        (en.GRPO(), {"sampling": {"workers": 2}}, "Ray samplers"),
        (en.GRPO(), {"teacher": "base"}, "no term of the objective reads a teacher"),
        (en.SDPO(), {"teacher": "ema"}, r"LocalEngine\(…, outer=teacher\)"),
        (en.SFT(), {"steps": 0}, "steps"),
    ],
)
def test_a_setting_that_could_do_nothing_is_refused_before_the_folder_is_made(
    make: Callable[..., en.LocalEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    objective: Any,
    more: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = make()
    teachers = {"base": BaseTeacher(), "ema": EMATeacher(engine.adapter)}
    if "teacher" in more:
        more = {"teacher": teachers[more["teacher"]]}
    with pytest.raises(ConfigError, match=words):
        en.train(engine, Vowels(), objective, **{"steps": 1, "console": QUIET, **more})
    assert not list(tmp_path.iterdir())
