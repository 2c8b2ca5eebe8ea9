"""Why the first audit of the tenth reading accused a right step, in one line each."""

from __future__ import annotations

MISSES: dict[str, str] = {}
ALARMS: dict[str, str] = {}
