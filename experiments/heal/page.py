"""One self-contained page: figure, table, and the policy's answers round by round."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from earnest.disk import write_text
from earnest.report.markup import Html, el, join
from earnest.steering.filter import Separation
from experiments.heal.figure import draw
from experiments.heal.run import RESULTS, read_results
from experiments.heal.table import tables

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; display: block; overflow-x: auto }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: left; white-space: nowrap }
img { max-width: 100% } h2 { margin-top: 2rem } .said td { white-space: normal }
"""

COLUMNS = ("round", "trait", "steered", "coherence", "steered", "mass", "sense", "dose", "survivors", "barrier/SFT",
           "cosine", "healed says", "steered says")  # fmt: skip


_FILTER = ("good", "broken", "auc", "reasons")


def write_page(folder: Path) -> Path:
    """report.html and heal.png beside the results."""
    results = read_results(folder / RESULTS)
    picture = draw(results, folder / "heal.png")
    source = "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
    title = f"Steer and heal: {results['model']}, {results['task']}"
    body = join(
        el("h1", title),
        Html(f'<img alt="trait against incoherence, and mass over rounds" src="{source}">'),
        *[_table(block) for block in tables(results).split("\n\n")],
        *[_loop(arm) for arm in results["arms"]],
    )
    head = join(el("meta", charset="utf-8"), el("title", title), Html(f"<style>{STYLE}</style>"))
    page = folder / "report.html"
    write_text(page, f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n')
    return page


def _table(markdown: str, **attributes: str) -> Html:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.strip().splitlines()]
    head, body = rows[0], rows[2:]
    return el(
        "table",
        el("thead", el("tr", *[el("th", cell) for cell in head])),
        el("tbody", *[el("tr", *[el("td", cell) for cell in row]) for row in body]),
        **attributes,
    )


def _loop(arm: dict[str, Any]) -> Html:
    """The first seed's rounds in numbers and words."""
    run = arm["runs"][0]
    lines = ["| " + " | ".join(COLUMNS) + " |", ""]
    for r in run["rounds"]:
        said = [(r[who]["answers"] or [""])[0].replace("|", "¦").replace("\n", " ") for who in ("healed", "steered")]
        numbers = [
            f"{r['healed']['trait']:.2f}",
            f"{r['steered']['trait']:.2f}",
            f"{r['healed']['coherence']:.3f}",
            f"{r['steered']['coherence']:.3f}",
            f"{r['healed']['mass']:.3f}",
            f"{r['healed']['sense']:.2f}",
            f"{r['dose']['used']:.3f}",
            str(r["survivors"]),
            f"{r['heal']['pressure']:.2f}",
            f"{r['vector']['cosine_first']:.2f}",
        ]
        lines.append("| " + " | ".join([str(r["round"]), *numbers, *said]) + " |")
    first = run["rounds"][0].get("filter") if run["rounds"] else None
    shown = None if first is None else el("p", f"In round 1 {Separation(**{k: first[k] for k in _FILTER})}.")
    ended = None if run["stopped"] is None else el("p", f"Stopped: {run['stopped']}")
    return join(el("h2", arm["name"]), _table("\n".join(lines), class_="said"), shown, ended)
