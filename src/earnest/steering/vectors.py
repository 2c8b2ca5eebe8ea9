"""Steering vectors from contrasts.

    mean difference   v = mean_i (h⁺_i − h⁻_i)                            Rimsky et al., arXiv 2312.06681
    principal         v = σ·u, the first principal direction of the h⁺_i − h⁻_i     Zou et al., arXiv 2310.01405
    weight space      v = U_r Σ_r V_rᵀ mean_i(x⁺_i − x⁻_i),  W = U Σ Vᵀ   in the range of the layer's weight
    apply             h ← h + c·v             ablate   h ← h − c·(h·v̂) v̂              Arditi et al., arXiv 2406.11717

h are states at the assistant tag of the same question under two opposite instructions, over diverse contexts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from earnest.adapters.errors import AdapterError
from earnest.adapters.merging import merged_weight
from earnest.adapters.runtime import layer_of
from earnest.disk import write_tensors
from earnest.models.policy import Policy
from earnest.steering.errors import SteeringError
from earnest.steering.sites import ActivationChange, block_paths, changed, module_at, tag_states, writer_paths
from earnest.tasks.base import Prompt


@dataclass(frozen=True)
class Contrast:
    """Instructions for both poles. Contexts pair them over many questions, so that only the pole differs."""

    high: tuple[str, ...]
    low: tuple[str, ...]

    def contexts(self, policy: Policy, questions: Sequence[Prompt]) -> tuple[list[list[int]], list[list[int]]]:
        """(high, low), one pair per question; the instructions alternate."""

        def side(instructions: tuple[str, ...]) -> list[list[int]]:
            return [
                policy.render([{"role": "system", "content": instructions[i % len(instructions)]}, *q.messages])
                for i, q in enumerate(questions)
            ]

        return side(self.high), side(self.low)


@dataclass(frozen=True, eq=False)
class Vector:
    """A shift for the output of each named module. ``made`` describes how it was made; ``base`` is the fingerprint of
    its model."""

    shifts: Mapping[str, Tensor]
    made: str
    base: str

    def __post_init__(self) -> None:
        if not self.shifts:
            raise SteeringError("a vector needs at least one module.")
        for path, shift in self.shifts.items():
            if shift.ndim != 1 or not bool(torch.isfinite(shift).all()):
                raise SteeringError(
                    f"{path}: a shift is one finite number per channel, got shape {tuple(shift.shape)}."
                )
        if not self.norm > 0:
            raise SteeringError(
                "the vector is 0 everywhere: the two sides of the contrast do not differ; give other contexts."
            )

    @property
    def norm(self) -> float:
        """The length of all shifts taken as one vector."""
        return float(self._flat().norm())

    def _flat(self) -> Float[Tensor, " n"]:
        return torch.cat([self.shifts[path].double() for path in sorted(self.shifts)])

    def cosine(self, other: Vector) -> float:
        """1 for the same direction, −1 for the opposite one, over all modules at once."""
        self._same_place(other)
        a, b = self._flat(), other._flat()
        return float(a @ b / (a.norm() * b.norm()))

    def __add__(self, other: Vector) -> Vector:
        self._same_place(other)
        return Vector(
            {p: s + other.shifts[p] for p, s in self.shifts.items()}, f"{self.made} + {other.made}", self.base
        )

    def __mul__(self, factor: float) -> Vector:
        return Vector({p: s * float(factor) for p, s in self.shifts.items()}, self.made, self.base)

    __rmul__ = __mul__

    def __neg__(self) -> Vector:
        return self * -1.0

    def _same_place(self, other: Vector) -> None:
        if {p: s.shape for p, s in self.shifts.items()} != {p: s.shape for p, s in other.shifts.items()}:
            raise SteeringError(
                f"the vectors act on different modules ({', '.join(self.shifts)} and {', '.join(other.shifts)}); "
                "make both at the same places."
            )

    def applied(self, policy: Policy, dose: float = 1.0) -> AbstractContextManager[None]:
        """Inside the block, add dose · shift to the output of each module at every position."""
        self._fits(policy)

        def add(shift: Tensor) -> ActivationChange:
            return lambda h: h + (dose * shift).to(h.device, h.dtype)

        return changed(policy, {path: add(shift) for path, shift in self.shifts.items()})

    def ablated(self, policy: Policy, share: float = 1.0) -> AbstractContextManager[None]:
        """Inside the block, remove ``share`` of each state's component along the shift (1: all of it)."""
        self._fits(policy)

        def take_out(shift: Tensor) -> ActivationChange:
            length = shift.double().norm()
            unit = (shift.double() / length.clamp_min(torch.finfo(torch.float64).tiny)).float()

            def change(h: Tensor) -> Tensor:
                along = unit.to(h.device, h.dtype if h.dtype == torch.float64 else torch.float32)
                states = h.to(along.dtype)
                return (states - share * (states @ along)[..., None] * along).to(h.dtype)

            return change

        return changed(policy, {path: take_out(shift) for path, shift in self.shifts.items()})

    def _fits(self, policy: Policy) -> None:
        if self.base != policy.fingerprint():
            raise SteeringError(f"the vector was made on another model than {policy.name}; make it again on this one.")

    def save(self, path: Path | str) -> Path:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {k: v.detach().float() for k, v in self.shifts.items()}
        write_tensors(path, tensors, {"made": self.made, "base": self.base, "format": "earnest-vector-1"})
        return path

    @classmethod
    def load(cls, path: Path | str) -> Vector:
        """The vector of a file that ``save`` wrote."""
        try:
            with safe_open(str(path), "pt") as file:
                facts = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, OSError) as error:
            raise SteeringError(
                f"{path} cannot be read as a vector ({error}); give a file that save() wrote."
            ) from None
        if facts.get("format") != "earnest-vector-1":
            raise SteeringError(f"{path} holds tensors, but no steering vector; give a file that save() wrote.")
        return cls(tensors, facts["made"], facts["base"])


