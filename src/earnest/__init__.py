"""Post-training of language models in which nothing fails silently.

Names are resolved when they are first used, so that importing earnest costs little more than nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "earnest.models": ("load", "Policy", "SampleSpec"),
    "earnest.adapters": (
        "attach",
        "load_adapter",
        "Adapter",
        "LoRA",
        "PiSSA",
        "DoRA",
        "DeLoRA",
        "IA3",
        "IA3FF",
        "HRA",
        "EVA",
        "AntiPaSTO",
        "ROAD",
        "OFT",
        "VeRA",
    ),
    "earnest.signals": ("Batch", "Teacher", "Reference", "FullLogits", "Hidden", "TopK"),
    "earnest.objectives": ("GRPO", "SFT", "Objective", "Term"),
    "earnest.engines": ("LocalEngine", "AdamW", "SGD", "StepReport"),
    "earnest.audit": ("prove", "Verdict"),
    "earnest.tasks": ("get_task",),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *sorted(_WHERE)]  # noqa: PLE0604  (names are strings; they resolve lazily)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'earnest' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from earnest.adapters import Adapter as Adapter
