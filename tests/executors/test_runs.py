"""Whole runs: `earnest run … replicas=2 --on ray` and `--on monarch`, from the command to the report."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import pytest

from tests.diloco.servers import BUCKET, Seaweed, free_ports
from tests.runs.tiny import recipe, tiny_folder

pytestmark = [pytest.mark.slow, pytest.mark.processes]

SMALL = ["sampling={prompts_per_step: 2, completions_per_prompt: 4, max_new_tokens: 4}", "sync.every=2", "steps=4"]


def test_replicas_and_their_samplers_share_one_ray(tmp_path: Path) -> None:
    """Each worker's samplers are actors of the cluster that the worker itself runs in; the launcher starts none."""
    folder = tmp_path / "run"
    path = recipe(tmp_path / "r.yaml", tiny_folder(tmp_path / "tiny"))
    words = ["run", str(path), *SMALL, "replicas=2", "sampling.workers=1", "sync.quorum=2", f"out={folder}"]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as sessions:  # a socket's path must be short
        environment = {**os.environ, "RAY_TMPDIR": sessions}
        environment.pop("RAY_ADDRESS", None)
        command = [sys.executable, "-m", "earnest.cli", *words, "--on", "ray"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert len([p for p in Path(sessions).glob("**/session_2*") if p.is_dir()]) == 1, "one Ray for all"
    for replica in range(2):
        lines = [json.loads(x) for x in (folder / f"replica-{replica}" / "metrics.jsonl").read_text().splitlines()]
        versions = [x["metrics"]["sampler/version"] for x in lines if x["kind"] == "step"]
        assert len(versions) == 4 and versions[-1] > versions[0]


@pytest.mark.parametrize("on", ["ray", "monarch"])
def test_a_whole_run(on: str, tmp_path: Path) -> None:
    """Both replicas are in every round, and the launcher writes what a local run writes."""
    folder = tmp_path / "run"
    path = recipe(tmp_path / "r.yaml", tiny_folder(tmp_path / "tiny"))
    words = ["run", str(path), *SMALL, "replicas=2", "sync.quorum=2", "eval.every=0", f"out={folder}", "--on", on]
    done = subprocess.run([sys.executable, "-m", "earnest.cli", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out reward" in done.stdout
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [(line["step"], line["metrics"]["outer/members"]) for line in steps] == [(2, 2), (4, 2)]
    header = json.loads((folder / "run.json").read_text())
    assert header["on"] == on and header["status"] == "finished"
    assert (folder / "adapter" / "adapter_model.safetensors").exists() and (folder / "report.html").exists()


def test_a_running_cluster_by_its_address_and_by_its_variable(tmp_path: Path) -> None:
    """`ray start --head` as somebody else's cluster, S3 as the store: by `--on ray:ADDRESS`, then by $RAY_ADDRESS; the
    cluster outlives both runs."""
    server = Seaweed(tmp_path / "seaweed").start()
    port, client = free_ports(2)
    path = recipe(tmp_path / "r.yaml", tiny_folder(tmp_path / "tiny"))
    ray = Path(sysconfig.get_path("scripts")) / "ray"
    address = f"127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as sessions:
        words = ["start", "--head", "--block", f"--port={port}", f"--ray-client-server-port={client}", "--num-cpus=4"]
        words += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", f"--temp-dir={sessions}"]
        environment = {**os.environ, **server.environment, "RAY_USAGE_STATS_ENABLED": "0"}
        environment.pop("RAY_ADDRESS", None)
        with (tmp_path / "head.log").open("wb") as log:
            head = subprocess.Popen([str(ray), *words], stdout=log, stderr=log, cwd=tmp_path, env=environment)
        try:
            _until_it_listens(port)
            for name, on, more in (("a", f"ray:{address}", {}), ("b", "ray", {"RAY_ADDRESS": address})):
                folder = tmp_path / name
                run = ["run", str(path), *SMALL, "replicas=2", "sync.quorum=2", f"store=s3://{BUCKET}", f"out={folder}"]
                command = [sys.executable, "-m", "earnest.cli", *run, "--on", on]
                done = subprocess.run(
                    command, capture_output=True, text=True, check=False, env={**environment, **more}, cwd=tmp_path
                )
                assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "head.log").read_text()[-2000:]
                lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
                assert [x["metrics"]["outer/members"] for x in lines if x["kind"] == "step"] == [2, 2]
                assert not list(folder.glob("replica-*")), "workers elsewhere keep their own folders"
                assert head.poll() is None
            assert len([p for p in Path(sessions).glob("session_2*") if p.is_dir()]) == 1, "no second Ray"
        finally:
            head.terminate()
            head.wait(timeout=60)
            server.stop()


def _until_it_listens(port: int) -> None:
    limit = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < limit
            time.sleep(0.2)


LOOP = "from monarch.actor import *; run_worker_loop_forever(ca='trust_all_connections', address='tcp://127.0.0.1:{}')"


def test_hosts_that_run_monarchs_workers_by_their_addresses(tmp_path: Path) -> None:
    """Two hosts, each a process with Monarch's own worker loop; S3 as the store."""
    server = Seaweed(tmp_path / "seaweed").start()
    path = recipe(tmp_path / "r.yaml", tiny_folder(tmp_path / "tiny"))
    ports, folder = free_ports(2), tmp_path / "run"
    environment = {**os.environ, **server.environment}
    with (tmp_path / "hosts.log").open("wb") as log:
        hosts = [
            subprocess.Popen([sys.executable, "-c", LOOP.format(p)], stdout=log, stderr=log, cwd=tmp_path)
            for p in ports
        ]
    try:
        for port in ports:
            _until_it_listens(port)
        run = ["run", str(path), *SMALL, "replicas=2", "sync.quorum=2", f"store=s3://{BUCKET}", f"out={folder}"]
        command = [sys.executable, "-m", "earnest.cli", *run, "--on"]
        command.append("monarch:" + ",".join(f"tcp://127.0.0.1:{p}" for p in ports))
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "hosts.log").read_text()[-2000:]
        lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [x["metrics"]["outer/members"] for x in lines if x["kind"] == "step"] == [2, 2]
    finally:
        for host in hosts:
            host.kill()
            host.wait()
        server.stop()
