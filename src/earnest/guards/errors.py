"""Errors and warnings of guards."""

from earnest.errors import EarnestError


class GuardError(EarnestError):
    """A guard cannot be made or applied with these settings."""


class GuardWarning(UserWarning):
    """The guard continues, but its directions are doubtful."""
