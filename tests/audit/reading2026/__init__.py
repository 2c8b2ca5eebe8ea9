"""A reading by strangers; see ``base``."""

from tests.audit.reading2026 import declared_a_losses, declared_a_rest, declared_b_losses, declared_b_rest
from tests.audit.reading2026.base import CASES, NO_SUBJECT, RIGHT

CASES.sort(key=lambda c: c.id)
RIGHT.sort(key=lambda r: r.id)

__all__ = [
    "CASES",
    "NO_SUBJECT",
    "RIGHT",
    "declared_a_losses",
    "declared_a_rest",
    "declared_b_losses",
    "declared_b_rest",
]
