"""Replicas that meet in an object store, and nowhere else (DiLoCo, arXiv 2311.08105)."""
