"""Rows of the user's file as they were trained on: the text of their tokens, with the trained ones marked."""

from __future__ import annotations

from earnest.report.blocks import section
from earnest.report.markup import Html, el, join
from earnest.report.record import Run, SampleRecord


def section_of(run: Run) -> Html | None:
    """The section, or None for a run without data of the user's own."""
    rows = [sample for sample in run.samples if sample.of_data]
    if not rows:
        return None
    lead = "The first training rows of the file, as the model reads them. The underlined tokens are trained."
    return section("data", "Training rows", el("p", lead), *(_row(sample) for sample in rows))


def _row(sample: SampleRecord) -> Html:
    trained = sum(s.tokens for s in sample.segments if s.author == "data")
    every = sum(s.tokens for s in sample.segments)
    head = el("h3", f"{sample.prompt_id}: {trained} of {every} tokens trained")
    spans = (el("mark" if s.author == "data" else "span", s.text) for s in sample.segments)
    return join(head, el("p", *spans, class_="tokens"))
