"""The eleventh reading by strangers: four readers (``cc``, ``dd``, ``ee`` and ``ff``), each in families of its own,
wrote forty defects from public issues of 2026 beside their fixes and forty right but unusual pieces of training code.

They declared their own cases (``declared``), after they had written them, from the guide and from the docstrings of the
declarations (``TASK.md``). Everything was committed before any case was audited.
"""

from __future__ import annotations

from pathlib import Path

from tests.audit.reading2026.base import Reading, parts, step_of

__all__ = ["READING", "declare", "no_subject", "parts", "step_of"]

READING = Reading(Path(__file__).parent)
declare, no_subject = READING.declare, READING.no_subject
