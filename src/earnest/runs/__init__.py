"""A run from its config to its folder: start it, stop it, resume it bit for bit."""

from __future__ import annotations

from earnest.lazy import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
