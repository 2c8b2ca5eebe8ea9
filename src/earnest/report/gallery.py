"""Samples before and after training, side by side: the same held-out prompts, in the file's order, not selected. And
rows of the user's file as they were trained on."""

from __future__ import annotations

from collections.abc import Sequence

from earnest.report.blocks import none, note, section
from earnest.report.markup import Html, el, join, number
from earnest.report.record import Run, SampleRecord

PAIRS = 100
ROLLOUTS = 60

KINDS = ("better", "worse", "same")


def samples(run: Run) -> Html:
    if not run.samples:
        return section("samples", "Samples", none("No samples are recorded."))
    pairs = run.pairs
    shown = pairs[:PAIRS]
    kinds = [_kind(*pair) for pair in pairs]
    cut = f"The first {PAIRS} of {len(pairs):,} are shown; samples.jsonl has all." if len(pairs) > PAIRS else ""
    return section(
        "samples",
        "Samples",
        el("p", _lead(kinds, _number(pairs))) if pairs else None,
        _filter(kinds[:PAIRS]) if len(set(kinds[:PAIRS])) > 1 else None,
        el("div", *(_pair(*pair) for pair in shown), class_="pairs"),
        note(cut),
        _rollouts(run),
    )


def _lead(kinds: Sequence[str], what: str) -> str:
    paired = len(kinds) - kinds.count("unpaired")
    if not paired:
        return f"{len(kinds):,} held-out prompts are recorded on one side only: there is nothing to compare yet."
    counts = f"{kinds.count('better')} better, {kinds.count('worse')} worse, {kinds.count('same')} with the same {what}"
    rest = f"; {kinds.count('unpaired')} on one side only" if paired < len(kinds) else ""
    return f"{len(kinds):,} recorded held-out prompts with the same sampling seed, in their order: {counts}{rest}."


def _filter(kinds: Sequence[str]) -> Html:
    """Buttons that the script activates; without the script all samples are shown."""
    options = [("all", len(kinds)), *((kind, kinds.count(kind)) for kind in KINDS)]
    buttons = []
    for name, count in options:
        own = {"type": "button", "data_show": name, "aria_pressed": "true" if name == "all" else "false"}
        buttons.append(el("button", name, el("span", str(count), class_="count"), **own))
    return el("div", *buttons, class_="filter", role="group", aria_label="Which samples", hidden=True)


def _kind(before: SampleRecord | None, after: SampleRecord | None) -> str:
    if before is None or after is None:
        return "unpaired"
    for old, new in ((before.reward, after.reward), (before.margin, after.margin), (after.loss, before.loss)):
        if old is not None and new is not None:
            return "better" if new > old else "worse" if new < old else "same"
    return "unpaired"


def _number(pairs: Sequence[tuple[SampleRecord | None, SampleRecord | None]]) -> str:
    """The number by which before and after are compared."""
    known = next((sample for pair in pairs for sample in pair if sample is not None), None)
    if known is None:
        return "reward"
    return "loss" if known.loss is not None else "margin" if known.margin is not None else "reward"


def _pair(before: SampleRecord | None, after: SampleRecord | None) -> Html:
    known = after or before
    assert known is not None, "a pair is made from at least one sample"
    identity = known.prompt_id + (f" · sample {known.sample}" if known.sample else "")
    prompt, sides = _prompt(known, identity), (_side("before", before), _side("after", after))
    return el("article", prompt, *sides, class_="pair", data_kind=_kind(before, after))


def _prompt(sample: SampleRecord, identity: str) -> Html:
    told = (el("p", el("span", m.role, class_="role"), el("span", m.text, class_="text")) for m in sample.prompt)
    return el("div", el("div", *told), el("span", identity, class_="id"), class_="prompt")


def _side(name: str, sample: SampleRecord | None) -> Html:
    if sample is None:
        head = el("p", el("span", name, class_="role"), class_="head")
        return el("div", head, none("not recorded"), class_="side")
    tone = "" if sample.correct is None else " right" if sample.correct else " wrong"
    word = "" if sample.correct is None else ", correct" if sample.correct else ", not correct"
    length = f" · {sample.tokens} tokens" if sample.tokens is not None else ""
    length += ", cut off" if sample.cut_off else ""
    numbers = {"reward": sample.reward, "loss": sample.loss, "margin": sample.margin}
    reward = ", ".join(f"{name} {number(value, 3)}" for name, value in numbers.items() if value is not None)
    mark = el("span", f"{reward}{word}", class_="score" + tone) if reward or word else None
    head = el("p", el("span", name, class_="role"), mark, el("span", length, class_="soft"), class_="head")
    completion = el("p", sample.completion, class_="completion") if sample.completion else none("(nothing)")
    feedback = el("p", sample.feedback, class_="feedback") if sample.feedback else None
    return el("div", head, completion, feedback, class_="side")


def _rollouts(run: Run) -> Html | None:
    rollouts = [sample for sample in run.samples if sample.phase == "train" and not sample.of_data]
    if not rollouts:
        return None
    shown, label = rollouts, f"Training rollouts ({len(rollouts)})"
    if len(rollouts) > ROLLOUTS:
        shown = [rollouts[round(i * (len(rollouts) - 1) / (ROLLOUTS - 1))] for i in range(ROLLOUTS)]
        label = f"Training rollouts ({ROLLOUTS} of {len(rollouts)}, evenly)"
    entries = (el("article", _prompt(s, s.prompt_id), _side(f"step {s.step}", s), class_="pair one") for s in shown)
    return el("details", el("summary", label), el("div", *entries, class_="pairs"), class_="rollouts")


def training_rows(run: Run) -> Html | None:
    """The text of the first rows' tokens, with the trained ones marked; None for a run without the user's own data."""
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
