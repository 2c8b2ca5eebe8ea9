"""An eleventh reading by strangers, who declared their own cases; see ``reading``."""

from tests.audit.reading2026k.reading import READING

READING.read()

__all__ = ["READING"]
