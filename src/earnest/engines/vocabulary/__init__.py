"""One pass over the vocabulary computes every per-token scalar that an objective reads."""

from earnest.engines.vocabulary.fused import scalars

__all__ = ["scalars"]
