"""The pieces of markup that every section uses."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources

from earnest.report.markup import Child, Html, el


def asset(name: str) -> str:
    """A file of ``assets``: page.css or page.js."""
    return resources.files("earnest.report").joinpath("assets", name).read_text(encoding="utf-8")


def document(title: str, style: str, policy: str, body: Html) -> str:
    """A whole HTML file; ``policy`` is its content security policy."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("style", Html(style)),
    )
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def static(title: str, style: str, *children: Child) -> str:
    """A page without a script, in the report's style and ``style``; it loads nothing."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return document(title, asset("page.css") + style, policy, el("body", el("main", *children)))


def section(key: str, title: str, *children: Child) -> Html:
    return el("section", el("h2", title, id=f"{key}-title"), *children, id=key, aria_labelledby=f"{key}-title")


def scroll(label: str, child: Html) -> Html:
    """A box with its own scroll bar (keyboard too), so that a wide table does not widen the page."""
    return el("div", child, class_="scroll", tabindex=0, role="region", aria_label=label)


def table(label: str, columns: Iterable[str], rows: Iterable[Child], class_: str | None = None) -> Html:
    """Rows (of ``row``) below the names of their columns, in a box that scrolls."""
    head = el("tr", *(el("th", name, scope="col") for name in columns))
    return scroll(label, el("table", el("thead", head), el("tbody", *rows), class_=class_))


def row(name: Child, *cells: Child) -> Html:
    """A row of a table: its name, then its cells."""
    return el("tr", el("th", name, scope="row"), *(el("td", cell) for cell in cells))


def badge(text: str, tone: str) -> Html:
    return el("span", text, class_=f"badge {tone}")


def note(text: str) -> Html | None:
    return el("p", text, class_="note") if text else None


def none(text: str) -> Html:
    """The text in place of something that is missing."""
    return el("p", text, class_="none")
