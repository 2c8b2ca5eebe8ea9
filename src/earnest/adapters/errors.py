"""The error of this package."""

from earnest.errors import EarnestError


class AdapterError(EarnestError):
    """An adapter cannot be attached, loaded, merged or exported with the given settings."""
