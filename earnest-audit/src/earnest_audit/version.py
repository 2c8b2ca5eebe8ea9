"""The version of earnest and of earnest-audit. Both pyproject files read the file VERSION."""

from pathlib import Path

__version__ = Path(__file__).with_name("VERSION").read_text(encoding="utf-8").strip()
