"""The one error of this package, a ``ValueError`` for the user."""

from __future__ import annotations

from earnest.errors import EarnestError


class AdapterError(EarnestError):
    """An adapter cannot be attached, loaded, merged or exported as asked."""
