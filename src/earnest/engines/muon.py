"""Muon (torch's own) for matrices, AdamW for every other parameter, as one ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from earnest.engines.optimizers import Optimizer, Parameters, groups, register
from earnest.settings import setting


class MuonAndAdamW(torch.optim.Optimizer):
    """Steps the groups with ``matrices=True`` with ``torch.optim.Muon`` and the others with ``torch.optim.AdamW``.

    It owns the groups and the state; the two optimizers get them before every step, so a loaded state reaches them.
    """

    def __init__(self, param_groups: Sequence[dict[str, Any]], lr: float) -> None:
        self.parts: dict[bool, torch.optim.Optimizer] = {}
        for matrices, kind in ((True, torch.optim.Muon), (False, torch.optim.AdamW)):
            if own := [g for g in param_groups if g["matrices"] is matrices]:
                self.parts[matrices] = kind(own, lr=lr)  # also writes its defaults into the groups
        super().__init__(param_groups, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "an engine computes its gradients before the step"
        for matrices, part in self.parts.items():
            part.param_groups = [g for g in self.param_groups if g["matrices"] is matrices]
            part.state = self.state
            part.step()


@register
@dataclass(frozen=True)
class Muon(Optimizer):
    """Muon (arXiv 2502.16982) for parameters with two dimensions: momentum, orthogonalized. AdamW for the others."""

    kind: ClassVar[str] = "muon"

    lr: float = setting(1e-3, "the learning rate", at_least=0.0)
    momentum: float = setting(0.95, "share of the previous momentum that is kept in each step", at_least=0.0, below=1.0)
    nesterov: bool = setting(True, "look ahead along the momentum")
    ns_steps: int = setting(5, "iterations of the orthogonalization (Newton-Schulz)", at_least=1, below=100)
    adjust: Literal["match_rms_adamw", "original"] = setting(
        "match_rms_adamw",
        "scale of a matrix's step: as long as AdamW's (0.2·√max(m, n)), so that AdamW's rates fit; or √max(1, m/n)",
    )
    betas: tuple[float, float] = setting(
        (0.9, 0.999), "AdamW's decay rates, for parameters that are no matrices", at_least=0.0, below=1.0
    )
    eps: float = setting(1e-8, "added to AdamW's denominator", at_least=0.0)
    weight_decay: float = setting(
        0.0, "each step shrinks the parameters by lr·weight_decay of their size", at_least=0.0
    )

    def build(self, decayed: Parameters, plain: Parameters) -> torch.optim.Optimizer:
        muon = {
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "ns_steps": self.ns_steps,
            "adjust_lr_fn": self.adjust,
        }
        found: list[dict[str, Any]] = []
        for group in groups(decayed, plain, self.weight_decay):
            for matrices, own in ((True, muon), (False, {"betas": self.betas, "eps": self.eps})):
                if params := [p for p in group["params"] if (p.ndim == 2) is matrices]:
                    found.append({**group, **own, "params": params, "matrices": matrices})
        return MuonAndAdamW(found, self.lr)
