"""A sixth reading by strangers, of right steps; see ``reading``."""

from tests.audit.reading2026f.reading import READING

READING.read()

__all__ = ["READING"]
