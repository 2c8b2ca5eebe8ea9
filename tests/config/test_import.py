"""Code of the user's own, by ``import:`` in a recipe and by entry points: known everywhere, or one sentence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from earnest import plugins
from earnest.config import dump, from_mapping, load, text
from earnest.errors import ConfigError
from earnest.objectives import OBJECTIVES
from earnest.tasks.registry import TASKS

TERM = """
from dataclasses import dataclass
from typing import ClassVar
from earnest.objectives import SFT, register

@register
@dataclass(frozen=True, kw_only=True)
class Mine(SFT):
    kind: ClassVar[str] = "{kind}"
"""
RECIPE = "import: [{entry}]\ntask: sort\nadapter: {{kind: lora}}\nobjective: [{{kind: {kind}}}]\nsteps: 1\n"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What a test registers is unknown to the next one."""
    yield
    for registry in (OBJECTIVES, TASKS):
        for name in list(registry.imported):
            del registry[name]
    for name in [name for name in sys.modules if name.startswith("earnest_import_")]:
        del sys.modules[name]


def _recipe(folder: Path, kind: str) -> Path:
    (folder / f"{kind}.py").write_text(TERM.format(kind=kind))
    (folder / "r.yaml").write_text(RECIPE.format(entry=f"{kind}.py", kind=kind))
    return folder / "r.yaml"


def test_a_file_beside_the_recipe_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = _recipe(tmp_path, "mine_beside")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    _, config = load(str(recipe))
    assert config.imports == [str(tmp_path / "mine_beside.py")]
    assert config.build_objective().terms[0].term.kind == "mine_beside"


def test_another_process_reads_the_dump_and_knows_the_term(tmp_path: Path) -> None:
    """What a resumed run, a replica and a sampler do: they have the run folder's config.yaml and nothing else."""
    _, config = load(str(_recipe(tmp_path, "mine_dumped")))
    (tmp_path / "config.yaml").write_text(dump(config))
    assert text.parse(dump(config), "dump")["import"] == [str(tmp_path / "mine_dumped.py")]
    code = (
        "from pathlib import Path\nfrom earnest.config import load_file\n"
        f"config = load_file(Path({str(tmp_path / 'config.yaml')!r}))\n"
        "print(config.build_objective().terms[0].term.label)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "mine_dumped", done.stderr


@pytest.mark.parametrize(
    ("entry", "content", "sentence"),
    [
        ("missing.py", None, "import: there is no file .*missing.py; give the path of a .py file"),
        (
            "no.such.module",
            None,
            "no.such.module cannot be imported: ModuleNotFoundError: No module named 'no'",
        ),
        ("torn.py", "def f(:\n", r"torn.py cannot be imported: SyntaxError: .* \(torn.py, line 1\); correct it"),
        ("raises.py", "x = 1\ny = x / 0\n", r"ZeroDivisionError: division by zero \(raises.py, line 2\)"),
        ("taken.py", TERM.format(kind="grpo"), "the objective name 'grpo' is taken by GRPO of earnest"),
    ],
)
def test_a_wrong_entry_is_one_sentence(
    entry: str, content: str | None, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / entry).write_text(content)
    data = text.parse(RECIPE.format(entry=entry, kind="grpo"), "r")
    for _ in range(2):  # a failed import is not remembered as a success
        with pytest.raises(ConfigError, match=sentence) as caught:
            from_mapping(data)
        assert "\n" not in str(caught.value)


def test_a_file_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "once.py").write_text("from pathlib import Path\nPath('ran').open('a').write('x')\n")
    assert plugins.load("once.py") == plugins.load(str(tmp_path / "once.py")) == str(tmp_path / "once.py")
    assert (tmp_path / "ran").read_text() == "x"


def test_an_installed_plug_in_is_known_without_an_import(tmp_path: Path) -> None:
    """A package's metadata on the path, as pip writes it; a plug-in that is broken is reported, by its package."""
    info = tmp_path / "someone-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someone\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[earnest.plugins]\nmine = someones_terms\n")
    (tmp_path / "someones_terms.py").write_text(TERM.format(kind="mine_installed"))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom earnest.cli import main\n"

    def earnest(*words: str) -> subprocess.CompletedProcess[str]:
        run = f"{code}main({list(words)!r})"
        return subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=False)

    assert "mine_installed" in earnest("objectives", "mine_installed").stdout
    (tmp_path / "someones_terms.py").write_text("import nothing_of_that_name\n")
    done = earnest("objectives")
    assert done.returncode == 2
    assert "someones_terms (the plugin 'mine' of someone) cannot be imported: ModuleNotFoundError" in done.stderr


def test_the_listing_commands_take_the_users_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from earnest.cli import main

    (tmp_path / "job.py").write_text(
        "from earnest.tasks import register\nfrom earnest.tasks.puzzles import PUZZLES, Puzzle\n"
        "old = PUZZLES[0]\nregister(Puzzle('mine/sort', 'a task of my own', *list(vars(old).values())[2:]))\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["tasks", "--import", str(tmp_path / "job.py")])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "mine/sort" in shown and "imported" in shown
