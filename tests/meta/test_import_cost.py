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
