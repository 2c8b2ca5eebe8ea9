"""`earnest run … replicas=N` and `earnest worker`: a whole run, from the command to the report."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from earnest import runs
from earnest.config import RunConfig, load_file
from earnest.config.replicas import plan
from earnest.diloco.executors.base import (
    EXECUTORS,
    ExecutorError,
    Exit,
    Job,
    get_executor,
    gpu_variables,
    supervise,
)
from earnest.diloco.globals import OuterSGD
from earnest.diloco.launch import job_of, resume, start, wants_gpu
from earnest.diloco.ledger import Ledger
from earnest.diloco.outer import SyncSchedule
from earnest.diloco.worker import read_config, work
from earnest.errors import ConfigError, EarnestError, SamplingError
from earnest.runs import setup
from earnest.runs.errors import Interrupted
from earnest.runs.folder import RunFolder
from earnest.store import Bucket, StoreError
from tests.diloco.forked import ForkExecutor
from tests.diloco.processes import commits, events
from tests.report.test_watch import evaluation
from tests.runs.tiny import recipe

Make = Callable[..., RunConfig]
SMALL = ("sampling={prompts_per_step: 2, completions_per_prompt: 4, max_new_tokens: 4}", "sync.every=2", "steps=4")


@pytest.fixture
def make(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setitem(EXECUTORS, "fork", "tests.diloco.forked:ForkExecutor")
    monkeypatch.setattr(ForkExecutor, "kill", {})
    return lambda *words: load_file(recipe(tmp_path / "recipe.yaml", tiny), [*SMALL, *words])


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


@pytest.mark.processes
def test_the_command_line_from_end_to_end(tiny: Path, tmp_path: Path) -> None:
    """`earnest run` starts two `earnest worker`s as processes of their own; one of them is killed and started again."""
    folder = tmp_path / "run"
    words = ["run", str(recipe(tmp_path / "r.yaml", tiny)), *SMALL, "steps=6", "replicas=2", f"out={folder}"]
    words += [f"store=file://{tmp_path}/store", "sync.wire=int8", "checkpoint.every=1"]
    command = [sys.executable, "-m", "earnest.cli", *words]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ledger = Ledger(Bucket.open(f"file://{tmp_path}/store/run"))
    while ledger.commit(0) is None:
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    workers = [p for p in children if b"worker" in Path(f"/proc/{p}/cmdline").read_bytes()]
    assert len(workers) == 2
    os.kill(int(workers[1]), signal.SIGKILL)
    out, error = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, error + (folder / "replica-1.log").read_text()
    assert "held-out reward" in out and "earnest worker file://" in out
    assert any("ended with -9; started again" in line for line in events(folder))
    assert [line["step"] for line in steps(folder)] == [2, 4, 6]
    sizes = [line["metrics"]["outer/bytes per round"] for line in steps(folder)]
    assert all(0 < size < 20_000 for size in sizes)
    page = (folder / "report.html").read_text()
    assert "bytes per round" in page and "started again" in page
    assert (folder / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.processes
def test_four_replicas_learn_though_one_is_killed(make: Make, tmp_path: Path) -> None:
    """The held-out reward rises by more than three standard errors; a replica dies on the way."""
    ForkExecutor.kill = {2: ("after the upload", 2)}
    words = ("replicas=4", "steps=12", "sync.lr=1.0", "sync.momentum=0.5", "eval={every: 0, prompts: 24, samples: 4}")
    more = ("sampling={prompts_per_step: 3, completions_per_prompt: 6, max_new_tokens: 8}", "optimizer.lr=0.03")
    finished = start("test", make(*words, *more, f"out={tmp_path / 'run'}"), quiet(), on="fork")
    assert finished.gain > 3 * (finished.gain_se or 0), finished
    assert any("replica 2 ended with -9" in line for line in events(tmp_path / "run"))
    ledger = Ledger(Bucket.open(f"file://{tmp_path}/run/bucket"))
    assert len(commits(ledger)) == 6


@pytest.mark.processes
def test_replicas_have_prompts_of_their_own_and_the_same_initial_adapter(make: Make, tmp_path: Path) -> None:
    start("test", make("replicas=2", "steps=2", f"out={tmp_path / 'run'}"), quiet(), on="fork")
    asked = [
        {
            json.loads(s)["prompt_id"]
            for s in (tmp_path / "run" / f"replica-{i}" / "samples.jsonl").read_text().splitlines()
        }
        for i in range(2)
    ]
    assert asked[0] and asked[1] and asked[0] != asked[1]


@pytest.mark.processes
def test_the_final_adapter_is_the_last_commit(make: Make, tmp_path: Path) -> None:
    from safetensors.torch import load_file as load

    from earnest.engines.checkpoint import read

    folder = tmp_path / "run"
    start("test", make("replicas=2", "checkpoint.every=1", f"out={folder}"), quiet(), on="fork")
    assert Ledger(Bucket.open(f"file://{folder}/bucket")).claim() == 2, "the replicas' own numbers are taken"
    exact = load(folder / "adapter" / "earnest_adapter.safetensors")
    tensors, _ = read(max((folder / "replica-0" / "checkpoints").glob("step-*")) / "engine")
    trained = {k.removeprefix("adapter."): v for k, v in tensors.items() if k.startswith("adapter.")}
    assert trained and all(any(torch.equal(v, e) for e in exact.values()) for v in trained.values())


@pytest.mark.processes
def test_workers_average_over_a_lighthouse_if_the_settings_name_one(make: Make, tmp_path: Path) -> None:
    """A whole run with torchft's own server: workers average over gloo, and the bucket has the final state."""
    from safetensors.torch import load_file as load
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=200)
    address = f"http://localhost:{server.address().rsplit(':', 1)[1]}"
    folder = tmp_path / "run"
    words = ("replicas=2", f"sync.lighthouse={address}", "sync.quorum=2", "sync.timeout=120", f"out={folder}")
    start("test", make(*words), quiet(), on="fork")
    server.shutdown()
    ledger = Ledger(Bucket.open(f"file://{folder}/bucket"))
    assert commits(ledger) == {} and max(ledger.states()) == 2  # no round went through the bucket
    assert [(line["step"], line["metrics"]["outer/members"]) for line in steps(folder)] == [(2, 2), (4, 2)]
    sizes = {line["metrics"]["outer/bytes per replica"] for line in steps(folder)}
    numbers = sum(p.numel() for p in load(folder / "adapter" / "earnest_adapter.safetensors").values())
    assert {line["metrics"]["outer/bytes per round"] for line in steps(folder)} == {2 * size for size in sizes}
    assert len(sizes) == 1 and 2 * numbers < sizes.pop() <= 4 * numbers
    assert all(line["reward"]["n"] == 2 * 2 * 8 for line in steps(folder)), "both replicas' rewards, of both steps"
    assert not [line for line in events(folder) if "warning" in line.lower()], "no complaint about rounds"
    assert any(
        t.abs().max() > 0 for k, t in load(folder / "adapter" / "earnest_adapter.safetensors").items() if "B" in k
    )


