"""A twelfth reading by strangers; see ``reading``."""

from tests.audit.reading2026l.reading import READING

READING.read()

__all__ = ["READING"]
