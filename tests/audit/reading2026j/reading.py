"""The tenth reading by strangers: four readers wrote a hundred right but unusual pieces of training code (``y``, ``z``,
``aa`` and ``bb``), each in families of its own (``TASK.md``).

Four further persons declared them (``declared``), as in the ninth reading. Everything was committed before any case
was audited.
"""

from __future__ import annotations

from pathlib import Path

from tests.audit.reading2026.base import Reading

READING = Reading(Path(__file__).parent)
declare, no_subject = READING.declare, READING.no_subject
