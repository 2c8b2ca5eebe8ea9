"""Broken variants and runtimes, and the check of the conformance table that finds each.

A mutant that passes its check shows a gap in the table. The check must fail with the message named here: a mutant that
merely crashes does not count. Those of torch.compile are in compile_worker.py.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from earnest.adapters import adapter as adapter_module
from earnest.adapters import files, merging, runtime
from earnest.adapters.conformance import CHECKS, Broken, Case, tiny_llama
from earnest.adapters.kernel import Factors
from earnest.adapters.variant import VARIANTS, Initialization, Spec
from earnest.adapters.variants.delora import DeLoRA
from earnest.adapters.variants.dora import DoRA
from earnest.adapters.variants.hra import HRA
from earnest.adapters.variants.ia3 import IA3
from earnest.adapters.variants.lora import LoRA
from earnest.adapters.variants.pissa import PiSSA
from earnest.adapters.variants.vera import VeRA

attaching = importlib.import_module("earnest.adapters.attach")  # the package's own `attach` is the function


class ReturnsInput(LoRA):
    """The forward does nothing."""

    def factors(self, t, layer, scale):
        return Factors(t["A"] * 0, t["B"] * 0)


class OffsetAtInitialization(LoRA):
    """B starts away from 0."""

    def initial(self, layer, ctx: Initialization):
        return super().initial(layer, ctx) | {"B": torch.full((layer.m, self.rank), 1e-3)}


class DeadHalf(LoRA):
    """A gets no gradient, ever."""

    def factors(self, t, layer, scale):
        return Factors(t["A"].detach(), t["B"], self.s * scale)


class Undeclared(LoRA):
    """A has no gradient at step 1 and does not declare it."""

    def inactive(self):
        return frozenset()


class Overdeclared(IA3):
    """Declares a tensor inactive that is not."""

    def inactive(self):
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

    def initial(self, layer, ctx):
        given = super().initial(layer, ctx)
        layer.module.weight.data -= given["B0"] @ given["A0"]
        return given

    def factors(self, t, layer, scale):
        return Factors(t["A0"] + t["dA"], t["B0"] + t["dB"], scale)


class CancelsLarge(PiSSA):
    """BA − B₀A₀ as two large products: the identity only up to rounding."""

    def factors(self, t, layer, scale):
        a = torch.cat([t["A0"] + t["dA"], t["A0"]])
        return Factors(a, torch.cat([t["B0"] + t["dB"], -t["B0"]], 1), self.s * scale)


class NoInitialTerm(HRA):
    """The reflections without the initial term: R = I up to rounding only."""

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


class RandomForward(LoRA):
    """Random at every call."""

    def factors(self, t, layer, scale):
        noise = 1 + 1e-3 * torch.rand(1).item()
        return Factors(t["A"], t["B"], self.s * scale * noise)


class CountsCalls(LoRA):
    """Each call differs a little from the last, so checkpointing recomputes other values."""

    calls = itertools.count()

    def factors(self, t, layer, scale):
        return Factors(t["A"], t["B"], self.s * scale * (1 + 1e-3 * next(self.calls)))


class IgnoresScale(LoRA):
    """Scales between 0 and 1 are ignored."""

    def factors(self, t, layer, scale):
        return Factors(t["A"], t["B"], self.s)


class MergesWhole(IA3):
    """Merges the adapter at scale 1 for every scale."""

    def weight(self, t, layer, w, b, scale):
        return super().weight(t, layer, w, b, 1.0)


class UnsharedVeRA(VeRA):
    """λ_d is read with a gradient cut."""

    def factors(self, t, layer, scale):
        return Factors(t["A"], t["lb"][:, None] * t["B"] * (self.d_initial + t["dld"].detach()), scale)


VARIANT_MUTANTS: list[tuple[Any, str, torch.dtype, str]] = [
    (ReturnsInput(rank=4), "gradients", torch.float32, "differ from the declaration"),
    (ReturnsInput(rank=4), "liveness", torch.float32, "gives the base's output"),
    (ReturnsInput(rank=4), "training", torch.float32, "does not fall"),
    (OffsetAtInitialization(rank=4), "identity", torch.float32, "logits at initialization"),
    (DeadHalf(rank=4), "gradients", torch.float32, "no gradient after a perturbation"),
    (Undeclared(rank=4), "gradients", torch.float32, "differ from the declaration"),
    (Overdeclared(), "gradients", torch.float32, "differ from the declaration"),
    (DeadParameter(rank=4), "gradients", torch.float32, "unused"),
    (DeadParameter(rank=4), "liveness", torch.float32, "unused does not change the output"),
    (MergesTwice(rank=4), "merging", torch.float32, "merged: differs"),
    (RescalesBase(rank=4), "detaching", torch.float32, "detached: not bit-equal"),
    (CancelsLarge(rank=4), "identity", torch.float32, "logits at initialization"),
    (NoInitialTerm(rank=4), "identity", torch.float32, "logits at initialization"),
    (RoundedMagnitude(rank=4), "identity", torch.bfloat16, "logits at initialization"),
    (Bf16Parameters(), "liveness", torch.bfloat16, "does not change the output|gives the base's output"),
    (RandomForward(rank=4), "liveness", torch.float32, "after putting every parameter back"),
    (CountsCalls(rank=4), "checkpointing", torch.float32, "gradient under checkpointing"),
    (IgnoresScale(rank=4), "scaling", torch.float32, "the output of scale 1"),
    (MergesWhole(), "scaling", torch.float32, "merged at scale 0.5"),
    (UnsharedVeRA(rank=16), "gradients", torch.float32, "no gradient after a perturbation"),
]


def _id(value: Any) -> str:
    return value if isinstance(value, str) else str(value) if isinstance(value, torch.dtype) else type(value).__name__


@pytest.mark.parametrize(("mutant", "check", "dtype", "message"), VARIANT_MUTANTS, ids=_id)
def test_a_broken_variant_fails_its_check(mutant: Any, check: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(Broken, match=message):
        CHECKS[check](Case(mutant, tiny_llama, dtype))


def test_a_forgotten_bias_fails_on_a_model_with_biases() -> None:
    from earnest.adapters.conformance import tiny_gpt2

    with pytest.raises(Broken, match="merged"):
        CHECKS["merging"](Case(ForgetsBias(), tiny_gpt2))


@dataclass(frozen=True)
class RuntimeMutant:
    """One defect in the runtime itself."""

    where: Any
    name: str
    make: Callable[[Any], Any]
    check: str
    message: str


def _no_restore(real: Any) -> Any:
    def unmerge(layer: Any) -> None:
        weight = layer.stash["weight"]
        layer.module.weight = torch.nn.Parameter(weight + 1e-7, requires_grad=False)
        layer.stash = None

    return unmerge


def _lenient(real: Any) -> Any:
    def load(self: Any, state: Any) -> None:  # as in PEFT: load matching keys and ignore the others
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
    def run(layer: Any, slots: Any, *rest: Any) -> Tensor:
        for slot in slots:
            slot.gate.scale = slot.gate.scale or 1.0
        return real(layer, slots, *rest)

    return run


def _first_slot_only(real: Any) -> Any:
    return lambda layer, slots, *rest: real(layer, slots[:1], *rest)


def _no_fingerprint(real: Any) -> Any:
    return lambda want, layers: None


def _rounded_file(real: Any) -> Any:
    return lambda path, tensors, *rest: real(path, {k: v.bfloat16().float() for k, v in tensors.items()}, *rest)


def _one_zeroed(real: Any) -> Any:
    def write(path: Any, tensors: Any, *rest: Any) -> None:
        first = next(iter(tensors))
        real(path, {k: v * 0 if k == first else v for k, v in tensors.items()}, *rest)

    return write


def _forgets_scale(real: Any) -> Any:
    def write(path: Any, data: Any) -> None:
        real(path, {k: v for k, v in data.items() if k != "scale"})

    return write


def _steals_hooks(real: Any) -> Any:
    def uninstall(slot: Any) -> None:
        real(slot)
        hooks = slot.layer.module._forward_hooks
        for key in list(hooks):  # as many as before, and none of them the same
            hooks[key] = lambda *_: None

    return uninstall


M = RuntimeMutant
RUNTIME_MUTANTS = {
    "unmerge adds instead of restoring": M(
        adapter_module, "unmerge_layer", _no_restore, "merging", "after unmerging|restore the"
    ),
    "a lenient load": M(adapter_module.Adapter, "load_state_dict", _lenient, "strictness", "was loaded"),
    "detach leaves the slot": M(attaching, "uninstall", _leaky_uninstall, "detaching", "does not restore modules"),
    "detach replaces another's hook": M(attaching, "uninstall", _steals_hooks, "detaching", "removes another's"),
    "off() is ignored": M(runtime, "run_slots", _drop_gate, "training", r"off\(\)"),
    "only the first adapter runs": M(runtime, "run_slots", _first_slot_only, "stacking", "top adapter does nothing"),
    "the base is not checked": M(files, "check_fingerprint", _no_fingerprint, "saving", "other base weights"),
    "the file is rounded": M(files, "write_tensors", _rounded_file, "saving", "reloaded"),
    "one tensor of the file is zero": M(files, "write_tensors", _one_zeroed, "saving", "reloaded"),
    "the scale is not written": M(files, "write_json", _forgets_scale, "scaling", "lost on disk"),
}


@pytest.mark.parametrize("what", RUNTIME_MUTANTS)
def test_a_broken_runtime_fails_its_check(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = RUNTIME_MUTANTS[what]
    monkeypatch.setattr(mutant.where, mutant.name, mutant.make(getattr(mutant.where, mutant.name)))
    with pytest.raises(Broken, match=mutant.message):
        CHECKS[mutant.check](Case(LoRA(rank=4), tiny_llama))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch says so, too
def test_reentrant_checkpointing_without_a_hook_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer transformers hook the embedding themselves; without that, earnest's hook is needed for the gradient."""
    monkeypatch.setattr(PreTrainedModel, "enable_input_require_grads", lambda self: None)
    CHECKS["checkpointing"](Case(LoRA(rank=4), tiny_llama))
    monkeypatch.setattr(attaching, "_hook_reentrant", lambda model: lambda: None)
    with pytest.raises(Broken, match="no gradient with use_reentrant=True"):
        CHECKS["checkpointing"](Case(LoRA(rank=4), tiny_llama))


def test_a_stale_factor_cache_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "state_key", _stale_cache(runtime.state_key))
    with pytest.raises(Broken, match="does not change the output"):
        CHECKS["liveness"](Case(DeLoRA(rank=4), tiny_llama))


def test_merging_without_the_stack_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    real = merging.slots_of
    monkeypatch.setattr(merging, "slots_of", lambda module: real(module)[-1:])
    with pytest.raises(Broken, match="merged stack"):
        CHECKS["stacking"](Case(LoRA(rank=4), tiny_llama))


def test_mutants_are_not_registered() -> None:
    assert VARIANTS["lora"] is LoRA
