"""Directions from paired differences.

    D [P, n]  one row per pair  →   D/√P = U Σ Vᵀ,  the top k rows of Vᵀ, with signs so that most pairs have D v > 0

A share of the pairs is held out for validation. All modules share one noise floor: the share ``floor`` of directions
with the lowest singular values is dropped, so a module without the signal has no directions instead of noise.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.errors import EarnestError
from earnest.guards.directions import Directions
from earnest.guards.errors import GuardError, GuardWarning
from earnest.settings import Checked, setting


@dataclass(frozen=True)
class Extraction(Checked):
    """How directions are made from paired differences."""

    error: ClassVar[type[EarnestError]] = GuardError

    top: int = setting(4, "the largest number of directions per module", at_least=1)
    floor: float = setting(
        0.25, "the share of directions that is dropped: the weakest over all modules", at_least=0.0, below=1.0
    )
    heldout: float = setting(
        0.25, "the share of the pairs that is held out to validate the directions", at_least=0.0, below=1.0
    )


def assemble(
    differences: Mapping[str, Float[Tensor, "P n"]],
    *,
    top: int = Extraction.top,
    floor: float = Extraction.floor,
    heldout: float = Extraction.heldout,
    seed: int = 0,
    source: str = "differences",
    validate: bool = True,
) -> Directions:
    """Directions from one difference per pair and module, unwanted minus wanted.

    ``validate``: warn if the directions classify the held-out pairs no better than chance.
    """
    if not differences:
        raise GuardError("no module has a difference; attach an adapter with trainable parameters first.")
    Extraction(top, floor, heldout)  # raises for values out of range
    pairs = next(iter(differences.values())).shape[0]
    kept_out = round(heldout * pairs)
    if pairs - kept_out < 2:
        raise GuardError(
            f"directions need at least 2 pairs to learn from; of {pairs} pairs heldout={heldout} leaves "
            f"{pairs - kept_out}. Give more pairs, or lower heldout."
        )
    order = torch.randperm(pairs, generator=torch.Generator().manual_seed(seed))
    learn, check = order[kept_out:], order[:kept_out]
    found = {}
    for name, D in differences.items():
        _, sigma, V = torch.linalg.svd(D.double()[learn] / len(learn) ** 0.5, full_matrices=False)
        found[name] = sigma[:top], V[:top]
    pooled = torch.cat([sigma for sigma, _ in found.values()])
    if not float(pooled.max()) > 0:
        raise GuardError("wanted and unwanted completions have the same gradients everywhere; give other pairs.")
    least = max(float(torch.quantile(pooled, floor)), 1e-12 * float(pooled.max()))
    basis, strength, agreement, validated = {}, {}, {}, {}
    score = torch.zeros(kept_out, dtype=torch.float64)
    for name, (sigma, V) in found.items():
        strong = sigma >= least
        if not bool(strong.any()):
            continue
        sigma, V = sigma[strong], V[strong]
        D = differences[name].double()
        sides = D[learn] @ V.t()
        votes = (sides.sign()).sum(0)
        side = torch.where(votes != 0, votes, sides.sum(0)).sign()
        side = torch.where(side == 0, torch.ones_like(side), side)
        V = V * side[:, None]
        basis[name], strength[name] = V.float(), sigma.float()
        agreement[name] = ((D[learn] @ V.t()) > 0).double().mean(0).float()
        if kept_out:
            beyond = D[check] @ V.t()
            validated[name] = (beyond > 0).double().mean(0).float()
            score += beyond @ sigma
    facts = {"pairs": float(len(learn)), "floor": least, "dropped": float(len(pooled) - sum(map(len, basis.values())))}
    if kept_out:
        facts |= {"heldout_pairs": float(kept_out), "heldout_accuracy": float((score > 0).double().mean())}
        if validate and facts["heldout_accuracy"] <= 0.5:
            warnings.warn(
                f"the directions classify only {facts['heldout_accuracy']:.0%} of {kept_out} held-out pairs correctly, "
                "no better than chance; give better pairs.",
                GuardWarning,
                stacklevel=2,
            )
    return Directions(basis, strength, agreement, validated, source, facts)
