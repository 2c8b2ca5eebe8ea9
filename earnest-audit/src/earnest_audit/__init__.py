"""The laws that every correct training step obeys, and how to check them on code that was never seen before.

Needs torch and numpy, and imports no package of earnest. Names are imported when they are first used;
``__init__.pyi`` lists them.
"""

from earnest_audit.lazy import lazy
from earnest_audit.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy(__name__, AuditCallback="transformers")
