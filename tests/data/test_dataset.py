"""Reading a user's file: the split depends on the prompts alone, nothing is cut or dropped without a count."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earnest.data.dataset import Dataset, DataSettings
from earnest.data.reading import DataError
from earnest.errors import ConfigError
from tests.models import tiny

POLICY = tiny.policy()


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def completions(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"sort {i} {i - 1}", "completion": f"{i - 1} {i}"} for i in range(1, count + 1)]


def load(source: str, context: int = 100, **more: Any) -> Dataset:
    return Dataset.load(DataSettings(train=source, **more), POLICY, context)


def prompts(data: Dataset, side: Any) -> list[str]:
    return [e.prompt[0]["content"] for e in data.examples(side)]


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), shards=st.integers(1, 5), share=st.floats(0.05, 0.6))
def test_any_order_and_any_cut_into_shards_give_the_same_split(
    seed: int, shards: int, share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = completions(40)
    one = load(lines(tmp_path_factory.mktemp("one") / "a.jsonl", rows), heldout=share)
    rng = random.Random(seed)
    rng.shuffle(rows)
    cuts = sorted(rng.randrange(41) for _ in range(shards - 1))
    folder = tmp_path_factory.mktemp("cut")
    for i, (a, b) in enumerate(zip([0, *cuts], [*cuts, 40], strict=True)):
        lines(folder / f"{i}.jsonl", rows[a:b])
    other = load(str(folder), heldout=share)
    for side in ("train", "heldout"):
        assert sorted(prompts(one, side)) == sorted(prompts(other, side))
    assert one.size("train") + one.size("heldout") == 40


def test_a_heldout_share_is_near_its_size_and_stable(tmp_path: Path) -> None:
    rows = completions(2000)
    source = lines(tmp_path / "a.jsonl", rows)
    small, large = load(source, heldout=0.05), load(source, heldout=0.2)
    assert 60 < small.size("heldout") < 140 and 330 < large.size("heldout") < 470
    assert set(prompts(small, "heldout")) < set(prompts(large, "heldout"))


def test_trained_tokens_are_counted(tmp_path: Path) -> None:
    data = load(lines(tmp_path / "a.jsonl", completions(3)))
    kept = [row for side in ("train", "heldout") for e in data.examples(side) for row in data.rendered(e)]
    assert len(kept) == 3 and data.counts.trained_tokens == sum(sum(row.trained) for row in kept) > 0


def test_a_copy_of_rows_is_not_left_open(tmp_path: Path) -> None:
    """The rows of a JSON list have no place in a file of lines, so they are copied into one."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps(completions(3)))
    kept = load(str(path))
    opened = [
        os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")
    ]
    assert kept.size("train") and not [name for name in opened if "earnest-rows-" in name]


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
def test_rows_are_read_again_from_disk_in_every_format(ending: str, tmp_path: Path) -> None:
    rows, path = completions(9), tmp_path / f"a.{ending}"
    if ending == "jsonl":
        lines(path, rows)
    elif ending == "json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("prompt,completion\n" + "".join(f"{r['prompt']},{r['completion']}\n" for r in rows))
    data = load(str(path), heldout=0.3)
    assert sorted(prompts(data, "train") + prompts(data, "heldout")) == sorted(r["prompt"] for r in rows)


def test_a_bad_row_stops_with_its_line_or_is_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "", "completion": "b"}\nnonsense\n')
    with pytest.raises(DataError, match=r"2 of 3 rows cannot be trained on:\n.*line 2: prompt is empty"):
        load(str(path), heldout=0.0)
    data = load(str(path), on_error="skip", heldout=0.0)
    assert (data.size("train"), data.counts.bad, len(data.problems)) == (1, 2, 2)


def test_a_row_that_is_too_long_is_never_cut_silently(tmp_path: Path) -> None:
    rows = [*completions(3), {"prompt": "p" * 30, "completion": "c" * 50}]
    source = lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"line 4: the row has 99 tokens, the limit is 64; set data\.too_long"):
        load(source, context=64, heldout=0.0)
    assert load(source, context=64, heldout=0.0, too_long="skip").size("train") == 3
    right = load(source, context=64, heldout=0.0, too_long="truncate_right")
    left = load(source, context=64, heldout=0.0, too_long="truncate_left")
    assert (right.counts.too_long, right.counts.truncated, right.size("train")) == (1, 1, 4)
    (head,), (tail,) = right.rendered(right.at("train", 3)), left.rendered(left.at("train", 3))
    assert len(head) == len(tail) == 64
    assert tail.tokens[-1] in POLICY.eos_ids and head.tokens[-1] not in POLICY.eos_ids


def test_duplicates_are_counted_and_leakage_stops_the_run(tmp_path: Path) -> None:
    rows = completions(6)
    data = load(lines(tmp_path / "a.jsonl", [*rows, rows[2]]), heldout=0.0)
    assert [(a.number, b.number) for a, b in data.duplicates] == [(3, 7)]
    train, held = lines(tmp_path / "t.jsonl", rows), lines(tmp_path / "h.jsonl", [rows[4], *completions(9)[7:]])
    with pytest.raises(DataError, match=r"1 held-out prompts are also trained on.*h\.jsonl, line 1.*t\.jsonl, line 5"):
        load(train, heldout=held)
    allowed = load(train, heldout=held, allow_leakage=True)
    assert (allowed.counts.leaked, allowed.size("train"), allowed.size("heldout")) == (1, 6, 3)


def test_a_row_of_another_layout_is_named(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}, {"text": "c"}])
    with pytest.raises(DataError, match=r"line 2: the column prompt is missing; the layout of the first row is compl"):
        load(source, heldout=0.0)


@pytest.mark.parametrize("share", [10, 1.0, -1, -0.1])
def test_a_share_outside_of_0_to_1_is_refused_with_its_key(share: float) -> None:
    """`heldout=10` once held out every row, and `heldout=-1` none, without a message."""
    with pytest.raises(ConfigError, match=r"heldout: .* at least 0 and below 1, got .* the name of a file"):
        DataSettings(train="rows.jsonl", heldout=share)


def test_nothing_left_to_train_on_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="leaves no row to train on, of 1 rows"):
        load(lines(tmp_path / "a.jsonl", completions(1)), heldout=1 - 1e-9)
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(DataError, match="of 0 rows"):
        load(str(tmp_path / "b.jsonl"))
