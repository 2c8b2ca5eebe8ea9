"""Filters over pairs, one after the other, with what each dropped, the reason and examples.

A filter that drops everything it was given, or raises, stops the job: an empty file is never a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from earnest.replay.errors import CleaningError
from earnest.replay.filters import Backend, BuiltIn, FilterResult, Op
from earnest.replay.leakage import Leakage
from earnest.replay.pairs import Pair

EXAMPLES = 3
CLEANERS = ("auto", "built-in", "data-juicer")


@dataclass(frozen=True)
class Dropped:
    """An example: the pair, the text that was judged, and what was found."""

    pair: str
    trace: str
    turn: int
    text: str
    value: float | None
    twin: str | None = None


@dataclass(frozen=True)
class Filtered:
    """What one filter did. ``unjudged`` have no text in its field (an answer that is a tool call), and stay."""

    op: str
    field: str
    settings: Mapping[str, Any]
    judged: int
    unjudged: int
    dropped: int
    examples: tuple[Dropped, ...] = ()


@dataclass(frozen=True)
class Cleaned:
    """The pairs that are left, and what each filter did."""

    pairs: tuple[Pair, ...]
    steps: tuple[Filtered, ...]
    backend: str


def backend_of(cleaner: str) -> Backend:
    """``auto`` is data-juicer where it is installed."""
    from earnest.replay import juicer

    if cleaner not in CLEANERS:
        raise CleaningError(f"cleaner {cleaner!r} is unknown; it is one of {', '.join(CLEANERS)}.")
    if cleaner == "data-juicer" or (cleaner == "auto" and juicer.installed()):
        return juicer.Juicer()
    return BuiltIn()


def clean(
    pairs: Sequence[Pair], ops: Sequence[Op], backend: Backend | None = None, leakage: Leakage | None = None
) -> Cleaned:
    """Each filter gets the pairs that the one before it kept; leakage comes last."""
    backend = BuiltIn() if backend is None else backend
    left = list(pairs)
    steps = []
    for op in (*ops, *(() if leakage is None else (leakage,))):
        texts = [pair.text(op.field) for pair in left]
        judged = [i for i, text in enumerate(texts) if text.strip()]
        said = [texts[i] for i in judged]
        verdicts = op.judge(said) if isinstance(op, Leakage) else _judge(backend, op, said)
        left, step = _sift(op, left, texts, dict(zip(judged, verdicts, strict=True)))
        steps.append(step)
    return Cleaned(tuple(left), tuple(steps), backend.name)


def _judge(backend: Backend, op: Op, texts: Sequence[str]) -> list[FilterResult]:
    if not texts:
        return []
    try:
        verdicts = backend.judge(op, texts)
    except CleaningError:
        raise
    except Exception as error:  # an error in foreign code stops the job: no record is kept or dropped without a verdict
        raise CleaningError(
            f"{op.op} ({backend.name}) raised {type(error).__name__}: {error}. Nothing was dropped; correct it or "
            "leave it out."
        ) from error
    if len(verdicts) != len(texts):
        raise CleaningError(f"{op.op} ({backend.name}) gave {len(verdicts)} verdicts on {len(texts)} texts.")
    return verdicts


def _sift(
    op: Op | Leakage, pairs: list[Pair], texts: list[str], judged: Mapping[int, FilterResult]
) -> tuple[list[Pair], Filtered]:
    bad = {i: v for i, v in judged.items() if not v.keep}
    places, examples = list(judged), []
    for i, v in list(bad.items())[:EXAMPLES]:
        twin = None if v.twin is None else pairs[places[v.twin]].id
        examples.append(Dropped(pairs[i].id, pairs[i].trace, pairs[i].turn, texts[i], v.value, twin))
    if pairs and len(bad) == len(pairs):
        shown = "; ".join(f"{e.text[:60]!r} ({'' if e.value is None else f'{e.value:.3g}'})" for e in examples)
        raise CleaningError(
            f"{op.op} on {op.field} ({dict(op.settings)}) dropped all {len(pairs)} pairs that were left, such as "
            f"{shown}. Loosen it or leave it out; nothing was written."
        )
    kept = [pair for i, pair in enumerate(pairs) if i not in bad]
    unjudged = len(pairs) - len(judged)
    return kept, Filtered(op.op, op.field, dict(op.settings), len(judged), unjudged, len(bad), tuple(examples))
