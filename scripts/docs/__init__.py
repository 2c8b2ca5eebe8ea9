"""README and docs as programs: `pages` reads, `check` judges, `run` executes them, `tables` writes their tables."""
