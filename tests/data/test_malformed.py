"""Damaged files of every format and layout: a clear sentence each, no other exception, nothing written.

The same rows in any order, in any cut into shards and in any format are the same data.
"""

from __future__ import annotations

import csv
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earnest.cli import main
from earnest.data.dataset import Dataset, DataSettings
from earnest.errors import EarnestError
from tests.models import tiny

POLICY = tiny.policy()
Row = dict[str, Any]
FORMATS = ("jsonl", "json", "csv", "tsv", "parquet", "arrow")


def talk(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"yes {i}"}]


LAYOUTS: dict[str, Callable[[int], Row]] = {
    "conversations": lambda i: {"messages": talk(i)},
    "sharegpt": lambda i: {"conversations": [{"from": "human", "value": f"say {i}"}, {"from": "gpt", "value": "yes"}]},
    "completions": lambda i: {"prompt": f"say {i}", "completion": f"yes {i}"},
    "judged": lambda i: {"prompt": f"say {i}", "completion": f"yes {i}", "label": i % 2 == 0},
    "pairs": lambda i: {"prompt": f"say {i}", "chosen": f"yes {i}", "rejected": f"no {i}"},
    "implicit": lambda i: {"chosen": talk(i), "rejected": [talk(i)[0], {"role": "assistant", "content": "no"}]},
    "alpaca": lambda i: {"instruction": f"say {i}", "input": "", "output": f"yes {i}"},
    "questions": lambda i: {"prompt": f"say {i}", "answer": f"yes {i}"},
    "text": lambda i: {"text": f"yes {i} and so on"},
}


def write(path: Path, rows: list[Row], ending: str) -> Path:
    path = path.with_suffix(f".{ending}")
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif ending == "json":
        path.write_text(json.dumps(rows))
    elif ending in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            table = csv.DictWriter(
                file, list(rows[0]), delimiter="," if ending == "csv" else "\t", extrasaction="ignore"
            )
            table.writeheader()
            table.writerows({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows)
    else:
        table_ = pa.Table.from_pylist(rows)
        if ending == "parquet":
            pq.write_table(table_, path)
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table_.schema) as writer:
                writer.write_table(table_)
    return path


# --- damage -----------------------------------------------------------------------------------------------------------

WRONG: list[Any] = [
    None,
    7,
    -1.5,
    True,
    "",
    "   ",
    [],
    {},
    [[]],
    [1, "a"],
    {"role": "user"},
    [{}],
    [None],
    "\x00",
    "9" * 400,
]


def cells(rng: random.Random, rows: list[Row]) -> None:
    """A wrong value in one column of one row, or of all."""
    name = rng.choice(list(rows[0]))
    value = rng.choice(WRONG)
    for row in rows if rng.random() < 0.3 else [rng.choice(rows)]:
        row[name] = value


def columns(rng: random.Random, rows: list[Row]) -> None:
    """A column that is missing, or has another name."""
    name = rng.choice(list(rows[0]))
    for row in rows if rng.random() < 0.5 else [rng.choice(rows)]:
        value = row.pop(name)
        if rng.random() < 0.5:
            row[f"{name}s"] = value
        row.setdefault("other", 1)


def messages(rng: random.Random, rows: list[Row]) -> None:
    """Roles and contents that are no conversation."""
    kind = rng.choice(["role", "order", "content", "last", "key"])
    row = rng.choice(rows)
    name = rng.choice(list(row))
    given = row[name] if isinstance(row[name], list) else talk(1)
    broken = [dict(m) for m in given]
    first, second, *_ = broken[0]
    if kind == "role":
        broken[-1][first] = rng.choice(["narrator", "", 3, None])
    elif kind == "order":
        broken = [broken[-1], *broken[:-1]]
    elif kind == "content":
        broken[rng.randrange(len(broken))][second] = rng.choice([None, 5, "", "  ", {"a": 1}])
    elif kind == "last":
        broken = broken[:-1]
    else:
        del broken[0][first]
    row[name] = broken


