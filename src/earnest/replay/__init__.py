"""Traces into preference pairs: replay each assistant turn to teachers, judge, pair, clean.

Names resolve when first used; importing this package imports neither torch nor pyarrow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from earnest.config.replay import ReplayConfig as ReplayConfig
    from earnest.replay.pairs import Pair as Pair
    from earnest.replay.pairs import read as read_pairs
    from earnest.replay.pairs import write as write_pairs
    from earnest.replay.run import Replayed as Replayed
    from earnest.replay.run import replay as replay
    from earnest.replay.traces import Trace as Trace
    from earnest.replay.traces import read as read_traces

_HOME = {
    "ReplayConfig": ("earnest.config.replay", "ReplayConfig"),
    "Pair": ("earnest.replay.pairs", "Pair"),
    "Replayed": ("earnest.replay.run", "Replayed"),
    "Trace": ("earnest.replay.traces", "Trace"),
    "read_pairs": ("earnest.replay.pairs", "read"),
    "read_traces": ("earnest.replay.traces", "read"),
    "replay": ("earnest.replay.run", "replay"),
    "write_pairs": ("earnest.replay.pairs", "write"),
}

__all__ = ["Pair", "ReplayConfig", "Replayed", "Trace", "read_pairs", "read_traces", "replay", "write_pairs"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'earnest.replay' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
