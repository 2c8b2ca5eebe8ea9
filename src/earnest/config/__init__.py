"""From YAML and ``key=value`` to a checked ``RunConfig``.

Names resolve when first used: a recipe is read, and its mistakes of spelling are found, without torch.
"""

from earnest_audit.lazy import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
