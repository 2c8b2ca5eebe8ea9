"""Post-training of language models in which nothing fails silently."""

__version__ = "0.1.0"
