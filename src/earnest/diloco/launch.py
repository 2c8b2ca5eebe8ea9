"""``earnest run … replicas=N store=URL``: put a run into a bucket, start its replicas, watch it, and fetch the result.

The launcher trains nothing. It measures the policy before, follows the commits, measures the final weights, and writes
the run folder. It reads all of this from the bucket, so the replicas may run anywhere.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from earnest.config import RunConfig, dump
from earnest.config.replicas import ReplicaPlan, plan
from earnest.diloco.executors.base import HUB_VARIABLES, STORE_VARIABLES, Executor, Job, get_executor, supervise
from earnest.diloco.globals import Globals
from earnest.diloco.groups import of_group
from earnest.diloco.ledger import Commit, Ledger
from earnest.diloco.outer import SyncSchedule, WeightCopies
from earnest.diloco.signing import signatures
from earnest.errors import ConfigError
from earnest.report.watch import FALLING, RunWatch
from earnest.runs import ranks, verdicts
from earnest.runs.best import mean_of
from earnest.runs.folder import RunFolder, default_place, require_free
from earnest.runs.lifecycle import Finished, complete
from earnest.runs.loop import TrainingLoop
from earnest.runs.preflight import preflight
from earnest.runs.progress import note_on, reporter_on
from earnest.runs.setup import Setup, build
from earnest.runs.stopping import Stopper
from earnest.store import Bucket, Damaged, Object, StoreError, join


def address(config: RunConfig, place: Path) -> str:
    """RUN_URL: a prefix of the store named like the run folder, or a folder inside it."""
    if config.store is None:
        return f"file://{place.absolute()}/bucket"
    return join(config.store, place.name)


def job_of(config: RunConfig, url: str, place: Path) -> Job:
    keys = {k: v for k, v in os.environ.items() if k.startswith(STORE_VARIABLES) or k in HUB_VARIABLES}
    return Job(
        url,
        config.replicas,
        keys,
        str(place.absolute()),
        config.sync.max_restarts,
        samplers=config.sampling.workers,
        gpu=wants_gpu(config.device),
        ranks=config.engine.ranks,
        files=local_files(config),
    )


def wants_gpu(device: str) -> bool | None:
    """Whether each replica gets a GPU of its own; None: where there are GPUs. Not if one device is named (cuda:3)."""
    return None if device == "auto" else device == "cuda"


def local_files(config: RunConfig) -> dict[str, str]:
    """Settings that name a file or folder of this machine: recipe key → path."""
    data, task = config.data, config.task
    given = {"model": config.model, "chat_template": config.chat_template}
    heldout = None if data is None or not isinstance(data.heldout, str) else data.heldout
    given |= {"data": None if data is None else data.train, "data.heldout": heldout}
    given |= {"task": None if task is None else task.name} | {
        f"import.{i}": name for i, name in enumerate(config.imports)
    }
    paths = {k: v for k, v in given.items() if v is not None and len(v) < 1000 and "\n" not in v}
    return {k: v for k, v in paths.items() if ("/" in v or "." in v) and Path(v.partition(":")[0]).exists()}


def dry_run(recipe: str, config: RunConfig, on: str) -> str:
    """What would be submitted, as JSON; secrets are named, not shown."""
    place = Path(config.out) if config.out is not None else default_place(recipe)
    job = job_of(config, address(config, place), place)
    shown = replace(job, env=dict.fromkeys(job.env, "…"))
    return json.dumps(get_executor(on).dry_run(shown), indent=1, ensure_ascii=False)


def start(recipe: str, config: RunConfig, console: Console | None = None, *, on: str = "local") -> Finished:
    """Train with replicas, into a new folder and a new prefix of the store."""
    console = console or Console()
    executor = get_executor(on)
    place = Path(config.out) if config.out is not None else default_place(recipe)
    require_free(place)
    url = address(config, place)
    setup = _build(config, console)
    try:
        preflight(setup)
        header = {"recipe": recipe, **setup.describe(), "url": url, "on": on}
        run = RunFolder.create(place, config, setup.policy, header)
        try:
            if not _put(url, recipe, dump(config), _rows(setup)):
                raise StoreError(
                    f"there is a run at {url} already; join it: `earnest worker {url}`, or choose another out=."
                )
        except StoreError as error:
            run.update(status="failed", reason=str(error))
            run.close()
            raise
        return _go(Launcher(setup, run, reporter_on(console), []), config, executor, url, console)
    finally:
        setup.close()


def _build(config: RunConfig, console: Console) -> Setup:
    """What the launcher evaluates with, in one process. It draws the held-out samples itself: ``sampling.workers`` are
    per replica, and actors of the launcher would take their place."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("replicas: each replica starts its own ranks; start this run without torchrun.")
    ranks.check(config)
    alone = config.sampling.model_copy(update={"workers": 0})
    one = config.engine.model_copy(update={"shard": 1, "replicate": 1, "tensor": 1, "offload": False})
    here = config.model_copy(update={"sampling": alone, "engine": one})
    return replace(build(here, note_on(console)), config=config)


