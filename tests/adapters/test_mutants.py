"""The conformance table's power: broken variants and runtimes, and the check that kills each.

A mutant that survives its check is a hole in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from earnest.adapters import adapter as adapter_module
from earnest.adapters import files, merging, runtime
from earnest.adapters.conformance import CHECKS, Broken, Case, tiny_llama
from earnest.adapters.errors import AdapterError
from earnest.adapters.kernel import Factors
from earnest.adapters.variant import VARIANTS, Birth, Spec
from earnest.adapters.variants.dora import DoRA
from earnest.adapters.variants.hra import HRA
from earnest.adapters.variants.ia3 import IA3
from earnest.adapters.variants.lora import LoRA
from earnest.adapters.variants.pissa import PiSSA
from earnest.adapters.variants.vera import VeRA


class ReturnsInput(LoRA):
    """The forward does nothing."""

    def factors(self, t, layer, scale):
        return Factors(t["A"] * 0, t["B"] * 0)


class BornOff(LoRA):
    """B starts away from 0."""

    def birth(self, layer, ctx: Birth):
        return super().birth(layer, ctx) | {"B": torch.full((layer.m, self.rank), 1e-3)}


class DeadHalf(LoRA):
    """A gets no gradient, ever."""

    def factors(self, t, layer, scale):
        return Factors(t["A"].detach(), t["B"], self.s * scale)


class Undeclared(LoRA):
    """A has no gradient at step 1 and does not say so."""

    def dormant(self):
        return frozenset()


class Overdeclared(IA3):
    """Declares a tensor dormant that is not."""

    def dormant(self):
        return frozenset({"d"})


class DeadParameter(LoRA):
    """One more parameter that nothing reads."""

    def specs(self, layer):
        return super().specs(layer) | {"unused": Spec((3,))}


class MergesTwice(LoRA):
    """The merge uses another scale than the forward."""

    def weight(self, t, layer, w, b, scale):
        return w + 2 * self.factors(t, layer, scale).dense(), b


class ForgetsBias(IA3):
    """The merge leaves the bias unscaled."""

    def weight(self, t, layer, w, b, scale):
        return super().weight(t, layer, w, b, scale)[0], b


class RescalesBase(PiSSA):
    """Writes into the base weight, as the paper's code does."""

    def birth(self, layer, ctx):
        given = super().birth(layer, ctx)
        layer.module.weight.data -= given["B0"] @ given["A0"]
        return given

    def factors(self, t, layer, scale):
        return Factors(t["A0"] + t["dA"], t["B0"] + t["dB"], scale)


class CancelsLarge(PiSSA):
    """BA − B₀A₀ as two large products: the identity only up to rounding."""

    def factors(self, t, layer, scale):
        a = torch.cat([t["A0"] + t["dA"], t["A0"]])
        return Factors(a, torch.cat([t["B0"] + t["dB"], -t["B0"]], 1), self.s * scale)


class NoBirthTerm(HRA):
    """The reflections without the birth term: R = I up to rounding only."""

    def factors(self, t, layer, scale):
        f = super().factors(t, layer, scale)
        u = t["U0"] + t["dU"]
        u = u / u.norm(dim=1, keepdim=True)
        return Factors(f.A[: self.rank], layer.rows(u).t(), f.scale)


class RoundedMagnitude(DoRA):
    """The norm of V in the base's dtype, as in PEFT: g = 1 ± 2⁻⁹ in bf16."""

    def after(self, t, y, layer, scale):
        w = layer.weight() + self.factors(t, layer, scale).dense()
        m = t["w2"].sqrt().to(layer.dtype).float() * (1 + t["dm"])
        return (y.float() * m / w.norm(dim=1)).to(y.dtype)


class Bf16Parameters(IA3):
    """1 + δ formed in the base's dtype: small steps are rounded away."""

    def after(self, t, y, layer, scale):
        return y * (1 + scale * 1e-4 * t["d"]).to(torch.bfloat16).to(y.dtype)


class IgnoresScaleOfHistory(LoRA):
    """Random at every call."""

    def factors(self, t, layer, scale):
        noise = 1 + 1e-3 * torch.rand(1).item()
        return Factors(t["A"], t["B"], self.s * scale * noise)


class UnsharedVeRA(VeRA):
    """λ_d is read with a gradient cut."""

    def factors(self, t, layer, scale):
        return Factors(t["A"], t["lb"][:, None] * t["B"] * (self.d_initial + t["dld"].detach()), scale)


VARIANT_MUTANTS: list[tuple[Any, str, torch.dtype]] = [
    (ReturnsInput(rank=4), "gradients", torch.float32),
    (ReturnsInput(rank=4), "liveness", torch.float32),
    (ReturnsInput(rank=4), "training", torch.float32),
    (BornOff(rank=4), "identity", torch.float32),
    (DeadHalf(rank=4), "gradients", torch.float32),
    (Undeclared(rank=4), "gradients", torch.float32),
    (Overdeclared(), "gradients", torch.float32),
    (DeadParameter(rank=4), "gradients", torch.float32),
    (DeadParameter(rank=4), "liveness", torch.float32),
    (MergesTwice(rank=4), "merging", torch.float32),
    (RescalesBase(rank=4), "detaching", torch.float32),
    (CancelsLarge(rank=4), "identity", torch.float32),
    (NoBirthTerm(rank=4), "identity", torch.float32),
    (RoundedMagnitude(rank=4), "identity", torch.bfloat16),
    (Bf16Parameters(), "liveness", torch.bfloat16),
    (IgnoresScaleOfHistory(rank=4), "saving", torch.float32),
    (UnsharedVeRA(rank=16), "gradients", torch.float32),
]


