"""The pieces of markup that every section uses."""

from __future__ import annotations

from earnest.report.markup import Child, Html, el


def section(key: str, title: str, *children: Child) -> Html:
    return el("section", el("h2", title, id=f"{key}-title"), *children, id=key, aria_labelledby=f"{key}-title")


def scroll(label: str, child: Html) -> Html:
    """A box with its own scroll bar (keyboard too), so that a wide table does not widen the page."""
    return el("div", child, class_="scroll", tabindex=0, role="region", aria_label=label)


def badge(text: str, tone: str) -> Html:
    return el("span", text, class_=f"badge {tone}")


def note(text: str) -> Html | None:
    return el("p", text, class_="note") if text else None


def none(text: str) -> Html:
    """The text in place of something that is missing."""
    return el("p", text, class_="none")
