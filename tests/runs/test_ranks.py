"""A run of two ranks: one folder, one line per step, and a rank that dies ends it with one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from earnest.config import from_mapping
from earnest.config.recipes import read
from earnest.engines.mesh import Mesh
from earnest.errors import ConfigError, EarnestError
from earnest.runs import ranks
from earnest.runs.setup import build

ROOT = Path(__file__).parents[2]
SMALL = ["steps=8", "eval.prompts=4", "eval.every=0", "sampling.prompts_per_step=4", "checkpoint.every=2"]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def settings(folder: Path) -> dict[str, Any]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "EARNEST_TEST": str(folder)}


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(p) for p in found.stdout.split()]


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run_and_one_process_continues_it(tmp_path: Path) -> None:
    out, undisturbed = tmp_path / "two", tmp_path / "one"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "earnest"]
    command = [*start, "run", "quickstart", "engine.shard=2", f"out={out}", *SMALL]
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(command, env=settings(out), stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while not (out / "checkpoints" / "step-000002").exists():
            assert launcher.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.05)
        second = next(p for p in children(launcher.pid) if b"RANK=1\0" in Path(f"/proc/{p}/environ").read_bytes())
        os.kill(second, signal.SIGKILL)
        killed = time.monotonic()
        assert launcher.wait(timeout=60) != 0
        assert time.monotonic() - killed < 60
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    told = (tmp_path / "log").read_text()
    assert f"rank 1 (process {second}) was killed" in told, told[-3000:]
    assert "rank 1" in (out / "events.log").read_text()
    one = [sys.executable, "-m", "earnest", "run"]
    for rest in ([str(out), "--resume", "engine.shard=1"], ["quickstart", f"out={undisturbed}", *SMALL]):
        done = subprocess.run([*one, *rest], env=settings(out), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = lines(out), lines(undisturbed)
    assert [(x["kind"], x["step"]) for x in ours] == [(x["kind"], x["step"]) for x in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a["reward"] == b["reward"], (a, b)  # the same completions, so the same weights to rounding
        if a["kind"] == "step":
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


FULL = ["engine.shard=2", "adapter={kind: full}", "optimizer.lr=1e-4"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [FULL, ["engine.tensor=2"]], ids=["full parameters in shards", "split layers"])
def test_two_ranks_save_resume_and_end_as_one_process(tmp_path: Path, layout: list[str]) -> None:
    """With a reference, which is the base, and through a checkpoint; the result is that of one process."""
    out, one = tmp_path / "two", tmp_path / "one"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "earnest"]
    small = [w for w in SMALL if not w.startswith("steps")]
    small.append("objective=[{kind: grpo, clip: 0.2}, {kind: reference_kl, weight: 0.1}]")
    alone = [w for w in layout if not w.startswith("engine")]
    for words in (
        [*start, "run", "quickstart", f"out={out}", "steps=2", *small, *layout],
        [*start, "run", str(out), "--resume", "steps=4"],
        [sys.executable, "-m", "earnest", "run", "quickstart", f"out={one}", "steps=4", *small, *alone],
    ):
        done = subprocess.run(words, env=settings(out), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    ours, theirs = lines(out), lines(one)
    steps = [(a, b) for a, b in zip(_last(ours), _last(theirs), strict=True) if a["kind"] == "step"]
    assert len(steps) == 4
    for a, b in steps:
        assert a["reward"] == b["reward"]
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        own, other = (x["terms"]["reference_kl"]["loss"] for x in (a, b))
        assert own == pytest.approx(other, rel=1e-2, abs=1e-7)
    assert own > 0  # the reference is not the trained policy
    verdict = json.loads((out / "verdict.json").read_text())
    assert any(f["law"] == "SH" and f["outcome"] == "holds" for f in verdict["checks"]), verdict
    name = "model.safetensors" if layout is FULL else "earnest_adapter.safetensors"
    a, b = (load_file(folder / "adapter" / name) for folder in (out, one))
    assert a.keys() == b.keys()
    for key in a:
        assert torch.allclose(a[key], b[key], rtol=1e-3, atol=1e-4 * float(b[key].abs().max())), key


@pytest.mark.slow
def test_a_run_of_two_ranks_continues_on_one_and_then_on_four(tmp_path: Path) -> None:
    """The trained weights and their optimizer are in shards. Every step is that of one process, and is there once."""
    out, one = tmp_path / "many", tmp_path / "one"
    small = [*(w for w in SMALL if not w.startswith("steps")), *FULL[1:]]
    for count, words in (
        (2, ["quickstart", f"out={out}", "steps=2", *small, "engine.shard=2"]),
        (1, [str(out), "--resume", "steps=4", "engine.shard=1"]),
        (4, [str(out), "--resume", "steps=6", "engine.shard=4"]),
        (1, ["quickstart", f"out={one}", "steps=6", *small]),
    ):
        many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)] if count > 1 else []
        command = [sys.executable, *many, "-m", "earnest", "run", *words]
        done = subprocess.run(command, env=settings(out), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    ours, theirs = _last(lines(out)), _last(lines(one))
    assert [x["step"] for x in ours] == [x["step"] for x in theirs] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(ours, theirs, strict=True):
        assert a["reward"] == b["reward"]  # the same prompts and completions
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    assert sorted(path.name for path in (out / "ranks").glob("*.log")) == [f"rank-{n}.log" for n in (1, 2, 3)]


@pytest.mark.slow
def test_two_ranks_sample_on_a_server_as_one_process_does(tmp_path: Path) -> None:
    """Rank 0 starts the server and pushes the weights of every step; both ranks train on its completions."""
    words = ["quickstart", "steps=3", *(w for w in SMALL if not w.startswith("steps")), "sampler.port=0"]
    for name, count in (("two", 2), ("one", 1)):
        many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if count > 1 else []
        command = [sys.executable, *many, "-m", "earnest", "run", *words, f"engine.shard={count}"]
        done = subprocess.run(
            [*command, f"out={tmp_path / name}"], env=settings(tmp_path), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    ours, theirs = (_last(lines(tmp_path / name)) for name in ("two", "one"))
    assert len(ours) == 3
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a["reward"] == b["reward"] and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        assert a["metrics"]["sampler/probe"] < 1e-4 and a["metrics"]["sampler/version"] == step


def _last(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps; a resumed run also has the evaluation at the end of the first part."""
    return [line for line in found if line["kind"] == "step"]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("sampler={url: 'http://127.0.0.1:1', staleness: 1}", "sampler.staleness"),
        ("sampler=file:///bucket", "sampler.url"),
        ("sampling.workers=1", "sampling.workers"),
    ],
)
def test_what_several_ranks_do_not_support_is_refused(override: str, key: str) -> None:
    config = from_mapping(read("quickstart")[1], ["engine.shard=2", override])
    with pytest.raises(ConfigError, match=f"^{key}: is not supported with several ranks"):
        ranks.join(config)


