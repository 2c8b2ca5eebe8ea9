"""``python -m earnest_audit.laws``: the laws as a markdown table; ``--pages``: a page for each, from its own file."""

from __future__ import annotations

import sys

from earnest_audit.frontends.pages import page
from earnest_audit.laws import LAWS
from earnest_audit.subjects import LAWS as SUBJECTS

ALL = (*LAWS, *SUBJECTS)


def table() -> str:
    lines = ["| law | tier | statement |", "|---|---|---|"]
    for law in ALL:
        cells = (f"{law.code}, {law.name}", law.tier, law.sentence)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def pages() -> str:
    return "\n\n".join(page(law) for law in ALL)


if __name__ == "__main__":
    print(pages() if "--pages" in sys.argv else table())
