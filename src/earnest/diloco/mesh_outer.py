"""A replica of several ranks: rank 0 synchronizes with the other replicas, and the other ranks take its weights.

The adapter is whole on every rank, so the difference that rank 0 sends is that of the whole adapter. Nothing but the
settings is read from the bucket by another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from earnest.diloco.lighthouse import LighthouseOuter
from earnest.diloco.outer import ReplicaOuter, WeightCopies
from earnest.engines.mesh import Mesh

PROGRESS = ("round", "updates", "over", "between", "heals")
"""What the other ranks take over from rank 0 after each call."""


class MeshOuter:
    """The outer hook of every rank of a replica; ``make`` builds rank 0's own."""

    def __init__(self, mesh: Mesh, engine: Any, make: Callable[[], ReplicaOuter | LighthouseOuter]) -> None:
        self.mesh = mesh
        self.first = make() if mesh.rank == 0 else None
        self.weights = WeightCopies(engine, 1) if self.first is None else self.first.weights
        self.meta: dict[str, Any] = {} if self.first is None else self.first.meta
        self.keeps_checkpoints = mesh.from_first(self.first is not None and self.first.keeps_checkpoints)
        self.round = self.updates = self.heals = 0
        self.over, self.between = False, True

    def join(self, engine: Any) -> bool:
        """Enter the run; True: the replica keeps the weights that it has."""
        return bool(self._together(engine, lambda first: first.join(engine), changed=lambda kept: not kept))

    def after_update(self, engine: Any) -> Mapping[str, float]:
        """After every update of the engine; the result has numbers where a round ended."""
        return dict(self._together(engine, lambda first: first.after_update(engine), changed=bool))

    def _together(self, engine: Any, call: Callable[[Any], Any], changed: Callable[[Any], bool]) -> Any:
        news: tuple[Any, dict[str, Any], list[Tensor] | None] | None = None
        if self.first is not None:
            result = call(self.first)
            copies = [c.detach() for c in self.weights.copies] if changed(result) else None
            news = result, {name: getattr(self.first, name) for name in PROGRESS}, copies
        news = self.mesh.from_first(news)
        assert news is not None, "rank 0 has made it"
        result, progress, weights = news
        vars(self).update(progress)
        if self.first is None and weights is not None:
            with torch.no_grad():
                for own, agreed in zip(self.weights.copies, weights, strict=True):
                    own.copy_(agreed)
            self.weights.push(engine)
        return result

    def close(self) -> None:
        """End what rank 0 started to synchronize."""
        if self.first is not None:
            self.first.close()

    def state_dict(self) -> dict[str, Tensor]:
        """Rank 0's state; it writes the checkpoint."""
        return {} if self.first is None else self.first.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self.first is not None:
            self.first.load_state_dict(state)
