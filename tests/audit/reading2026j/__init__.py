"""A tenth reading by strangers; see ``reading``."""

from tests.audit.reading2026j.reading import READING

READING.read()

__all__ = ["READING"]
