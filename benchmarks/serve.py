"""Concurrent chats, tokens per second and latency: `earnest serve`, idle and while it learns, and `transformers serve`.

    python benchmarks/serve.py [--chats 8] [--seconds 24] [--rounds 3] [--threads 1]
    python benchmarks/serve.py --table             the table of the stored result

The same model (nano), the same prompts and settings, the same number of threads, one process each, one server up at a
time. Windows of time take turns, so that a busy machine disturbs all alike: the base; an adapter while nothing is
learned; the same adapter while feedback is always waiting, so that an update runs all the time. The first seconds of a
window are not counted; a window that should learn and made no version ends the benchmark. What was sampled is
counted by one tokenizer for all. Learning that costs chat more than 30 % of its throughput is a failure: exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from earnest.models.places import nano_folder
from earnest.tasks.style import TOPICS

HERE = Path(__file__).parent
WARM = 2.0
LENGTH = 32
MOST = 0.30  # of chat's throughput may go to learning


def _port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def _server(kind: str, threads: int, folder: Path) -> Iterator[tuple[str, str]]:
    """(address, name of the model)."""
    port = _port()
    if kind == "earnest":
        model = "assistant"
        command = [sys.executable, "-m", "earnest.cli", "serve", "--data", str(folder), "--threads", str(threads)]
    else:
        model = str(nano_folder())
        command = [str(Path(sys.executable).parent / "transformers"), "serve", model, "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with (folder.parent / f"{kind}.log").open("w") as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, env=environment)
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(url, model, process)
            yield url, model
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ask(model: str, number: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"Describe the {TOPICS[number % len(TOPICS)]}."}],
        "max_tokens": LENGTH,
        "temperature": 1.0,
        "seed": number,
    }


def _wait(url: str, model: str, process: subprocess.Popen[bytes]) -> None:
    while True:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}")
        try:
            if httpx.post(f"{url}/v1/chat/completions", json=_ask(model, 0), timeout=120).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)


async def _load(url: str, model: str, chats: int, seconds: float, teach: bool) -> dict[str, Any]:
    """``chats`` users who each ask, wait for the answer and ask again."""
    begin = time.perf_counter() + WARM
    end = begin + seconds
    answers: list[tuple[float, str]] = []

    async def user(client: httpx.AsyncClient, number: int) -> None:
        while (started := time.perf_counter()) < end:
            found = (await client.post("/v1/chat/completions", json=_ask(model, number))).json()
            now = time.perf_counter()
            if begin <= now < end:
                answers.append((now - started, found["choices"][0]["message"]["content"]))
            number += chats

    async def teacher(client: httpx.AsyncClient) -> None:
        """Keeps the queue filled, a little at a time."""
        while time.perf_counter() < end:
            await _fill(client, model)
            await asyncio.sleep(0.5)

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        before = await _versions(client) if teach else 0
        if teach:
            await _fill(client, model)
        await asyncio.gather(*(user(client, n) for n in range(chats)), *([teacher(client)] if teach else []))
        made = await _versions(client) - before if teach else 0
        while teach and (await client.get("/v1/feedback", params=NEWEST)).json()["counts"]["queued"]:
            await asyncio.sleep(0.2)
    latencies = sorted(a for a, _ in answers)
    tokenizer = _tokenizer()
    tokens = sum(len(tokenizer.encode(text).ids) + 1 for _, text in answers)  # and the one that ends the turn
    return {
        "tokens_per_second": tokens / seconds,
        "answers": len(answers),
        "p50": statistics.median(latencies),
        "p99": latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))],
        "versions": made,
    }


NEWEST = {"adapter": "assistant", "limit": 1}


async def _versions(client: httpx.AsyncClient) -> int:
    return len((await client.get("/v1/adapters/assistant")).json()["versions"])


async def _fill(client: httpx.AsyncClient, model: str) -> None:
    """At least two updates' worth of feedback waits."""
    if (await client.get("/v1/feedback", params=NEWEST)).json()["counts"]["queued"] >= 16:
        return
    found = (await client.post("/v1/chat/completions", json=_ask(model, 0))).json()
    items = [{"completion_id": found["id"], "text": "Warmer please."}] * 16
    (await client.post("/v1/feedback", json={"feedback": items})).raise_for_status()


async def _learned_once(url: str) -> None:
    """An adapter that is one: version 0 is the base, and costs what the base costs."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await _fill(client, "assistant")
        while (await client.get("/v1/feedback", params=NEWEST)).json()["counts"]["queued"]:
            await asyncio.sleep(0.2)
        # Whatever is learned while this runs, the same version answers: learning is what is measured.
        await client.post("/v1/adapters/assistant/pin", json={"version": 1})


def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(nano_folder() / "tokenizer.json"))


THEIRS = "transformers serve, base"
WINDOWS = ("earnest serve, base", "earnest serve, adapter", "earnest serve, adapter, learning")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=24.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "serve.json")
    parser.add_argument("--table", action="store_true", help="print the table of the stored result")
    args = parser.parse_args()
    if args.table:
        stored = json.loads(args.out.read_text())
        print(table(stored))
        judge(stored)
        return
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in (THEIRS, *WINDOWS)}

    def window(kind: str, url: str, model: str) -> None:
        row = asyncio.run(_load(url, model, args.chats, args.seconds, "learning" in kind))
        found[kind].append(row)
        print(kind, {k: round(v, 3) for k, v in row.items()}, flush=True)
        if "learning" in kind and not row["versions"]:
            raise SystemExit(f"nothing was learned in {args.seconds:g} s, so this measures no learning; --seconds more")

    with tempfile.TemporaryDirectory() as folder:
        with _server("transformers", args.threads, Path(folder) / "data") as (url, model):
            for _ in range(args.rounds):
                window(THEIRS, url, model)
        with _server("earnest", args.threads, Path(folder) / "data") as (url, _):
            asyncio.run(_learned_once(url))
            for _ in range(args.rounds):
                for kind in WINDOWS:
                    window(kind, url, "base" if kind.endswith("base") else "assistant")
    rows = {kind: {k: statistics.median(r[k] for r in own) for k in own[0]} for kind, own in found.items() if own}
    idle, busy = (rows[kind]["tokens_per_second"] for kind in WINDOWS[1:])
    result = {
        "chats": args.chats,
        "threads": args.threads,
        "seconds": args.seconds,
        "rounds": args.rounds,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "rows": rows,
        "all": found,
        "cost_of_learning": 1 - busy / idle,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    judge(result)


def judge(result: dict[str, Any]) -> None:
    """End with an error where learning takes more of chat than it may."""
    cost = result["cost_of_learning"]
    if not cost <= MOST:  # also where it is no number
        raise SystemExit(
            f"learning costs chat {cost:.0%} of its throughput, at most {MOST:.0%} is allowed; look at SHARES in "
            "serve/turns.py and at how long an update works before it yields its turn."
        )


def table(result: dict[str, Any]) -> str:
    lines = ["| server | tokens/s | p50 (s) | p99 (s) | versions made |", "| --- | --- | --- | --- | --- |"]
    for kind, r in result["rows"].items():
        lines.append(
            f"| {kind} | {r['tokens_per_second']:.0f} | {r['p50']:.2f} | {r['p99']:.2f} | {r['versions']:.0f} |"
        )
    return "\n".join(lines) + f"\n\nlearning costs chat {result['cost_of_learning']:.0%} of its throughput"


if __name__ == "__main__":
    main()
