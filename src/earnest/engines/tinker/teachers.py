"""Teachers elsewhere: samplers with weights that were saved before.

    live      the student's weights as they are now
    base      the base model
    frozen    weights that were saved under a path
    ema       T_t = (1-r)·T_{t-1} + r·p_t over the student's weights after each update, T_0 = p_0

The average of ``ema`` is one of probabilities, not of weights: no wire lets a client average weights. Each update's
weights stay a sampler of their own, and each is asked; beyond ``window`` of them the oldest two become one, whose share
of the average is reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from earnest.engines.base import AtIdsWanted, LogProbsWanted, TopKWanted
from earnest.engines.tinker.scoring import mixed, score
from earnest.errors import SignalError
from earnest.signals.batch import Batch
from earnest.signals.distributions import TopK

if TYPE_CHECKING:
    from earnest.engines.tinker.engine import TinkerEngine


@dataclass(frozen=True)
class RemoteTeacher:
    """One set of weights. ``path``: of a frozen teacher, as ``save_weights_for_sampler`` gave it."""

    kind: Literal["live", "base", "frozen"] = "live"
    path: str | None = None

    def __post_init__(self) -> None:
        if (self.kind == "frozen") != (self.path is not None):
            raise SignalError(
                f"RemoteTeacher: kind {self.kind!r} and path {self.path!r}; 'frozen' has a path, others none."
            )

    def logprobs(self, engine: TinkerEngine, batch: Batch) -> Tensor:
        found = score(self._sampler(engine), batch, LogProbsWanted())
        assert isinstance(found, Tensor)
        return found

    def top(self, engine: TinkerEngine, batch: Batch, k: int) -> TopK:
        found = score(self._sampler(engine), batch, TopKWanted(k))
        assert isinstance(found, TopK)
        return found

    def at(self, engine: TinkerEngine, batch: Batch, ids: Tensor) -> Tensor:
        found = score(self._sampler(engine), batch, AtIdsWanted(ids))
        assert isinstance(found, Tensor)
        return found

    def _sampler(self, engine: TinkerEngine) -> Any:
        return engine.sampler(self.path if self.path is not None else self.kind)


@dataclass
class RemoteEMA:
    """The moving average over the student's past weights: an engine's ``outer``, asked after every update."""

    rate: float = 0.05
    window: int = 16
    kind: Literal["ema"] = "ema"
    _samplers: list[Any] = field(default_factory=list)
    _weights: list[float] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1 or self.window < 2:
            raise SignalError(
                f"RemoteEMA: rate is {self.rate} and window {self.window}; give 0 < rate ≤ 1, window ≥ 2."
            )

    @property
    def weights(self) -> tuple[float, ...]:
        """The share of each sampler in the average, oldest first; they sum to 1."""
        return tuple(self._weights)

    def start(self, engine: TinkerEngine) -> None:
        """T_0: the student's weights now. An engine that is given this average as ``outer`` does it."""
        if not self._samplers:
            self._samplers, self._weights, self._versions = [engine.sampler("live")], [1.0], [engine.version]

    def after_update(self, engine: TinkerEngine) -> dict[str, float]:
        """Take the student's present weights into the average."""
        if not self._samplers:
            raise SignalError("RemoteEMA: it was not started before this update; give it to the engine as outer=….")
        self._weights = [w * (1 - self.rate) for w in self._weights]
        self._samplers.append(engine.sampler("live"))
        self._weights.append(self.rate)
        self._versions.append(engine.version)
        merged = 0.0
        while len(self._samplers) > self.window:
            merged = self._weights[0] + self._weights[1]
            self._weights[1] = merged
            del self._samplers[0], self._weights[0], self._versions[0]
        return {"ema_rate": self.rate, "ema_samplers": float(len(self._samplers)), "ema_merged_share": merged}

    def logprobs(self, engine: TinkerEngine, batch: Batch) -> Tensor:
        self.start(engine)
        found = [score(s, batch, LogProbsWanted()) for s in self._samplers]
        return mixed(self._weights, [f[:, None] for f in found if isinstance(f, Tensor)])[:, 0]

    def at(self, engine: TinkerEngine, batch: Batch, ids: Tensor) -> Tensor:
        self.start(engine)
        found = [score(s, batch, AtIdsWanted(ids)) for s in self._samplers]
        return mixed(self._weights, [f for f in found if isinstance(f, Tensor)])

    def top(self, engine: TinkerEngine, batch: Batch, k: int) -> TopK:
        raise SignalError(
            "RemoteEMA: the top K of an average of distributions is not among what their samplers send; "
            "take support='student', where the average is exact at the student's K ids."
        )


AnyTeacher = RemoteTeacher | RemoteEMA
