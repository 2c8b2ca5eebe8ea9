"""Traces into preference pairs: replay each assistant turn to teachers, judge, pair, clean.

Names resolve when first used; importing this package imports neither torch nor pyarrow.
"""

from earnest_audit.lazy import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
