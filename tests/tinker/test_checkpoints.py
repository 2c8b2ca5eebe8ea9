"""Checkpoints on disk: a process that dies at any step of an overwrite, a full disk, folders of the first edition."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from earnest.serve.store import ServerStore
from earnest.serve.tinker import checkpoints
from earnest.serve.tinker.checkpoints import CheckpointStore
from earnest.serve.tinker.errors import NotThere, WireError
from earnest.serve.tinker.names import CheckpointPath

RUN = f"{'a' * 32}:train:0"
NAME = CheckpointPath(RUN, "weights", "state")
LORA = {"rank": 1, "seed": 3, "train_attn": True, "train_mlp": True, "train_unembed": False}

# In a process of its own: a child of it ends, without any cleanup, at its k-th call of anything that touches the disk.
KILLED = """
import os, shutil, sys
from pathlib import Path
from earnest.serve.database import Database
from earnest.serve.store import ServerStore
from earnest.serve.tinker import checkpoints
from tests.tinker.test_checkpoints import NAME, full

left = None

def dying(call):
    def instead(*args, **kwargs):
        global left
        if left is not None:
            if not left:
                os._exit(9)
            left -= 1
        return call(*args, **kwargs)
    return instead

checkpoints.sync, shutil.rmtree, Path.unlink, Database.write = map(
    dying, (checkpoints.sync, shutil.rmtree, Path.unlink, Database.write)
)
for k in range(100):
    root = Path(sys.argv[1]) / str(k)
    shutil.copytree(Path(sys.argv[1]) / "start", root)
    if not (child := os.fork()):
        if sys.argv[2] == "import":
            left = k
            checkpoints.CheckpointStore(ServerStore(root))
        else:
            kept, left = checkpoints.CheckpointStore(ServerStore(root)), k
            kept.save(NAME, full("new"), overwrite=True)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        print(k)
        break
"""


def _killed(root: Path, when: str) -> int:
    """How many calls touch the disk; folder k of ``root`` is what a process left that died before call k."""
    run = [sys.executable, "-c", KILLED, str(root), when]
    done = subprocess.run(run, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    return int(done.stdout)


def full(text: str) -> Any:
    """Writes a checkpoint of two files, one in a folder."""

    def write(folder: Path) -> None:
        (folder / "inner").mkdir(parents=True)
        for file in ("one", "inner/two"):
            (folder / file).write_text(text)

    return write


@contextmanager
def opened(root: Path) -> Iterator[CheckpointStore]:
    store = ServerStore(root)
    try:
        yield CheckpointStore(store)
    finally:
        store.close()


def read(store: CheckpointStore) -> set[str]:
    found = store.find(NAME)
    files = [f for f in sorted(found.folder.rglob("*")) if f.is_file()]
    assert [f.name for f in files] == ["two", "one"] and found.size == sum(f.stat().st_size for f in files)
    return {f.read_text() for f in files}


@contextmanager
def started(root: Path, text: str = "before") -> Iterator[CheckpointStore]:
    with opened(root) as store:
        store.add(RUN, "m", LORA, {"for": "tests"})
        store.save(NAME, full(text))
        yield store


def first_edition(root: Path, *, folder: str | None) -> Path:
    """A run as the first edition wrote it; the oldest records do not name their checkpoints' folders."""
    place = root / "tinker" / RUN.replace(":", "-")
    full("before")(place / "weights" / (folder or "state"))
    entry = {"time": "2026-01-01T00:00:00+00:00", "size": 12, "metadata": {"k": "v"}, "expires": None}
    record = {
        "id": RUN,
        "last_request": "2026-01-02T00:00:00+00:00",
        "checkpoints": {"weights/state": entry if folder is None else {**entry, "folder": folder}},
        "base_model": "m",
        "lora": LORA,
        "metadata": {"for": "tests"},
    }
    (place / "run.json").write_text(json.dumps(record))
    return place / "run.json"


