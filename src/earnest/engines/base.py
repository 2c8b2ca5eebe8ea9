"""The protocols of engines, adapters and guards.

    scalars(batch, needs)  →  objective.evaluate  →  backward(batch, derivatives)  →  update()

``step`` calls all of them. Shapes: N active tokens, K tokens per position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from earnest.adapters import Adapter
from earnest.engines.reports import StepReport, UpdateReport
from earnest.models.protocol import PolicyLike
from earnest.models.sampling import SampleSpec
from earnest.objectives.base import Objective, Term
from earnest.objectives.needs import Need
from earnest.objectives.view import Scalars
from earnest.rollouts.rollout import Rollout
from earnest.signals.batch import Batch
from earnest.signals.distributions import Distribution
from earnest.signals.scorer import Wanted, Who

if TYPE_CHECKING:
    from earnest.engines.local import LocalEngine
    from earnest.engines.optimizers import Optimizer


class AdapterLike(Protocol):
    """The trained weights, which a run describes, saves and pushes to samplers. If the weights are on a service,
    ``parameters`` and ``state_dict`` are empty and ``save`` writes their address."""

    @property
    def variant(self) -> Any: ...

    @property
    def targets(self) -> tuple[str, ...]: ...

    def parameters(self) -> Sequence[Tensor]: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def save(self, folder: str | Path, base_model: str | None = None) -> Path: ...

    def export_lora(self, folder: str | Path, base_model: str | None = None, rank: int | None = None) -> Path: ...


class Guard(Protocol):
    """Checks the update that the optimizer computed; may change the parameters in place. Its state is checkpointed.

    The engine calls ``bind`` once, ``prepare`` between clipping and the optimizer, ``judge`` after the optimizer.
    Inside ``ablated`` the policy is the one that would be deployed.
    """

    def bind(self, adapter: Adapter, optimizer: torch.optim.Optimizer) -> None: ...

    def prepare(self, names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> None: ...

    def judge(
        self, names: Sequence[str], before: Sequence[Tensor], parameters: Sequence[torch.nn.Parameter]
    ) -> Mapping[str, float]: ...

    def ablated(self) -> AbstractContextManager[None]: ...

    def describe(self) -> str: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


@runtime_checkable
class GuardOfParts(Guard, Protocol):
    """A guard that also works where each rank holds some rows of the parameters."""

    def set_parts(self, parts: Mapping[str, torch.nn.Parameter]) -> None:
        """Called before ``bind``: the tensors that this rank updates, by the names of the adapter's parameters. Those
        of a sharded parameter are its rows on this rank, and ``prepare`` and ``judge`` get them."""


class Outer(Protocol):
    """Called after every update and its guard: replicas synchronize and averaging teachers average here."""

    def after_update(self, engine: Any) -> Mapping[str, float]: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class Engine(Protocol):
    """A policy, the adapter that is trained on it, and the place where its steps run.

    ``version`` counts updates, ``tokens`` the active tokens trained on. A member that an engine does not support (a
    service shows no gradients) raises an ``EarnestError`` with the reason.
    """

    version: int
    tokens: int

    @property
    def local(self) -> LocalEngine | None:
        """This engine if its weights are in this process, else None. Proofs and replicas need it."""

    @property
    def policy(self) -> PolicyLike: ...

    @property
    def adapter(self) -> AdapterLike: ...

    @property
    def guard(self) -> Guard | None: ...

    @property
    def optimizer_spec(self) -> Optimizer: ...

    @property
    def learning_rate(self) -> float:
        """The rate of the newest update; lr before the first."""

    def plan(self, t: int, total: int) -> None:
        """The next update is number ``t`` (from 1) of ``total``: it has the schedule's rate of that number."""

    def sample(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        """``n`` completions of every prompt by the live policy, prompt by prompt, with their exact log-probs."""

    def score(self, batch: Batch, want: Wanted, policy: Who = "live") -> Tensor | Distribution:
        """Log-probs or distributions at the batch's active tokens, without a gradient."""

    def scalars(self, batch: Batch, needs: Sequence[Need]) -> Scalars:
        """The whole batch's per-token scalars, without a graph."""

    def backward(self, batch: Batch, weights: Mapping[Need, Tensor]) -> None:
        """Add Σ weights · ∂scalars/∂θ to the gradients; ``weights`` have the layout that ``scalars`` returns."""

    def update(self) -> UpdateReport:
        """Clip, optimizer, guard, outer sync, in this order; ``version`` increases by 1."""

    def step(self, batch: Batch, objective: Objective | Term, *, shares: bool = False) -> StepReport:
        """Scalars, objective, backward and update. ``shares`` also measures each term's own gradient norm."""

    def gradients(self, batch: Batch, objective: Objective | Term) -> dict[str, Tensor]:
        """The gradient by every trainable parameter; the engine is unchanged afterwards."""

    def save(self, folder: Path | str) -> Path:
        """Write everything that the next step depends on; the folder is complete or not there."""

    def load(self, folder: Path | str) -> None:
        """Continue from what ``save`` wrote."""
