"""A seventh reading by strangers, of right steps only, in six families: agents, packing, sharding, schedules, data
stages and metrics over ranks. Four readers wrote a hundred cases in ``m``, ``n``, ``o`` and ``p`` (``TASK.md``), and
four further persons declared them (``reading2026d/DECLARE.md``), without seeing the audit. Everything was
committed before any of them was audited.
"""

from __future__ import annotations

from pathlib import Path

from tests.audit.reading2026.base import Reading

READING = Reading(Path(__file__).parent)
declare, no_subject = READING.declare, READING.no_subject
