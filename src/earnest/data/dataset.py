"""The user's rows: read, checked, split and rendered. They stay on disk and are read again when needed.

    every row is read once before training: its layout, its roles, its template, its length, its hash
    held out: a share of the conversations by the hash of how they open, or a file of its own
    duplicates are counted; a held-out prompt that is also trained on stops the run, unless it is allowed by name

The opening (all messages before the first answer) decides the side, so the split does not depend on the order of the
rows or the cut into shards, and several turns of one conversation are on the same side.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from earnest.data import reading
from earnest.data.layouts import Example, Layout, RowError, recognise, renamed
from earnest.data.reading import DataError, DatasetRow, Place, Problem
from earnest.data.rendering import LossOn, Rendered, Renderer, answer, demonstration
from earnest.errors import ConfigError
from earnest.settings import Checked, setting

SHOWN = 5
"""Problems that an error message lists."""


@dataclass(frozen=True, kw_only=True)
class DataSettings(Checked):
    """How the user's rows are read; the keys of ``data:`` in a recipe."""

    train: str = setting(doc="a file, a folder of shards, a folder of `datasets`, or hf:ID")
    heldout: float | str = setting(0.05, "the share of prompts that is held out, or a file of held-out rows")
    columns: dict[str, str] | None = setting(None, "other names of columns: {ours: theirs}, as in {prompt: question}")
    on_error: str = setting("stop", "what a bad row does: stop the run, or skip the row", choices=("stop", "skip"))
    too_long: str = setting(
        "error",
        "what happens to a row that is longer than the context",
        choices=("error", "skip", "truncate_left", "truncate_right"),
    )
    max_tokens: int | None = setting(None, "the longest row in tokens; none: the model's context", at_least=2)
    loss_on: LossOn = setting(
        "assistant",
        "which tokens are trained: those of every answer, of the last answer, or all",
    )
    allow_leakage: bool = setting(False, "train although held-out prompts are among the training prompts")

    def validate(self) -> None:
        if not isinstance(self.heldout, str) and not 0 <= self.heldout < 1:
            raise ConfigError(
                f"heldout: the share of prompts that is held out must be at least 0 and below 1, got "
                f"{self.heldout:g}; for example 0.1, or the name of a file of held-out rows."
            )


Side = Literal["train", "heldout"]


@dataclass
class DatasetCounts:
    """The counts from reading; the report has all of them."""

    rows: int = 0
    bad: int = 0
    too_long: int = 0
    truncated: int = 0
    duplicates: int = 0
    leaked: int = 0
    trained_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)


