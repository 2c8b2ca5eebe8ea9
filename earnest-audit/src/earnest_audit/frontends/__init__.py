"""How an audit is started: the command, pytest, a callback of trainers, steps in the form of other libraries."""

from earnest_audit.lazy import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
