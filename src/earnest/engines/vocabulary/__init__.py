"""One pass over the vocabulary makes every per-token scalar that an objective asks for."""

from earnest.engines.vocabulary.fused import backward, scalars

__all__ = ["backward", "scalars"]
