"""`earnest doctor` names every extra of the package, and `--json` of a listing has the rows of its table."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from earnest.cli import main
from earnest.commands.doctor import EXTRAS, checks

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


def test_no_folder_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["runs", str(tmp_path / "none")])
    assert end.value.code == 2 and "is not a folder" in capsys.readouterr().err
