"""The rows of the store, as the rest of the server sees them."""

from __future__ import annotations

import array
import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Thumbs = Literal["up", "down"]
Status = Literal["queued", "applied", "held", "unused", "failed", "cancelled"]
"""``applied``: in a version that became live; ``held``: in a candidate that is not promoted; ``cancelled``:
withdrawn before it was learned from."""
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class AdapterRow:
    """An adapter: version 0 is the base; ``live`` is the version that answers, ``pinned`` keeps it live."""

    id: int
    name: str
    created: float
    learn: Mapping[str, Any]
    live: int
    pinned: bool
    next: int
    origin: str | None


@dataclass(frozen=True)
class StoredCompletion:
    """A stored answer: its exact tokens and the log-probs that they were sampled with."""

    id: str
    choice: int
    model: str
    version: int
    kind: Literal["chat", "text"]
    messages: Sequence[Mapping[str, Any]]
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float
    text: str
    finish: str
    adapter: int | None = None
    key: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    created: float = field(default_factory=time.time)


@dataclass(frozen=True)
class NewFeedback:
    """A user's feedback on a completion, before it is stored."""

    completion: str
    choice: int = 0
    text: str | None = None
    thumbs: Thumbs | None = None
    better: str | None = None
    id: str | None = None


@dataclass(frozen=True)
class FeedbackRow:
    seq: int
    id: str
    received: float
    adapter: int
    completion: str
    choice: int
    key: str
    text: str | None
    thumbs: Thumbs | None
    better: str | None
    status: Status
    version: int | None
    note: str

    def public(self, adapter: str) -> dict[str, Any]:
        shown = asdict(self)
        shown.pop("seq")
        return shown | {"adapter": adapter}


@dataclass(frozen=True)
class VersionRow:
    """A version: ``promoted`` ones have been live or may be; a ``candidate`` has the reason in ``reason``."""

    adapter: int
    number: int
    parent: int
    created: float
    status: Literal["promoted", "candidate"]
    reason: str
    record: Mapping[str, Any]


def to_adapter(row: sqlite3.Row) -> AdapterRow:
    values = dict(row)
    return AdapterRow(**values | {"learn": json.loads(values["learn"]), "pinned": bool(values["pinned"])})


def to_version(row: sqlite3.Row) -> VersionRow:
    return VersionRow(**dict(row) | {"record": json.loads(row["record"])})


_ARRAYS = {"prompt": "i", "tokens": "i", "logprobs": "d"}
_JSON = ("messages", "sampling")


def to_completion(row: sqlite3.Row) -> StoredCompletion:
    values = dict(row)
    for name, code in _ARRAYS.items():
        numbers = array.array(code)
        numbers.frombytes(values[name])
        values[name] = tuple(numbers)
    return StoredCompletion(**values | {name: json.loads(values[name]) for name in _JSON})


def from_completion(completion: StoredCompletion) -> dict[str, Any]:
    """The row of a completion, by column."""
    values = dict(vars(completion))
    values |= {name: array.array(code, values[name]).tobytes() for name, code in _ARRAYS.items()}
    return values | {name: json.dumps(values[name]) for name in _JSON}
