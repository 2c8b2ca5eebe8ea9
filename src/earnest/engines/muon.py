"""Muon (torch's own) for matrices, AdamW for every other parameter, as one ``torch.optim.Optimizer``.

A matrix of which each rank holds some rows is orthogonalized whole: its momentum is gathered for the step, one matrix
at a time, and each rank applies the rows of the step that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from earnest.adapters.linalg import gathered, is_sharded
from earnest.engines.optimizers import Optimizer, Parameters, groups, register
from earnest.engines.trained import as_shard, part_of
from earnest.settings import setting


class MuonAndAdamW(torch.optim.Optimizer):
    """Steps the groups with ``matrices=True`` with ``torch.optim.Muon`` and the others with ``torch.optim.AdamW``.

    It owns the groups and the state; the two optimizers get them before every step, so a loaded state reaches them.
    ``held`` gives the model's own tensor of which a parameter is this rank's part.
    """

    def __init__(self, param_groups: Sequence[dict[str, Any]], lr: float) -> None:
        self.held: Callable[[Tensor], Tensor] = lambda parameter: parameter
        self.parts: dict[bool, torch.optim.Optimizer] = {}
        for matrices, kind in ((True, torch.optim.Muon), (False, torch.optim.AdamW)):
            if own := [g for g in param_groups if g["matrices"] is matrices]:
                self.parts[matrices] = kind(own, lr=lr)  # also writes its defaults into the groups
        super().__init__(param_groups, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "an engine computes its gradients before the step"
        for matrices, part in self.parts.items():
            groups = [g for g in self.param_groups if g["matrices"] is matrices]
            cut = [[p for p in g["params"] if matrices and is_sharded(self.held(p))] for g in groups]
            part.param_groups = [
                {**g, "params": [p for p in g["params"] if not any(p is c for c in own)]} if own else g
                for g, own in zip(groups, cut, strict=True)
            ]
            part.state = self.state
            part.step()
            for group, own in zip(groups, cut, strict=True):
                for p in own:
                    self._step_part(p, group)

    @torch.no_grad()
    def _step_part(self, p: torch.nn.Parameter, group: dict[str, Any]) -> None:
        """The step of this rank's rows ``p`` of a matrix."""
        if p.grad is None:
            return
        held, lr, share = self.held(p), float(group["lr"]), group["momentum"]
        momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
        momentum.lerp_(p.grad, 1 - share)
        ahead = p.grad.lerp(momentum, share) if group["nesterov"] else momentum
        whole = gathered(as_shard(ahead, held))
        step = torch.nn.Parameter(torch.zeros_like(whole))
        step.grad = whole
        own = {k: group[k] for k in ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
        torch.optim.Muon([step], lr=lr, weight_decay=0.0, momentum=0.0, nesterov=False, **own).step()
        p.mul_(1 - lr * group["weight_decay"]).add_(part_of(step.detach(), held))


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
