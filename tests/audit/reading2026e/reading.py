"""A fifth reading by strangers, of right steps only: four more readers wrote two hundred pieces of unusual right
training code (``reading2026d/TASK.md``). The first 25 of each are here in ``i``, ``j``, ``k`` and ``l``, all of them
losses; four further persons declared them (``reading2026d/DECLARE.md``), without seeing the audit. Everything was
committed before any of them was audited.
"""

from __future__ import annotations

from pathlib import Path

from tests.audit.reading2026.base import Reading

READING = Reading(Path(__file__).parent)
declare, no_subject = READING.declare, READING.no_subject