def raw(rng: random.Random, path: Path) -> None:
    """The file's bytes: cut, changed, in another encoding, of another format, or none."""
    data = path.read_bytes()
    kind = rng.choice(["cut", "flip", "utf16", "latin", "nul", "empty", "space", "other", "junk", "doubled", "nested"])
    place = rng.randrange(1, len(data))
    if kind == "cut":
        data = data[:place]
    elif kind == "flip":
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 30)):
            damaged[rng.randrange(len(data))] = rng.randrange(256)
        data = bytes(damaged)
    elif kind == "utf16":
        data = data.decode("utf-8", "replace").encode("utf-16")
    elif kind == "latin":
        data = data[:place] + b"\xe9\xff\xc3" + data[place:]
    elif kind == "nul":
        data = data[:place] + b"\x00" * 20 + data[place:]
    elif kind in ("empty", "space"):
        data = b"" if kind == "empty" else b"\n \n\t"
    elif kind == "other":
        data = rng.choice([b"\x1f\x8b\x08" + data, b"PK\x03\x04" + data, b"PAR1" + data, b"ARROW1" + data, b"<html>"])
    elif kind == "junk":
        data = rng.randbytes(300)
    elif kind == "doubled":
        data = data + data[: len(data) // 2]
    else:
        data = b"[" * 100_000
    path.write_bytes(data)


def damaged(seed: int, folder: Path) -> tuple[str, Path]:
    """(what was done, the file) of one seed."""
    rng = random.Random(seed)
    ending, layout = FORMATS[seed % len(FORMATS)], rng.choice(list(LAYOUTS))
    rows = [LAYOUTS[layout](i) for i in range(6)]
    damage = rng.choice([cells, columns, messages, raw, raw])
    if damage is raw:
        path = write(folder / "rows", rows, ending)
        raw(rng, path)
        return f"{seed}: {layout}.{ending} {damage.__name__}", path
    damage(rng, rows)  # type: ignore[arg-type]
    try:
        path = write(folder / "rows", rows, ending)
    except (pa.ArrowException, TypeError, ValueError):  # a table cannot hold such rows; a list can
        path = write(folder / "rows", rows, "jsonl")
    return f"{seed}: {layout}{path.suffix} {damage.__name__}", path


def left_over() -> set[str]:
    return {p.name for p in Path(tempfile.gettempdir()).glob("earnest-rows-*")}


def test_200_damaged_files_are_a_clear_sentence_each(tmp_path: Path) -> None:
    refused, before = Counter[str](), left_over()
    for seed in range(360):
        folder = tmp_path / str(seed)
        folder.mkdir()
        what, path = damaged(seed, folder)
        content = path.read_bytes()
        try:
            Dataset.load(DataSettings(train=str(path), heldout=0.2), POLICY, 200)
        except EarnestError as error:
            sentence = str(error)
            refused[what.split()[-1]] += 1
            assert path.name in sentence and sentence.encode(), (what, sentence)  # a lone surrogate cannot be printed
            assert sentence.rstrip()[-1] in ".)" and len(sentence) < 3000, (what, sentence)
            assert not re.search(r"Traceback|object at 0x|<class '", sentence), (what, sentence)
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        assert path.read_bytes() == content and list(folder.iterdir()) == [path], f"{what}: something was written"
    assert refused.total() >= 200 and min(refused[name] for name in ("cells", "columns", "messages", "raw")) > 20, (
        refused
    )
    assert left_over() <= before, "no copy of rows stays behind"


@pytest.mark.parametrize("seed", [2, 7, 38, 29])
def test_the_commands_end_with_2_and_no_traceback(seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, path = damaged(seed, tmp_path)
    place = tmp_path / "run"
    for command in (["data", str(path)], ["run", "sft", "task=null", f"data={path}", f"out={place}", "steps=1"]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code in (1, 2), command
        printed = "".join(capfd.readouterr())
        assert "Traceback" not in printed and printed.strip()
    assert not place.exists() and list(tmp_path.iterdir()) == [path]


# --- the same rows ----------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    shards=st.integers(1, 4),
    layout=st.sampled_from(list(LAYOUTS)),
    ending=st.sampled_from(FORMATS),
    share=st.floats(0.1, 0.6),
)
def test_any_order_cut_and_format_give_the_same_rows_on_the_same_sides(
    seed: int, shards: int, layout: str, ending: str, share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = [LAYOUTS[layout](i) for i in range(24)]

    def sides(source: Path) -> list[Counter[str]]:
        data = Dataset.load(DataSettings(train=str(source), heldout=share), POLICY, 200)
        return [
            Counter(json.dumps([e.prompt, e.reply, e.rejected, e.text, e.label, e.answer]) for e in data.examples(side))
            for side in ("train", "heldout")
        ]

    expected = sides(write(tmp_path_factory.mktemp("one") / "rows", rows, "jsonl"))
    rng = random.Random(seed)
    rng.shuffle(rows)
    cuts = sorted(rng.sample(range(1, 24), shards - 1))
    folder = tmp_path_factory.mktemp("cut")
    for number, (a, b) in enumerate(zip([0, *cuts], [*cuts, 24], strict=True)):
        write(folder / f"part-{number}", rows[a:b], ending)
    assert sides(folder) == expected and sum(map(Counter.total, expected)) == 24
