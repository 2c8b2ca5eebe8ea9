"""Groups of commands that ``cli`` registers. torch is imported inside the functions, so that `--help` is fast."""
