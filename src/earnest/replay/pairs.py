"""Preference pairs on disk: a parquet file, one row per pair, with its origin.

Messages are JSON texts, so that a call with any arguments is kept exactly; the file's metadata record how it was made.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from earnest.errors import MissingExtra
from earnest.replay.errors import ReplayError
from earnest.replay.traces import Message, meaning, plain_text

FORMAT = "earnest preference pairs 1"


@dataclass(frozen=True)
class Pair:
    """Two answers to one state. ``winner`` is the author of the chosen one; ``margin`` is the judge's, above 0."""

    trace: str
    turn: int
    teacher: str
    sample: int
    margin: float
    judge: str
    winner: Literal["teacher", "trace"]
    prompt: tuple[Message, ...]
    chosen: Message
    rejected: Message
    tools: tuple[Message, ...] = ()
    teacher_model: str = ""
    completion_id: str | None = None
    model: str | None = None
    version: str | None = None

    @property
    def id(self) -> str:
        """An id computed from the content."""
        said = json.dumps([[dict(m) for m in self.prompt], meaning(self.chosen), meaning(self.rejected)])
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    def text(self, field: str) -> str:
        """What a filter reads: ``prompt``, ``chosen``, ``rejected``, or the whole ``pair``."""
        if field == "prompt":
            return "\n".join(plain_text(m) for m in self.prompt if m["role"] in ("user", "tool"))
        if field == "pair":
            return "\n".join(plain_text(m) for m in (*self.prompt, self.chosen, self.rejected))
        return str(getattr(self, field).get("content") or "")


_JSON = ("prompt", "chosen", "rejected", "tools")


def write(path: Path, pairs: Sequence[Pair], about: Mapping[str, Any]) -> None:
    """Write all or nothing: the file is renamed into place."""
    pa, pq = _pyarrow()
    names = [f.name for f in fields(Pair)]
    columns: dict[str, list[Any]] = {"id": [pair.id for pair in pairs]} | {name: [] for name in names}
    for pair in pairs:
        for name, value in asdict(pair).items():
            columns[name].append(json.dumps(value, ensure_ascii=False) if name in _JSON else value)
    kinds = {"turn": pa.int64(), "sample": pa.int64(), "margin": pa.float64()}
    schema = pa.schema(
        [(name, kinds.get(name, pa.string())) for name in columns],
        metadata={"format": FORMAT, "earnest": json.dumps(dict(about), ensure_ascii=False)},
    )
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns, schema=schema), fresh)
    fresh.replace(path)


def read(path: Path) -> list[Pair]:
    """The pairs of a file that ``write`` made, or of one with the columns prompt, chosen and rejected."""
    _, pq = _pyarrow()
    if not path.is_file():
        raise ReplayError(f"there is no file {path}; `earnest replay TRACES out={path}` makes one.")
    try:
        table = pq.read_table(path)
    except Exception as error:
        raise ReplayError(f"{path} is not a parquet file: {error}.") from None
    missing = [name for name in ("prompt", "chosen", "rejected") if name not in table.column_names]
    if missing:
        raise ReplayError(f"{path} has no column {', '.join(missing)}; it has {', '.join(table.column_names)}.")
    known = {f.name for f in fields(Pair)}
    found = []
    for number, row in enumerate(table.to_pylist()):
        try:
            found.append(_pair(number, {name: value for name, value in row.items() if name in known}))
        except (ValueError, TypeError, KeyError) as error:
            raise ReplayError(f"{path}, row {number}: {error}.") from None
    if not found:
        raise ReplayError(f"{path} holds no pair; nothing would be trained.")
    return found


def about(path: Path) -> dict[str, Any]:
    """The file's record of how it was made."""
    _, pq = _pyarrow()
    return json.loads((pq.read_schema(path).metadata or {}).get(b"earnest", b"{}"))


def _pair(number: int, row: dict[str, Any]) -> Pair:
    for name in _JSON:
        row[name] = _messages(name, row.get(name))
    given: dict[str, Any] = {"trace": f"row-{number}", "turn": 0, "teacher": "given", "sample": 0, "margin": 1.0}
    made = Pair(**given | {"judge": "given", "winner": "teacher"} | row)
    for name in ("chosen", "rejected"):
        message = getattr(made, name)
        if not isinstance(message, Mapping) or message.get("role") != "assistant":
            raise ValueError(f"{name} must be one assistant message (with role and content) or a text, got {message!r}")
    if not made.prompt:
        raise ValueError("the prompt has no message")
    if meaning(made.chosen) == meaning(made.rejected):
        raise ValueError("chosen and rejected are the same answer, which is not a preference")
    return replace(made, prompt=tuple(made.prompt), tools=tuple(made.tools))


def _messages(name: str, value: Any) -> Any:
    """A column as messages. They may be JSON; any other text is one message of the user (``prompt``) or the assistant.
    ``chosen`` and ``rejected`` may also be a list of one message."""
    if isinstance(value, str):
        with suppress(json.JSONDecodeError):
            parsed = json.loads(value)
            if name == "tools" or _are_messages(parsed):
                value = parsed
    if isinstance(value, str) and name != "tools":
        return [{"role": "user", "content": value}] if name == "prompt" else {"role": "assistant", "content": value}
    if name in ("chosen", "rejected") and isinstance(value, list) and len(value) == 1:
        return value[0]
    return value or ()


def _are_messages(value: Any) -> bool:
    """Whether JSON holds a message or a list of them, and is not just the text of an answer."""
    several = value if isinstance(value, list) else [value]
    return all(isinstance(message, dict) and "role" in message for message in several)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("pyarrow", "replay", "a file of preference pairs") from None
    return pyarrow, pyarrow.parquet
