"""Loading a policy, its tokenizer and chat template, and sampling from it.

Names resolve when first used: importing this package imports neither torch nor transformers.
"""

from earnest_audit.lazy import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
