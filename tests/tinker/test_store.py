"""Checkpoints on disk while the process dies at every single step of an overwrite."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from earnest.serve.tinker.names import Path as Name
from earnest.serve.tinker.store import Store

RUN = f"{'a' * 32}:train:0"
NAME = Name(RUN, "weights", "state")

# In a process of its own, with one thread: a child of it ends at its k-th call of anything that touches the disk.
KILLED = """
import os, shutil, sys
from pathlib import Path
from earnest.serve.tinker import store
from tests.tinker.test_store import NAME, full

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

store.sync, shutil.rmtree, os.replace, Path.rename = map(dying, (store.sync, shutil.rmtree, os.replace, Path.rename))
for k in range(100):
    root = Path(sys.argv[1]) / str(k)
    shutil.copytree(Path(sys.argv[1]) / "start", root)
    if not (child := os.fork()):
        kept, left = store.Store(root), k
        kept.save(NAME, full("new"), overwrite=True)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        print(k)
        break
"""


def full(text: str) -> Any:
    """Writes a checkpoint of two files, one in a folder."""

    def write(folder: Path) -> None:
        (folder / "inner").mkdir(parents=True)
        for file in ("one", "inner/two"):
            (folder / file).write_text(text)

    return write


def read(store: Store) -> set[str]:
    folder, entry = store.find(NAME)
    files = [f for f in sorted(folder.rglob("*")) if f.is_file()]
    assert [f.name for f in files] == ["two", "one"] and entry["size"] == sum(f.stat().st_size for f in files)
    return {f.read_text() for f in files}


def started(root: Path, text: str = "before") -> Store:
    store = Store(root)
    store.add(RUN, {"base_model": "m", "lora": {"rank": 1}, "metadata": {}})
    store.save(NAME, full(text))
    return store


def test_a_process_that_dies_in_an_overwrite_leaves_one_of_the_two_whole(tmp_path: Path) -> None:
    started(tmp_path / "start")
    run = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(run, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    last = int(done.stdout)
    assert last >= 4  # at the least: the folder's rename, run.json's, a sync each
    found = []
    for k in range(last + 1):
        store = Store(tmp_path / str(k))
        (text,) = read(store)
        found.append(text)
        (folder,) = (tmp_path / str(k)).glob("tinker/*/weights/*")  # and nothing else: what it left was swept
        assert folder == store.find(NAME)[0]
        store.save(NAME, full("after"), overwrite=True)
        assert read(Store(tmp_path / str(k))) == {"after"}
    assert found == sorted(found) and set(found) == {"before", "new"}  # never back again


def test_an_overwrite_that_fails_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = started(tmp_path)

    def full_disk(run: str) -> None:
        raise OSError(f"no room for {run}")

    with monkeypatch.context() as broken:
        broken.setattr(store, "_write", full_disk)
        with pytest.raises(OSError, match="no room"):
            store.save(NAME, full("new"), overwrite=True)
    assert read(store) == {"before"} == read(Store(tmp_path))
    store.save(NAME, full("new"), overwrite=True)
    assert read(store) == {"new"} == read(Store(tmp_path))
    store.delete(NAME)
    assert list(tmp_path.glob("tinker/*/weights/*")) == []


def test_every_file_is_synced_before_its_folder_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import earnest.serve.tinker.store as module

    store, synced = started(tmp_path), []
    monkeypatch.setattr(module, "sync", lambda path: synced.append(path.name))
    store.save(Name(RUN, "sampler_weights", "s"), full("x"))
    assert {"one", "two", "inner"} <= set(synced[: synced.index("sampler_weights")])


def test_a_record_from_before_overwrites_had_folders_is_read(tmp_path: Path) -> None:
    started(tmp_path)
    (file,) = tmp_path.glob("tinker/*/run.json")
    record = json.loads(file.read_text())
    del record["checkpoints"]["weights/state"]["folder"]
    file.write_text(json.dumps(record))
    store = Store(tmp_path)
    assert read(store) == {"before"}
    store.save(NAME, full("new"), overwrite=True)
    assert read(Store(tmp_path)) == {"new"}
