"""A model that a client trains: a LoRA on the host's policy, its gradients, its AdamW.

optim_step: g ← g·min(1, c/‖g‖) where c > 0, then torch's AdamW with the lr, β₁, β₂, ε and decay of this step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path as Folder
from typing import TYPE_CHECKING, Any

from earnest.serve.tinker import passes
from earnest.serve.tinker.data import PassOutput, PassRequest
from earnest.serve.tinker.errors import WireError

if TYPE_CHECKING:
    from earnest.serve.host import Host

ALPHA = 32.0
"""LoRA's α, whatever the rank (the wire has no field for it): ΔW = (32/r)·B·A."""


@dataclass(frozen=True)
class LoraConfig:
    """A LoRA as the wire describes it; ``seed`` determines its initialization."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 4096:
            raise WireError(f"the LoRA rank is {self.rank}; give 1 … 4096.")
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise WireError("train_attn, train_mlp and train_unembed are all false: nothing would be trained.")

    def targets(self, host: Host) -> list[str]:
        """The paths of the layers that it adapts."""
        from earnest.adapters.targets import linears

        model = host.policy.model
        head = model.get_output_embeddings()
        chosen = []
        for path, module in linears(model).items():
            if module is head:
                wanted = self.train_unembed
            else:
                wanted = self.train_attn if "attn" in path or "attention" in path else self.train_mlp
            if wanted:
                chosen.append(path)
        if not chosen:
            raise WireError(f"{asdict(self)} matches no linear layer of {host.policy.name}.")
        return chosen


@dataclass(frozen=True)
class AdamParams:
    """One step's settings, with the API's own defaults."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> AdamParams:
        unknown = set(given) - set(cls.__dataclass_fields__)
        if unknown:
            raise WireError(f"adam_params has {sorted(unknown)}; it takes {sorted(cls.__dataclass_fields__)}.")
        try:
            params = cls(**{k: float(v) for k, v in given.items()})
        except (TypeError, ValueError) as error:
            raise WireError(f"adam_params: {error}.") from error
        for name, high in (("learning_rate", math.inf), ("beta1", 1.0), ("beta2", 1.0), ("eps", math.inf)):
            if not 0 <= getattr(params, name) < high:
                raise WireError(f"adam_params.{name} is {getattr(params, name)}; it must be in [0, {high}).")
        for name in ("weight_decay", "grad_clip_norm"):
            if not 0 <= getattr(params, name) < math.inf:
                raise WireError(f"adam_params.{name} is {getattr(params, name)}; it must be 0 (off) or more.")
        return params


class LiveModel:
    def __init__(self, host: Host, run: str, lora: LoraConfig) -> None:
        from earnest.adapters import LoRA
        from earnest.engines import AdamW, LocalEngine

        self.host, self.run, self.lora = host, run, lora
        self.variant = LoRA(rank=lora.rank, alpha=ALPHA)
        self.targets = lora.targets(host)
        self.adapter = host.attach(f"tinker {run}", self.variant, targets=self.targets, seed=lora.seed)
        # Every step has its own settings; the optimizer is built with the defaults.
        defaults = AdamParams()
        spec = AdamW(lr=defaults.learning_rate, betas=(defaults.beta1, defaults.beta2), eps=defaults.eps)
        self.engine = LocalEngine(host.policy, self.adapter, spec, max_grad_norm=None)
        self.weights_version = 0
        """The number of changes of the weights; samplers of the same version share one adapter."""

    def pass_(self, request: PassRequest) -> PassOutput:
        policy = self.host.policy
        loss = passes.check(request, policy.head.weight.shape[0], policy.positions)
        with self.host.turn("tinker", self.adapter) as turn:
            return passes.run(self.engine, request, loss, turn.yield_turn)

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Clip, then AdamW with these settings. Refused where no pass has added a gradient since the last step."""
        if all(p.grad is None for p in self.engine.parameters):
            raise WireError("optim_step before any forward_backward: there is no gradient to step along.")
        decayed = {id(p) for p in self.adapter.decay_parameters()}
        with self.host.turn("tinker", self.adapter):
            for group in self.engine.optimizer.param_groups:
                group["lr"], group["eps"] = params.learning_rate, params.eps
                group["betas"] = (params.beta1, params.beta2)
                group["weight_decay"] = params.weight_decay if id(group["params"][0]) in decayed else 0.0
            self.engine.max_grad_norm = params.grad_clip_norm or None
            report = self.engine.update()
        self.weights_version += 1
        return {
            "unclipped_grad_l2:mean": report.gradient_norm,
            "clip_factor:mean": report.clip_factor,
            "update_l2:mean": report.update_norm,
        }

    def save(self, folder: Folder) -> None:
        with self.host.turn("tinker", self.adapter):
            self.engine.save(folder)

    def save_sampler(self, folder: Folder, name: str) -> None:
        with self.host.turn("tinker", self.adapter):
            self.adapter.save(folder, name)

    def load(self, folder: Folder, *, optimizer: bool) -> None:
        """Load a state of a run with the same LoRA; without ``optimizer`` the moments start at 0."""
        from earnest.engines import checkpoint

        with self.host.turn("tinker", self.adapter):
            self.engine.optimizer.zero_grad(set_to_none=True)
            if optimizer:
                self.engine.load(folder)
            else:
                tensors, _ = checkpoint.read(folder)
                own = {k.removeprefix("adapter."): v for k, v in tensors.items() if k.startswith("adapter.")}
                self.adapter.load_state_dict(own)
                self.engine.optimizer.state.clear()
        self.weights_version += 1

    def close(self) -> None:
        self.host.detach(self.adapter.name)
