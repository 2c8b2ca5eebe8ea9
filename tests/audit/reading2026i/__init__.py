"""A ninth reading by strangers; see ``reading``."""

from tests.audit.reading2026i.reading import READING

READING.read()

__all__ = ["READING"]
