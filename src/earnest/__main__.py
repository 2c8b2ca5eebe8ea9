"""``python -m earnest`` is the command ``earnest``."""

from earnest.cli import main

main()
