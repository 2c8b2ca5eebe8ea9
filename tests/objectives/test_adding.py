"""docs/adding-an-objective.md: the page's file is written to the folder of objectives; no other file changes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import earnest as en
from earnest import objectives
from earnest.errors import ObjectiveError
from earnest.objectives import OBJECTIVES, Term, build, describe, register
from tests.objectives.support import full_batch

PAGE = Path(__file__).parents[2] / "docs" / "adding-an-objective.md"


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    block = re.search(r"```python\n(\"\"\"The focal loss.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    (tmp_path / "focal.py").write_text(block[1], encoding="utf-8")
    monkeypatch.setattr(objectives, "__path__", [*objectives.__path__, str(tmp_path)])
    yield
    OBJECTIVES.pop("focal_sft", None)
    sys.modules.pop("earnest.objectives.focal", None)


def test_one_file_registers_lists_and_checks_it(added: None) -> None:
    term = build("focal_sft", gamma=1.0)
    assert type(term) is objectives.FocalSFT is en.FocalSFT
    info = next(info for info in describe() if info.kind == "focal_sft")
    assert info.equation and [f.name for f in info.fields] == ["gamma"]
    with pytest.raises(ObjectiveError, match=r"focal_sft\.gamma: must be a finite number at least 0, got -1"):
        build("focal_sft", gamma=-1)
    batch, policy = full_batch()
    plain = policy.gradient(batch, objectives.SFT())
    torch.testing.assert_close(policy.gradient(batch, build("focal_sft", gamma=0.0)), plain)
    assert (policy.gradient(batch, term) - plain).abs().max() > 1e-3


def test_a_kind_that_is_taken_and_a_field_without_a_range_are_refused() -> None:
    from dataclasses import dataclass

    class Other(Term):
        kind = "sft"

    with pytest.raises(ObjectiveError, match=r"'sft' is taken by SFT of earnest\.objectives\.sft; choose another"):
        register(Other)

    @dataclass(frozen=True, kw_only=True)
    class Bare(Term):
        kind = "bare"
        speed: float = 1.0

    with pytest.raises(ObjectiveError, match="the field 'speed' has no range and no meaning"):
        register(Bare)
    assert OBJECTIVES["sft"] is objectives.SFT and "bare" not in OBJECTIVES


def test_a_misspelt_name_is_still_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="GRPOO"):
        en.GRPOO  # noqa: B018  (the access is the test)
    with pytest.raises(ImportError, match="GRPOO"):
        from earnest.objectives import GRPOO  # noqa: F401
