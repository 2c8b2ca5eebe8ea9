"""An eighth reading by strangers; see ``reading``."""

from tests.audit.reading2026h.reading import READING

READING.read()

__all__ = ["READING"]
