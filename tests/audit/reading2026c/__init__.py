"""A third reading by strangers; see ``reading``."""

from tests.audit.reading2026c.reading import READING

READING.read()

__all__ = ["READING"]
