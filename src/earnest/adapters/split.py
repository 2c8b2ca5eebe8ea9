"""A linear layer of which each rank of a team computes a part (tensor parallelism, arXiv 1909.08053).

    columns    y_k = x W_kᵀ           W [m, n] is cut by its m outputs. Every rank has x and makes its own outputs.
    rows       y = Σ_k x_k W_kᵀ       W is cut by its n inputs. Every rank has its own inputs; the sum makes y whole.

The backward pass of ``columns`` sums ∂x over the team; that of ``rows`` needs no exchange. An adapter with factors,
ΔW = B A, is whole on every rank, and a rank computes with its rows of B (columns) or its columns of A (rows):

    columns    y_k = x W_kᵀ + (x Aᵀ) B_kᵀ            rows    y = Σ_k (x_k W_kᵀ + (x_k A_kᵀ) Bᵀ)

So the gradient of A and of B on a rank is one addend of the whole gradient, and the sum over the ranks is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from earnest.adapters.kernel import Around, Factors

Cut = Literal["columns", "rows"]


class Team:
    """The ranks that compute the same rows of a batch: this one is number ``index`` of ``count``. ``alone``: every rank
    computes whole layers with weights that are gathered for each product, and exchanges nothing else. Comparisons with
    the team's result use it."""

    def __init__(self, index: int, count: int, group: dist.ProcessGroup) -> None:
        self.index, self.count, self.group = index, count, group
        self.alone = False

    def __deepcopy__(self, memo: object) -> Team:
        return self  # a copy of a model is computed by the same ranks

    @contextmanager
    def set_alone(self, alone: bool = True) -> Iterator[None]:
        """``alone`` inside the block."""
        before, self.alone = self.alone, alone
        try:
            yield
        finally:
            self.alone = before

    def again(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of the two forward passes of a checkpointed layer: ``alone`` in the second as in the first."""
        return nullcontext(), self.set_alone(self.alone)

    def whole_input(self, x: Tensor) -> Tensor:
        """x, which every rank has; its gradient becomes the sum of the ranks' gradients."""
        return _SummedGradient.apply(x, self)

    def sum(self, tensor: Tensor) -> Tensor:
        """A new tensor: the sum over the team."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total


@dataclass(frozen=True, eq=False)
class Split:
    """How a layer is cut, and which part of it this rank has."""

    cut: Cut
    team: Team

    def part(self, weight: Tensor) -> Tensor:
        """This rank's part of a matrix [m, n] or of a bias [m], as a view."""
        dim = 0 if self.cut == "columns" else 1
        size = weight.shape[dim] // self.team.count
        return weight.narrow(dim, self.team.index * size, size)

    def factors(self, whole: Factors | Around) -> Factors | Around:
        """This rank's part of the factors of ΔW."""
        if self.team.alone:
            return whole
        if isinstance(whole, Around):
            if self.cut == "rows":
                return replace(whole, start=self.part(whole.start), delta=self.part(whole.delta))
            return replace(whole, left=self.part(whole.left), frozen=self.part(whole.frozen))
        if self.cut == "rows":
            return replace(whole, A=self.part(whole.A))
        gain = None if whole.gain is None else self.part(whole.gain)
        return replace(whole, B=self.part(whole.B), gain=gain)

    def gathered(self, part: Tensor) -> Tensor:
        """The whole tensor from the team's parts; every rank of the team calls this at the same time."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.team.count)]
        dist.all_gather(parts, part.detach().contiguous(), group=self.team.group)
        return torch.cat(parts, 0 if self.cut == "columns" else 1)

    def change(self, x: Tensor, weight: Tensor) -> Tensor:
        """What a whole ΔW [m, n] adds to the layer's output for its input x, without a gradient."""
        if self.team.alone:
            return F.linear(x, weight)
        own = F.linear(x, self.part(weight))
        return own if self.cut == "columns" else self.team.sum(own)

    def entering(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before the layer and its adapters: the gradient of a whole input is summed over the team."""
        if self.cut == "rows" or self.team.alone:
            return args
        return (self.team.whole_input(args[0]), *args[1:])

    def leaving(self, module: nn.Module, _: tuple[Any, ...], output: Tensor) -> Tensor:
        """After the layer and its adapters: partial outputs are summed over the team, and the bias is added once."""
        if self.cut == "columns":
            return output
        whole: Tensor = output if self.team.alone else _Sum.apply(output, self.team)
        return whole + module.bias if isinstance(module.bias, Tensor) else whole


class SplitLinear(nn.Linear):
    """A linear layer with this rank's part of the weight."""

    split: Split

    def forward(self, input: Tensor) -> Tensor:
        split, bias = self.split, self.bias if self.split.cut == "columns" else None
        if not split.team.alone:
            return F.linear(input, self.weight, bias)
        found: Tensor = _GatheredProduct.apply(input, self.weight, split)
        return found if bias is None else found + split.gathered(bias)


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.team.sum(gradients[0]), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, team: Team) -> Tensor:
        return team.sum(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None  # every rank has the gradient of the whole output


class _GatheredProduct(torch.autograd.Function):
    """x Wᵀ with the whole W, which exists during the product only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Tensor, split: Split) -> Tensor:
        ctx.split = split
        ctx.save_for_backward(part)
        return F.linear(x, split.gathered(part))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (part,) = ctx.saved_tensors
        return gradients[0] @ ctx.split.gathered(part), None, None