@pytest.mark.processes
@pytest.mark.slow
def test_the_first_replica_of_a_lighthouse_is_killed_and_the_run_ends(tiny: Path, tmp_path: Path) -> None:
    """No replica is essential: the others go on, replica 0 is started again and restored, and the end is written."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=200, heartbeat_timeout_ms=1000)
    address = f"http://localhost:{server.address().rsplit(':', 1)[1]}"
    folder = tmp_path / "run"
    words = ["run", str(recipe(tmp_path / "r.yaml", tiny)), *SMALL, "steps=40", "replicas=3", f"out={folder}"]
    words += [f"sync.lighthouse={address}", "sync.quorum=2", "sync.timeout=60", "sync.snapshot_every=5"]
    words.append(f"store=file://{tmp_path}/store")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "earnest.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    ledger = Ledger(Bucket.open(f"file://{tmp_path}/store/run"))
    while not ledger.reports(1):
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    named = {p: Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0") for p in children}
    (first,) = [p for p, line in named.items() if b"worker" in line and line[line.index(b"--replica") + 1] == b"0"]
    os.kill(int(first), signal.SIGKILL)
    out, error = launcher.communicate(timeout=400)
    server.shutdown()
    logs = "".join(p.read_text()[-2000:] for p in sorted(folder.glob("replica-*.log")))
    assert launcher.returncode == 0, error + logs
    assert "held-out reward" in out and max(ledger.states()) == 20
    assert any("replica 0 ended with -9; started again" in line for line in events(folder))
    assert [line["step"] for line in steps(folder)] == [2 * k for k in range(1, 21)]
    members = [line["metrics"]["outer/members"] for line in steps(folder)]
    assert members[0] in (2, 3) and min(members) >= 2


def test_what_was_started_for_sampling_ends_with_a_worker_and_with_the_launcher(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where training fails. The launcher starts no samplers of ``sampling.workers``: those are the replicas'."""

    from earnest.config import dump
    from earnest.diloco import launch, worker

    closed: list[int] = []

    class FakeSampler:
        """A sampler that a run starts beside its model."""

        fails, staleness = False, 0

        def __init__(self, workers: int, engine: Any) -> None:
            self.workers, self.engine, self.metrics = workers, engine, {}

        def sample(self, *words: Any) -> Any:
            if FakeSampler.fails:
                raise SamplingError("the sampler is gone")
            return self.engine.sample(*words)

        def close(self) -> None:
            closed.append(self.workers)

    def build(config: RunConfig, say: Any, mesh: Any = None) -> Any:
        alone = config.model_copy(update={"sampling": config.sampling.model_copy(update={"workers": 0})})
        built = setup.build(alone, say, mesh)
        return replace(built, samplers=FakeSampler(config.sampling.workers, built.engine))

    monkeypatch.setattr(launch, "build", build)
    monkeypatch.setattr(worker, "build", build)
    config = make("replicas=2", "steps=2", "sync.grace=0", "sampling.workers=3", f"out={tmp_path / 'run'}")
    url = f"file://{tmp_path}/bucket"
    launch._put(url, "test", dump(config))
    work(url, 0, tmp_path / "mine", quiet())
    assert closed == [3]
    FakeSampler.fails = True
    with pytest.raises(EarnestError, match="the sampler is gone"):
        start("test", config, quiet(), on="fork")  # in the check, before a worker is started
    assert closed == [3, 0]
    url = f"file://{tmp_path}/other"
    launch._put(url, "test", dump(config))
    with pytest.raises(EarnestError, match="the sampler is gone"):
        work(url, 0, tmp_path / "fails", quiet())
    assert closed == [3, 0, 3]


