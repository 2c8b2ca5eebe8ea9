"""A policy with a LoRA in float64 and plain PyTorch: W + s·B·A written into the weights, logits all at once.

Nothing of earnest's forward, vocabulary pass or kernels is used, so agreement is agreement of two programs.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from earnest.adapters import Adapter
from earnest.models import Policy


class Reference:
    def __init__(self, policy: Policy, adapter: Adapter) -> None:
        self.scale = adapter.variant.s  # type: ignore[attr-defined]
        self.factors = {name: t.detach().double().requires_grad_() for name, t in adapter.named_parameters().items()}
        self.paths = list(adapter.slots)
        fresh = type(policy.model)(policy.model.config)
        fresh.load_state_dict(policy.model.state_dict())
        self.model = copy.deepcopy(fresh).double().eval().requires_grad_(False)
        head = self.model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)  # no longer tied

    def logits(self, ids: list[int]) -> Tensor:
        """[T, V], differentiable by the factors."""
        weights = {}
        for path in self.paths:
            base = self.model.get_submodule(path).weight
            weights[f"{path}.weight"] = base + self.scale * self.factors[f"{path}.B"] @ self.factors[f"{path}.A"]
        out = torch.func.functional_call(
            self.model, weights, (), {"input_ids": torch.tensor([ids]), "use_cache": False}, tie_weights=False
        )
        return out.logits[0]

    def logp(self, ids: list[int]) -> Tensor:
        return self.logits(ids).log_softmax(-1)

    def target_logp(self, ids: list[int]) -> Tensor:
        """log π(ids[t + 1] | ids[: t + 1])."""
        return self.logp(ids[:-1]).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        found = torch.autograd.grad(loss, list(self.factors.values()), allow_unused=True)
        return {
            n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(self.factors.items(), found, strict=True)
        }


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    """The same gradient up to float32: the error's norm, relative to the whole gradient's."""
    assert ours.keys() == theirs.keys()
    size = torch.stack([g.double().norm() for g in theirs.values()]).norm()
    off = torch.stack([(ours[n].double() - theirs[n].double()).norm() for n in theirs]).norm()
    assert float(size) > 0, "there is no gradient to compare"
    assert float(off) <= tolerance * float(size), f"off by {float(off):.3g} of {float(size):.3g}"