def test_offload_of_weights_that_are_on_the_cpu_is_refused() -> None:
    config = from_mapping(read("quickstart")[1], ["engine.shard=2", "engine.offload=true", "device=cpu"])
    with pytest.raises(ConfigError, match=r"^engine\.offload: the weights are on the CPU already; leave it out"):
        build(config, lambda _: None, Mesh(0, 2, 2))
    with pytest.raises(ConfigError, match=r"engine\.offload: moves the shards of a base; set engine\.shard to 2"):
        from_mapping(read("quickstart")[1], ["engine.offload=true"])


@pytest.mark.parametrize(
    ("override", "key"),
    [("adapter={kind: full}", "adapter.kind"), ("adapter.modules_to_save=[lm_head]", "adapter.modules_to_save")],
)
def test_replicas_exchange_whole_tensors(override: str, key: str) -> None:
    config = from_mapping(read("quickstart")[1], ["engine.shard=2", "replicas=2", override])
    with pytest.raises(ConfigError, match=f"^{key}: is not supported with replicas that share differences"):
        ranks.check(config)
    ranks.check(from_mapping(read("quickstart")[1], ["engine.shard=2", override]))


def test_the_ranks_of_a_team_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = from_mapping(read("quickstart")[1], ["engine.shard=2", "engine.tensor=2"])
    with pytest.raises(ConfigError, match="shard=2 × replicate=1 × tensor=2 needs 4 processes, and this is one of 2"):
        ranks.join(config)


def test_the_reason_of_a_rank_that_failed_reaches_the_others(tmp_path: Path) -> None:
    here, other = Mesh(0, 2), Mesh(1, 2)
    here.notes = other.notes = tmp_path
    here._people = other._people = [("here", 1), ("elsewhere", 2)]
    with pytest.raises(ValueError, match="a grader"), other.explained():
        raise ValueError("a grader raised")
    with pytest.raises(EarnestError, match="rank 1 stopped: ValueError: a grader raised"), here.explained():
        raise RuntimeError("[gloo] Connection closed by peer")
    with pytest.raises(RuntimeError, match="something else"), here.explained():
        raise RuntimeError("something else")
