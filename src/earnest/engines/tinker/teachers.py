"""Teachers on a service: samplers with saved weights.

    live      the student's weights as they are now
    base      the base model
    frozen    weights that were saved under a path
    ema       T_t = (1-r)·T_{t-1} + r·p_t over the student's weights after each update, T_0 = p_0

``ema`` averages probabilities, not weights: a service lets no client average weights. The weights of each update stay a
sampler of their own, and each scores. Beyond ``window`` of them the share of the oldest is added to the next one. The
share that was added bounds the distance of the average from the recursion, in total variation:

    ema_merged_share = (1-r)^window once the window is full,   |T̂ - T|₁/2 ≤ ema_merged_share

It is reported after every update; without a ``window`` setting the window is long enough to keep it ≤ TOLERANCE.
A window above ``MOST`` is refused: `earnest serve` keeps 64 samplers of a session, this window and the newest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import Tensor

from earnest.engines.tinker.scoring import mixed, score
from earnest.errors import SignalError
from earnest.signals.batch import Batch
from earnest.signals.distributions import TopK
from earnest.signals.scorer import AtIdsWanted, LogProbsWanted, TopKWanted, Wanted

if TYPE_CHECKING:
    from earnest.engines.tinker.engine import TinkerEngine


TOLERANCE = 0.05
MOST = 63
SLOWEST = math.ceil(1000 * (1 - TOLERANCE ** (1 / MOST))) / 1000
"""The smallest rate, to three places, whose own window is no longer than MOST."""


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
        return cast(Tensor, self._score(engine, batch, LogProbsWanted()))

    def top(self, engine: TinkerEngine, batch: Batch, k: int) -> TopK:
        return cast(TopK, self._score(engine, batch, TopKWanted(k)))

    def at(self, engine: TinkerEngine, batch: Batch, ids: Tensor) -> Tensor:
        return cast(Tensor, self._score(engine, batch, AtIdsWanted(ids)))

    def _score(self, engine: TinkerEngine, batch: Batch, want: Wanted) -> Tensor | TopK:
        return score(engine.sampler(self.path if self.path is not None else self.kind), batch, want)


@dataclass
class RemoteEMA:
    """The moving average over the student's past weights: an engine's ``outer``, called after every update.

    ``window``: the number of past weights that are kept, one teacher pass each; None: by the rate (59 for 0.05).
    """

    rate: float = 0.05
    window: int | None = None
    kind: Literal["ema"] = "ema"
    _samplers: list[Any] = field(default_factory=list)
    _weights: list[float] = field(default_factory=list)
    _merged: float = 0.0  # share that was added to newer weights

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1 or (self.window is not None and self.window < 2):
            raise SignalError(
                f"RemoteEMA: rate is {self.rate} and window {self.window}; give 0 < rate ≤ 1, window ≥ 2 or none."
            )
        if self.window is None:
            self.window = 2 if self.rate == 1 else max(2, math.ceil(math.log(TOLERANCE) / math.log1p(-self.rate)))
        if self.window > MOST:
            raise SignalError(
                f"RemoteEMA: rate {self.rate:g} with a window of {self.window} past weights; a service keeps "
                f"{MOST} at most, so take a rate of {SLOWEST:.3f} or more, or a window of up to {MOST}, which "
                f"merges (1-{self.rate:g})^{MOST} = {(1 - self.rate) ** MOST:.0%} of the average."
            )

    @property
    def weights(self) -> tuple[float, ...]:
        """The share of each sampler in the average, oldest first; they sum to 1."""
        return tuple(self._weights)

    def start(self, engine: TinkerEngine) -> None:
        """T_0: the student's weights now. An engine that is given this average as ``outer`` does it."""
        if not self._samplers:
            self._samplers, self._weights = [engine.sampler("live")], [1.0]

    def after_update(self, engine: TinkerEngine) -> dict[str, float]:
        """Take the student's present weights into the average."""
        if not self._samplers:
            raise SignalError("RemoteEMA: it was not started before this update; give it to the engine as outer=….")
        assert self.window is not None
        self._weights = [w * (1 - self.rate) for w in self._weights]
        self._merged *= 1 - self.rate
        self._samplers.append(engine.sampler("live"))
        self._weights.append(self.rate)
        if len(self._samplers) > self.window:
            self._merged = self._weights[0]  # its own share, and what was added to it before
            self._weights[1] += self._weights[0]
            del self._samplers[0], self._weights[0]
        return {"ema_rate": self.rate, "ema_samplers": float(len(self._samplers)), "ema_merged_share": self._merged}

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
