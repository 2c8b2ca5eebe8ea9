"""A third reading by strangers; see ``reading``."""

from tests.audit.reading2026c.reading import read

READING = read()