def _rows(setup: Setup) -> str | None:
    """The hash of the user's rows, which every replica must read as the launcher does."""
    return None if setup.data is None else setup.data.dataset.sha256


def _put(url: str, recipe: str, config: str, rows: str | None = None) -> bool:
    """Refuse a store that overwrites, then write the settings; False: a run's settings are there already."""
    bucket = Bucket.open(url, writer="launcher")
    bucket.probe()
    return Ledger(bucket).put_config(config, {"recipe": recipe, "data": rows})


def resume(run: RunFolder, config: RunConfig, console: Console) -> Finished:
    """Start the replicas of a run again; committed rounds are not repeated. If the launcher was killed before
    the settings were in the bucket, or the store refused them, they are written now."""
    executor = get_executor(str(run.header["on"]))
    setup = _build(config, console)
    try:
        _put(str(run.header["url"]), str(run.header["recipe"]), dump(config), _rows(setup))
        return _go(Launcher(setup, run, reporter_on(console), []), config, executor, str(run.header["url"]), console)
    finally:
        setup.close()


def _go(launcher: Launcher, config: RunConfig, executor: Executor, url: str, console: Console) -> Finished:
    setup, run = launcher.setup, launcher.run
    try:
        launcher.follow(config, executor, url)
        introduction = [
            setup.policy.describe(),
            f"{config.replicas} replicas in {url}; run folder {run.path}",
            f"another machine joins with: earnest worker {url}",
        ]
        return complete(launcher, console, introduction)
    finally:
        run.close()


