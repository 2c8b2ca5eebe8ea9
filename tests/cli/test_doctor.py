"""`earnest doctor` names every extra of the package, and `--json` of a listing has the rows of its table."""

from __future__ import annotations

import io
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from earnest.cli import main
from earnest.commands.auditing import _sampler_verdict
from earnest.commands.listings import EXTRAS, checks
from earnest.errors import EarnestError
from earnest.listings import Listing, runs
from earnest.tasks import list_tasks
from tests.report import folders

ROOT = Path(__file__).parents[2]
GROUPS = {"all", "dev", "juicer", "replay", "test"}  # several extras in one, or with no module of their own


def test_every_extra_is_checked() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) - GROUPS == set(EXTRAS)


def test_a_missing_extra_has_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "ray", ("no_such_module", "replicas"))
    (row,) = [r for r in checks()[1].records() if r["extra"] == "ray"]
    assert row["state"] == "missing: pip install 'earnest[ray]'"


@pytest.mark.parametrize("words", ["tasks", "recipes", "models", "adapters", "objectives", "objectives grpo"])
def test_listings_as_json(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*words.split(), "--json"])
    records = json.loads(capsys.readouterr().out)
    assert end.value.code == 0 and len(records) > 1 and len({tuple(r) for r in records}) == 1
    if words == "tasks":  # complete: the table has one row for all datasets of reasoning-gym
        assert [r["task"] for r in records] == [info.name for info in list_tasks()]
    with pytest.raises(SystemExit):
        main(words.split())
    assert not capsys.readouterr().out.lstrip().startswith("["), "a table, unless JSON is requested"


def test_adapters_are_checked_with_and_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def checked(compile: bool) -> tuple[Listing, list[str]]:
        seen.append(compile)
        return Listing("adapters", ("adapter",)), ["lora: a fault"]

    monkeypatch.setattr("earnest.listings.checked_adapters", checked)
    for word in ("--check", "--compile"):
        with pytest.raises(SystemExit) as end:
            main(["adapters", word])
        assert end.value.code == 1
    assert seen == [False, True]


def test_the_help_of_audit_shows_which_options_take_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["audit", "--help"])
    shown = capsys.readouterr().out
    assert all(re.search(rf"--{name}\s+FILE", shown) for name in ("junit", "sarif", "markdown"))


def test_no_folder_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["runs", str(tmp_path / "none")])
    assert end.value.code == 2 and "is not a folder" in capsys.readouterr().err


def test_every_gpu_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda i: f"GPU {'ab'[i]}")
    (row,) = [r for r in checks()[0].records() if "devices" in r.values()]
    assert "cuda:0 GPU a, cuda:1 GPU b, cpu (" in " ".join(map(str, row.values()))


def test_runs_are_a_table_unless_json_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders.make(tmp_path / "one")
    for words, begins in (((), " "), (("--json",), "[")):
        with pytest.raises(SystemExit) as end:
            main(["runs", str(tmp_path), *words])
        shown = capsys.readouterr().out
        assert end.value.code == 0 and "one" in shown and shown.lstrip().startswith("[") == (begins == "[")


def test_the_table_of_runs_breaks_no_word_in_80_columns() -> None:
    table = Listing("runs", ("run", "task", "status", "steps", "measure", "before", "best", "after", "started"))
    row = ("animals", "talks.jsonl", "finished", "100/100", "accuracy", "0.123", "0.456", "0.789", "11-17 14:56")
    table.add(*row)
    shown = io.StringIO()
    Console(file=shown, width=80).print(table)
    words = shown.getvalue().split()
    assert {word for cell in (*table.columns, *row) for word in cell.split()} <= set(words)


def test_the_table_of_runs_breaks_no_date_and_shows_failed_laws(tmp_path: Path) -> None:
    name = "quickstart-20261117-170640"
    folders.make(tmp_path / name, fail=True)
    shown = io.StringIO()
    Console(file=shown, width=80).print(runs(tmp_path))
    assert "01-02 03:04" in shown.getvalue() and "finished" in shown.getvalue() and "60/60" in shown.getvalue()
    (row,) = runs(tmp_path).records()
    assert (row["status"], row["finding"]) == ("finished", "1 law failed")


def test_the_settings_of_a_sampler_are_the_words_after_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("earnest.runs.sampling.audited", lambda *given: seen.append(given))
    _sampler_verdict(["http://x", "temperature=0.7", "seed=1"], "nano", None, "KEY")
    assert seen[0][:3] == ("http://x", ["temperature=0.7", "seed=1"], "nano")
    for words in ([], ["localhost:8000"]):
        with pytest.raises(EarnestError, match="give the address of the server"):
            _sampler_verdict(words, "nano", None, "KEY")
