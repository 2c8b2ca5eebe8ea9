"""An attached adapter: its parameters, its gate, merging, its state."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from earnest.adapters.delta import Delta
from earnest.adapters.errors import AdapterError
from earnest.adapters.fingerprint import base_fingerprint
from earnest.adapters.layer import Layer, ModuleLayer
from earnest.adapters.merging import merge_layer, merged_weight, unmerge_layer
from earnest.adapters.report import AttachReport
from earnest.adapters.runtime import AdapterGate, Slot, slots_of
from earnest.adapters.variant import Variant
from earnest.deprecated import warn_renamed
from earnest.models.written import state_key


class Adapter:
    """One variant on a set of layers of one model, with one gate for all of them. `attach` and `load_adapter` make
    it."""

    def __init__(
        self,
        model: nn.Module,
        variant: Variant,
        slots: dict[str, Slot],
        gate: AdapterGate,
        report: AttachReport,
        targets: tuple[str, ...],
        remove: Callable[[], None],
        mirrors: Sequence[Slot] = (),
    ) -> None:
        self.model, self.variant, self.slots, self.report, self.targets = model, variant, slots, report, targets
        self.name = report.name
        self._gate, self._remove = gate, remove
        self.mirrors = tuple(mirrors)  # further modules that hold a parameter of a slot (a tied head)
        self.tokenizer: Any = None  # the policy's, for a folder that is a model
        self._merged: dict[str, Any] | None = None
        self._fingerprint: dict[str, Any] | None = None
        self.attached = True

    def __repr__(self) -> str:
        state = "" if self.attached else ", detached"
        return f"Adapter({self.variant!r}, {len(self.slots)} layers, scale={self.scale:g}{state})"

    @property
    def adapted(self) -> dict[str, Slot]:
        """The slots that have the adapter's variant."""
        return {path: slot for path, slot in self.slots.items() if slot.variant is self.variant}

    @property
    def replaces(self) -> bool:
        """Whether some module is trained whole: then it acts on whole batches, and its update is not a LoRA."""
        return any(slot.replaces for slot in self.slots.values())

    @property
    def saved_modules(self) -> dict[str, Slot]:
        """The slots of ``modules_to_save``: trained whole, besides the adapter."""
        return {path: slot for path, slot in self.slots.items() if slot.variant is not self.variant}

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor, trainable or frozen: '<module path>.<tensor>' in model order."""
        return {f"{path}.{name}": t for path, slot in self.slots.items() for name, t in slot.tensors.items()}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The trainable fp32 parameters in a stable order; empty after freeze()."""
        return {n: t for n, t in self.named_tensors().items() if isinstance(t, nn.Parameter) and t.requires_grad}

    def parameters(self) -> list[nn.Parameter]:
        return list(self.named_parameters().values())

    def _declared(self, fact: Callable[[Variant], frozenset[str]]) -> set[str]:
        """The tensors for which their variant declares a fact."""
        return {f"{path}.{name}" for path, slot in self.slots.items() for name in slot.named(fact(slot.variant))}

    def _named(self, fact: Callable[[Variant], frozenset[str]], inside: bool) -> list[nn.Parameter]:
        chosen = self._declared(fact)
        return [p for n, p in self.named_parameters().items() if (n in chosen) == inside]

    def decay_parameters(self) -> list[nn.Parameter]:
        """Parameters that weight decay pulls toward the base model."""
        return self._named(lambda v: v.no_decay(), inside=False)

    def no_decay_parameters(self) -> list[nn.Parameter]:
        """Parameters on which decay has no meaning (directions)."""
        return self._named(lambda v: v.no_decay(), inside=True)

    def inactive_at_initialization(self) -> set[str]:
        """Names of parameters whose gradient is exactly 0 at step 1, by design."""
        return self._declared(lambda v: v.inactive()) & set(self.named_parameters())

    def faster_parameters(self) -> list[nn.Parameter]:
        """Parameters whose learning rate the optimizer's ``lr_ratio`` multiplies."""
        return self._named(lambda v: v.faster(), inside=True)

    def dormant_at_birth(self) -> set[str]:
        """Deprecated name of ``inactive_at_initialization``."""
        warn_renamed("dormant_at_birth()", "inactive_at_initialization()")
        return self.inactive_at_initialization()

    def freeze(self, frozen: bool = True) -> None:
        """Freeze the adapter, or make it trainable again. A frozen adapter still acts; it gets no gradient."""
        for slot in self.slots.values():
            for p in slot._parameters.values():
                assert p is not None
                p.requires_grad_(not frozen)
                if frozen:
                    p.grad = None

    @property
    def scale(self) -> float:
        """The gate: at 0 the model is the base, bit for bit; at 1 it has the adapter as trained."""
        return self._gate.scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._require_attached()
        if not math.isfinite(value):
            raise AdapterError(f"scale must be finite, got {value!r}")
        if value != self._gate.scale and any(s.layer.stash is not None for s in self.slots.values()):
            raise AdapterError(f"adapter {self.name!r} is merged into the weights; unmerge() before changing its scale")
        self._gate.scale = float(value)

    @contextmanager
    def scaled(self, value: float) -> Iterator[Adapter]:
        """Set another scale inside the block."""
        before = self._gate.scale
        self.scale = value
        try:
            yield self
        finally:
            self._gate.scale = before

    def off(self) -> Any:
        """Switch the adapter off inside the block: the base, bit for bit."""
        return self.scaled(0.0)

    @property
    def mergeable(self) -> bool:
        """Whether merge() is possible: every layer has a dense weight of its own, and none is quantised."""
        return all(slot.layer.mergeable for slot in self.slots.values())

    @property
    def merging_exact(self) -> bool:
        """Whether the merged policy is the trained one: in fp32, or if all layers replace their parameters. In 16 bits
        the merged weight of a low-rank update is rounded, and the unmerged layer does not round it."""
        return all(slot.replaces or slot.layer.dtype == torch.float32 for slot in self.slots.values())

    def merging_pays(self, tokens: int) -> bool:
        """Whether one merge is less work than ``tokens`` (rows × new tokens) through the unmerged adapter.

        A module that is trained whole forms its weights in every forward, so one merge is never more work.
        At rank r a merge costs Σ m·n·r products and each token costs Σ (m + n)·r, so r cancels: merging is cheaper
        above Σ m·n / Σ (m + n) tokens, which is half the width of a square layer.
        """
        if self.replaces:
            return True
        layers = [slot.layer for slot in self.slots.values()]
        return tokens * sum(x.m + x.n for x in layers) >= sum(x.m * x.n for x in layers)

    def merge(self) -> None:
        """Write W', the map that the layer computes now with all its active adapters: in fp32, rounded once. The base's
        own tensors are kept, and unmerge() puts the same objects back. Other modules that share a tied weight keep the
        base's value, unless the adapter trains the weight itself. Merged layers run only without a gradient."""
        self._require_attached()
        if self._merged is not None:
            raise AdapterError(f"adapter {self.name!r} is merged already")
        if self._gate.rows is not None:
            raise AdapterError("inside rows() different rows have different weights; merge outside of it")
        done: list[Layer] = []
        made: dict[int, nn.Parameter] = {}
        try:
            for slot in self._all():
                merge_layer(slot.layer, made if slot.replaces and self.mirrors else None)
                done.append(slot.layer)
        except BaseException:
            for layer in done:
                unmerge_layer(layer)
            raise
        self._merged = {path: self._live_key(slot) for path, slot in self.slots.items()}

    def unmerge(self) -> None:
        """Put the base's tensors back, bit for bit. Then raise if the adapter's parameters changed while it was
        merged."""
        if self._merged is None:
            raise AdapterError(f"adapter {self.name!r} is not merged")
        keys, self._merged = self._merged, None
        for slot in self._all():
            unmerge_layer(slot.layer)
        moved = [path for path, slot in self.slots.items() if self._live_key(slot) != keys[path]]
        if moved:
            raise AdapterError(
                f"parameters of {moved[0]} changed while merged, so later outputs used stale weights; "
                "update parameters only while unmerged"
            )

    def _all(self) -> tuple[Slot, ...]:
        return (*self.slots.values(), *self.mirrors)

    @staticmethod
    def _live_key(slot: Slot) -> Any:
        return [(s.gate.scale, state_key(s.trainable())) for s in slots_of(slot.layer.module)]

    @contextmanager
    def merged(self) -> Iterator[Adapter]:
        """Merge inside the block: sampling then runs at the speed of the base."""
        self.merge()
        try:
            yield self
        finally:
            self.unmerge()

    def merge_report(self) -> dict[str, dict[str, float]]:
        """Per linear module: ‖ΔW‖/‖W‖, and the share of ΔW that rounding to the base's dtype loses."""
        out = {}
        for path, slot in self.slots.items():
            if isinstance(slot.layer, ModuleLayer):
                continue
            w0 = slot.layer.weight()
            w1, _ = merged_weight(slot.layer)
            delta = float((w1 - w0).norm())
            lost = float((w1.to(slot.layer.dtype).float() - w1).norm())
            out[path] = {"change": delta / max(float(w0.norm()), 1e-30), "rounding": lost / delta if delta else 0.0}
        return out

    def deltas(self) -> Iterator[tuple[str, Tensor]]:
        """(module path, ΔW [m, n] in fp32) of this adapter on the base weight, at the current scale."""
        for path, delta in self.delta_operators():
            yield path, delta.dense()

    def delta_operators(self) -> Iterator[tuple[str, Delta]]:
        """(path of a linear module, ΔW as an operator): matvec, rmatvec, norms. ΔW is not formed if the variant has
        factors."""
        for path, slot in self.slots.items():
            if not isinstance(slot.layer, ModuleLayer):
                yield path, Delta(slot)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of every tensor; a run that loads them resumes bit for bit."""
        return {n: t.detach().clone() for n, t in self.named_tensors().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state. Missing, unexpected and misshapen keys are errors; then nothing is loaded."""
        own = self.named_tensors()
        check_keys(own, state)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])

    @property
    def base_fingerprint(self) -> dict[str, Any]:
        """Hash and sketch of the adapted layers' base weights; computed once."""
        if self._fingerprint is None:
            self._fingerprint = base_fingerprint({p: s.layer for p, s in self.slots.items()})
        return self._fingerprint

    @property
    def fingerprint(self) -> str:
        """One hash of the variant, its layers and the base weights under it."""
        facts = [self.variant.name, self.variant.settings(), list(self.slots), self.base_fingerprint["sha256"]]
        facts += [list(self.saved_modules)] if self.saved_modules else []
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    def save(self, folder: str | Path, base_model: str | None = None) -> Path:
        """Write PEFT's files and earnest's exact ones, or the whole model if its weights are trained; see
        `earnest.adapters.files`."""
        from earnest.adapters.files import save_adapter

        return save_adapter(self, Path(folder), base_model)

    def export_lora(self, folder: str | Path, base_model: str | None = None, rank: int | None = None) -> Path:
        """Write a plain LoRA that vLLM, SGLang, TGI and llama.cpp read; see `earnest.adapters.peft_format`."""
        from earnest.adapters.peft_format import export_lora

        return export_lora(self, Path(folder), base_model, rank)

    def detach(self) -> None:
        """Remove the adapter: weights, requires_grad, forward and hooks are as before attach."""
        self._require_attached()
        if self._merged is not None:
            self.unmerge()
        for slot in self._all():
            if slot.layer.stash is not None:
                raise AdapterError(f"{slot.layer.name} is merged by another adapter; unmerge it first")
        self._remove()
        self.attached = False

    def _require_attached(self) -> None:
        if not self.attached:
            raise AdapterError(f"adapter {self.name!r} is detached; attach or load it again")


