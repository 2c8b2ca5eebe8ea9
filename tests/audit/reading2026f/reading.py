"""A sixth reading by strangers, of right steps only: cases 26 to 50 of the readers of ``tests/audit/reading2026e``,
most of them no losses. Four further persons declared them, and they were audited after the causes of the fifth
reading's alarms were removed. Everything was committed before.
"""

from __future__ import annotations

from pathlib import Path

from tests.audit.reading2026.base import Reading

READING = Reading(Path(__file__).parent)
declare, no_subject = READING.declare, READING.no_subject
