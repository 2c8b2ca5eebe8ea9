"""A third reading by strangers: two more readers who had never seen the audit wrote the cases in ``e`` and ``f`` from
public issues of 2026 (``TASK.md`` is all that they were given).

Two further persons declared them (``DECLARE.md``, ``declared``). They read the documentation of the declarations and no
source of the audit, did not see the broken versions, titles or names of the cases, and did not call the audit.
Everything was committed before any case was audited. The readers' files are unchanged. After the record of the first
run, a field that was added to ``Step`` was declared where the case's words state it (f/r19: empty_rows).
"""

from __future__ import annotations

from pathlib import Path

from tests.audit.reading2026.base import Reading

READING = Reading(Path(__file__).parent)
declare, no_subject = READING.declare, READING.no_subject
