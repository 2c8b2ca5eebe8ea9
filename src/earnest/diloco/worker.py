"""``earnest worker RUN_URL``: one replica of a run in a bucket. It samples and trains prompts of its own.

Everything it needs is in the bucket: the settings, the weights, the rounds. Its folder only saves work: a replica that
is started again in it continues from its last checkpoint, bit for bit; without the folder, from the last commit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from earnest.config import RunConfig
from earnest.config.loading import from_mapping
from earnest.config.replicas import ReplicaPlan, plan
from earnest.config.text import parse
from earnest.diloco.ledger import CONFIG, Ledger
from earnest.diloco.lighthouse import LighthouseOuter
from earnest.diloco.mesh_outer import MeshOuter
from earnest.diloco.outer import ReplicaOuter, SyncSchedule
from earnest.diloco.protocol import Rules
from earnest.diloco.signing import signatures
from earnest.diloco.wire import Wire
from earnest.disk import clean
from earnest.errors import CheckpointError, ConfigError, EarnestError
from earnest.rollouts import Rollouts
from earnest.runs import checkpoints, ranks
from earnest.runs.collect import BatchSource
from earnest.runs.folder import RunFolder
from earnest.runs.loop import TrainingLoop
from earnest.runs.progress import note_on, reporter_on
from earnest.runs.setup import Setup, build
from earnest.runs.stopping import Stopper
from earnest.seeds import derive
from earnest.store import Bucket, StoreError

OuterHook = ReplicaOuter | LighthouseOuter | MeshOuter


class TwoHooks:
    """Two outer hooks: the replicas synchronize, then an averaging teacher reads the resulting weights."""

    def __init__(self, first: OuterHook, then: Any) -> None:
        self.first, self.then = first, then

    def after_update(self, engine: Any) -> Mapping[str, float]:
        return {**self.first.after_update(engine), **self.then.after_update(engine)}

    def state_dict(self) -> dict[str, Tensor]:
        own = {f"replicas.{k}": v for k, v in self.first.state_dict().items()}
        return own | {f"teacher.{k}": v for k, v in self.then.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for part, name in ((self.first, "replicas."), (self.then, "teacher.")):
            part.load_state_dict({k.removeprefix(name): v for k, v in state.items() if k.startswith(name)})


def read_config(ledger: Ledger) -> tuple[str, RunConfig, str | None]:
    """(recipe, settings, hash of the user's rows) of the run in this bucket."""
    found = ledger.config()
    if found is None:
        raise StoreError(
            f"there is no run at {ledger.bucket.url} (no {CONFIG}); give the address that `earnest run` printed."
        )
    return str(found.meta["recipe"]), from_mapping(parse(found.payload.decode(), CONFIG)), found.meta.get("data")


def own_seed(config: RunConfig, replica: int) -> RunConfig:
    """The same run with this replica's own prompts and samples; the adapter was initialized with the run's seed."""
    return config.model_copy(update={"seed": derive(config.seed, "replica", replica) % 2**31})


class ReplicaLoop(TrainingLoop):
    """The training loop of one replica: no evaluation, checkpoints between rounds, steps that follow the rounds."""

    outer: OuterHook
    rewards: list[float]

    def again(self) -> str:
        return f"earnest worker {self.run.header['url']}"

    def enter(self) -> None:
        """Continue from a checkpoint or from the bucket."""
        kept = self.outer.join(self.setup.engine)
        where = "its checkpoint" if kept else "the bucket"
        self.run.event("info", f"joined in round {self.outer.round} from {where}")
        self._follow()

    def save(self) -> None:
        """Save between rounds only: inside one, the round under way would be lost."""
        if self.outer.between and self.outer.keeps_checkpoints:
            super().save()

    def _train(self, stopper: Stopper) -> None:
        config, engine, outer = self.setup.config, self.setup.require_local("a replica"), self.outer
        while not outer.over:
            self._stop_if_asked(stopper)
            before = engine.version
            self._one_step(self.step + 1)
            # A step on which every term was idle changes nothing, and still counts towards the round.
            for _ in range(config.updates_per_batch - (engine.version - before)):
                assert engine.outer is not None
                engine.outer.after_update(engine)
            self._follow()
            if outer.between and self.step - max(self.saved_at, 0) >= min(config.checkpoint.every, config.steps):
                self.save()
        self.save()

    def _collect(self, step: int) -> Rollouts:
        collected = super()._collect(step)
        if self.outer.between:
            self.rewards = []
        self.rewards += [a.grade.reward for a in collected.attempts]
        rewards = self.rewards  # n, Σ r, Σ r²: those of replicas add up
        self.outer.meta["rewards"] = [float(len(rewards)), sum(rewards), sum(r * r for r in rewards)]
        return collected

    def _one_step(self, step: int) -> None:
        super()._one_step(step)
        names = ("loss", "skipped", "idle", "learned_nothing", "grad_norm", "update_norm", "lr", "passes")
        shown = {name: self.line.get(name) for name in names}
        shown["terms"] = {n: {**t, "metrics": {}} for n, t in self.line["terms"].items()}
        self.outer.meta.update(seconds=round(self.seconds, 3), line=clean(shown))

    def _follow(self) -> None:
        """If synchronizing moved this replica to another round, its steps and prompts continue there."""
        config = self.setup.config
        wanted = self.outer.updates // config.updates_per_batch
        if wanted != self.step:
            self.run.event("info", f"from step {self.step} to step {wanted} with round {self.outer.round}")
            self.source = BatchSource(self.setup, position=wanted * config.sampling.prompts_per_step)
            self.step = wanted


def work(url: str, replica: int | None, folder: Path | None, console: Console) -> int | None:
    """Train as a replica until the run is over; returns the replica's number.

    If the run's settings name several ranks, this process starts them and returns None, unless ``torchrun`` started it.
    """
    ledger = Ledger(Bucket.open(url, writer="joiner" if replica is None else f"replica-{replica}"))
    recipe, config, rows = read_config(ledger)
    if config.engine.ranks > 1 and "WORLD_SIZE" not in os.environ:
        _start_ranks(config.engine.ranks, url, replica, folder)
        return None
    console = ranks.console_of(console)
    mesh = ranks.join(config)
    own = -1
    if mesh.rank == 0:
        ledger.bucket.probe()  # the launcher may reach the store by another route
        own = ledger.claim() if replica is None else replica
    own = mesh.from_first(own)
    ledger = replace(ledger, signatures=signatures(config.sync.signers, own))
    setup = build(config, note_on(console), mesh)
    if setup.data is not None and rows not in (None, setup.data.dataset.sha256):
        setup.close()
        raise ConfigError(f"data: {setup.data.path} has other rows here than where the run was started; copy the file.")
    setup = replace(setup, config=own_seed(config, own))
    place = mesh.from_first(folder or Path("runs") / f"{url.rstrip('/').rsplit('/', 1)[-1]}-replica-{own}")
    known = mesh.from_first((place / "run.json").exists())
    with ExitStack() as ending:
        ending.callback(setup.close)
        here = ranks.own_copy(place) if known else ranks.own_place(mesh, place)
        mesh.gathered(0)  # every rank has its copy before rank 0 writes
        run = _folder(here, url, own, recipe, setup)
        ending.callback(ranks.leave, mesh)
        ending.callback(run.close)
        ranks.settle(mesh, place, here)
        loop = ReplicaLoop(setup, run, reporter_on(console), [])
        make = partial(outer_hook, setup, ledger, own, plan(config), run)
        outer = make() if mesh.size == 1 else MeshOuter(mesh, setup.engine, make)
        ending.callback(outer.close)
        engine = setup.require_local("a replica")
        engine.outer = outer if engine.outer is None else TwoHooks(outer, engine.outer)
        loop.outer, loop.rewards = outer, []
        if mesh.from_first(mesh.rank == 0 and checkpoints.newest(run) is not None):
            loop.restore()
        loop.enter()
        loop.train()
        run.update(status="finished", steps_done=loop.step, seconds=round(loop.seconds, 3))
        run.event("info", f"finished; brought back {outer.heals} times")
    return own


def _start_ranks(count: int, url: str, replica: int | None, folder: Path | None) -> None:
    """This replica's ranks as processes of this machine; raises if one of them fails."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    words = ["--standalone", "--nproc-per-node", str(count), "-m", "earnest", "worker", url]
    words += [] if replica is None else ["--replica", str(replica)]
    words += [] if folder is None else ["--folder", str(folder)]
    try:
        main(words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise EarnestError(
            f"rank {rank} of this replica ended with {failure.exitcode}; its output is above, or in "
            f"ranks/rank-{rank}.log of the replica's folder."
        ) from None


def outer_hook(
    setup: Setup, ledger: Ledger, replica: int, planned: ReplicaPlan, run: RunFolder
) -> ReplicaOuter | LighthouseOuter:
    """The outer hook of these settings, on the rank that synchronizes."""
    sync, schedule = planned.config.sync, SyncSchedule.of(planned.config.sync)
    ends: dict[str, Any] = {"rounds": planned.rounds, "snapshot_every": sync.snapshot_every}
    if sync.lighthouse is not None:
        how = (sync.lighthouse, planned.quorum, schedule)
        return LighthouseOuter(setup.engine, ledger, replica, *how, timeout=sync.timeout, **ends)
    rules = Rules(planned.config.replicas, planned.quorum, sync.grace, sync.timeout, max_norm=sync.max_norm)
    wire = Wire(sync.wire or ("bf16" if sync.algorithm == "diloco" else "fp32"), sync.density, sync.feedback)
    say = partial(run.event, "warning")
    return ReplicaOuter(setup.engine, ledger, replica, rules, schedule, wire, groups=sync.groups, say=say, **ends)


def _folder(place: Path, url: str, replica: int, recipe: str, setup: Setup) -> RunFolder:
    facts = {"url": url, "replica": replica}
    if (place / "run.json").exists():
        run = RunFolder.open(place)
        if {k: run.header.get(k) for k in facts} != facts:
            run.close()
            raise CheckpointError(f"{place} belongs to another run or replica; give another --folder.")
        return run
    header = {"recipe": recipe, **setup.describe(), **facts}
    return RunFolder.create(place, setup.config, setup.policy, header)
