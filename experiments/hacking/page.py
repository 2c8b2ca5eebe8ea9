"""One self-contained page: the figure and the tables, and what is missing."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from earnest.disk import write_json, write_text
from experiments.hacking.config import Config
from experiments.hacking.figure import write_figure
from experiments.hacking.plan import ARMS, Job
from experiments.hacking.results import FILE, gather
from experiments.hacking.tables import arms_of, levels, tables

STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:82rem;margin:2rem auto;padding:0 1rem}
img{max-width:100%;background:#fff;border-radius:6px} .wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.5rem 0 1.5rem}
td,th{padding:.25rem .7rem;border-bottom:1px solid #8884;text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left} .missing{color:#b00} dt{font-weight:600;float:left;clear:left;width:9rem}
"""


def write_page(folder: Path, config: Config, jobs: Sequence[Job], full: bool) -> Path:
    """results.json, results.md, hacking.png and report.html in ``folder``; returns the last."""
    facts = config.model_dump(mode="json", exclude={"out"}) | {"full": full}
    results = gather(folder, [job.name for job in jobs], facts)
    write_json(folder / FILE, results)
    found = tables(results)
    text = "\n\n".join(f"## {title}\n\n" + "\n".join(lines) for title, lines in found.items())
    write_text(folder / "results.md", text + "\n")
    picture = write_figure(results, folder / "hacking.png")
    encoded = base64.b64encode(picture.read_bytes()).decode()
    missing = results["missing"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>hacking</title><style>{STYLE}</style><h1>{html.escape(config.description or 'hacking')}</h1>",
        f"<p class=missing>Not there yet: {html.escape(', '.join(missing))}</p>" if missing else "",
        f"<img alt='exploited and solved rates of every arm by step' src='data:image/png;base64,{encoded}'>",
        f"<p>Means over seeds with 95&nbsp;% intervals (one seed: over its held-out prompts). The matched solve "
        f"rate (what none, erase and route all reach), seed by seed: {levels(results)}. {_clock(results)}</p>",
    ]
    for title, lines in found.items():
        parts.append(f"<h2>{html.escape(title)}</h2><div class=wide>{_table(lines)}</div>")
    arms = "".join(f"<dt>{html.escape(a)}</dt><dd>{html.escape(ARMS[a])}</dd>" for a in arms_of(results))
    write_text(folder / "report.html", "\n".join([*parts, f"<h2>The arms</h2><dl>{arms}</dl></html>"]))
    return folder / "report.html"


def _clock(results: Mapping[str, Any]) -> str:
    """How long the jobs took; jobs of an earlier version did not record it."""
    seconds = [job["seconds"] for job in results["jobs"] if job.get("seconds") is not None]
    return f"{len(seconds)} training runs took {sum(seconds):.0f}&nbsp;s." if seconds else ""


def _table(lines: Sequence[str]) -> str:
    cells = [[html.escape(c.strip()) for c in line.strip("|").split("|")] for line in lines]
    head = "".join(f"<th>{c}</th>" for c in cells[0])
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in cells[2:])
    return f"<table><tr>{head}</tr>{body}</table>"