def check_keys(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise if the keys or shapes of a state differ from the adapter's."""
    missing = [k for k in own if k not in state]
    unexpected = [k for k in state if k not in own]
    misshapen = [k for k in own if k in state and own[k].shape != state[k].shape]
    if missing or unexpected or misshapen:
        parts = [_list("missing", missing), _list("unexpected", unexpected)]
        parts += [f"{k}: shape {tuple(state[k].shape)}, expected {tuple(own[k].shape)}" for k in misshapen[:3]]
        raise AdapterError("the state does not fit this adapter: " + "; ".join(p for p in parts if p))
    bad = [k for k in own if not bool(torch.isfinite(state[k]).all())]
    if bad:
        raise AdapterError(f"{bad[0]} has values that are not finite; the state is damaged")


def _list(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} {what} ({', '.join(names[:3])}{more})" if names else ""


@contextmanager
def rows(
    model: Any, adapters: Sequence[Adapter | Sequence[Adapter] | None], among: Collection[Adapter] | None = None
) -> Iterator[None]:
    """Apply different adapters to different rows of a batch: one entry per row (an adapter, several, or None: the
    base).

    Adapters that no row names are off inside the block. The scales of the others stay as they are. ``among``: all
    adapters of the model, if the caller knows them; otherwise the model is searched.
    """
    model = model if isinstance(model, nn.Module) else model.model
    wanted: dict[int, list[int]] = {}
    for row, entry in enumerate(adapters):
        for adapter in () if entry is None else (entry,) if isinstance(entry, Adapter) else entry:
            adapter._require_attached()
            wanted.setdefault(id(adapter._gate), []).append(row)
    if among is None:
        slots = [s for m in model.modules() for s in slots_of(m)]
    else:
        slots = [next(iter(a.slots.values())) for a in among]  # a merged adapter is merged on all its layers
    gates = {id(s.gate): s.gate for s in slots}
    if any(s.layer.stash is not None for s in slots):
        raise AdapterError("the model is merged; rows() needs unmerged layers, so call unmerge() first")
    strangers = set(wanted) - set(gates)
    if strangers:
        raise AdapterError("rows() names an adapter of another model")
    saved = {key: (g.scale, g.rows, g.batch) for key, g in gates.items()}
    try:
        for key, gate in gates.items():
            if key in wanted:
                gate.rows, gate.batch = torch.tensor(wanted[key]), len(adapters)
            else:
                gate.scale = 0.0
        yield
    finally:
        for key, gate in gates.items():
            gate.scale, gate.rows, gate.batch = saved[key]


def without_adapters(model: Any) -> AbstractContextManager[None]:
    """Switch every adapter of the model off inside the block, frozen ones too: the base, bit for bit."""
    return rows(model, ())
