"""Post-training of language models in which nothing fails silently.

Names are imported when they are first used, so ``import earnest`` costs almost nothing; ``__init__.pyi`` lists them.
A term or an adapter that is registered under another name is ``earnest.<class name>`` as well.
"""

from __future__ import annotations

from typing import Any

from earnest.lazy import lazy
from earnest.version import __version__ as __version__

_listed, __dir__, __all__ = lazy(__name__)


def __getattr__(name: str) -> Any:
    if name in __all__ or not name[0].isupper():
        return _listed(name)
    from earnest.adapters import VARIANTS
    from earnest.objectives import OBJECTIVES

    known = {cls.__name__: cls for cls in (*OBJECTIVES.values(), *VARIANTS.values())}
    return known[name] if name in known else _listed(name)