def _id(value: Any) -> str:
    return value if isinstance(value, str) else str(value) if isinstance(value, torch.dtype) else type(value).__name__


@pytest.mark.parametrize(("mutant", "check", "dtype"), VARIANT_MUTANTS, ids=_id)
def test_a_broken_variant_is_killed(mutant: Any, check: str, dtype: torch.dtype) -> None:
    with pytest.raises((Broken, AdapterError)):
        CHECKS[check](Case(mutant, tiny_llama, dtype))


def test_a_forgotten_bias_is_killed_where_there_are_biases() -> None:
    from earnest.adapters.conformance import tiny_gpt2

    with pytest.raises(Broken, match="merged"):
        CHECKS["merging"](Case(ForgetsBias(), tiny_gpt2))


@dataclass(frozen=True)
class RuntimeMutant:
    """One fault put into the runtime itself."""

    where: Any
    name: str
    make: Callable[[Any], Any]
    check: str


def _no_restore(real: Any) -> Any:
    def unmerge(layer: Any) -> None:
        weight, _ = layer.stash
        layer.module.weight = torch.nn.Parameter(weight + 1e-7, requires_grad=False)
        layer.stash = None

    return unmerge


def _lenient(real: Any) -> Any:
    def load(self: Any, state: Any) -> None:  # what PEFT does: take what fits, say nothing
        for name, tensor in self.named_tensors().items():
            if name in state and state[name].shape == tensor.shape:
                tensor.data.copy_(state[name])

    return load


def _leaky_uninstall(real: Any) -> Any:
    def uninstall(slot: Any) -> None:
        slot.gate.scale = 0.0  # "off" instead of removed

    return uninstall


def _stale_cache(real: Any) -> Any:
    return lambda tensors, exact=True: 0


def _drop_gate(real: Any) -> Any:
    def run(layer: Any, slots: Any, x: Tensor, rest: Any) -> Tensor:
        for slot in slots:
            slot.gate.scale = slot.gate.scale or 1.0
        return real(layer, slots, x, rest)

    return run


def _first_slot_only(real: Any) -> Any:
    return lambda layer, slots, x, rest: real(layer, slots[:1], x, rest)


def _no_fingerprint(real: Any) -> Any:
    return lambda want, layers: None


def _rounded_file(real: Any) -> Any:
    return lambda path, tensors: real(path, {k: v.bfloat16().float() for k, v in tensors.items()})


def _one_zeroed(real: Any) -> Any:
    def write(path: Any, tensors: Any) -> None:
        first = next(iter(tensors))
        real(path, {k: v * 0 if k == first else v for k, v in tensors.items()})

    return write


RUNTIME_MUTANTS = {
    "unmerge adds instead of restoring": RuntimeMutant(adapter_module, "unmerge_layer", _no_restore, "merging"),
    "a lenient load": RuntimeMutant(adapter_module.Adapter, "load_state_dict", _lenient, "strictness"),
    "detach leaves the slot": RuntimeMutant(adapter_module, "uninstall", _leaky_uninstall, "detaching"),
    "off() is ignored": RuntimeMutant(runtime, "run_slots", _drop_gate, "training"),
    "only the first adapter runs": RuntimeMutant(runtime, "run_slots", _first_slot_only, "stacking"),
    "the base is not checked": RuntimeMutant(files, "check_fingerprint", _no_fingerprint, "saving"),
    "the file is rounded": RuntimeMutant(files, "write_tensors", _rounded_file, "saving"),
    "one tensor of the file is zero": RuntimeMutant(files, "write_tensors", _one_zeroed, "saving"),
}


@pytest.mark.parametrize("what", RUNTIME_MUTANTS)
def test_a_broken_runtime_is_killed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = RUNTIME_MUTANTS[what]
    monkeypatch.setattr(mutant.where, mutant.name, mutant.make(getattr(mutant.where, mutant.name)))
    with pytest.raises((Broken, AdapterError, AttributeError)):
        CHECKS[mutant.check](Case(LoRA(rank=4), tiny_llama))


def test_a_stale_factor_cache_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "state_key", _stale_cache(runtime.state_key))
    with pytest.raises(Broken):
        CHECKS["liveness"](Case(PiSSA(rank=4), tiny_llama))


def test_merging_without_the_stack_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = merging.slots_of
    monkeypatch.setattr(merging, "slots_of", lambda module: real(module)[-1:])
    with pytest.raises(Broken, match="merged stack"):
        CHECKS["stacking"](Case(LoRA(rank=4), tiny_llama))


def test_mutants_are_not_registered() -> None:
    assert VARIANTS["lora"] is LoRA
