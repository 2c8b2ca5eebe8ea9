"""The subjects of the conformance table: three models, every variant's examples, and `Case`, one combination."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from earnest.adapters.adapter import Adapter
from earnest.adapters.attach import attach
from earnest.adapters.targets import linears
from earnest.adapters.variant import VARIANTS, Variant

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = 3e-6  # of the largest value, for two correct computations in fp32
NOISE = 8.0  # in bf16 and fp16: the allowed multiple of the base model's own rounding noise


class Broken(AssertionError):
    """A check failed."""


def need(ok: bool, message: str) -> None:
    if not ok:
        raise Broken(message)


def tiny_llama() -> nn.Module:
    """Two blocks, grouped-query attention, no biases, tied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2,
        attn_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def tiny_gpt2() -> nn.Module:
    """Two blocks of Conv1D with (non-zero) biases."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(p, std=0.1)
    return model


def nano() -> nn.Module:
    """The embedded model."""
    from earnest.models import load

    return load("nano").model


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": tiny_llama, "gpt2": tiny_gpt2, "nano": nano}


def subjects() -> dict[str, tuple[str, dict[str, Any]]]:
    """Label -> (variant, settings that fit the tiny models), from the ``examples`` of each variant."""
    out = {}
    for name, cls in sorted(VARIANTS.items()):
        examples = cls.__dict__.get("examples") or {name: {}}
        out.update({label: (name, dict(settings)) for label, settings in examples.items()})
    return out


SUBJECTS = subjects()


@lru_cache(maxsize=32)
def _model(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    return make().to(dtype).eval()


@dataclass
class Case:
    """One variant on a fresh copy of one model in one dtype."""

    variant: Variant
    make: Callable[[], nn.Module]
    dtype: torch.dtype = torch.float32
    targets: Any = None
    ids: Tensor = field(init=False)

    def __post_init__(self) -> None:
        vocabulary = int(_model(self.make, self.dtype).config.vocab_size)  # type: ignore[union-attr,arg-type]
        rng = torch.Generator().manual_seed(7)
        self.ids = torch.randint(0, min(vocabulary, 64), (3, 7), generator=rng)

    def model(self) -> nn.Module:
        return copy.deepcopy(_model(self.make, self.dtype))

    def attach(self, model: nn.Module) -> Adapter:
        calibration = [self.ids] if self.variant.wants_calibration() else None
        return attach(model, self.variant, targets=self.targets, calibration=calibration)

    def logits(self, model: nn.Module) -> Tensor:
        with torch.no_grad():
            return model(self.ids).logits

    def loss(self, model: nn.Module) -> Tensor:
        logits = model(self.ids[:, :-1]).logits.float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), self.ids[:, 1:].flatten())

    @cached_property
    def base_logits(self) -> Tensor:
        return self.logits(_model(self.make, self.dtype))

    @cached_property
    def noise(self) -> float:
        """Relative rounding noise of the base: these weights computed in this dtype against fp32."""
        if self.dtype == torch.float32:
            return 0.0
        exact = self.logits(self.model().float())
        return float((self.base_logits.float() - exact).abs().max() / exact.abs().max())

    def ready(self, perturbed: bool = True) -> tuple[nn.Module, Adapter]:
        model = self.model()
        adapter = self.attach(model)
        if perturbed:
            perturb(adapter)
        return model, adapter

    def close(self, a: Tensor, b: Tensor, what: str) -> None:
        a, b = a.detach(), b.detach()
        need(bool(torch.isfinite(a).all()), f"{what}: not finite")
        gap = float((a.float() - b.float()).abs().max())
        limit = max(TOLERANCE, NOISE * self.noise) * max(1.0, float(b.float().abs().max()))
        need(gap <= limit, f"{what}: differs by {gap:.2e}, allowed {limit:.1e}")

    def equal(self, a: Tensor, b: Tensor, what: str) -> None:
        gap = float((a.float() - b.float()).abs().max())
        need(torch.equal(a, b), f"{what}: not bit-equal (largest difference {gap:.2e})")


def first_linear(model: nn.Module) -> nn.Module:
    """The first layer that can have an adapter."""
    return next(iter(linears(model).values()))


def perturb(adapter: Adapter, std: float = 0.1, seed: int = 3) -> None:
    """Add noise to every parameter, so that a symmetric initial state (B = 0, equal pairs) hides no defect."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in adapter.parameters():
            p.add_(std * torch.randn(p.shape, generator=rng).to(p.device))
