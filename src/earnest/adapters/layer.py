"""One adapted module: a linear map with the same interface for every kind, or the module's own parameters alone.

``y = x Wᵀ + b`` with W [m, n]: ``nn.Linear``, GPT-2's ``Conv1D`` (stores Wᵀ), and *opaque* linear-like modules
(quantised weights, other libraries' kernels), of which only the forward is used. Legend: m outputs, n inputs, k rows.
A ``ModuleLayer`` is any other module, such as an embedding or a norm; an ``ExpertsLayer`` holds the weights of all
experts of a mixture as 3-D parameters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from earnest.adapters.errors import AdapterError
from earnest.adapters.linalg import gathered
from earnest.adapters.split import Split


def _is_conv1d(module: nn.Module) -> bool:
    # By name, so that importing adapters does not import transformers.
    return any(c.__name__ == "Conv1D" and c.__module__.startswith("transformers.") for c in type(module).__mro__)


def is_linear_like(module: nn.Module) -> bool:
    """Whether `attach` can adapt the module: it has in and out features and maps the last dimension."""
    if _is_conv1d(module):
        return True
    has_size = all(isinstance(getattr(module, a, None), int) for a in ("in_features", "out_features"))
    return has_size and not isinstance(module, (nn.Bilinear,))


def is_dense(weight: object) -> bool:
    """Whether the weight is a plain tensor of floats, not a quantised one. A fake tensor stands for a plain one."""
    return isinstance(weight, Tensor) and type(weight.data) in (Tensor, FakeTensor) and weight.is_floating_point()


def is_experts(module: nn.Module) -> bool:
    """Whether the module holds 3-D parameters, one matrix for each expert."""
    return not is_linear_like(module) and any(p is not None and p.ndim == 3 for p in module._parameters.values())


class Layer:
    """A target module as the linear map [m, n] that it computes."""

    def __init__(self, name: str, module: nn.Module) -> None:
        if not is_linear_like(module):
            raise AdapterError(f"{name} is a {type(module).__name__}, not a linear layer; target the linears in it")
        self.name = name
        self.module = module
        self.base_class: type[nn.Module] = type(module)
        self.stash: dict[str, nn.Parameter] | None = None  # the base's own parameters while merged
        self.cache: dict[Any, tuple[Any, Tensor, tuple[Tensor, ...]]] = {}  # derived values, see runtime.cached
        self.split: Split | None = None  # the part of the weight that this rank of a team has; None: all of it
        weight: Any = getattr(module, "weight", None)
        if _is_conv1d(module):
            self.kind, (self.n, self.m) = "conv1d", weight.shape
        else:
            self.n, self.m = int(module.in_features), int(module.out_features)  # type: ignore[arg-type]
            self.kind = "linear" if is_dense(weight) and isinstance(module, nn.Linear) else "opaque"
        probe = weight if isinstance(weight, Tensor) else next(iter([*module.parameters(), *module.buffers()]), None)
        self.device = probe.device if probe is not None else torch.device("cpu")
        self._inner = probe.dtype if probe is not None and probe.is_floating_point() else torch.float32

    def check_rank(self, variant: str, rank: int) -> None:
        """Refuse a rank above that of the weight."""
        if rank > (most := min(self.m, self.n)):
            raise AdapterError(f"{variant}: rank {rank} exceeds {self.name}'s {most}; choose rank ≤ {most}.")

    def own(self) -> dict[str, nn.Parameter]:
        """The base's parameters that the module itself holds, by name; also while it is merged."""
        held = {**self.module._parameters, **(self.stash or {})}
        return {name: p for name, p in held.items() if p is not None}

    def _base(self, name: str) -> Any:
        """The base's weight or bias; for a module that keeps it elsewhere (a buffer, a parametrisation) its value."""
        found = self.own().get(name)
        return getattr(self.module, name, None) if found is None else found

    def facts(self) -> dict[str, Tensor]:
        """The base tensors that identify the layer, by path: the weight [m, n] in fp32."""
        return {self.name: self.weight()}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the base computes now: a model may be cast after `attach`."""
        weight = self._base("weight")
        if not isinstance(weight, Tensor):
            weight = next(iter([*self.module.parameters(recurse=False), *self.module.buffers(recurse=False)]), None)
        own = getattr(self.module, "compute_dtype", None)  # quantised layers have it, bitsandbytes' too
        floats = (t.dtype for t in (weight, self.bias) if t is not None and t.is_floating_point())
        return own if isinstance(own, torch.dtype) else next(floats, self._inner)

    @property
    def bias(self) -> Tensor | None:
        bias = self._base("bias")
        return bias if isinstance(bias, Tensor) else None

    @property
    def mergeable(self) -> bool:
        """Whether a dense weight can be written: not if the weight is quantised (quantising again would lose the
        update), and not if it is not the module's own parameter (a parametrisation)."""
        return self.kind != "opaque" and self.module._parameters.get("weight") is not None

    def base(self, *args: Any, **kwargs: Any) -> Tensor:
        """The original forward of the module."""
        return self.base_class.forward(self.module, *args, **kwargs)

    def rows(self, u: Float[Tensor, "k n"]) -> Float[Tensor, "k m"]:
        """u Wᵀ without the bias, differentiable in u: computed as k extra tokens through the base's kernel."""
        if self.split is not None:
            raise AdapterError(
                f"{self.name}: this adapter computes with the base's weight in each pass, and the ranks of a team have "
                "a part of it each; take lora, or set engine.tensor=1"
            )
        u = u.to(self.dtype)
        if self.kind == "opaque":
            return self._without_bias(u)
        weight = gathered(self._base("weight"))
        return F.linear(u, weight) if self.kind == "linear" else u @ weight

    def weight(self) -> Float[Tensor, "m n"]:
        """W in fp32, detached and exact. For an opaque module W = base(I)ᵀ, from its forward."""
        with torch.no_grad():
            if self.kind == "opaque":
                return self._probe()
            w = gathered(self._base("weight")).detach()
            w = (w if self.split is None else self.split.gathered(w)).float()
            return w if self.kind == "linear" else w.t().contiguous()

    def _without_bias(self, u: Tensor) -> Tensor:
        if isinstance(self.module, nn.Linear):  # a quantised weight has its own dispatch
            return F.linear(u, self.module.weight)
        params, bias = self.module._parameters, self.module._parameters.get("bias")
        if bias is None:
            out = self.base(u)
            return out if self.bias is None else out - self.bias
        params["bias"] = None  # exact, while (w + b) − b would round; not thread-safe
        try:
            return self.base(u)
        finally:
            params["bias"] = bias

    def _probe(self) -> Tensor:
        eye = torch.eye(self.n, dtype=self.dtype, device=self.device)
        w = torch.cat([self._without_bias(c).float() for c in eye.split(1024)]).t().contiguous()
        u = torch.linspace(-1.0, 1.0, self.n, device=self.device)[None]
        want, got = u @ w.t(), self._without_bias(u.to(self.dtype)).float()
        if not torch.allclose(want, got, rtol=0.05, atol=0.05 * float(want.abs().max() + 1e-12)):
            raise AdapterError(
                f"{self.name} ({self.base_class.__name__}) is not a linear map (are its activations quantised?), so "
                "its weight cannot be read; use a variant that needs no weight: lora, eva, ia3, ia3_ff, road, vera"
            )
        return w


