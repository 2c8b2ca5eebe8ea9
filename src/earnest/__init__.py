"""Post-training of language models in which nothing fails silently.

Names are imported when they are first used, so ``import earnest`` costs almost nothing; ``__init__.pyi`` lists them.
A term that is registered without being listed there is ``earnest.<class name>`` as well.
"""

from __future__ import annotations

from typing import Any

from earnest.version import __version__ as __version__
from earnest_audit.lazy import lazy

_listed, __dir__, __all__ = lazy(__name__)


def __getattr__(name: str) -> Any:
    if name[0].isupper() and name not in __all__:
        from earnest import objectives

        return getattr(objectives, name)
    return _listed(name)
