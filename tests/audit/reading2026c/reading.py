"""A third reading by strangers: two more readers who had never seen the audit wrote the cases in ``e`` and ``f`` from
public issues of 2026 (``TASK.md`` is all that they were given).

Two further persons declared them (``DECLARE.md``, ``declared``). They read the documentation of the declarations and no
source of the audit, did not see the broken versions, titles or names of the cases, and did not call the audit.
Everything was committed before any case was audited. The readers' files are unchanged. After the record of the first
run, a field that was added to ``Step`` was declared where the case's words state it (f/r19: empty_rows).
"""

from __future__ import annotations

from pathlib import Path

from tests.audit.reading2026.base import Reading, load

HERE = Path(__file__).parent
READING = Reading(HERE)
declare, no_subject = READING.declare, READING.no_subject


def read() -> Reading:
    """The cases with their declarations."""
    for path in sorted((HERE / "declared").glob("*.py")):
        load(path)
    READING.sort()
    return READING
