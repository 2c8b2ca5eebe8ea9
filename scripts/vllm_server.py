"""A real vLLM in a process of its own, from .venv-vllm (`make vllm`): for tests and benchmarks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / ".venv-vllm" / "bin" / "vllm"
START = 600.0
"""Seconds that the server may take to start."""
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_SERVER_DEV_MODE": "1",  # /pause, /resume, /reset_prefix_cache
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class Vllm:
    """The server with nano, with prefix cache and adapters. ``folder`` holds its log and the adapters.

    ``live``: its layers read the weights themselves, and not copies that oneDNN packed (envs/repair_vllm.py).
    """

    def __init__(self, folder: Path, live: bool = False) -> None:
        self.folder, self.live = folder, live
        self.loras = folder / "loras"
        self.loras.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        model = ROOT / "src" / "earnest" / "models" / "nano"
        options = {
            "served-model-name": "nano", "host": "127.0.0.1", "port": self.port, "dtype": "float32",
            "max-model-len": 256, "max-lora-rank": 16, "max-loras": 2, "logprobs-mode": "processed_logprobs",
            "block-size": 32,
        }  # fmt: skip
        flags = ["--enable-lora", "--enforce-eager", "--enable-prefix-caching"]
        words = [str(w) for name, value in options.items() for w in (f"--{name}", value)]
        assert PROGRAM.exists(), f"{PROGRAM} is missing; `make vllm` makes it from envs/vllm.txt"
        command = [str(PROGRAM), "serve", str(model), *words, *flags]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | SETTINGS
        environment |= {"VLLM_LIVE_WEIGHTS": "1"} if self.live else {}
        with (self.folder / "vllm.log").open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True, cwd=self.folder
            )
        began = time.monotonic()
        while not self.answers():
            died = self.process.poll() is not None
            assert not died and time.monotonic() - began < START, (self.folder / "vllm.log").read_text()[-4000:]
            time.sleep(0.5)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        """End the server and the processes that it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
