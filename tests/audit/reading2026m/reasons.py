"""Why the first audit of the thirteenth reading missed a defect or accused a right step, in one line each."""

from __future__ import annotations

MISSES: dict[str, str] = {}
ALARMS: dict[str, str] = {}
