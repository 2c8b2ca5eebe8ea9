"""Conversations turn by turn, as tokens: what the policy sampled is marked, because only that can be trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from earnest.report.blocks import section
from earnest.report.markup import Html, el, number
from earnest.report.record import Run, SampleRecord, SegmentRecord

SHOWN = 6
TAUGHT = 2
"""Conversations of the training that a teacher with a hint taught."""


def section_of(run: Run) -> Html | None:
    """The section, or None for a run without conversations."""
    found = [sample for sample in run.samples if sample.conversation]
    if not found:
        return None
    last = max(found, key=lambda sample: sample.step).step
    chosen = ([s for s in found if s.phase == "after"] or [s for s in found if s.step == last])[:SHOWN]
    chosen += [s for s in found if s.teacher_read and s not in chosen][-TAUGHT:]
    lead = (
        "Every token that the policy read or sampled, turn by turn. The underlined ones were sampled by the policy. In "
        "conversations of a training step they alone are trained; held-out conversations are not trained on. Where a "
        "teacher read a hint or a solution, the tokens that it taught have a coloured ground."
    )
    shown = (_conversation(sample) for sample in chosen)
    return section("conversations", "Conversations", el("p", lead), _endings(run), *shown)


def _endings(run: Run) -> Html | None:
    """How the conversations of the first and of the last evaluation ended."""
    lines = [(e.step, _shares(e.metrics)) for e in run.evaluations if _shares(e.metrics)]
    chosen = lines[:1] + lines[1:][-1:]
    items = [el("li", f"step {step}: " + ", ".join(parts)) for step, parts in chosen]
    return el("ul", *items) if items else None


def _shares(metrics: Mapping[str, float | None]) -> list[str]:
    found = {name.removeprefix("ended/"): value for name, value in metrics.items() if name.startswith("ended/")}
    return [f"{name.replace('_', ' ')} {value:.0%}" for name, value in found.items() if value]


def _conversation(sample: SampleRecord) -> Html:
    rewards = ", ".join(number(reward, 3) for reward in sample.turn_rewards)
    parts = [
        f"{sample.phase}, step {sample.step}",
        f"ended: {(sample.ending or 'unknown').replace('_', ' ')}",
        "" if sample.reward is None else f"reward {number(sample.reward, 3)}",
        f"rewards of the turns: {rewards}" if any(sample.turn_rewards) else "",
    ]
    head = el("p", " · ".join(part for part in parts if part), el("span", sample.prompt_id, class_="id"), class_="head")
    rows = sorted({segment.row for segment in sample.segments})
    marked = "trained" if sample.phase == "train" else "sampled"
    bodies = [
        _row([s for s in sample.segments if s.row == row], row if len(rows) > 1 else None, marked) for row in rows
    ]
    hints = [
        el("details", el("summary", "what the teacher read before the tokens that it taught"), el("pre", text))
        for text in sample.teacher_read
    ]
    return el("article", head, *bodies, *hints, class_="conversation")


def _row(segments: Sequence[SegmentRecord], number_: int | None, marked: str) -> Html:
    label = None if number_ is None else el("p", f"row {number_ + 1}: the template rewrote the history", class_="soft")
    return el("div", label, *(_turn(turn, marked) for turn in _turns(segments)))


def _turns(segments: Sequence[SegmentRecord]) -> list[list[SegmentRecord]]:
    """Each segment of the policy, a tool or a user with the template's tokens before it; the last also has those after
    it."""
    turns: list[list[SegmentRecord]] = []
    before: list[SegmentRecord] = []
    for segment in segments:
        if segment.author == "template":
            before.append(segment)
        elif turns and not before and turns[-1][-1].author == segment.author != "policy":
            turns[-1].append(segment)
        else:
            turns.append([*before, segment])
            before = []
    if before:
        turns = [*turns[:-1], [*turns[-1], *before]] if turns else [before]
    return turns


def _turn(segments: Sequence[SegmentRecord], marked: str) -> Html:
    """``marked``: what is written at the policy's turns."""
    author = next((s.author for s in segments if s.author != "template"), "template")
    own = [s for s in segments if s.author == author]
    tokens, taught = sum(s.tokens for s in own), sum(s.taught for s in own)
    parts = [author, f"{tokens} tokens" if tokens != 1 else "1 token"]
    parts += [marked] if author == "policy" else ["read"]
    parts += [f"{taught} taught"] if taught else []
    spans = []
    for s in segments:
        kind = f"segment {s.author}{' taught' if s.taught else ''}"
        spans.append(el("span", s.text, class_=kind, title=f"{s.author}, {s.tokens} tokens"))
    return el("div", el("p", " · ".join(parts), class_="who"), el("p", *spans, class_="completion"), class_="turn")
