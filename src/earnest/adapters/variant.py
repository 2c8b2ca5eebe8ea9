"""The interface of a variant, and the registry. A variant defines:

1. ``specs(layer)``       names, shapes and dtypes of the tensors of one layer;
2. ``initial(layer, …)``  their values at initialization, such that the layer is *bit-exactly* the base;
3. the forward            any of ``before`` (x → x'), ``factors`` (a low-rank ΔW), ``after`` (y → y') and ``replace``
                          (W → W'), and ``experts`` (the same for the 3-D weights of a mixture of experts);
4. ``weight``             the same map in weight space, in fp32 (inherited if only ``factors`` is defined);
5. facts: paper, reference, equation, learning rate, tensors inactive at initialization, tensors without weight decay.

A variant with ``replace`` changes the module's own parameters, so the module need not be a linear layer.
A layer with adapters 1…K computes f_k(x) = after_k(f_{k−1}(before_k(x)) + ΔW_k x), f_0 = the base. Every function
takes the gate's ``scale`` c; c = 1 is the trained adapter. At c = 0 the runtime skips the adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from earnest.adapters.errors import AdapterError
from earnest.adapters.kernel import Around, Factors
from earnest.adapters.layer import Layer
from earnest.deprecated import old_names, warn_renamed
from earnest.errors import EarnestError
from earnest.registry import Registry
from earnest.settings import Checked, FieldProblem, make

Tensors = Mapping[str, Tensor]
WeightAndBias = tuple[Tensor, Tensor | None]
__getattr__ = old_names(globals(), {"Birth": "Initialization"})


@dataclass(frozen=True)
class Spec:
    """One tensor of one layer. Trainable tensors are fp32; frozen ones are fp32, or the base's dtype (``compute``)."""

    shape: tuple[int, ...]
    trainable: bool = True
    compute: bool = False

    def dtype(self, layer: Layer) -> torch.dtype:
        return layer.dtype if self.compute else torch.float32


@dataclass(frozen=True)
class Initialization:
    """What ``initial`` may read besides the layer."""

    rng: torch.Generator  # seeded, on the CPU
    moments: Mapping[str, Tensor]  # layer name -> Σ x xᵀ / tokens [n, n] over the calibration tokens, fp32
    tokens: int  # number of calibration tokens; 0 without calibration
    widest: tuple[int, int]  # (m, n) maxima over all targets
    shared_rng: torch.Generator  # the same stream for every layer (VeRA's common bases)


