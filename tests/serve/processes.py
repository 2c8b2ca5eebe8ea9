"""`earnest serve` in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

QUICK = """
adapter: {kind: lora, rank: 2}
optimizer: {lr: 1e-3}
updates: 1
gate:
  {prompts: ["Hi!"], samples: 2, max_new_tokens: 4, self_similarity: 1, entropy_ratio: 0, entropy_most: 99, drift: 50}
"""


class Process:
    """A server with nano; ``before`` is Python that runs in it first."""

    def __init__(self, folder: Path, *options: str, before: str = "pass", learn: str = QUICK) -> None:
        (folder / "learn.yaml").write_text(learn)
        start = f"{before}\nfrom earnest.cli import main\nmain()"
        command = [sys.executable, "-c", start, "serve", "--port", "0", "--threads", "1", *options]
        command += ["--data", str(folder / "data"), "--learn", str(folder / "learn.yaml")]
        self.log = folder / "log.txt"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("earnest serve: http://"), self.log.read_text()
        self.http = httpx.Client(base_url=line.split()[2], timeout=60)

    def chat(self, model: str = "assistant", **more: object) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "Describe the fox."}], "max_tokens": 4}
        return self.http.post("/v1/chat/completions", json=body | more)

    def end(self) -> None:
        """Close it in order, unless it is dead already."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.http.close()


@contextmanager
def process(folder: Path, *options: str, before: str = "pass") -> Iterator[Process]:
    found = Process(folder, *options, before=before)
    try:
        yield found
    finally:
        found.end()
