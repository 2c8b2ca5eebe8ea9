"""Runs: start one from its config, stop it, resume it bit for bit. Everything that it writes is in its folder."""

from earnest_audit.lazy import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
