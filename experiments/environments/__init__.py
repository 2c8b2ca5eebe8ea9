"""Environments of verifiers that experiments train on; put this folder on the path to load one by its name."""
