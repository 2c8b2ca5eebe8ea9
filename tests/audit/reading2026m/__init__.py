"""A thirteenth reading by strangers; see ``reading``."""

from tests.audit.reading2026m.reading import READING

READING.read()

__all__ = ["READING"]
