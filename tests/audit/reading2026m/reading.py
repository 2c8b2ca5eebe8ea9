"""The thirteenth reading by strangers: two readers (``kk`` and ``ll``), each in families of its own, wrote twenty
defects from public issues of 2026 beside their fixes and thirty right but unusual pieces of training code.

Two further persons declared them (``declared``, ``DECLARE.md``): they saw neither titles nor broken versions, and not
which cases are defects. Everything was committed before any case was audited.
"""

from __future__ import annotations

from pathlib import Path

from tests.audit.reading2026.base import Reading, parts, step_of

__all__ = ["READING", "declare", "no_subject", "parts", "step_of"]

READING = Reading(Path(__file__).parent)
declare, no_subject = READING.declare, READING.no_subject
