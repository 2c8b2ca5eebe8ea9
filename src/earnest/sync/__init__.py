"""Versions of weights for samplers outside the training process: push, probe, refuse what is stale.

Transports: Ray actors (``ray``), HTTP servers (``servers``), processes that see only a bucket (``bucket``).
"""
