"""``python -m earnest_audit``: the command ``earnest-audit``."""

import sys

from earnest_audit.frontends.command import main

if __name__ == "__main__":
    sys.exit(main())