@dataclass(frozen=True)
class Variant(Checked):
    """Base of all variants: a frozen dataclass of settings, and pure functions of one layer's tensors."""

    error: ClassVar[type[EarnestError]] = AdapterError
    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""  # arXiv id
    reference: ClassVar[str] = ""  # the independent implementation that the tests compare with
    equation: ClassVar[str] = ""
    lr: ClassVar[float] = 1e-4  # default learning rate for AdamW
    lr_source: ClassVar[str] = ""  # the source of that default
    targets: ClassVar[tuple[str, ...]] = ("attention",)  # default roles, see targets.py
    shared: ClassVar[frozenset[str]] = frozenset()  # frozen tensors that all layers share (as top-left corners)
    detached: ClassVar[str] = ""  # what the method holds fixed in the derivative, which then is not the exact one
    cheap: ClassVar[bool] = False  # factors() costs nothing, so sampling does not cache them
    reads_base: ClassVar[bool] = False  # factors() computes with the base's weight in each pass
    peft_type: ClassVar[str] = ""  # PEFT's name for the method, if PEFT has it
    peft_names: ClassVar[Mapping[str, str]] = {}  # tensor -> PEFT's key after the module path
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # rows of the conformance table: label -> small settings
    _uses: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for old, new in (("birth", "initial"), ("dormant", "inactive")):
            if old in vars(cls):
                warn_renamed(f"{cls.__name__}.{old}()", f"{new}()", stacklevel=4)
                setattr(cls, new, vars(cls)[old])
            elif new in vars(cls):
                setattr(cls, old, vars(cls)[new])  # for super().birth() in a subclass
        hooks = ("before", "factors", "after", "replace", "experts", "weight")
        cls._uses = frozenset(h for h in hooks if getattr(cls, h) is not getattr(Variant, h))

    @property
    def label(self) -> str:
        return self.name

    @classmethod
    def uses(cls, hook: str) -> bool:
        """Whether this class defines one of: before, factors, after, replace, experts, weight."""
        return hook in cls._uses

    # -- 1 and 2 -----------------------------------------------------------------------------------------------------
    def specs(self, layer: Layer) -> dict[str, Spec]:
        raise TypeError(f"variant {type(self).__name__} defines no specs()")

    def initial(self, layer: Layer, ctx: Initialization) -> dict[str, Tensor]:
        """The tensors at initialization; those left out start at zero."""
        return {}

    def check(self, layer: Layer) -> None:
        """Raise if the settings do not fit the layer (a rank too large, a block that does not divide …)."""

    def candidates(self, model: nn.Module) -> dict[str, nn.Module] | None:
        """The modules that the variant can be put on, by path; None: every linear layer."""
        return None

    def wants_calibration(self) -> bool:
        """Whether initial() reads the calibration moments."""
        return False

    # -- 3 -----------------------------------------------------------------------------------------------------------
    def before(self, t: Tensors, x: Tensor, layer: Layer, scale: float) -> Tensor:
        return x

    def factors(self, t: Tensors, layer: Layer, scale: float) -> Factors | Around:
        raise TypeError(f"variant {self.name} has no low-rank form")

    def after(self, t: Tensors, y: Tensor, layer: Layer, scale: float) -> Tensor:
        return y

    def replace(self, t: Tensors, name: str, value: Tensor, scale: float) -> Tensor:
        """The module's parameter ``name``, of which ``value`` is the base's, in fp32."""
        raise TypeError(f"variant {self.name} replaces no parameters")

    def experts(self, t: Tensors, name: str, value: Tensor, scale: float) -> Tensor:
        """The 3-D parameter ``name`` of a mixture of experts, of which ``value`` is the base's, in fp32. The tensors of
        this parameter are named ``<name>_<tensor>``."""
        raise TypeError(f"variant {self.name} has no form for experts")

    # -- 4 -----------------------------------------------------------------------------------------------------------
    def weight(self, t: Tensors, layer: Layer, w: Tensor, b: Tensor | None, scale: float) -> WeightAndBias:
        """(W', b') in fp32 from (W, b) in fp32: what ``merge`` writes."""
        return w + self.factors(t, layer, scale).plain().dense(), b

    # -- 5 -----------------------------------------------------------------------------------------------------------
    def inactive(self) -> frozenset[str]:
        """Trainable tensors whose gradient is exactly 0 at initialization, by design."""
        return frozenset()

    def no_decay(self) -> frozenset[str]:
        """Trainable tensors on which weight decay has no meaning."""
        return frozenset()

    def faster(self) -> frozenset[str]:
        """Trainable tensors whose learning rate the optimizer's ``lr_ratio`` multiplies (LoRA+)."""
        return frozenset()

    def linear(self) -> bool:
        """Whether ΔW(θ + θ') = ΔW(θ) + ΔW(θ') in the trained tensors."""
        return False

    def linear_note(self) -> str:
        """Why the variant is not linear, for the error message."""
        return self.equation

    def portable_rank(self, layer: Layer) -> int | None:
        """The rank of the LoRA that equals this variant exactly, or None (then it can only be merged)."""
        if self.uses("before") or self.uses("after") or not self.uses("factors"):
            return None
        return int(getattr(self, "rank", 0)) or None

    def export_note(self) -> str:
        """Why there is no portable export, for the error message."""
        return f"{self.name} changes the weight at full rank"

    # -- PEFT's own format for this variant, where PEFT has one ------------------------------------------------------
    def peft_config(self) -> dict[str, Any] | None:
        """The method's own fields of PEFT's config, or None: then it is written as a LoRA if that is exact."""
        return None

    def to_peft(self, t: Tensors, layer: Layer) -> dict[str, Tensor]:
        """PEFT's key after the module path -> tensor."""
        return {theirs: t[own] for own, theirs in self.peft_names.items()}

    def shared_to_peft(self, shared: Tensors) -> dict[str, Tensor]:
        """Model-wide key -> tensor."""
        return {}

    @classmethod
    def from_peft_config(cls, config: Mapping[str, Any]) -> Variant | None:
        """The variant that a PEFT config of this ``peft_type`` describes, or None if it is not of this class."""
        return None

    def from_peft(self, layer: Layer, tensors: Tensors, shared: Tensors) -> dict[str, Tensor]:
        """The layer's tensors from PEFT's, by PEFT's key after the module path."""
        return {own: tensors[theirs] for own, theirs in self.peft_names.items()}

    def as_read(self) -> Variant:
        """The variant to use after reading from PEFT's format."""
        return self

    def settings(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


VARIANTS: Registry[type[Variant]] = Registry("adapter", "earnest.adapters.variants", AdapterError)
V = TypeVar("V", bound=type[Variant])


def register(cls: V) -> V:
    """Class decorator: registers a variant under its ``name``."""
    for fact in ("name", "paper", "reference", "equation"):
        if not getattr(cls, fact):
            raise AdapterError(f"variant {cls.__name__} declares no {fact}; add it to the class")
    if not any(cls.uses(hook) for hook in ("before", "factors", "after", "replace")):
        raise AdapterError(
            f"variant {cls.name!r} defines none of before(), factors(), after(), replace(): it would do nothing"
        )
    if any(cls.uses(hook) for hook in ("before", "after", "replace")) and not cls.uses("weight"):
        raise AdapterError(
            f"variant {cls.name!r} defines before(), after() or replace() and must define weight() for merging"
        )
    VARIANTS.add(cls.name, cls)
    return cls


def get_variant(name: str, **values: Any) -> Variant:
    """``get_variant("lora", rank=8)``: a variant by name, with its settings checked."""
    try:
        return make(VARIANTS.find(name), values)
    except FieldProblem as problem:
        raise AdapterError(f"{name}.{problem}") from None


def list_variants() -> list[dict[str, Any]]:
    """One row per variant: name, paper, reference, equation, default learning rate and settings with their defaults."""
    return [
        {
            "name": cls.name,
            "paper": f"arXiv {cls.paper}",
            "reference": cls.reference,
            "equation": cls.equation,
            "lr": cls.lr,
            "lr_source": cls.lr_source,
            "settings": {f.name: f.default for f in fields(cls)},
        }
        for _, cls in sorted(VARIANTS.items())
    ]
