"""``python -m earnest.audit.laws``: the laws as a markdown table, from their own declarations."""

from __future__ import annotations

from earnest.audit.laws import LAWS
from earnest.audit.subjects import LAWS as SUBJECTS


def table() -> str:
    lines = ["| law | statement | needs | exceptions | detects |", "|---|---|---|---|---|"]
    for law in (*LAWS, *SUBJECTS):
        cells = (f"{law.code}, {law.name}", law.sentence, law.needs, law.traps, law.caught)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