@pytest.mark.processes
def test_resume_continues_from_the_last_committed_round(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher is stopped after the first round; the resumed one does not repeat that round."""
    from earnest.diloco.launch import Launcher

    record = Launcher._record

    def stop(self: Any, *args: Any) -> None:
        record(self, *args)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Launcher, "_record", stop)
    folder, config = tmp_path / "run", make("replicas=2", "steps=8", f"out={tmp_path / 'run'}")
    with pytest.raises(Interrupted):
        start("test", config, quiet(), on="fork")
    monkeypatch.undo()
    monkeypatch.setitem(EXECUTORS, "fork", "tests.diloco.forked:ForkExecutor")
    assert json.loads((folder / "run.json").read_text())["status"] == "interrupted"
    with pytest.raises(ConfigError, match=r"use one of them, or set replicas=1"):
        runs.resume(folder, console=quiet())
    runs.resume(folder, console=quiet(), replicas=resume)
    assert [line["step"] for line in steps(folder)] == [2, 4, 6, 8]
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"


def test_a_worker_joins_without_a_number(make: Make, tmp_path: Path) -> None:
    """Alone it takes the first free number and does the whole run."""
    from earnest.config import dump
    from earnest.diloco.launch import _put

    url = f"file://{tmp_path}/bucket"
    _put(url, "test", dump(make("replicas=2", "sync.grace=0", "steps=2")))
    assert work(url, None, tmp_path / "mine", quiet()) == 0
    assert work(url, None, tmp_path / "other", quiet()) == 1  # the run is over; it ends at once
    assert Ledger(Bucket.open(url)).committed() == 1
    name, config, _ = read_config(Ledger(Bucket.open(url)))
    assert (name, config.replicas) == ("test", 2)
    with pytest.raises(EarnestError, match="belongs to another run or replica"):
        work(url, 5, tmp_path / "mine", quiet())


def test_a_round_that_was_cleaned_up_before_the_launcher_looked_has_no_bytes(make: Make, tmp_path: Path) -> None:
    """None, not 0: what it sent is unknown. The next round is complete."""
    from earnest.config import dump
    from earnest.diloco.launch import Launcher, _build, _put
    from earnest.runs.progress import reporter_on
    from earnest.runs.stopping import Stopper

    url, config = f"file://{tmp_path}/bucket", make("replicas=1", f"store=file://{tmp_path}")
    _put(url, "test", dump(config))
    work(url, 0, tmp_path / "mine", quiet())
    bucket = Bucket.open(url)
    bucket.delete(bucket.list("outer/00000000/delta"))
    built = _build(config, quiet())
    header = {"recipe": "test", **built.describe(), "url": url, "on": "local"}
    folder = RunFolder.create(tmp_path / "run", config, built.policy, header)
    launcher = Launcher(built, folder, reporter_on(quiet()), [])
    launcher.follow(config, Scripted({}), url)
    launcher._look(Stopper(print))
    first, second = (line["metrics"] for line in steps(tmp_path / "run"))
    assert first["outer/bytes per round"] is first["outer/bytes per replica"] is None and first["outer/tokens"] > 0
    assert second["outer/bytes per round"] == second["outer/bytes per replica"] > 0
    assert [line for line in events(tmp_path / "run") if "round 0: 1 of 1 members' reports are missing" in line]
    # The replicas' own rewards rise, and those of the averaged weights fall.
    last = steps(tmp_path / "run")[-1]
    for number, own, heldout in ((6, 0.6, [0.9, 0.8]), (8, 0.9, [0.4, 0.3])):
        launcher._write_line(last | {"step": number, "reward": {"mean": own, "sd": 0.1, "n": 8}})
        launcher._write_line(evaluation(number, heldout).model_dump(mode="json"))
    (warned,) = [line for line in events(tmp_path / "run") if "the held-out reward fell from 0.850" in line]
    assert "while the training reward went from" in warned and "try sync.lr=1 sync.momentum=0" in warned
    folder.close()
    built.close()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["worker", "file:///tmp/nothing-here-at-all"], "there is no run at"),
        (["worker", "nowhere"], "give s3://bucket/prefix"),
        (["run", "quickstart", "--dry-run"], "add replicas=N"),
        (["run", "quickstart", "replicas=2", "--on", "lokal"], "did you mean 'local'"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    from earnest.cli import main

    with pytest.raises(SystemExit) as ended:
        main(words)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and says in error and "Traceback" not in error


def test_a_run_with_replicas_is_not_trained_in_one_process(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"replicas is 2 and store is None: .*earnest\.diloco\.launch"):
        runs.start("test", make("replicas=2", f"out={tmp_path / 'run'}"), quiet())
    assert not (tmp_path / "run").exists()


def test_dry_run_prints_the_commands_and_no_secret(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from earnest.diloco.launch import dry_run

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    text = dry_run("test", make("replicas=3", "store=s3://b/runs", f"out={tmp_path / 'exp'}"), "local")
    jobs = json.loads(text)
    assert len(jobs) == 3 and "hush" not in text and jobs[0]["env"]["AWS_SECRET_ACCESS_KEY"] == "…"
    assert jobs[2]["command"][2:7] == ["earnest.cli", "worker", "s3://b/runs/exp", "--replica", "2"]
    assert not (tmp_path / "exp").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["replicas=2", "steps=5"], "multiple of 2"),
        (["replicas=2", "sync.fragments=3"], r"multiple of sync\.fragments"),
        (["replicas=2", "sync.delay=2"], r"below every / fragments"),
        (["replicas=2", "updates_per_batch=4"], r"multiple of updates_per_batch"),
        (["replicas=2", "sync.quorum=3"], "3 is more than the 2 replicas"),
        (["replicas=2", "sync.momentum=-0.1"], r"sync\.momentum"),
        (["replicas=2", "sync.momentum=1"], r"sync\.momentum"),
        (["replicas=2", "sync.density=0.1"], "only the wires topk and sparseloco have a density"),
        (["replicas=2", "sync.wire=fp32", "sync.feedback=0.5"], "fp32 sends everything"),
        (["replicas=4", "sync.groups=3"], "a multiple of as many replicas"),
        (["replicas=4", "sync.groups=2", "sync.max_norm=2"], "max_norm and signers"),
        (["replicas=2", "sync.algorithm=local_sgd", "sync.wire=int8"], "averages weights"),
        (["replicas=2", "sync.algorithm=local_sgd", "sync.lr=0.5"], "no meaning with algorithm: local_sgd"),
        (["replicas=2", "sync.lighthouse=http://x:1", "sync.grace=1"], "no meaning with lighthouse"),
        (["sync.wire=int8"], "no meaning for one replica"),
        (["replicas=2", "engine.kind=tinker"], "trains in one place"),
    ],
)
def test_settings_are_checked_before_anything_starts(words: list[str], says: str, make: Make) -> None:
    with pytest.raises(ConfigError, match=says):
        make(*words)


def test_by_default_the_outer_step_takes_the_average(make: Make) -> None:
    """With the paper's lr 0.7 and momentum 0.9 rewards decay where rounds or batches are small."""
    for outer in (SyncSchedule.of(make("replicas=2").sync).outer, OuterSGD()):
        assert (outer.lr, outer.momentum) == (1.0, 0.0)


def test_half_of_the_replicas_are_a_quorum_by_default(make: Make) -> None:
    assert [plan(make(f"replicas={n}")).quorum for n in (2, 3, 4, 5)] == [1, 2, 2, 3]


def test_every_setting_of_sync_is_read(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field of ``sync`` is read between the launcher's plan and a worker's end."""
    from earnest.config import dump
    from earnest.config.schema import Strict, SyncConfig
    from earnest.diloco.launch import _put, job_of

    config = make("replicas=1", f"store=file://{tmp_path}", "steps=2")
    read: set[str] = set()
    look = Strict.__getattribute__

    def watch(self: Any, name: str) -> Any:
        if type(self).__name__ == "SyncConfig":
            read.add(name)
        return look(self, name)

    url = f"file://{tmp_path}/bucket"
    _put(url, "test", dump(config))
    monkeypatch.setattr(Strict, "__getattribute__", watch)
    job_of(config, url, tmp_path)
    work(url, 0, tmp_path / "mine", quiet())
    monkeypatch.undo()
    assert set(SyncConfig.model_fields) - read == set()


# --- supervising ------------------------------------------------------------------------------------------------------


class Scripted:
    """An executor whose replicas end as written: {replica: [exit codes]}."""

    name = "scripted"

    def __init__(self, codes: dict[int, list[int]]) -> None:
        self.codes, self.ended, self.started, self.stopped = codes, [], [], False

    def dry_run(self, job: Job) -> list[dict[str, Any]]:
        return []

    def start(self, job: Job, replica: int, attempt: int) -> None:
        self.started.append((replica, attempt))
        self.ended.append(Exit(replica, attempt, self.codes[replica].pop(0), "the end of its log"))

    def poll(self) -> list[Exit]:
        ended, self.ended = self.ended, []
        return ended

    def stop(self) -> None:
        self.stopped = True


def test_a_dead_replica_is_started_again_at_most_max_restarts_times() -> None:
    said: list[str] = []
    executor = Scripted({0: [0], 1: [-9, -9, 0], 2: [1, 1, 1]})
    job = Job("file:///x", 3, max_restarts=2)
    exits = supervise(executor, job, lambda: None, said.append, finished=lambda: len(executor.started) == 7, poll=0)
    assert sorted(executor.started) == [(0, 1), (1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)]
    assert len(exits) == 7 and executor.stopped


def test_when_every_replica_has_ended_the_error_names_the_way_to_continue() -> None:
    executor = Scripted({0: [1]})
    with pytest.raises(ExecutorError, match=r"the end of its log\nWhat is committed is safe in file:///x"):
        supervise(executor, Job("file:///x", 1, max_restarts=0), lambda: None, print, finished=lambda: False, poll=0)
    assert executor.stopped


def test_executors_are_known_by_name() -> None:
    assert get_executor("local").name == "local"
    with pytest.raises(ExecutorError, match="takes no option"):
        get_executor("local:4")


@pytest.mark.processes
def test_a_run_whose_settings_never_reached_the_bucket_can_be_resumed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher was killed between the folder and config.yaml, or the store refused it."""
    config = make("replicas=2", f"out={tmp_path / 'run'}", f"store=file://{tmp_path}/store")
    with monkeypatch.context() as refusing:
        refusing.setattr(Bucket, "probe", lambda self: (_ for _ in ()).throw(StoreError("no store")))
        with pytest.raises(StoreError, match="no store"):
            start("test", config, quiet(), on="fork")
    assert Ledger(Bucket.open(f"file://{tmp_path}/store/run")).config() is None
    resume(RunFolder.open(tmp_path / "run"), config, quiet())
    assert len(steps(tmp_path / "run")) == 2


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_worker_dies_with_its_launcher(tmp_path: Path) -> None:
    """Else --resume would start duplicates beside the workers of a launcher that was killed."""
    words = ["serve", "--port", "0", "--data", str(tmp_path / "data")]  # any command that stays
    code = (
        "import sys, time\nfrom earnest.diloco.executors.local import LocalExecutor\n"
        "from earnest.diloco.executors.base import Job\n"
        f"Job.words = lambda self, replica: {words!r}\nexecutor = LocalExecutor()\n"
        f"executor.start(Job('file:///x', 1, folder={str(tmp_path)!r}), 0, 1)\n"
        "print(executor.running[0][1].process.pid, flush=True)\ntime.sleep(600)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    worker = int(launcher.stdout.readline())
    while "http://" not in (tmp_path / "replica-0.log").read_text():
        time.sleep(0.1)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists() and "State:\tZ" not in Path(f"/proc/{worker}/status").read_text():
        assert time.monotonic() < deadline, "the worker outlived its launcher"
        time.sleep(0.1)


def test_each_replica_of_a_machine_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    job = Job("file:///x", 3, gpu=True)
    for on in ("local", "monarch"):
        shown = get_executor(on).dry_run(job)
        assert [one["env"]["CUDA_VISIBLE_DEVICES"] for one in shown] == ["4", "6", "4"]
        assert all("CUDA_VISIBLE_DEVICES" not in one["env"] for one in get_executor(on).dry_run(Job("file:///x", 3)))
    started: list[dict[str, Any]] = []
    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", lambda *_, **given: started.append(given["env"]))
        local = get_executor("local")
        for replica in range(3):
            local.start(job, replica, 1)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in started] == ["4", "6", "4"], "what is shown is what is started"
    assert all(one["actor"]["num_gpus"] == 1 for one in get_executor("ray").dry_run(job))
    pairs = replace(job, replicas=2, ranks=2)  # a GPU for each rank
    shown = get_executor("local").dry_run(pairs)
    assert [one["env"]["CUDA_VISIBLE_DEVICES"] for one in shown] == ["4,6", "4,6"]
    assert all(one["actor"]["num_gpus"] == 2 for one in get_executor("ray").dry_run(pairs))
    assert all("num_gpus" not in one["actor"] for one in get_executor("ray").dry_run(Job("file:///x", 3)))
    assert [wants_gpu(device) for device in ("cuda", "auto", "cuda:3", "cpu")] == [True, None, False, False]


def test_gpus_of_other_machines_are_shared_out_there(monkeypatch: pytest.MonkeyPatch) -> None:
    away = Job("s3://bucket/run", 5, gpu=None)
    hosts = get_executor("monarch:tcp://10.0.0.1:1,tcp://10.0.0.2:1").dry_run(away)
    assert [(one["host"][-3], one["gpu"]) for one in hosts] == [("1", 0), ("2", 0), ("1", 1), ("2", 1), ("1", 2)]
    for there, each in ((0, None), (2, 1 / 3), (4, 0.5), (8, 1.0)):
        monkeypatch.setattr("torch.cuda.device_count", lambda there=there: there)
        assert get_executor("ray").dry_run(away)[0]["actor"].get("num_gpus") == each
    assert "if there are any" in get_executor("ray:10.0.0.1:6379").dry_run(away)[0]["actor"]["num_gpus"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert gpu_variables(None, 1) == {}, "there is no CUDA here"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert [gpu_variables(None, number)["CUDA_VISIBLE_DEVICES"] for number in range(3)] == ["4", "6", "4"]
    monkeypatch.setenv("EARNEST_INSTALL", "git+https://example.org/earnest")
    for on, way_out in (("modal", "modal:A10G"), ("hf", "hf:a10g-small"), ("hf:cpu-upgrade", "hf:a10g-small")):
        with pytest.raises(ExecutorError, match=f"device=cuda needs a machine with a GPU; write --on {way_out}"):
            get_executor(on).dry_run(replace(away, gpu=True))
        assert get_executor(on).dry_run(away) and get_executor(way_out).dry_run(replace(away, gpu=True))


def test_files_and_tokens_of_this_machine_are_found(
    make: Make, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    job = job_of(make("replicas=2"), "s3://b/r", tmp_path)
    assert job.files == {"model": str(tiny)} and job.env["HF_TOKEN"] == "hf_x"
    assert "model" not in job_of(make("replicas=2", "model=nano"), "s3://b/r", tmp_path).files


def talks(tmp_path: Path, first: int = 0) -> Path:
    path = tmp_path / "talks.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"say {i}", "completion": f"yes {i}!"}) + "\n" for i in range(first, 30))
    )
    return path


@pytest.mark.processes
def test_replicas_train_on_the_users_own_rows(make: Make, tmp_path: Path) -> None:
    """Two replicas lower the held-out loss of a file, each in its own order; a worker with other rows is refused."""
    data = talks(tmp_path)
    words = ("task=null", "objective=[{kind: sft}]", f"data={{train: {data}, heldout: 0.2}}", "optimizer.lr=0.02")
    config = make(*words, "replicas=2", "steps=4", "eval.every=2", f"out={tmp_path / 'run'}")
    done = start("test", config, quiet(), on="fork")
    assert done.measure == "loss" and done.after < done.before
    losses = [[line["loss"] for line in steps(tmp_path / "run" / f"replica-{i}")] for i in range(2)]
    assert len(losses[0]) == 4 and losses[0] != losses[1], "each replica has its own order"
    assert [line["step"] for line in steps(tmp_path / "run")] == [2, 4] and "reward" not in steps(tmp_path / "run")[0]
    talks(tmp_path, first=5)
    with pytest.raises(ConfigError, match=r"talks.jsonl has other rows here than where the run was started"):
        work(f"file://{tmp_path}/run/bucket", 5, tmp_path / "late", quiet())


@pytest.mark.parametrize("word", ["sampling.workers=1", "sampler=http://localhost:1"])
def test_samplers_without_a_task_are_refused(make: Make, tmp_path: Path, word: str) -> None:
    with pytest.raises(ConfigError, match=r"task: is required with sampling.workers and sampler, which sample its"):
        make("task=null", "objective=[{kind: sft}]", f"data={talks(tmp_path)}", word)
