"""Replicas that synchronize through an object store and need no other connection (DiLoCo, arXiv 2311.08105)."""
