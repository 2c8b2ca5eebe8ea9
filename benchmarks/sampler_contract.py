"""The contract of `earnest audit sampler` on real servers: `earnest serve`, and vLLM where `make vllm` has made it.

    python benchmarks/sampler_contract.py [--out benchmarks/results/sampler_contract.json]

The policy is nano in fp32. A server that is not here keeps its recorded verdict.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.vllm_server import PROGRAM, Vllm

RESULTS = Path(__file__).parent / "results" / "sampler_contract.json"


@contextmanager
def earnest(folder: Path) -> Iterator[tuple[str, str | None]]:
    command = [sys.executable, "-m", "earnest.cli", "serve", "--port", "0", "--data", str(folder), "--threads", "1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found is not None, "earnest serve printed no address"
        yield found.group(), None
    finally:
        server.terminate()
        server.wait()


@contextmanager
def vllm(folder: Path) -> Iterator[tuple[str, str | None]]:
    server = Vllm(folder)
    try:
        yield server.url, str(server.loras)
    finally:
        server.stop()


def verdict(url: str, folder: str | None) -> dict[str, Any]:
    import earnest as en
    from earnest.sync.contract import audit_sampler
    from earnest.sync.server import Server

    policy = en.load("nano")
    engine = en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=8)))
    found = audit_sampler(Server(url, folder=folder), engine, progress=lambda law: print(law, file=sys.stderr))
    return {"title": found.title.split(" at ")[0], **found.to_dict()}


def cell(finding: dict[str, Any]) -> str:
    measured = finding["measured"].replace("|", "\\|")
    return f"**{finding['outcome']}**: {measured}" if finding["outcome"] != "holds" else f"holds: {measured}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS)
    out: Path = parser.parse_args().out
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    servers = {"earnest": earnest} | ({"vllm": vllm} if PROGRAM.exists() else {})
    for name, start in servers.items():
        with tempfile.TemporaryDirectory() as scratch, start(Path(scratch) / name) as (url, folder):
            found[name] = verdict(url, folder)
    out.write_text(json.dumps(found, indent=1) + "\n")
    rows = {name: {f["law"]: cell(f) for f in v["findings"]} for name, v in found.items()}
    print("| law | " + " | ".join("`earnest serve`" if n == "earnest" else "vLLM 0.32.0, CPU" for n in found) + " |")
    print("|---|" + "---|" * len(found))
    for law in dict.fromkeys(law for column in rows.values() for law in column):
        print(f"| {law} | " + " | ".join(column.get(law, "-") for column in rows.values()) + " |")


if __name__ == "__main__":
    main()
