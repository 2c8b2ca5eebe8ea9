"""``Directions``: for each guarded module, orthonormal rows in its parameters' space that point toward the unwanted
behaviour.

For a step u that increases the unwanted behaviour, the descent direction -u has a positive coordinate along a
direction. Shapes: k directions of a module, n numbers of its parameter, flattened; P pairs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.disk import write_tensors
from earnest.guards.errors import GuardError

FORMAT = "earnest-directions-1"
PARTS = ("basis", "strength", "agreement", "validated")


def by_owner(tensors: Mapping[str, Tensor], owners: Sequence[str], what: str) -> dict[str, dict[str, Tensor]]:
    """The tensors of ``what``, by the two parts of their keys "<owner>.<name>"."""
    parts: dict[str, dict[str, Tensor]] = {owner: {} for owner in owners}
    for key, value in tensors.items():
        owner, _, name = key.partition(".")
        if owner not in parts:
            raise GuardError(f"{key!r} is not part of {what}, which has {', '.join(parts)}.")
        parts[owner][name] = value
    return parts


@dataclass(frozen=True, eq=False)
class Directions:
    """``basis[name]`` [k, n], strongest first; ``strength`` their singular values, ``agreement`` the share of pairs
    that agree with their sign, ``validated`` the share of held-out pairs that agree.

    ``facts`` has the numbers of the whole extraction, ``source`` describes its input.
    """

    basis: Mapping[str, Float[Tensor, "k n"]]
    strength: Mapping[str, Float[Tensor, " k"]]
    agreement: Mapping[str, Float[Tensor, " k"]] = field(default_factory=dict)
    validated: Mapping[str, Float[Tensor, " k"]] = field(default_factory=dict)
    source: str = "given"
    facts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.basis:
            raise GuardError("no module has a direction; give more pairs, raise top=, or lower floor=.")
        for name, V in self.basis.items():
            if V.ndim != 2 or V.shape[0] < 1 or V.shape[0] > V.shape[1]:
                raise GuardError(f"{name}: directions must be [k, n] with 1 ≤ k ≤ n, got {tuple(V.shape)}.")
            off = float((V.double() @ V.double().t() - torch.eye(V.shape[0], dtype=torch.float64)).abs().max())
            if not off < 1e-4:
                raise GuardError(
                    f"{name}: directions must be orthonormal, they are off by {off:.1g}; use torch.linalg.qr."
                )
            if name not in self.strength or self.strength[name].shape != V.shape[:1]:
                raise GuardError(f"{name}: strength must have one number for each of the {V.shape[0]} directions.")

    def __len__(self) -> int:
        return sum(V.shape[0] for V in self.basis.values())

    def describe(self) -> str:
        accuracy = (
            f", {self.facts['heldout_accuracy']:.0%} of held-out pairs" if "heldout_accuracy" in self.facts else ""
        )
        return f"{len(self)} directions in {len(self.basis)} modules, from {self.source}{accuracy}"

    def overlap(self, other: Directions) -> float:
        """The share of ``other`` in the span of this one: Σ‖V Wᵀ‖² / Σk, 1 for the same space, ≈ k/n for random
        ones."""
        shared = [n for n in other.basis if n in self.basis]
        inside = sum(float((self.basis[n].double() @ other.basis[n].double().t()).square().sum()) for n in shared)
        return inside / len(other)

    def heading(self, other: Directions) -> float:
        """The cosine between the two strength-weighted sums; negative if ``other`` points the opposite way."""
        mine, theirs = self._headings(), other._headings()
        dot = sum(float(mine[n] @ theirs[n]) for n in mine if n in theirs)
        norms = [sum(float(v.square().sum()) for v in which.values()) ** 0.5 for which in (mine, theirs)]
        return dot / (norms[0] * norms[1])

    def _headings(self) -> dict[str, Float[Tensor, " n"]]:
        return {n: self.strength[n].double() @ V.double() for n, V in self.basis.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Everything but ``source`` and ``facts``, by "<what>.<module>"."""
        return {f"{p}.{n}": t for p in PARTS for n, t in getattr(self, p).items()}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], source: str = "given", facts: Mapping[str, float] | None = None
    ) -> Directions:
        return cls(**by_owner(tensors, PARTS, "a file of directions"), source=source, facts=dict(facts or {}))

    def save(self, path: Path | str) -> Path:
        path = Path(path)
        meta = {"format": FORMAT, "source": self.source, "facts": json.dumps(dict(self.facts))}
        write_tensors(path, self.tensors(), meta)
        return path

    @classmethod
    def load(cls, path: Path | str) -> Directions:
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise GuardError(f"there is no file of directions at {path}; write one with Directions.save.")
        try:
            with safe_open(path, "pt") as file:
                meta = file.metadata() or {}
                if meta.get("format") != FORMAT:
                    raise GuardError(f"{path} has no directions in it ({FORMAT}); write one with Directions.save.")
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        except SafetensorError as error:
            raise GuardError(f"{path} is not a whole safetensors file ({error}); write it again.") from error
        return cls.from_tensors(tensors, meta["source"], json.loads(meta["facts"]))
