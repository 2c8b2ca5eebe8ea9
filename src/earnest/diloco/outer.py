"""An engine's outer hook: torchft's DiLoCo or LocalSGD, run after each update and its guard.

    update  →  guard  →  [every H updates]  Θ − θᵢ  →  average over replicas  →  outer SGD on Θ  →  θᵢ ← Θ

torchft works on fp32 copies on the CPU, so every machine computes the same bits, whatever device the engine trains on.
A guard's quarantine is averaged like the weights, by the same linear step: main = total − quarantine holds for the
averages as it holds for each replica.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from earnest.config.schema import SyncConfig
from earnest.diloco.errors import FellBehind, OutOfStep
from earnest.diloco.globals import Globals, OuterSGD
from earnest.diloco.ledger import Ledger
from earnest.diloco.manager import BucketManager
from earnest.diloco.protocol import Rules, beginning
from earnest.diloco.wire import Wire
from earnest.errors import CheckpointError, ConfigError, MissingExtra
from earnest.store import Damaged


@dataclass(frozen=True)
class SyncSchedule:
    """When and how replicas synchronize: each fragment after every ``every`` updates; ``outer`` None is LocalSGD."""

    every: int = 10
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    outer: OuterSGD | None = field(default_factory=OuterSGD)

    @classmethod
    def of(cls, sync: SyncConfig) -> SyncSchedule:
        outer = OuterSGD(sync.lr, sync.momentum, sync.nesterov) if sync.algorithm == "diloco" else None
        return cls(sync.every, sync.fragments, sync.delay, sync.alpha, outer)

    def __post_init__(self) -> None:
        if self.every % self.fragments:
            raise ConfigError(
                f"sync.every is {self.every}; it must be a multiple of sync.fragments ({self.fragments})."
            )
        if not 0 <= self.delay < self.interval:
            raise ConfigError(
                f"sync.delay is {self.delay}; it must be at least 0 and below every / fragments ({self.interval})."
            )

    @property
    def interval(self) -> int:
        """Updates between two rounds."""
        return self.every // self.fragments


class WeightCopies:
    """fp32 copies on the CPU of what is trained: the adapter's parameters, then the guard's quarantine."""

    def __init__(self, engine: Any, fragments: int) -> None:
        self.guarded = sorted(k for k in _guard_state(engine) if k.startswith("quarantine."))
        self.copies = [nn.Parameter(t.detach().float().cpu().clone()) for t in self._live(engine)]
        count = len(engine.parameters)
        if fragments > count:
            raise ConfigError(f"sync.fragments is {fragments}, but there are only {count} tensors to share out.")
        owner = _share_out([p.numel() for p in engine.parameters], fragments)
        names = list(zip(engine.names, owner, strict=False))  # a parameter and its quarantine share a round
        owner += [next((o for n, o in names if n in name), 0) for name in self.guarded]
        self.groups = [[i for i, o in enumerate(owner) if o == f] for f in range(fragments)]

    def _live(self, engine: Any) -> list[Tensor]:
        state = _guard_state(engine)
        return [*engine.parameters, *(state[name] for name in self.guarded)]

    def modules(self) -> list[nn.Module]:
        return [nn.ParameterList([self.copies[i] for i in group]) for group in self.groups]

    def tensors(self) -> list[list[Tensor]]:
        return [[self.copies[i].detach() for i in group] for group in self.groups]

    @torch.no_grad()
    def pull(self, engine: Any) -> None:
        for held, live in zip(self.copies, self._live(engine), strict=True):
            held.copy_(live.float())

    @torch.no_grad()
    def push(self, engine: Any) -> None:
        count = len(engine.parameters)
        for held, live in zip(self.copies[:count], engine.parameters, strict=True):
            live.copy_(held.to(live.dtype))
        if self.guarded:
            new = dict(zip(self.guarded, self.copies[count:], strict=True))
            state = _guard_state(engine)
            engine.guard.load_state_dict({k: new[k].detach().to(t) if k in new else t for k, t in state.items()})

    @torch.no_grad()
    def become(self, globals_: Globals) -> None:
        for group, fragment in zip(self.groups, globals_.fragments, strict=True):
            for index, weight in zip(group, fragment.weights, strict=True):
                self.copies[index].copy_(weight)


def algorithm(manager: Any, weights: WeightCopies, schedule: SyncSchedule) -> tuple[Any, torch.optim.Optimizer]:
    """torchft's DiLoCo or LocalSGD on the copies, with any Manager: ours, or torchft's own with its Lighthouse."""
    try:
        from torchft.local_sgd import DiLoCo, LocalSGD
    except ImportError:
        raise MissingExtra("torchft", "diloco", "a run with replicas") from None
    tick = torch.optim.SGD(weights.copies, lr=0.0)  # torchft counts steps in its hooks; the copies have no gradient
    modules = weights.modules()
    if schedule.outer is None:
        return LocalSGD(manager, nn.ModuleList(modules), tick, schedule.every), tick
    made = DiLoCo(
        manager,
        modules,
        tick,
        [schedule.outer.build(list(m.parameters())) for m in modules],
        sync_every=schedule.every,
        fragment_sync_delay=schedule.delay,
        fragment_update_alpha=schedule.alpha,
        # with more than one bucket replicas differ afterwards, without an error (torchft 0.2.0)
        use_bucketization=False,
    )
    return made, tick


class ReplicaProgress(ABC):
    """A replica's progress in its run, over a bucket or a Lighthouse."""

    schedule: SyncSchedule
    rounds: int
    inner: int
    keeps_checkpoints = False
    """Whether a replica continues from its own checkpoint."""

    @property
    @abstractmethod
    def round(self) -> int:
        """Rounds that this replica has passed."""

    @property
    def updates(self) -> int:
        """Updates that it has passed, counting those of rounds that it skipped."""
        return self.round * self.schedule.interval + self.inner

    @property
    def over(self) -> bool:
        return self.round >= self.rounds

    @property
    def between(self) -> bool:
        """Whether a checkpoint may be taken: no round is under way."""
        return self.inner == 0

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """End what was started to synchronize."""


