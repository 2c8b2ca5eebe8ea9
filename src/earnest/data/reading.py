"""Rows of a data file, one at a time, each with its place in the file.

    .jsonl .ndjson    one JSON object per line
    .json             a list of objects
    .csv .tsv         the first line names the columns
    .parquet .arrow   needs pyarrow (pip install 'earnest[data]')
    a folder          its data files in the order of their names, or what `datasets.Dataset.save_to_disk` wrote
    hf:ID[:SPLIT]     a data set of the Hugging Face hub, through `datasets`

No reader holds a whole file, except .json, whose list is one JSON value. A row that cannot be read becomes a `Problem`
and reading continues with the next one.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from earnest.errors import EarnestError

HUB = "hf:"


class DataError(EarnestError):
    """A data source cannot be used; the message names the file and the way out."""


@dataclass(frozen=True)
class Place:
    """The place of a row: a file, and the number of the line or row in it, counted from 1."""

    file: str
    number: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


@dataclass(frozen=True)
class DatasetRow:
    """One row as its file has it. ``offset`` is the byte where its line begins, in a file of JSON lines."""

    place: Place
    values: dict[str, Any]
    offset: int | None = None


@dataclass(frozen=True)
class Problem:
    """Why a row cannot be trained on."""

    place: Place
    sentence: str

    def __str__(self) -> str:
        return f"{self.place}: {self.sentence}"


def rows(source: str) -> Iterator[DatasetRow | Problem]:
    """Every row of a file, a folder or a hub id, in order."""
    if source.startswith(HUB):
        yield from _hub(source)
        return
    for file in files(source):
        yield from _READERS[_ending(file)](file)


def count_lines(source: str) -> int | None:
    """The lines of a JSON-lines file; None for other sources, whose rows are counted only when they are read."""
    path = Path(source).expanduser()
    if _ending(path) != ".jsonl" or not path.is_file():
        return None
    with path.open("rb") as file:
        return sum(part.count(b"\n") for part in iter(lambda: file.read(2**20), b""))


def files(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_file():
        if _ending(path) not in _READERS:
            raise DataError(f"{source}: {_ending(path) or 'no ending'} is not read; give one of {', '.join(_READERS)}.")
        return [path]
    if not path.is_dir():
        raise DataError(f"{source}: there is no such file or folder; give a path that exists, or hf:ID.")
    if (path / "dataset_dict.json").is_file():
        splits = sorted(p.name for p in path.iterdir() if p.is_dir())
        raise DataError(f"{source} holds several splits ({', '.join(splits)}); give one, such as {path / splits[0]}.")
    found = sorted(p for p in path.iterdir() if p.is_file() and _ending(p) in _READERS and p.name not in _NOT_ROWS)
    if not found:
        raise DataError(f"{source}: the folder has no data file; it needs {', '.join(_READERS)} files.")
    endings = sorted({_ending(p) for p in found})
    if len(endings) > 1:
        raise DataError(f"{source}: the folder mixes {' and '.join(endings)} files; give a folder of one kind.")
    return found


# Beside the shards of a folder that `datasets` wrote.
_NOT_ROWS = {"dataset_info.json", "state.json"}


def _ending(path: Path) -> str:
    return path.suffix.lower()


def _json_lines(file: Path) -> Iterator[DatasetRow | Problem]:
    offset = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parsed(Place(str(file), number), line, offset)
            offset += len(line)


def _parsed(place: Place, line: bytes, offset: int | None) -> DatasetRow | Problem:
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        return Problem(place, f"byte {error.start} is not UTF-8; save the file as UTF-8.")
    except (ValueError, RecursionError) as error:
        reason = str(error).split(":")[0] if isinstance(error, ValueError) else "it is nested too deeply"
        return Problem(place, f"the line is not JSON ({reason}); one JSON object belongs on each line.")
    return _object(place, value, offset)


def _object(place: Place, value: object, offset: int | None = None) -> DatasetRow | Problem:
    if isinstance(value, dict):
        return DatasetRow(place, value, offset)
    return Problem(place, f"a row is a JSON object with named columns, not {_kind(value)}.")


def _kind(value: object) -> str:
    names = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false"}
    return names.get(type(value), "null")


def _json_list(file: Path) -> Iterator[DatasetRow | Problem]:
    try:
        whole = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not valid JSON ({error}); a .json file holds one list of objects.") from None
    if isinstance(whole, dict):
        lists = {k: v for k, v in whole.items() if isinstance(v, list) and v and isinstance(v[0], dict)}
        if len(lists) != 1:
            raise DataError(f"{file} holds one object; a .json file holds a list of objects, one per row.")
        whole = next(iter(lists.values()))
    if not isinstance(whole, list):
        raise DataError(f"{file} holds {_kind(whole)}; a .json file holds a list of objects, one per row.")
    for number, value in enumerate(whole, 1):
        yield _object(Place(str(file), number, "row"), value)


def _separated(delimiter: str) -> Callable[[Path], Iterator[DatasetRow | Problem]]:
    def read(file: Path) -> Iterator[DatasetRow | Problem]:
        csv.field_size_limit(2**31 - 1)
        with file.open(encoding="utf-8-sig", newline="", errors="surrogateescape") as lines:
            table = csv.reader(lines, delimiter=delimiter)
            try:
                header = next(table, [])
                if any("\udc80" <= c <= "\udcff" for name in header for c in name):
                    raise DataError(f"{file}: the first line is not UTF-8; save the file as UTF-8.")
                if not header or len(set(header)) < len(header):
                    raise DataError(f"{file}: the first line names the columns, each once; it is {header}.")
                before = table.line_num
                for cells in table:
                    place, before = Place(str(file), before + 1), table.line_num
                    if not cells:
                        continue
                    if len(cells) != len(header):
                        yield Problem(place, f"the row has {len(cells)} cells, the header has {len(header)}.")
                    elif any("\udc80" <= c <= "\udcff" for cell in cells for c in cell):
                        yield Problem(place, "the row is not UTF-8; save the file as UTF-8.")
                    else:
                        yield DatasetRow(place, {k: _cell(v) for k, v in zip(header, cells, strict=True)})
            except csv.Error as error:
                yield Problem(Place(str(file), table.line_num), f"the line cannot be read ({error}).")

    return read


def _cell(text: str) -> Any:
    """A list or an object that a cell holds as JSON (messages, for instance); any other cell is its text."""
    with suppress(ValueError):
        return json.loads(text) if text[:1] in "[{" and text[-1:] in "]}" else text
    return text


def _parquet(file: Path) -> Iterator[DatasetRow | Problem]:
    parquet = _pyarrow("pyarrow.parquet", file)
    try:
        # pre_buffer would hold all row groups at once.
        table = parquet.ParquetFile(file, memory_map=True, pre_buffer=False)
        yield from _records(file, table.iter_batches(batch_size=16))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is not a whole Parquet file ({_first(error)}); write it again.") from None


def _arrow(file: Path) -> Iterator[DatasetRow | Problem]:
    """`datasets` writes the streaming form, others the file form. The file is mapped, not loaded: a batch may be all of
    it."""
    arrow, ipc = _pyarrow("pyarrow", file), _pyarrow("pyarrow.ipc", file)
    try:
        with arrow.memory_map(str(file)) as opened:
            whole = opened.read(6) == b"ARROW1"
            opened.seek(0)
            if whole:
                table = ipc.open_file(opened)
                yield from _records(file, (table.get_batch(i) for i in range(table.num_record_batches)))
            else:
                yield from _records(file, ipc.open_stream(opened))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is not a whole Arrow file ({_first(error)}); write it again.") from None


def _records(file: Path, batches: Iterable[Any]) -> Iterator[DatasetRow]:
    """The rows of Arrow's batches, a few at a time as Python objects."""
    slices = (batch.slice(start, 16) for batch in batches for start in range(0, batch.num_rows, 16))
    for number, values in enumerate((values for part in slices for values in part.to_pylist()), 1):
        yield DatasetRow(Place(str(file), number, "row"), values)


def _pyarrow(module: str, file: Path) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(f"{file} needs pyarrow: pip install 'earnest[data]'.") from None


def _hub(source: str) -> Iterator[DatasetRow | Problem]:
    name, _, split = source.removeprefix(HUB).partition(":")
    try:
        import datasets
    except ImportError:
        raise DataError(f"{source} needs the datasets library: pip install 'earnest[data]'.") from None
    try:
        found = datasets.load_dataset(name, split=split or "train", streaming=True)
        for number, values in enumerate(found, 1):
            yield DatasetRow(Place(source, number, "row"), dict(values))
    except Exception as error:  # the hub's client raises many kinds
        raise DataError(
            f"{source} cannot be read from the Hugging Face hub ({type(error).__name__}: {_first(error)}); "
            "check the name and the network, or give a file."
        ) from None


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")


_READERS: dict[str, Callable[[Path], Iterator[DatasetRow | Problem]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_list,
    ".csv": _separated(","),
    ".tsv": _separated("\t"),
    ".parquet": _parquet,
    ".arrow": _arrow,
}
