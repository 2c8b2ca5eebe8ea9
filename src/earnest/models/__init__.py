"""Loading a policy, its tokenizer and chat template, and sampling from it.

Names resolve when first used: importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from earnest.models.catalog import ModelInfo as ModelInfo
    from earnest.models.catalog import list_models as list_models
    from earnest.models.loading import load as load
    from earnest.models.policy import HeadSpec as HeadSpec
    from earnest.models.policy import Policy as Policy
    from earnest.models.sampling import Completion as Completion
    from earnest.models.sampling import SampleSpec as SampleSpec
    from earnest.models.sampling import sample as sample

_HOME = {
    "ModelInfo": "catalog",
    "list_models": "catalog",
    "load": "loading",
    "HeadSpec": "policy",
    "Policy": "policy",
    "Completion": "sampling",
    "SampleSpec": "sampling",
    "sample": "sampling",
}

__all__ = ["Completion", "HeadSpec", "ModelInfo", "Policy", "SampleSpec", "list_models", "load", "sample"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'earnest.models' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"earnest.models.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
