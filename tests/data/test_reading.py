"""Every format gives the same rows; a bad row is a problem with its place, and reading goes on."""

from __future__ import annotations

import csv
import datetime
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from earnest.data.dataset import Dataset, DataSettings
from earnest.data.reading import DataError, DatasetRow, Problem, rows
from tests.models import tiny

ROWS: list[dict[str, Any]] = [
    {"prompt": "Sort: c a", "answer": "a c"},
    {"prompt": 'Sort:\n"é"', "answer": "é, 日本"},
    {"prompt": "Sort: 3 1", "answer": "1 3"},
]


def write(folder: Path, ending: str) -> Path:
    path = folder / f"rows.{ending}"
    if ending in ("jsonl", "ndjson"):
        path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in ROWS) + "\n\n")
    elif ending == "json":
        path.write_text(json.dumps(ROWS))
    elif ending in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, ["prompt", "answer"], delimiter="," if ending == "csv" else "\t")
            table.writeheader()
            table.writerows(ROWS)
    elif ending == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)
    else:
        table_ = pa.Table.from_pylist(ROWS)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table_.schema) as writer:
            writer.write_table(table_)
    return path


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow"])
def test_every_format_gives_the_same_rows(ending: str, tmp_path: Path) -> None:
    found = list(rows(str(write(tmp_path, ending))))
    assert [r.values for r in found if isinstance(r, DatasetRow)] == ROWS
    assert len(found) == len(ROWS)


def test_a_folder_of_shards_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for i, row in enumerate(ROWS):
        (tmp_path / f"part-{i}.jsonl").write_text(json.dumps(row))
    assert [r.values for r in rows(str(tmp_path)) if isinstance(r, DatasetRow)] == ROWS


def test_a_folder_that_datasets_wrote_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "set"))
    assert [r.values for r in rows(str(tmp_path / "set")) if isinstance(r, DatasetRow)] == ROWS
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "sets"))
    with pytest.raises(DataError, match="several splits"):
        list(rows(str(tmp_path / "sets")))


def test_a_bad_line_is_a_problem_with_its_number_and_reading_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\nnot json\n[1]\n{"a": "\xff"}\n\n{"a": 2}\n')
    found = list(rows(str(path)))
    assert [r.values for r in found if isinstance(r, DatasetRow)] == [{"a": 1}, {"a": 2}]
    problems = [str(p) for p in found if isinstance(p, Problem)]
    assert [p.split(", line ")[1][0] for p in problems] == ["2", "3", "4"]
    assert "not JSON" in problems[0] and "named columns, not a list" in problems[1] and "UTF-8" in problems[2]
    assert problems[1].endswith("line 3: a row is a JSON object with named columns, not a list.")


def test_a_row_of_a_csv_with_too_few_cells_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('prompt,answer\n"a\nb",1\nonly one\nc,3\n')
    found = list(rows(str(path)))
    assert [getattr(r, "values", None) for r in found] == [
        {"prompt": "a\nb", "answer": "1"},
        None,
        {"prompt": "c", "answer": "3"},
    ]
    assert str(found[1]).endswith("line 4: the row has 1 cells, the header has 2.")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"x", ".txt is not read; give one of .jsonl"),
        ("a.json", b"{", "is not valid JSON"),
        ("a.json", b"3", "holds a number; a .json file holds a list"),
        ("a.json", b'{"a": 1}', "holds one object"),
        ("a.parquet", b"PAR1 broken", "is not a whole Parquet file"),
        ("a.arrow", b"broken", "is not a whole Arrow file"),
        ("a.csv", b"a,a\n1,2\n", "names the columns, each once"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        list(rows(str(tmp_path / name)))


def test_a_missing_path_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file or folder"):
        list(rows(str(tmp_path / "nothing.jsonl")))
    with pytest.raises(DataError, match="the folder has no data file"):
        list(rows(str(tmp_path)))
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "b.csv").write_text("a\n1\n")
    with pytest.raises(DataError, match="mixes"):
        list(rows(str(tmp_path)))


def test_dates_become_texts_also_where_a_row_is_compared(tmp_path: Path) -> None:
    """JSON has no dates. Two rows that differ in one only are two rows."""
    made = [{"prompt": "p", "completion": "c", "day": datetime.date(2026, 1, day)} for day in (1, 2)]
    pq.write_table(pa.Table.from_pylist(made), tmp_path / "a.parquet")
    found = Dataset.load(DataSettings(train=str(tmp_path / "a.parquet"), heldout=0), tiny.policy(), 100)
    assert (found.size("train"), found.counts.duplicates) == (2, 0)
    assert [e.row["day"] for e in found.examples("train")] == ["2026-01-01", "2026-01-02"]


def test_a_data_set_of_the_hub_is_read_by_its_id_and_split(tmp_path: Path) -> None:
    """The id is a folder here, which `datasets` loads in the same way; no network is needed."""
    folder = tmp_path / "animals"
    folder.mkdir()
    for name, count in (("train", 3), ("test", 1)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS[:count]))
    assert [r.values for r in rows(f"hf:{folder}") if isinstance(r, DatasetRow)] == ROWS
    assert [r.values for r in rows(f"hf:{folder}:test") if isinstance(r, DatasetRow)] == ROWS[:1]
    with pytest.raises(DataError, match="cannot be read from the Hugging Face hub"):
        list(rows(f"hf:{folder}:validation"))


def large(path: Path, count: int) -> None:
    """``count`` rows of 60 kB each, in one Arrow batch or in small groups of Parquet."""
    made = [{"prompt": f"sort {i}", "completion": f"{i}", "notes": f"{i:06}" * 10_000} for i in range(count)]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in made))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(made[0]))
            table.writeheader()
            table.writerows(made)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(made), path, row_group_size=10, compression="none", use_dictionary=False)
    else:
        whole = pa.Table.from_pylist(made)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, whole.schema) as writer:
            writer.write_table(whole)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "arrow"])
def test_memory_does_not_grow_with_the_file(ending: str, tmp_path: Path) -> None:
    """All rows of 12 MB are checked and read with less than a third of that in memory, Arrow's own included."""
    path, policy = tmp_path / f"rows.{ending}", tiny.policy()
    large(path, 200)
    settings = DataSettings(train=str(path), heldout=0.0)
    size, before = path.stat().st_size, pa.total_allocated_bytes()
    assert size > 10e6
    of_arrow: list[int] = []
    tracemalloc.start()
    try:
        data = Dataset.load(settings, policy, 100, lambda _: of_arrow.append(pa.total_allocated_bytes() - before))
        assert sum(len(e.row["notes"]) for e in data.examples("train")) == 200 * 60_000
        assert tracemalloc.get_traced_memory()[1] + max(of_arrow) < size / 3
    finally:
        tracemalloc.stop()
