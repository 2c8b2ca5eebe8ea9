"""Renamed public names work for one more release, and each warns at its first use."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import earnest as en
from earnest.adapters.layer import Layer
from earnest.objectives.registry import OBJECTIVES, register


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("earnest.adapters.variant", "Birth", "Initialization"),
        ("earnest.adapters.conformance", "kick", "perturb"),
        ("earnest.steering", "Starved", "TooFewSurvivors"),
        ("earnest.steering", "Yardstick", "TraitEvaluator"),
    ],
)
def test_an_old_name_of_a_module_is_the_new_one_and_warns_once(module: str, old: str, new: str) -> None:
    home = importlib.import_module(module)
    vars(home).pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        assert getattr(home, old) is getattr(home, new)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(home, old) is getattr(home, new)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        home.absent  # noqa: B018 - the access is the test


def test_a_variant_with_the_old_method_names_is_attached_with_its_tensors() -> None:
    """``birth`` and ``dormant`` of a user's variant take effect, also where they call super()."""
    with pytest.warns(DeprecationWarning, match="is now") as seen:

        class Old(en.adapters.LoRA):
            def birth(self, layer: Layer, ctx: Any) -> dict[str, torch.Tensor]:
                return {name: 0 * t + 3 for name, t in super().birth(layer, ctx).items()}  # type: ignore[misc]

            def dormant(self) -> frozenset[str]:
                return super().dormant() | {"more"}  # type: ignore[misc,no-any-return]

    assert [str(w.message).split(";")[0] for w in seen] == [
        "Old.birth() is now initial()",
        "Old.dormant() is now inactive()",
    ]
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    adapter = en.adapters.attach(model, Old(rank=2), targets="0")
    assert (adapter.named_tensors()["0.A"] == 3).all() and Old(rank=2).inactive() == {"A", "more"}
    with pytest.warns(DeprecationWarning, match="inactive_at_initialization"):
        assert adapter.dormant_at_birth() == {"0.A"}


def test_a_term_with_the_old_name_of_a_law_has_the_new_one() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Old(en.SFT):
        kind: ClassVar[str] = "old_law"
        laws: ClassVar[frozenset[str]] = frozenset({"zero_at_source", "dormant_at_source"})

    names: Mapping[str, Any] = OBJECTIVES
    try:
        with pytest.warns(DeprecationWarning, match="inactive_at_source"):
            register(Old)
        assert names["old_law"].laws == {"zero_at_source", "inactive_at_source"}
    finally:
        OBJECTIVES.pop("old_law")
        OBJECTIVES.imported.discard("old_law")
