"""`make gpu` without a GPU, and how it reads the outcome of a test."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from scripts import gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_ends_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--out", str(tmp_path / "report.json")])
    assert gpu.main() == 1
    assert "no CUDA device" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("inside", "outcome"),
    [("", "passed"), ('<failure message="2 != 3"/>', "failure"), ('<skipped message="no"/>', "skipped")],
)
def test_an_outcome_is_read(inside: str, outcome: str) -> None:
    xml = f'<testcase classname="tests.a" name="b" time="1.5">{inside}</testcase>'
    found = gpu.outcome(ElementTree.fromstring(xml))
    assert (found["test"], found["outcome"], found["seconds"]) == ("tests.a::b", outcome, 1.5)
