"""A reading by strangers; see ``base``."""

from tests.audit.reading2026 import declared_a_losses, declared_a_rest, declared_b_losses, declared_b_rest
from tests.audit.reading2026.base import READING

READING.sort()

__all__ = ["READING", "declared_a_losses", "declared_a_rest", "declared_b_losses", "declared_b_rest"]
