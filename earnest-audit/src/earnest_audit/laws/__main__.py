"""``python -m earnest_audit.laws``: the laws as a markdown table; ``--pages``: a page for each, from its own file."""

import sys

from earnest_audit.frontends.pages import pages, table

if __name__ == "__main__":
    print(pages() if "--pages" in sys.argv else table())
