"""Tests of README and docs: `pages` reads them, `check` checks them, `run` runs them, `tables` writes their tables."""
