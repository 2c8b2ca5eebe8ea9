"""What can go wrong with a guard."""

from __future__ import annotations

from earnest.errors import EarnestError


class GuardError(EarnestError):
    """A guard cannot do what was asked of it."""


class GuardWarning(UserWarning):
    """A guard went on, but what it guards with is doubtful."""
