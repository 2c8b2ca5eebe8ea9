"""Importing earnest is cheap because of what it leaves out; benchmarks/import_time.py prints the seconds."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

# `import earnest` is measured over `import torch`; so torch may come, and nothing else that is slow.
HEAVY = (
    "transformers",
    "pydantic",
    "typer",
    "rich",
    "matplotlib",
    "tokenizers",
    "yaml",
    "huggingface_hub",
    "datasets",
    "peft",
    "trl",
)


def loaded(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after `statement`."""
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_earnest_loads_nothing_heavy() -> None:
    assert not loaded("import earnest") & {*HEAVY, "torch", "numpy"}


def test_the_command_line_answers_without_torch() -> None:
    got = loaded("import earnest.cli")
    assert "typer" in got
    assert not got & {
        "torch",
        "numpy",
        "transformers",
        "pydantic",
        "matplotlib",
        "tokenizers",
        "huggingface_hub",
        "datasets",
    }


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"]])
def test_help_answers_without_torch(words: list[str]) -> None:
    """The installed script itself, with the imports that it makes written to stderr."""
    script = Path(sysconfig.get_path("scripts")) / "earnest"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", script, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Usage: earnest" in done.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in imported
    # typer itself loads pydantic to read the arguments of a subcommand
    never = {"torch", "numpy", "transformers", "matplotlib", *(["pydantic"] if words == ["--help"] else [])}
    assert not imported & never, imported & never


MISTAKES = {
    ("run", "quickstat"): "recipe 'quickstat' is unknown: did you mean 'quickstart'?",
    ("run", "missing/recipe.yaml"): "there is no file missing/recipe.yaml",
    ("run", "quickstart", "stps=3"): "stps: unknown key; did you mean 'steps'?",
    ("run", "quickstart", "steps"): "'steps' is not an override; write key=value",
    ("run", "quickstart", "objective.7.clip=1"): "objective is a list",
    ("audit", "quickstart", "sed=3"): "sed: unknown key; did you mean 'seed'?",
    ("plan", "quickstat"): "recipe 'quickstat' is unknown",
    ("data", "missing.jsonl"): "missing.jsonl: there is no such file or folder",
    ("export", "missing"): "there is no folder missing",
    ("report", "missing"): "missing: there is no such folder",
    ("runs", "missing"): "missing is not a folder",
    ("eval", "missing"): "missing: there is no such run folder",
}


def test_a_mistake_in_the_words_is_found_without_torch(tmp_path: Path) -> None:
    """In one interpreter, because starting one for each takes half a second."""
    code = """
import contextlib, io, json, sys
from earnest.cli import main
found = []
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            main(words)
        except SystemExit as end:
            found.append([end.code, said.getvalue(), "torch" in sys.modules])
print(json.dumps(found))
"""
    words = [sys.executable, "-c", code, json.dumps(list(MISTAKES))]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    for (given, sentence), (exit_code, said, torch) in zip(MISTAKES.items(), json.loads(done.stdout), strict=True):
        assert (exit_code, torch) == (2, False), given
        assert said.startswith("earnest: ") and sentence in said and said.count("\n") == 1, said


def test_the_keys_that_are_read_from_the_source_are_those_of_a_recipe() -> None:
    from earnest.config import RunConfig
    from earnest.config.explain import names
    from earnest.config.overrides import top_keys

    assert sorted(top_keys()) == sorted(names(RunConfig))


def test_every_public_name_resolves() -> None:
    code = (
        "import earnest as en\nfor name in en.__all__:\n    getattr(en, name)\nassert set(en.__all__) <= set(dir(en))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:earnest", "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