class ReplicaOuter(ReplicaProgress):
    """One replica's outer hook over a bucket. The run ends after ``rounds``. Every ``snapshot_every`` rounds one of the
    members writes the whole state, from which others join, and removes what is no longer needed."""

    keeps_checkpoints = True

    def __init__(
        self,
        engine: Any,
        ledger: Ledger,
        replica: int,
        rules: Rules,
        schedule: SyncSchedule,
        wire: Wire,
        *,
        rounds: int,
        snapshot_every: int = 10,
        groups: int = 1,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        if schedule.outer is None and wire.lossy:
            raise ConfigError(
                f"sync.wire: local_sgd averages weights, not differences, so {wire.kind} would lose them."
            )
        self.ledger, self.replica, self.schedule, self.rounds = ledger, replica, schedule, rounds
        self.snapshot_every, self.say = snapshot_every, say
        self.weights = WeightCopies(engine, schedule.fragments)
        agreed = Globals(self.weights.tensors(), schedule.outer, rules.max_norm)
        self.manager = BucketManager(ledger, rules, replica, agreed, wire, groups=groups)
        self.inner = 0
        self.heals = 0
        # tokens: the engine's count at the last look, and the weight of the delta under way
        self._seen = self._sent = 0
        self._trained = [0] * schedule.fragments  # by fragment: tokens trained on since it was last averaged
        self._algorithm: Any = None
        self._build()

    def _build(self) -> None:
        if self._algorithm is not None:
            self._algorithm.__exit__(None, None, None)
        self.manager.reset()
        self._algorithm, self.tick = algorithm(self.manager, self.weights, self.schedule)
        if self.schedule.outer is not None:
            for fragment, held in zip(self._algorithm._fragments, self.globals.fragments, strict=True):
                for name, weight in zip(fragment.original_parameters, held.weights, strict=True):
                    fragment.original_parameters[name].copy_(weight.detach())
                fragment._outer_optimizer.load_state_dict(copy_state(held.optimizer))
        self._algorithm.__enter__()

    @property
    def globals(self) -> Globals:
        return self.manager.globals

    @property
    def meta(self) -> dict[str, Any]:
        """Written with the next delta, for the launcher."""
        return self.manager.meta

    @property
    def round(self) -> int:
        return self.globals.round

    def join(self, engine: Any) -> bool:
        """Enter the run. A replica keeps what it has (a checkpoint, or its initialization) if that is the start of the
        present round, or of the one before, which it then trains again, to the same bits. Otherwise it takes the newest
        committed state. True: what it had is kept."""
        if not self.ledger.states():
            first = Globals(self.weights.tensors(), self.schedule.outer)
            self.ledger.put_state(0, first.pack(), first.fingerprint())
        kept = self.ledger.committed() - self.round in (0, 1) and self._is_current()
        if kept:
            self._seen = engine.tokens  # tokens from before it joined do not count in this run
        else:
            self._take(engine)
        if not self.over:
            self.manager.announce()
        return kept

    def _is_current(self) -> bool:
        try:
            return beginning(self.ledger, self.round)[0] == self.globals.fingerprint()
        except FellBehind:
            return False

    def _take(self, engine: Any) -> None:
        """Take the newest committed state from the bucket."""
        self.globals.recover(self.ledger)
        self.weights.become(self.globals)
        self.weights.push(engine)
        self._build()
        self.inner = 0
        self._seen, self._sent = engine.tokens, 0
        self._trained = [0] * self.schedule.fragments

    def after_update(self, engine: Any) -> Mapping[str, float]:
        if self.over:
            return {}
        try:
            return self._step(engine)
        except OutOfStep as why:
            self.heals += 1
            at = self.round
            self._take(engine)
            self.say(f"round {at}: {why}; brought back from the bucket to the start of round {self.round}")
            if not self.over:
                self.manager.announce()
            return {"healed": 1.0, "round": float(self.round)}

    def _step(self, engine: Any) -> Mapping[str, float]:
        self.inner += 1
        interval, last = self.schedule.interval, self.inner == self.schedule.interval
        sends = self.inner == interval - self.schedule.delay
        if sends or last:
            self.weights.pull(engine)
        self._trained = [count + engine.tokens - self._seen for count in self._trained]
        self._seen = engine.tokens
        fragment = self.round % self.schedule.fragments
        if sends:  # a delta's weight: the tokens since its own fragment was averaged, not since any was
            self.manager.tokens = self._sent = self._trained[fragment]
        self.tick.step()
        if not last:
            self.manager.begin()
            return {}
        self.weights.push(engine)
        self.inner = 0
        # torchft has set the agreed weights: of the training during the delay only alpha's share is left
        self._trained[fragment] = self._trained[fragment] - self._sent if self.schedule.alpha else 0
        return {**self.manager.last, **self._after_round(), "healed": 0.0}

    def _after_round(self) -> dict[str, float]:
        """Write a snapshot where it is this replica's turn, check that the others are not further, and announce this
        replica in the next round."""
        numbers: dict[str, float] = {}
        commit = self.manager.commit
        if self.round % self.snapshot_every == 0 or self.over:
            turn = commit.members[(self.round // self.snapshot_every) % len(commit.members)]
            self.manager.clean_group(self.round - 2 * self.snapshot_every)
            if turn == self.manager.member:
                numbers = {"bytes_state": float(self.snapshot())}
        if self.over:
            return numbers
        if self.ledger.commit(self.round) is not None:
            raise FellBehind("the others have finished the next round already")
        self.manager.announce()
        return numbers

    def snapshot(self) -> int:
        """Write the state; once it can be read back, remove all before the snapshot before it. Returns the bytes
        written; 0 where another replica was first, or where the upload is incomplete."""
        older = [k for k in self.ledger.states() if k < self.round]
        payload = self.globals.pack()
        if not self.ledger.put_state(self.round, payload, self.globals.fingerprint()):
            return 0
        try:
            self.ledger.state(self.round)
        except Damaged:
            self.say(f"the state of round {self.round} is incomplete in the bucket; nothing is removed")
            return 0
        self.ledger.clean(max(older, default=0))
        return len(payload)

    def state_dict(self) -> dict[str, Tensor]:
        """The agreed state and the residuals that are not sent yet; only between rounds."""
        if not self.between:
            raise CheckpointError(f"a checkpoint inside a round ({self.inner} updates in) would lose its round.")
        state = {f"global.{k}": v.clone() for k, v in self.globals.tensors().items()}
        state |= {f"residual.{k}": v.clone() for k, v in self.manager.residual.items()}
        return state | {"round": torch.tensor(self.round), "trained": torch.tensor(self._trained)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a checkpoint; ``join`` decides whether it is still current."""
        agreed = {k.removeprefix("global."): v for k, v in state.items() if k.startswith("global.")}
        self.globals.load(agreed, int(state["round"]))
        self.manager.residual = {
            int(k.removeprefix("residual.")): v.clone() for k, v in state.items() if k.startswith("residual.")
        }
        none = torch.zeros(self.schedule.fragments, dtype=torch.long)
        self._trained = state.get("trained", none).tolist()  # of fragments that were not averaged in the last round
        self.weights.become(self.globals)
        self._build()
        self.inner = 0


def _guard_state(engine: Any) -> dict[str, Tensor]:
    return engine.guard.state_dict() if engine.guard is not None else {}


def copy_state(optimizer: Any) -> Any:
    return copy.deepcopy(optimizer.state_dict())


def _share_out(sizes: Sequence[int], fragments: int) -> list[int]:
    """Neighbouring tensors together, about equally many numbers in each fragment, none empty."""
    total, seen = sum(sizes), 0
    owner: list[int] = []
    for i, size in enumerate(sizes):
        wanted = min(fragments - 1, (seen + size // 2) * fragments // max(total, 1))
        floor = owner[-1] if owner else 0
        rest = len(sizes) - i  # tensors that are left for the fragments that are still empty
        owner.append(max(floor, min(wanted, floor + 1), fragments - rest))
        seen += size
    return owner
