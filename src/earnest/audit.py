"""``earnest.audit``: the package ``earnest_audit``, under the name that users of earnest type."""

from typing import Any

import earnest_audit

__all__ = earnest_audit.__all__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; earnest_audit has {', '.join(__all__)}.")
    return getattr(earnest_audit, name)