class Dataset:
    """The rows of both sides. ``examples(side)`` reads them; ``at(side, i)`` reads one."""

    def __init__(self, settings: DataSettings, policy: Renderer, context: int) -> None:
        self.settings, self.policy = settings, policy
        self.limit = min(settings.max_tokens or context, context)
        self.layout: Layout | None = None
        self.counts = DatasetCounts()
        self.problems: list[Problem] = []
        self.duplicates: list[tuple[Place, Place]] = []
        self.leaks: list[tuple[Place, Place]] = []
        self._sides: dict[Side, _Rows] = {"train": _Rows(), "heldout": _Rows()}
        self._seen: dict[bytes, tuple[Side, Place]] = {}
        self._rows_seen: dict[bytes, Place] = {}
        self._digest = hashlib.sha256()

    @classmethod
    def load(
        cls, settings: DataSettings, policy: Renderer, context: int, progress: Callable[[int], None] | None = None
    ) -> Dataset:
        """Read and check every row; raises where rows are bad and not skipped, or leaked, or where none is left."""
        made = cls.scan(settings, policy, context, progress)
        made.require_usable()
        return made

    @classmethod
    def scan(
        cls, settings: DataSettings, policy: Renderer, context: int, progress: Callable[[int], None] | None = None
    ) -> Dataset:
        """Read and check every row, and keep what was found; nothing is refused yet."""
        made = cls(settings, policy, context)
        if isinstance(settings.heldout, str):
            made._read(settings.heldout, "heldout", progress)
        made._read(settings.train, None if isinstance(settings.heldout, float | int) else "train", progress)
        return made

    def require_usable(self) -> None:
        if self.problems and self.settings.on_error == "stop":
            listed = "\n".join(f"  {p}" for p in self.problems[:SHOWN])
            more = f"\n  and {len(self.problems) - SHOWN} more" if len(self.problems) > SHOWN else ""
            raise DataError(
                f"data: {len(self.problems)} of {self.counts.rows} rows cannot be trained on:\n{listed}{more}\n"
                "Mend them, or set data.on_error: skip. `earnest data FILE` shows them all."
            )
        if self.leaks and not self.settings.allow_leakage:
            held, trained = self.leaks[0]
            raise DataError(
                f"data: {len(self.leaks)} held-out prompts are also trained on (first: {held} and {trained}), so the "
                "evaluation would measure memory; take them out, or set data.allow_leakage: true."
            )
        if not len(self._sides["train"]):
            raise DataError(
                f"data: {self.settings.train} leaves no row to train on, of {self.counts.rows} rows; "
                "lower data.heldout, or give more rows."
            )

    @property
    def sha256(self) -> str:
        """A hash of all rows in their order and of the side of each."""
        return self._digest.hexdigest()

    def size(self, side: Side) -> int:
        return len(self._sides[side])

    def at(self, side: Side, index: int) -> Example:
        assert self.layout is not None, "rows are read before they are used"
        return self.layout.read(renamed(self._sides[side].read(index), self.settings.columns or {}))

    def examples(self, side: Side) -> Iterator[Example]:
        return (self.at(side, i) for i in range(self.size(side)))

    def rendered(self, example: Example) -> list[Rendered]:
        """The rows of tokens that an example gives, none longer than the limit."""
        return [r for made in self._rendered(example) if (r := self._fit(made)) is not None]

    def _read(self, source: str, side: Side | None, progress: Callable[[int], None] | None) -> None:
        for row in reading.rows(source):
            self.counts.rows += 1
            if progress is not None and self.counts.rows % 100 == 0:
                progress(self.counts.rows)
            try:
                if isinstance(row, Problem):
                    raise RowError(row.sentence)
                self._take(row, side)
            except RowError as error:
                self.counts.bad += 1
                self.problems.append(Problem(row.place, str(error)))

    def _take(self, row: DatasetRow, side: Side | None) -> None:
        values = renamed(row.values, self.settings.columns or {})
        if self.layout is None:
            try:
                self.layout = recognise(values, self.settings.columns)
            except DataError as error:
                raise DataError(f"data: {row.place}: {error}") from None
        missing = [c for c in self.layout.columns if c not in values]
        if missing:
            raise RowError(f"the column {missing[0]} is missing; the layout of the first row is {self.layout.name}.")
        example = self.layout.read(values)
        made = self._rendered(example)
        lengths = [len(r) for r in made] or [0]
        if max(lengths) > self.limit:
            self.counts.too_long += 1
            if self.settings.too_long == "error":
                raise RowError(
                    f"the row has {max(lengths)} tokens, the limit is {self.limit}; set data.too_long to skip, "
                    "truncate_left or truncate_right, or raise data.max_tokens."
                )
            if self.settings.too_long == "skip":
                return
            self.counts.truncated += 1
        kept = self.rendered(example)
        if len(kept) < len(made) and (not kept or example.kind == "pair"):
            raise RowError(
                f"cutting the row to {self.limit} tokens leaves none that is trained; set data.too_long to skip, or "
                "cut the other end."
            )
        key = _key([dict(m) for m in example.prompt] or example.text)
        opened = takewhile(lambda m: m["role"] != "assistant", example.prompt)
        share = int.from_bytes(_key([dict(m) for m in opened] or example.text)[:8], "big") / 2**64  # in [0, 1)
        side = side or ("heldout" if share < float(self.settings.heldout) else "train")
        whole = _key(_plain_row(row.values))
        self._digest.update(whole + side.encode())
        self._notice(key, whole, side, row.place)
        self._sides[side].add(row)
        self.counts.lengths.update(lengths)
        self.counts.trained_tokens += sum(sum(r.trained) for r in kept)

    def _notice(self, prompt: bytes, whole: bytes, side: Side, place: Place) -> None:
        if whole in self._rows_seen:
            self.counts.duplicates += 1
            self.duplicates.append((self._rows_seen[whole], place))
        self._rows_seen.setdefault(whole, place)
        other = self._seen.setdefault(prompt, (side, place))
        if other[0] != side:
            self.counts.leaked += 1
            self.leaks.append((other[1], place) if other[0] == "heldout" else (place, other[1]))

    def _rendered(self, example: Example) -> list[Rendered]:
        if example.kind == "question":
            return []
        if example.kind in ("demonstration", "text"):
            return demonstration(self.policy, example, self.settings.loss_on)
        replies = [example.reply, *([example.rejected] if example.rejected else [])]
        return [answer(self.policy, example.prompt, reply, example.tools) for reply in replies]

    def _fit(self, row: Rendered) -> Rendered | None:
        excess = len(row) - self.limit
        if excess <= 0:
            return row
        cut = slice(excess, None) if self.settings.too_long == "truncate_left" else slice(None, self.limit)
        made = Rendered(row.tokens[cut], row.trained[cut])
        return made if any(made.trained[1:]) else None


class _Rows:
    """Places of rows on disk: byte offsets into files of JSON lines. Other formats are copied into one such file."""

    def __init__(self) -> None:
        self._files: list[Path] = []
        self._numbers: dict[str, int] = {}
        self._file, self._offset = array("I"), array("Q")
        self._copy: Path | None = None
        self._end = 0

    def __len__(self) -> int:
        return len(self._offset)

    def add(self, row: DatasetRow) -> None:
        if row.offset is not None:
            self._put(row.place.file, row.offset)
            return
        if self._copy is None:
            handle, name = tempfile.mkstemp(prefix="earnest-rows-", suffix=".jsonl")
            os.close(handle)
            self._copy = Path(name)
            weakref.finalize(self, self._copy.unlink, missing_ok=True)
        line = json.dumps(_plain_row(row.values), ensure_ascii=False).encode() + b"\n"
        with self._copy.open("ab") as copy:
            copy.write(line)
        self._put(str(self._copy), self._end)
        self._end += len(line)

    def _put(self, file: str, offset: int) -> None:
        if file not in self._numbers:
            self._numbers[file] = len(self._files)
            self._files.append(Path(file))
        self._file.append(self._numbers[file])
        self._offset.append(offset)

    def read(self, index: int) -> dict[str, Any]:
        with self._files[self._file[index]].open("rb") as file:
            file.seek(self._offset[index])
            return json.loads(file.readline())


def _plain_row(values: dict[str, Any]) -> dict[str, Any]:
    """The row as JSON can hold it: dates and the like become texts."""
    return json.loads(json.dumps(values, default=str))


def _key(value: object) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16).digest()
