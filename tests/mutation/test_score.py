"""MU on a small project: weak tests let mutants live, strong ones do not, and a stopped run goes on."""

from __future__ import annotations

import ast
import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from earnest.mutation import OPERATORS, score, score_tests
from earnest.mutation.operators import Mutant, mutants
from earnest.mutation.score import MutationError, _left_out, _try

SOURCE = """
def loss(logp, kl, beta):
    return -logp + beta * kl
"""
WEAK = """
from tiny import loss

def test_it_runs():
    assert isinstance(loss(1.0, 2.0, 0.5), float)
"""
STRONG = """
from tiny import loss

def test_hand_worked():
    assert loss(1.0, 3.0, 0.25) == -0.25
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the project needs none; their import takes 2 s
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "tiny.py").write_text(SOURCE)
    (tmp_path / "test_weak.py").write_text(WEAK)
    (tmp_path / "test_strong.py").write_text(STRONG)
    return tmp_path


def test_weak_tests_let_mutants_live_and_strong_ones_do_not(project: Path) -> None:
    source = project / "src" / "tiny.py"
    weak = score_tests(project / "test_weak.py", source, root=project, limit=3)
    strong = score_tests(project / "test_strong.py", source, root=project, limit=3)
    assert weak.share == 0.0 and len(weak.survivors) == 3
    assert strong.share == 1.0 and "| 3 | 3 | 0 | 100% |" in strong.table()
    assert source.read_text() == SOURCE, "the project itself is never touched"


@pytest.mark.slow
def test_a_stopped_run_goes_on(project: Path) -> None:
    source, out = project / "src" / "tiny.py", project / "mutants.jsonl"
    first = score_tests(project / "test_strong.py", source, root=project, out=out, limit=2)
    lines = out.read_text().splitlines()
    out.write_text(lines[0] + "\n" + lines[1][:10] + "\n")  # the second line is torn
    said: list[str] = []
    again = score_tests(project / "test_strong.py", source, root=project, out=out, limit=2, progress=said.append)
    assert again == first and len(said) == 2
    assert len(out.read_text().splitlines()) == 3, "only the torn one was made again"


def test_what_cannot_be_judged_says_so(project: Path) -> None:
    source = project / "src" / "tiny.py"
    (project / "test_red.py").write_text("def test_red():\n    assert False\n")
    (project / "test_none.py").write_text("")
    (project / "src" / "empty.py").write_text("")
    with pytest.raises(MutationError, match="fail before anything is changed"):
        score_tests(project / "test_red.py", source, root=project)
    with pytest.raises(MutationError, match="no test in"):
        score_tests(project / "test_none.py", source, root=project)
    with pytest.raises(MutationError, match="can be mutated"):
        score_tests(project / "test_weak.py", project / "src" / "empty.py", root=project)
    with pytest.raises(MutationError, match="not inside"):
        score_tests(project / "test_weak.py", Path(__file__), root=project)


def test_settings_of_an_object_and_both_sides_are_changed() -> None:
    source = "class A:\n  def f(self, x, beta):\n    return self.clip * x - beta / self.width\n"
    made = {m.what: m.source.splitlines()[-1].strip() for m in mutants(source)}
    assert made["self.clip is ignored"] == "return 0.5 * x - beta / self.width"
    assert made["beta is ignored"] == "return self.clip * x - 0.5 / self.width"
    assert made["the left side of - is dropped"] == "return -(beta / self.width)"
    assert made["the left side of * is dropped"] == "return x - beta / self.width"
    assert made["the right side of / is dropped"] == "return self.clip * x - beta"
    assert not any("width is ignored" in what for what in made), "not every attribute is a knob"


def test_whole_methods_stop_working() -> None:
    source = "class A:\n  def state_dict(self):\n    return {'a': 1}\n  def forward(self, x):\n    return x + 1\n"
    made = {m.what: m.source for m in mutants(source, OPERATORS)}
    assert "return {}" in made["state_dict is emptied"]
    assert made["forward is bypassed"].count("return x") == 1 and "x + 1" not in made["forward is bypassed"]
    for text in made.values():
        ast.parse(text)


def test_a_package_that_is_called_runs_is_copied_and_results_are_not(tmp_path: Path) -> None:
    for folder in ("runs", "src/thing/runs", "src/thing/__pycache__", ".venv-other"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copytree(tmp_path, tmp_path.parent / "copy", ignore=lambda p, names: _left_out(tmp_path, p, names))
    found = {str(p.relative_to(tmp_path.parent / "copy")) for p in (tmp_path.parent / "copy").rglob("*")}
    assert found == {"src", "src/thing", "src/thing/runs"}


def test_a_mutant_is_gone_before_the_next_one(project: Path) -> None:
    """The second file is tested by nothing, so its mutants live, unless the first file is still a mutant."""
    (project / "src" / "untested.py").write_text("def double(x):\n    return 2 * x\n")
    found = score_tests(project / "test_strong.py", project / "src", root=project, limit=4)
    assert [o.fate for o in found.outcomes if o.file.endswith("tiny.py")] == ["killed"] * 3
    assert [o.fate for o in found.outcomes if o.file.endswith("untested.py")] == ["survived"]
    assert "| `src/untested.py` | 1 | 0 | 1 | 0% |" in found.table()


def test_a_mutant_whose_tests_do_not_end_is_a_timeout(project: Path) -> None:
    mutant = Mutant(1, "x", "def loss(*_): ...\n")
    assert _try(project, Path("src/tiny.py"), mutant, Path("test_weak.py"), 0.001) == "timeout"
    assert (project / "src/tiny.py").read_text() == SOURCE


def test_only_what_is_read_is_ignored_and_only_results_are_detached() -> None:
    made = [m.what for m in mutants("def f(clip, y):\n    clip = 1\n    x = y\n    z = g(clip)\n    return z\n")]
    assert made.count("clip is ignored") == 1 and [w for w in made if "detached" in w] == ["z is detached"]


def test_the_command_prints_the_given_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name in ("a", "b"):
        files.append(tmp_path / f"{name}.jsonl")
        found = [{"file": name, "line": 3, "what": fate, "fate": fate, "key": fate} for fate in ("survived", "killed")]
        files[-1].write_text("".join(json.dumps(outcome) + "\n" for outcome in found))
    monkeypatch.setattr(sys, "argv", ["mutation", *map(str, files)])
    runpy.run_path(str(Path(score.__file__).with_name("__main__.py")), run_name="__main__")
    shown = capsys.readouterr().out
    assert "| `a` | 2 | 1 | 1 | 50% |" in shown and "| `b` | 3 | survived |" in shown
