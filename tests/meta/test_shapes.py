"""The instrumentation itself: annotated shapes are enforced while the tests run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from jaxtyping import install_import_hook

MODULE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
import torch
from jaxtyping import Float, Int
from torch import Tensor
if TYPE_CHECKING:
    from nowhere import Unknown

def dot(a: Float[Tensor, "N d"], b: Float[Tensor, "N d"], how: Unknown = None) -> Float[Tensor, " N"]:
    return (a * b).sum(-1)

def wrong(a: Float[Tensor, "N d"]) -> Float[Tensor, " d"]:
    return a.sum(-1)

@dataclass(frozen=True)
class Row:
    x: Float[Tensor, " T"]
    y: Int[Tensor, " T"] | None = None

    def same(self) -> Self:
        return self

    def scaled(self, w: Float[Tensor, " T"] | None) -> Self:
        return self
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "shape_victim.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with install_import_hook("shape_victim", "tests.shapes.check"):
        yield importlib.import_module("shape_victim")
    sys.modules.pop("shape_victim")


def test_right_shapes_pass(module) -> None:
    assert module.dot(torch.ones(3, 2), torch.ones(3, 2)).tolist() == [2, 2, 2]
    row = module.Row(torch.ones(3), torch.ones(3, dtype=torch.long))
    assert row.same().scaled(torch.ones(3)) is row


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.dot(torch.ones(3, 2), torch.ones(1, 2)),  # would broadcast without a word
        lambda m: m.dot(torch.ones(3, 2), torch.ones(3, 2, dtype=torch.long)),
        lambda m: m.wrong(torch.ones(3, 2)),
        lambda m: m.Row(torch.ones(3), torch.ones(2, dtype=torch.long)),
        lambda m: m.Row(torch.ones(3)).scaled(torch.ones(3, 1)),
    ],
)
def test_wrong_shapes_are_caught(module, call) -> None:
    with pytest.raises(Exception, match=r"[Tt]ype-?check"):
        call(module)


def test_the_package_is_instrumented() -> None:
    hooks = [finder for finder in sys.meta_path if type(finder).__module__ == "jaxtyping._import_hook"]
    assert any(finder.should_instrument("earnest.engines") for finder in hooks)
