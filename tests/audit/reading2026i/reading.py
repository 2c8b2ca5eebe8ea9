"""The ninth reading by strangers: four readers wrote the cases in ``s``, ``t``, ``u`` and ``v``, each ten defects from
public issues of 2026 beside their fixes and twenty-five right but unusual pieces of training code (their task is that
of ``reading2026h``).

Four further persons declared them (``declared``). They saw neither titles nor broken versions, read the
documentation of the declarations and no source of the audit, and did not call the audit. Everything was committed
before any case was audited.
"""

from __future__ import annotations

from pathlib import Path

from tests.audit.reading2026.base import Reading

READING = Reading(Path(__file__).parent)
declare, no_subject = READING.declare, READING.no_subject
