"""kill -9 at any moment: what was accepted is never lost, is part of exactly one version, and in order.

Real processes, real SIGKILLs: some while the server accepts and its model is still being loaded, some in the middle of
an update.
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
from earnest.serve.store import ServerStore

LEARN = """
adapter: {kind: lora, rank: 2}
optimizer: {lr: 1e-3}
updates: 2
batch: 16
gate:
  {prompts: ["Hi!"], samples: 2, max_new_tokens: 4, self_similarity: 1, entropy_ratio: 0, entropy_most: 99, drift: 50}
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


def _talk(
    server: Process,
    chats: list[str],
    kill: int,
    accepted: list[str],
    early: list[str],
    stop: threading.Event,
    pause: float,
) -> None:
    """Give feedback one after the other until the server is gone; what got its 202 is noted, and as early what got it
    before the model was there. The pause keeps the queue from filling up: behind a 429 there is nothing to lose."""
    number = 0
    while not stop.is_set():
        name = f"k{kill:03}-{number:03}"
        body = {"completion_id": chats[number % len(chats)], "text": "Warmer please.", "id": name}
        try:
            answer = server.http.post("/v1/feedback", json=body)
            if answer.status_code == 429:  # a loaded machine learns more slowly than this talks
                time.sleep(0.5)
                continue
            assert answer.status_code == 202, answer.text
            accepted.append(name)
            if server.http.get("/health").json()["status"] == "loading":  # still, after the 202
                early.append(name)
        except httpx.HTTPError:
            return
        number += 1
        stop.wait(pause)


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
    early: list[str] = []
    learning = set(rng.sample(range(kills), late))
    for kill in range(kills):
        server = Process(folder)
        server.http.post("/v1/adapters/assistant/resume")  # no update is to blame for these deaths
        stop = threading.Event()
        pause = 0.5 if kill in learning else 0.05
        talker = threading.Thread(target=_talk, args=(server, chats, kill, accepted, early, stop, pause))
        talker.start()
        if kill in learning:
            with httpx.Client(base_url=server.http.base_url, timeout=120) as watcher:
                while watcher.get("/health").json().get("learning") is None:
                    time.sleep(0.02)
        time.sleep(rng.random() * (1.5 if kill in learning else 0.4))
        server.kill()
        stop.set()
        talker.join()
    assert early and len(accepted) >= kills  # all of accepted, early ones included, is looked for below

    last = Process(folder)
    last.http.post("/v1/adapters/assistant/resume")
    while (counts := last.http.get("/v1/feedback", params={"adapter": "assistant"}).json()["counts"])["queued"]:
        time.sleep(0.1)
    last.process.send_signal(signal.SIGTERM)  # and this one may go in peace
    last.end()
    assert last.process.returncode in (0, -signal.SIGTERM)

    store = ServerStore(folder / "data")
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


def test_two_kills(tmp_path: Path) -> None:
    _kills(tmp_path, 2, 1, seed=0)


@pytest.mark.slow
def test_a_hundred_kills(tmp_path: Path) -> None:
    _kills(tmp_path, 100, 40, seed=1)


def test_a_shutdown_by_signal_finishes_running_answers(tmp_path: Path) -> None:
    """SIGTERM: answers under way are finished, watchers are let go, what was accepted waits for the next start."""
    server = Process(tmp_path)
    ask = {"model": "assistant", "messages": [{"role": "user", "content": "Describe the fox."}], "max_tokens": 16}
    first = server.http.post("/v1/chat/completions", json=ask).json()
    ended: list[str] = []
    begun = threading.Barrier(5)

    def listen(path: str, body: dict | None) -> None:
        method = "POST" if body else "GET"
        with (
            httpx.Client(base_url=server.http.base_url, timeout=60) as client,
            client.stream(method, path, json=body) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            begun.wait()
            ended.append([line for line in lines if line][-1:][0] if body else f"{path} {len(list(lines)) >= 0}")

    work = [("/v1/chat/completions", {**ask, "stream": True, "n": 4, "seed": s}) for s in range(3)]
    threads = [threading.Thread(target=listen, args=w) for w in [*work, ("/v1/events", None)]]
    for thread in threads:
        thread.start()
    begun.wait()
    said = {"completion_id": first["id"], "text": "Warmer please."}
    assert server.http.post("/v1/feedback", json=said).status_code == 202
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    server.end()
    assert server.process.returncode in (0, -signal.SIGTERM)
    assert sorted(ended) == ["/v1/events True", "data: [DONE]", "data: [DONE]", "data: [DONE]"]
    store = ServerStore(tmp_path / "data")
    try:
        assert sum(store.counts(1).values()) == 1
        assert len(store.db.read("SELECT * FROM completions")) == 1 + 3 * 4
    finally:
        store.close()


def test_a_model_that_is_not_there_ends_the_server(tmp_path: Path) -> None:
    """It would accept feedback that nothing ever learns from."""
    command = [sys.executable, "-m", "earnest.cli", "serve", "--port", "0", "--model", str(tmp_path / "none")]
    done = subprocess.run([*command, "--data", str(tmp_path / "data")], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "none" in done.stderr and "Traceback" not in done.stderr
