"""A third reading by strangers: two more readers who had never seen the audit wrote the cases in ``e`` and ``f`` from
public issues of 2026 (``TASK.md`` is all that they were given).

Two further persons declared them (``DECLARE.md``, ``declared``). They read the documentation of the declarations and no
source of the audit, did not see the broken versions, titles or names of the cases, and did not call the audit.
Everything was committed before any case was audited; the readers' and declarers' files are unchanged, but for the names
of the cases.
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