def test_a_process_that_dies_in_an_overwrite_leaves_one_of_the_two_whole(tmp_path: Path) -> None:
    with started(tmp_path / "start"):
        pass
    last = _killed(tmp_path, "save")
    assert last >= 4  # at the least: the files, their folder, the commit, the old folder
    found = []
    for k in range(last + 1):
        root = tmp_path / str(k)
        with opened(root) as store:
            (text,) = read(store)
            found.append(text)
            (folder,) = root.glob("tinker/*/weights/*")  # and nothing else: what it left was swept
            assert folder == store.find(NAME).folder
            store.save(NAME, full("after"), overwrite=True)
        with opened(root) as store:
            assert read(store) == {"after"}
    assert found == sorted(found) and set(found) == {"before", "new"}  # never back again


def test_an_overwrite_that_fails_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(tmp_path) as store:

        def full_disk(work: object) -> None:
            raise OSError(f"no room for {work}")

        with monkeypatch.context() as broken:
            broken.setattr(store.db, "write", full_disk)
            with pytest.raises(OSError, match="no room"):
                store.save(NAME, full("new"), overwrite=True)
        assert read(store) == {"before"} and len(list(tmp_path.glob("tinker/*/weights/*"))) == 1
    with opened(tmp_path) as store:
        assert read(store) == {"before"}
        with pytest.raises(WireError, match="exists already"):
            store.save(NAME, full("new"))
        store.save(NAME, full("new"), overwrite=True)
        assert read(store) == {"new"}
        store.delete(NAME)
        assert list(tmp_path.glob("tinker/*/weights/*")) == []
        with pytest.raises(NotThere, match="no checkpoint"):
            store.find(NAME)


def test_every_file_is_synced_before_its_checkpoint_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(tmp_path) as store:
        synced: list[str] = []
        write = store.db.write
        monkeypatch.setattr(checkpoints, "sync", lambda path: synced.append(path.name))
        monkeypatch.setattr(store.db, "write", lambda work: (synced.append("commit"), write(work))[1])
        store.save(CheckpointPath(RUN, "sampler_weights", "s"), full("x"))
        before = synced[: synced.index("commit")]
        assert {"one", "two", "inner", "sampler_weights", "tinker"} <= set(before)
        assert before.index("inner") < before.index("sampler_weights") < before.index("tinker")


@pytest.mark.parametrize("folder", [None, "state@0123456789ab"])
def test_a_data_folder_of_the_first_edition_is_taken_over(tmp_path: Path, folder: str | None) -> None:
    record = first_edition(tmp_path, folder=folder)
    with opened(tmp_path) as store:
        assert not record.exists() and store.runs() == [RUN]
        run = store.describe(RUN)
        assert (run["base_model"], run["lora_rank"], run["user_metadata"]) == ("m", 1, {"for": "tests"})
        assert run["last_request_time"] == "2026-01-02T00:00:00+00:00" and store.get(RUN).lora == LORA
        assert run["last_checkpoint"]["user_metadata"] == {"k": "v"} and run["last_sampler_checkpoint"] is None
    with opened(tmp_path) as store:
        assert read(store) == {"before"}
        store.save(NAME, full("new"), overwrite=True)
        assert len(list(tmp_path.glob("tinker/*/weights/*"))) == 1
    with opened(tmp_path) as store:
        assert read(store) == {"new"}


def test_a_process_that_dies_while_it_takes_a_folder_over_loses_nothing(tmp_path: Path) -> None:
    first_edition(tmp_path / "start", folder=None)
    last = _killed(tmp_path, "import")
    assert last >= 2  # the commit, and the file's end
    for k in range(last + 1):
        with opened(tmp_path / str(k)) as store:
            assert read(store) == {"before"} and not list(store.root.glob("*/run.json"))


def test_a_record_that_cannot_be_read_stops_the_start_and_stays(tmp_path: Path) -> None:
    record = first_edition(tmp_path, folder=None)
    for broken in ("{", '{"id": "x"}', record.read_text().replace('"weights/state"', '"state"')):
        record.write_text(broken)
        with pytest.raises(WireError, match=r"run\.json is not a record of a training run"), opened(tmp_path):
            pass
        assert record.read_text() == broken