class Launcher(TrainingLoop):
    """A run whose steps are done elsewhere: each committed round is one line of metrics.jsonl."""

    ledger: Ledger
    job: Job
    executor: Executor
    plan: ReplicaPlan
    agreed: Globals
    seen: int

    def follow(self, config: RunConfig, executor: Executor, url: str) -> None:
        """Call before ``train``: sets the run's address and reads how many rounds this folder has recorded."""
        self.executor, self.job = executor, job_of(config, url, self.run.path)
        bucket, checks = Bucket.open(url, writer="launcher"), signatures(config.sync.signers)
        self.ledger, self.plan = Ledger(bucket, signatures=checks), plan(config)
        for number in range(config.replicas):
            self.ledger.reserve(number)  # a worker that joins without a number becomes one more
        self.weights = WeightCopies(self.setup.engine, config.sync.fragments)
        self.agreed = Globals(self.weights.tensors(), SyncSchedule.of(config.sync).outer, config.sync.max_norm)
        known = self.run.metrics.read()
        self.evaluations = [line for line in known if line["kind"] == "eval"]
        gain = config.sync.lr / (1 - config.sync.momentum)
        undone = (
            f"The outer step moves the weights by sync.lr / (1 - sync.momentum) = {gain:.3g} times the replicas' "
            "average progress; try sync.lr=1 sync.momentum=0, or a lower optimizer.lr."
        )
        self.watch = RunWatch(known, {FALLING: undone})
        self.seen = max([line["version"] for line in known if line["kind"] == "step"], default=0) // self.plan.interval
        self.step = self.plan.steps_at(self.seen)

    def _train(self, stopper: Stopper) -> None:
        if not verdicts.holds(self.run.path):
            self._check()
        if not self.evaluations:
            self._evaluate("before")
        look = self._listen if self.plan.config.sync.lighthouse else self._look
        supervise(self.executor, self.job, lambda: look(stopper), self._say, finished=self._finished)
        if self.plan.config.sync.lighthouse:
            self._listen(stopper, ended=True)
        self._adopt()
        self._evaluate("after")

    def _say(self, text: str) -> None:
        self.run.event("warning", text)
        self.progress.note(text)

    def _finished(self) -> bool:
        return self.seen >= self.plan.rounds or self.ledger.committed() >= self.plan.rounds

    def _look(self, stopper: Stopper) -> None:
        """Write a line for each round that was committed since the last look; evaluate when one is due."""
        while self.seen < self.plan.rounds:
            self._stop_if_asked(stopper)
            commit = self.ledger.commit(self.seen)
            if commit is None:
                newer = [k for k in self.ledger.states() if k > self.seen]
                if not newer:
                    return
                self._say(f"rounds {self.seen} to {newer[0] - 1} were removed before the launcher read them")
                self.seen = newer[0]
                continue
            found, members, means = self._deltas(commit)
            for error in (d for d in found if isinstance(d, Damaged)):
                self._say(f"round {self.seen}: {error}")
            deltas = [d for d in found if isinstance(d, Object)]
            self._record(self.seen, members, sum(commit.tokens), deltas, means)
        self._stop_if_asked(stopper)

    def _deltas(self, commit: Commit) -> tuple[list[Object | Damaged | None], int, int]:
        """The replicas' deltas of this round, their number, and the bytes of the groups' means, if there are groups."""
        written = self.ledger.deltas(commit.round, list(zip(commit.members, commit.attempts, strict=True)))
        if self.plan.config.sync.groups == 1:
            return written, len(written), 0
        means = sum(d.size for d in written if isinstance(d, Object))
        found: list[Object | Damaged | None] = []
        for group in commit.members:
            below = of_group(self.ledger, group)
            own = below.commit(commit.round)
            assert own is not None, "a group's mean is written after its commit, which stays"
            found += below.deltas(commit.round, list(zip(own.members, own.attempts, strict=True)))
        return found, len(found), means

    def _listen(self, stopper: Stopper, *, ended: bool = False) -> None:
        """The same with a Lighthouse: a line for each round that all of its members have reported, or
        that they have passed; ``ended``: no more reports will come."""
        while self.seen < self.plan.rounds:
            self._stop_if_asked(stopper)
            reports = self.ledger.reports(self.seen)
            members = max([int(one.meta["members"]) for one in reports], default=0)
            if not (reports and len(reports) >= members) and not ended and not self.ledger.reports(self.seen + 1):
                return
            if not reports:
                self._say(f"round {self.seen} was averaged, but its members ended before they reported it")
                self.seen += 1
                continue
            self._record(self.seen, members, sum(int(one.meta["tokens"]) for one in reports), reports)
        self._stop_if_asked(stopper)

    def _record(self, k: int, members: int, tokens: int, deltas: Sequence[Object], means: int = 0) -> None:
        self.seen = k + 1
        self.step = self.plan.steps_at(self.seen)
        if len(deltas) < members:  # removed, damaged, or its writer ended before its report
            self._say(
                f"round {k}: {members - len(deltas)} of {members} members' reports are missing; its bytes are unknown"
            )
        sizes = [int(d.meta.get("bytes", d.size)) for d in deltas]
        n, total, squares = (sum(d.meta["rewards"][i] for d in deltas) for i in range(3))
        line: dict[str, Any] = {"kind": "step", "step": self.step, "version": self.seen * self.plan.interval}
        if n:
            mean = total / n
            line["reward"] = {"mean": mean, "sd": math.sqrt(max(0.0, squares / n - mean * mean)), "n": int(n)}
        numbers = {
            "outer/members": members,
            "outer/tokens": tokens,
            "outer/bytes per round": sum(sizes) + means if len(sizes) >= members else None,
            "outer/bytes per replica": sum(sizes) / len(sizes) if sizes else None,
        }
        self.seconds = max([self.seconds, *(float(d.meta.get("seconds", 0.0)) for d in deltas)])
        line |= _merged([d.meta["line"] for d in deltas if "line" in d.meta])
        line |= {"micro_batches": None, "metrics": numbers, "seconds": {}}
        self._write_line(line)
        every = self.setup.config.eval.every
        if every and self.step < self.setup.config.steps and self.step // every > self._last_measured() // every:
            self._adopt()
            if self._last_measured() < self.step < self.setup.config.steps:  # on a Lighthouse states are rare
                self._evaluate(None)

    def _last_measured(self) -> int:
        """The step of the newest evaluation."""
        return max((int(line["step"]) for line in self.evaluations), default=0)

    def _adopt(self) -> None:
        """Take the newest committed weights into the policy."""
        self.agreed.recover(self.ledger)
        self.weights.become(self.agreed)
        self.weights.push(self.setup.engine)
        self.setup.engine.version = self.agreed.round * self.plan.interval
        self.step = self.plan.steps_at(self.agreed.round)

    def save(self) -> None:
        """Nothing is trained here: the bucket is the checkpoint."""


def _merged(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The replicas' lines on one step as one line: means of their numbers, the first one's texts."""
    nothing: dict[str, Any] = {"loss": None, "terms": {}, "skipped": [], "idle": {}, "passes": None}
    merged = nothing | {"grad_norm": None, "update_norm": None, "lr": None} | (dict(lines[0]) if lines else {})
    for name in ("loss", "grad_norm", "update_norm"):
        merged[name] = mean_of([line[name] for line in lines])
    terms = {label: dict(term) for line in reversed(lines) for label, term in line["terms"].items()}
    for label, term in terms.items():
        term["loss"] = mean_of([line["terms"][label]["loss"] for line in lines if label in line["terms"]])
    reasons = [line.get("learned_nothing") for line in lines]
    return merged | {"terms": terms, "learned_nothing": reasons[0] if reasons and None not in reasons else None}
