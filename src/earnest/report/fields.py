"""Reading JSON strictly: each accessor checks one field; its error names the file, line, field and value."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from earnest.report.record import ReportError

Word = TypeVar("Word", bound=str)

GUIDE = "docs/run-folder.md says what belongs there"


class Fields:
    """A JSON object and where it stands."""

    __slots__ = ("data", "where")

    def __init__(self, where: str, data: Mapping[str, Any]) -> None:
        self.where = where
        self.data = data

    def _fail(self, key: str, wanted: str) -> ReportError:
        got = f"got {_short(self.data[key])}" if key in self.data else "it is missing"
        return ReportError(f"{self.where}: {key!r} has to be {wanted}, {got}; {GUIDE}.")

    def text(self, key: str) -> str:
        value = self.data.get(key)
        if not isinstance(value, str):
            raise self._fail(key, "a text")
        return value

    def text_or_none(self, key: str) -> str | None:
        return None if self.data.get(key) is None else self.text(key)

    def word(self, key: str, allowed: Sequence[Word]) -> Word:
        for word in allowed:
            if self.data.get(key) == word:
                return word
        raise self._fail(key, "one of " + ", ".join(repr(str(word)) for word in allowed))

    def integer(self, key: str) -> int:
        value = self.data.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._fail(key, "a whole number ≥ 0")
        return value

    def integer_or_none(self, key: str) -> int | None:
        return None if self.data.get(key) is None else self.integer(key)

    def number(self, key: str) -> float:
        value = self.number_or_none(key)
        if value is None:
            raise self._fail(key, "a number")
        return value

    def number_or_none(self, key: str) -> float | None:
        return self._number(key, self.data.get(key))

    def _number(self, key: str, value: object) -> float | None:
        if type(value) is float or type(value) is int:  # json makes these two and no subclass but bool
            return float(value) if math.isfinite(value) else None
        if value is None:
            return None
        raise self._fail(key, "a number or null")

    def flag_or_none(self, key: str) -> bool | None:
        value = self.data.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._fail(key, "true, false or null")
        return value

    def inner(self, key: str) -> Fields:
        value = self.data.get(key)
        if not isinstance(value, dict):
            raise self._fail(key, "an object")
        return Fields(f"{self.where}: {key}", value)

    def inner_or_none(self, key: str) -> Fields | None:
        return None if self.data.get(key) is None else self.inner(key)

    def items(self, key: str) -> Iterator[Fields]:
        """The objects of a list."""
        value = self.data.get(key)
        if not isinstance(value, list):
            raise self._fail(key, "a list of objects")
        for index, entry in enumerate(value):
            if not isinstance(entry, dict):
                raise ReportError(f"{self.where}: {key}[{index}] has to be an object, got {_short(entry)}; {GUIDE}.")
            yield Fields(f"{self.where}: {key}[{index}]", entry)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.data.get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self._fail(key, "a list of texts")
        return tuple(value)

    def list_of_numbers(self, key: str) -> tuple[float, ...] | None:
        """A list of finite numbers, or None where it is absent."""
        value = self.data.get(key)
        if value is None:
            return None
        found = [self._number(key, entry) for entry in value] if isinstance(value, list) else [None]
        numbers = tuple(number for number in found if number is not None)
        if len(numbers) != len(found):
            raise self._fail(key, "a list of numbers")
        return numbers

    def numbers(self, key: str) -> dict[str, float | None]:
        """A map of numbers; absent is empty."""
        if not self.data.get(key):
            return {}
        inner = self.inner(key)
        return {name: inner._number(name, value) for name, value in inner.data.items()}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


class Decoder:
    """JSON whose NaN and Infinity (which JSON does not have, but Python writes) become gaps, and are counted."""

    def __init__(self) -> None:
        self.nonfinite = 0
        self._json = json.JSONDecoder(parse_constant=self._constant)

    def _constant(self, _: str) -> None:
        self.nonfinite += 1

    def parse(self, text: str, where: str) -> Fields:
        try:
            data = self._json.decode(text)
        except json.JSONDecodeError as error:
            raise ReportError(f"{where}: not JSON ({error.msg} at column {error.colno}); mend or remove it.") from error
        if not isinstance(data, dict):
            raise ReportError(f"{where}: has to be a JSON object, got {_short(data)}; {GUIDE}.")
        return Fields(where, data)


def read_text(path: Path) -> str | None:
    """The file's text, or None where there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise ReportError(f"{path.name}: not UTF-8 (byte {error.start}); mend or remove it.") from error
    except OSError as error:
        raise ReportError(f"{path.name}: cannot be read ({error.strerror}).") from error


def lines(text: str, name: str, decoder: Decoder, gaps: list[str]) -> Iterator[Fields]:
    """The objects of a JSONL file. A last line torn by a kill is left out, which is said; any other bad line raises."""
    rows = text.split("\n")
    whole, rest = rows[:-1], rows[-1]
    for number, row in enumerate(whole, start=1):
        if row.strip():
            yield decoder.parse(row, f"{name}, line {number}")
    if rest.strip():
        try:
            yield decoder.parse(rest, f"{name}, line {len(rows)}")
        except ReportError:
            gaps.append(f"The last line of {name} is torn (the run was killed while writing it) and is left out.")