def mean_difference(
    policy: Policy, high: Sequence[Sequence[int]], low: Sequence[Sequence[int]], layers: Sequence[int] | None = None
) -> Vector:
    """The mean of high minus low over paired contexts, in the residual stream after each layer."""
    return Vector(
        {path: d.mean(0) for path, d in _differences(policy, high, low, block_paths(policy, layers)).items()},
        f"mean difference over {len(high)} contexts",
        policy.fingerprint(),
    )


def principal(
    policy: Policy, high: Sequence[Sequence[int]], low: Sequence[Sequence[int]], layers: Sequence[int] | None = None
) -> Vector:
    """The first principal direction of the paired differences, with their mean projection on it as its length.

    The differences are not centred, because their mean is the signal. The direction points from low to high.
    """
    shifts = {}
    for path, d in _differences(policy, high, low, block_paths(policy, layers)).items():
        direction = torch.linalg.svd(d.double(), full_matrices=False).Vh[0]
        shifts[path] = ((d.double() @ direction).mean() * direction).float()
    return Vector(shifts, f"principal direction of {len(high)} contexts", policy.fingerprint())


def weight_space(
    policy: Policy,
    high: Sequence[Sequence[int]],
    low: Sequence[Sequence[int]],
    layers: Sequence[int] | None = None,
    *,
    paths: Sequence[str] | None = None,
    rank: int | None = 16,
) -> Vector:
    """The mean difference of a linear layer's inputs, mapped by its weight through the ``rank`` singular directions
    with the largest change (None: all of them, which is W·Δx).

    paths: linear layers; None: the output layers of the feed-forward parts of ``layers``.
    """
    paths = writer_paths(policy, layers) if paths is None else paths
    shifts = {}
    for path, d in _differences(policy, high, low, paths, inputs=True).items():
        u, s, vh = torch.linalg.svd(_weight(policy, path).double(), full_matrices=False)
        coordinates = s * (vh @ d.double().mean(0))
        count = len(s) if rank is None else rank
        if not 1 <= count <= len(s):
            raise SteeringError(f"rank is {rank}; {path} has the ranks 1 to {len(s)}.")
        kept = coordinates.abs().topk(count).indices
        shifts[path] = (u[:, kept] @ coordinates[kept]).float()
    shown = "full rank" if rank is None else f"rank {rank}"
    return Vector(shifts, f"weight space of {len(high)} contexts, {shown}", policy.fingerprint())


def _differences(
    policy: Policy,
    high: Sequence[Sequence[int]],
    low: Sequence[Sequence[int]],
    paths: Sequence[str],
    *,
    inputs: bool = False,
) -> dict[str, Float[Tensor, "P d"]]:
    if len(high) != len(low):
        raise SteeringError(
            f"contexts come in pairs: got {len(high)} for the high pole and {len(low)} for the low one."
        )
    up, down = (tag_states(policy, side, paths, inputs=inputs) for side in (high, low))
    return {path: up[path] - down[path] for path in paths}


def _weight(policy: Policy, path: str) -> Float[Tensor, "m n"]:
    """The current weight of the layer with its active adapters."""
    module = module_at(policy, path)
    try:
        layer = layer_of(path, module)
    except AdapterError as error:
        raise SteeringError(f"{path} is not a linear layer ({error}); weight_space needs one.") from None
    return merged_weight(layer)[0].detach()
