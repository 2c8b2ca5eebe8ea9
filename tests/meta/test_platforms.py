"""The parts that depend on the platform, under a simulated other one: no fcntl, no folder sync, no POSIX signals."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from earnest import disk

WINDOWS_LIKE = """
import contextlib, signal, sys
import torch, fastapi, torch.distributed, transformers.models.llama.modeling_llama  # others' code has its own
import transformers.generation.utils
with contextlib.suppress(ImportError):
    import obstore
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None  # importing it raises, as on Windows
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "pthread_sigmask"):
    delattr(signal, name)
from earnest import disk
disk.WINDOWS = True
"""


def run(code: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-c", WINDOWS_LIKE + code, *words)
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


USES = """
from earnest.cli import main
def call(*words):
    try:
        main(list(words))
    except SystemExit as end:
        assert not end.code, (words, end.code)
call("run", *sys.argv[1:])
print("the runs:")
call("runs", "--json")
import earnest.serve.app, earnest.serve.state, earnest.diloco.launch
"""


def test_a_run_trains_and_is_listed_and_the_server_is_imported(tmp_path: Path) -> None:
    """In one process, because the imports of each take several seconds."""
    words = ("quickstart", "steps=1", "eval.prompts=2", "eval.samples=1", "out=runs/a", "check=false")
    done = run(USES, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    listed = done.stdout.partition("the runs:")[2]
    assert '"status": "finished"' in listed and '"1/1"' in listed, listed


def test_folders_are_not_synced_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    monkeypatch.setattr(disk, "WINDOWS", True)
    disk.sync(tmp_path)
    assert synced == []
    (tmp_path / "a").write_text("a")
    disk.sync(tmp_path / "a")
    assert len(synced) == 1


def test_a_lock_is_held_by_one_process(tmp_path: Path) -> None:
    held = disk.lock(tmp_path / "lock")
    assert held is not None
    code = f"from pathlib import Path; from earnest import disk; print(disk.lock(Path({str(tmp_path / 'lock')!r})))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "None"
    thread = threading.Thread(target=held.release)  # any thread of the process may release it
    thread.start()
    thread.join()
    again = disk.lock(tmp_path / "lock")
    assert again is not None
    again.release()
