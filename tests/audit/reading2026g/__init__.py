"""A seventh reading by strangers, of right steps; see ``reading``."""

from tests.audit.reading2026g.reading import READING

READING.read()

__all__ = ["READING"]
