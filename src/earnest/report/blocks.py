"""The few pieces of markup that every section is made of."""

from __future__ import annotations

from earnest.report.markup import Child, Html, el


def section(key: str, title: str, *children: Child) -> Html:
    return el("section", el("h2", title, id=f"{key}-title"), *children, id=key, aria_labelledby=f"{key}-title")


def scroll(label: str, child: Html) -> Html:
    """A box that scrolls on its own, by keyboard too, so that a wide table never widens the page."""
    return el("div", child, class_="scroll", tabindex=0, role="region", aria_label=label)


def badge(text: str, tone: str) -> Html:
    return el("span", text, class_=f"badge {tone}")


def note(text: str) -> Html | None:
    return el("p", text, class_="note") if text else None


def none(text: str) -> Html:
    """What is said where something is missing."""
    return el("p", text, class_="none")
