"""Defects of public issues of 2026 and unusual right steps; see ``base``."""

from tests.audit.blind2026 import (
    agents,
    data_stages,
    metrics,
    packing,
    right_machinery,
    right_steps,
    schedules,
    sharding,
)
from tests.audit.blind2026.base import CASES, RIGHT

__all__ = [
    "CASES",
    "RIGHT",
    "agents",
    "data_stages",
    "metrics",
    "packing",
    "right_machinery",
    "right_steps",
    "schedules",
    "sharding",
]
