"""kill -9 at any moment: what was accepted is never lost, is part of exactly one version, and in order.

Real processes, real SIGKILLs: some while the server only accepts and has not imported torch, some in the middle of an
update.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from earnest.engines import checkpoint
from earnest.serve.store import Store

LEARN = """
adapter: {kind: lora, rank: 2}
optimizer: {lr: 1e-3}
updates: 2
batch: 16
gate: {prompts: ["Hello!"], samples: 2, max_new_tokens: 4, self_similarity: 1.0, entropy_ratio: 0.0, drift: 50.0}
"""


class Process:
    """`earnest serve` as a user starts it."""

    def __init__(self, folder: Path) -> None:
        (folder / "learn.yaml").write_text(LEARN)
        command = [sys.executable, "-m", "earnest.cli", "serve", "--port", "0", "--threads", "1"]
        command += ["--data", str(folder / "data"), "--learn", str(folder / "learn.yaml")]
        self.log = (folder / "log.txt").open("ab")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("earnest serve: http://"), (folder / "log.txt").read_text()
        self.http = httpx.Client(base_url=line.split()[2], timeout=120)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.end()

    def end(self) -> None:
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.http.close()
        self.log.close()


def _talk(server: Process, chats: list[str], kill: int, accepted: list[str], stop: threading.Event) -> None:
    """Give feedback one after the other until the server is gone; what got its 202 is noted."""
    number = 0
    while not stop.is_set():
        name = f"k{kill:03}-{number:03}"
        body = {"completion_id": chats[number % len(chats)], "text": "Warmer please.", "id": name}
        try:
            if server.http.post("/v1/feedback", json=body).status_code == 202:
                accepted.append(name)
        except httpx.HTTPError:
            return
        number += 1
        stop.wait(0.02)


def _kills(folder: Path, kills: int, late: int, seed: int) -> None:
    rng = random.Random(seed)
    first = Process(folder)
    ask = {"model": "assistant", "max_tokens": 6, "seed": 0}
    chats = []
    for word in ("fox", "river"):
        body = {**ask, "messages": [{"role": "user", "content": f"Describe the {word}."}]}
        chats.append(first.http.post("/v1/chat/completions", json=body).json()["id"])
    first.kill()  # the completions have to outlive it
    accepted: list[str] = []
    before_torch = 0
    learning = set(rng.sample(range(kills), late))
    for kill in range(kills):
        server = Process(folder)
        if kill not in learning:
            before_torch += server.http.get("/health").json()["status"] == "loading"
        stop = threading.Event()
        talker = threading.Thread(target=_talk, args=(server, chats, kill, accepted, stop))
        talker.start()
        if kill in learning:
            with httpx.Client(base_url=server.http.base_url, timeout=120) as watcher:
                while watcher.get("/health").json().get("learning") is None:
                    time.sleep(0.02)
        time.sleep(rng.random() * (1.5 if kill in learning else 0.4))
        server.kill()
        stop.set()
        talker.join()
    assert before_torch > 0 and len(accepted) >= kills

    last = Process(folder)
    while (counts := last.http.get("/v1/feedback", params={"adapter": "assistant"}).json()["counts"])["queued"]:
        time.sleep(0.1)
    last.process.send_signal(signal.SIGTERM)  # and this one may go in peace
    last.end()
    assert last.process.returncode in (0, -signal.SIGTERM)

    store = Store(folder / "data")
    try:
        row = store.adapter("assistant")
        versions = store.versions(row.id)
        learned = [name for v in versions for name in v.record["feedback"]]
        assert len(learned) == len(set(learned)) == counts["applied"], "applied more than once"
        assert set(accepted) <= set(learned), "an accepted feedback is lost"
        assert learned == sorted(learned), "out of order"
        assert all(v.status == "promoted" for v in versions) and row.live == versions[-1].number
        assert [v.parent for v in versions] == [0, *(v.number for v in versions[:-1])]
        # The weights that are live have had every update once: two for each version.
        _, meta = checkpoint.read(folder / "data" / "adapters" / str(row.id) / str(row.live) / "engine")
        assert meta["version"] == 2 * len(versions)
    finally:
        store.close()


def test_ten_kills(tmp_path: Path) -> None:
    _kills(tmp_path, 10, 2, seed=0)


@pytest.mark.slow
def test_a_hundred_kills(tmp_path: Path) -> None:
    _kills(tmp_path, 100, 40, seed=1)
