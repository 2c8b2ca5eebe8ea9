"""Versions of weights for samplers outside the training process: push, probe, refuse stale ones.

Transports: Ray actors (``ray``), HTTP servers (``servers``), processes that reach only a bucket (``bucket``).
"""