class ModuleLayer(Layer):
    """A module that is not a linear map (an embedding, a norm, experts): only its own parameters are used."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module, self.base_class = name, module, type(module)
        self.stash, self.cache, self.split, self.kind = None, {}, None, "module"
        own = list(self.own().values())
        if not own:
            raise AdapterError(
                f"{name} ({type(module).__name__}) has no parameters of its own; name the modules in it."
            )
        self.m, self.n = sum(p.numel() for p in own), 1
        self.device, self._inner = own[0].device, own[0].dtype

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.own().values())).dtype

    @property
    def mergeable(self) -> bool:
        return True

    def weight(self) -> Tensor:
        raise AdapterError(
            f"{self.name} is a {self.base_class.__name__}, which is not a linear map and has no W [m, n]"
        )

    def facts(self) -> dict[str, Tensor]:
        return {
            f"{self.name}.{key}": p.detach().float().reshape(-1, p.shape[-1] if p.ndim else 1)
            for key, p in self.own().items()
        }


class ExpertsLayer(ModuleLayer):
    """The experts of a mixture: parameters [experts, a, b], of which a token uses the matrices of a few experts."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.kind = "experts"

    def stacks(self) -> dict[str, nn.Parameter]:
        """The 3-D parameters, by name."""
        return {name: p for name, p in self.own().items() if p.ndim == 3}
