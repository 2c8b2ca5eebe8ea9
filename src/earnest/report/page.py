"""The page: one HTML file that makes no network request; the same folder gives the same bytes."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from earnest.disk import write_text
from earnest.report import blocks, conversations, gallery, headline, laws, sections
from earnest.report.curves import Chart
from earnest.report.load import load
from earnest.report.markup import Html, el
from earnest.report.record import ReportError, Run
from earnest.version import __version__


def write(run_dir: str | Path, to: str | Path | None = None) -> Path:
    """Make the report of ``run_dir`` and return its path: ``report.html`` in the folder, or ``to``."""
    return put(render(load(run_dir)), Path(to) if to is not None else Path(run_dir) / "report.html")


def put(text: str, target: Path) -> Path:
    """Write a page, atomically."""
    try:
        write_text(target, text)
    except OSError as error:
        raise ReportError(
            f"{target}: cannot be written ({error.strerror}); give another place with to=FILE."
        ) from error
    return target


def render(run: Run) -> str:
    reward, reward_charts = sections.reward(run)
    terms, term_charts = sections.terms(run)
    update, update_charts = sections.update(run)
    parts: list[tuple[str, str, Html | None]] = [
        ("reward", "Reward" if run.measure == "reward" else "Held-out rows", reward),
        ("terms", "Terms", terms),
        ("update", "Update", update),
        ("samples", "Samples", gallery.samples(run)),
        ("data", "Training rows", gallery.training_rows(run)),
        ("conversations", "Conversations", conversations.section_of(run)),
        ("samplers", "Samplers", sections.samplers(run)),
        ("verdict", "Verdict", laws.verdict(run)),
        ("watch", "Watch", sections.watch(run)),
        ("events", "Events", sections.events(run)),
        ("config", "Config", sections.config(run)),
        ("environment", "Environment", sections.environment(run)),
    ]
    body = [headline.headline(run), headline.notices(run), *(part for *_, part in parts)]
    names = {key: name for key, name, part in parts if part is not None}
    title = f"{run.header.task} on {run.header.model} · earnest"
    return document(title, names, body, [*reward_charts, *term_charts, *update_charts], run.folder.name)


def document(
    title: str, names: Mapping[str, str], body: Sequence[Html | None], charts: Sequence[Chart], source: str
) -> str:
    """A page around ``body``; ``names`` are its sections (key → title, the first has the curves) and ``source`` is
    what it was made from."""
    style, script = blocks.asset("page.css"), blocks.asset("page.js")
    assert len({chart.key for chart in charts}) == len(charts), "two charts of one page share a key"
    data = _json({chart.key: chart.data() for chart in charts})
    contents = el("nav", *(el("a", name, href=f"#{key}") for key, name in names.items()), aria_label="Sections")
    page = el(
        "body",
        el("a", "Skip to the curves", href=f"#{'curves' if 'curves' in names else next(iter(names))}", class_="skip"),
        el("div", contents, el("button", "theme", type="button", id="theme", hidden=True), class_="bar"),
        el("main", *body),
        el("footer", el("p", f"Made by earnest {__version__} from {source}; loads nothing from anywhere.")),
        el("script", data, type="application/json", id="charts"),
        el("script", Html(script)),
    )
    return blocks.document(title, style, _policy(style, script), page)


def _json(data: Any) -> Html:
    """JSON inside a script element: without ``<`` no text in it can end the element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Html(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _policy(style: str, script: str) -> str:
    """The content security policy: nothing is loaded, and only our own script and style run."""
    own = f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
