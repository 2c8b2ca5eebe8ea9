"""attach(): put a variant on a model's layers. After an error the model is exactly as before."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from earnest.adapters.adapter import Adapter
from earnest.adapters.calibrate import input_moments
from earnest.adapters.errors import AdapterError
from earnest.adapters.layer import Layer, is_experts, is_linear_like
from earnest.adapters.report import AttachReport
from earnest.adapters.runtime import SLOTS, AdapterGate, Slot, install, layer_of, slots_of, uninstall
from earnest.adapters.targets import Match, block_index, default_targets, find_targets, linears, own_modules
from earnest.adapters.variant import VARIANTS, Initialization, Variant
from earnest.adapters.variants.full import Full

# Base parameter -> [requires_grad before the first adapter, adapters that hold it frozen].
_LEDGER: Any = WeakIdKeyDictionary()


WHOLE = Full()
"""The variant of modules that are trained whole."""
_ENDS = "'embed_tokens' or 'lm_head'"


def model_of(model_or_policy: Any) -> nn.Module:
    """The nn.Module of a policy, or the module itself."""
    model = model_or_policy if isinstance(model_or_policy, nn.Module) else getattr(model_or_policy, "model", None)
    if not isinstance(model, nn.Module):
        raise AdapterError(f"attach needs a policy or a torch module, got {type(model_or_policy).__name__}")
    return model


def attach(
    model_or_policy: Any,
    variant: Variant,
    targets: str | Sequence[str] | None = None,
    layers: Iterable[int] | None = None,
    calibration: Iterable[Any] | None = None,
    seed: int = 0,
    name: str | None = None,
    modules_to_save: Sequence[str] | None = None,
) -> Adapter:
    """Put ``variant`` on the target layers and freeze the base. The outputs stay bit-exactly those of the base.

    targets       names (a path or its tail), "all-linear" or "re:<regex>"; None: the variant's default. For ``Full``
                  also "all", and a name includes the modules inside it
    layers        block numbers (negative from the end); None: all
    calibration   batches (dicts for the model, or tensors of token ids), for variants that read data
                  at initialization
    seed          of the initial values
    name          of the adapter, unique on its model; None: "default", then "adapter1", …
    modules_to_save   modules trained with all their parameters besides the adapter, such as "embed_tokens" (PEFT's
                  name and meaning: a tied weight that is named is no longer tied)
    """
    model = model_of(model_or_policy)
    _check_variant(variant, calibration)
    modules, matches, whole = _chosen(model, variant, targets, layers, modules_to_save)
    moments: Mapping[str, Tensor] = {}
    tokens = 0
    if calibration is not None:
        moments, tokens = input_moments(model, modules, calibration)
    with torch.inference_mode(False), torch.no_grad():
        views = _views(model, modules)
        widest = (max(v.m for v in views.values()), max(v.n for v in views.values()))
        tensors = {n: _initial_tensors(variant, v, seed, moments, tokens, widest) for n, v in views.items()}
        tensors |= {n: {k: torch.zeros(s.shape) for k, s in WHOLE.specs(v).items()} for n, v in whole.items()}
    adapter = mount(model, variant, views, tensors, matches, name, tokens, whole)
    adapter.tokenizer = getattr(model_or_policy, "tokenizer", None)
    return adapter


def mounted_empty(
    model: nn.Module,
    variant: Variant,
    targets: str | Sequence[str] | None = None,
    layers: Iterable[int] | None = None,
    modules_to_save: Sequence[str] | None = None,
) -> Adapter:
    """The adapter of ``attach`` with tensors of the right shapes and any values, for a model that has no values."""
    modules, matches, whole = _chosen(model, variant, targets, layers, modules_to_save)
    views = _views(model, modules)
    for view in views.values():
        variant.check(view)
    kinds = [(views, variant), (whole, WHOLE)]
    tensors = {n: {k: torch.empty(s.shape) for k, s in v.specs(x).items()} for xs, v in kinds for n, x in xs.items()}
    return mount(model, variant, views, tensors, matches, None, whole=whole)


def _chosen(
    model: nn.Module,
    variant: Variant,
    targets: str | Sequence[str] | None,
    layers: Iterable[int] | None,
    modules_to_save: Sequence[str] | None,
) -> tuple[dict[str, nn.Module], tuple[Match, ...], dict[str, Layer]]:
    """The modules that get the variant, how they were found, and the modules that are trained whole."""
    among = variant.candidates(model)
    if targets is None:
        targets = default_targets(model, variant.targets) if among is None else variant.targets
    modules, matches = find_targets(model, targets, layers, among)
    for path, module in modules.items():
        if is_experts(module) and not (variant.uses("experts") or variant.uses("replace")):
            able = ", ".join(sorted(name for name, cls in VARIANTS.items() if cls.uses("experts")))
            raise AdapterError(
                f"{path} holds the weights of its experts as 3-D parameters, and {variant.name} has no form for them; "
                f"use {able}, or leave {path.rpartition('.')[2]!r} out of the targets"
            )
    if modules_to_save and among is not None:
        raise AdapterError(f"{variant.name} trains modules whole already; name them in targets, not in modules_to_save")
    return modules, matches, saved_modules(model, modules_to_save or (), modules)


def saved_modules(model: nn.Module, names: Sequence[str], adapted: Iterable[str]) -> dict[str, Layer]:
    """The modules of ``modules_to_save``, by PEFT's rule: a path or its tail."""
    found: dict[str, Layer] = {}
    every = own_modules(model)
    for name in names:
        hits = [n for n in every if n == name or n.endswith("." + name)]
        if not hits:
            raise AdapterError(f"modules_to_save: no module of {type(model).__name__} is named {name!r}; give {_ENDS}")
        for path in hits:
            if not any(p is not None for p in every[path]._parameters.values()) or set(every[path]._modules) - {SLOTS}:
                raise AdapterError(
                    f"modules_to_save: {path} holds other modules; name single ones with parameters, such as {_ENDS}"
                )
            if path in set(adapted):
                raise AdapterError(f"modules_to_save: {path} also has the adapter; take it out of one of the two")
            found[path] = layer_of(path, every[path])
            WHOLE.check(found[path])
    return found


def _check_variant(variant: Variant, calibration: Iterable[Any] | None) -> None:
    if not isinstance(variant, Variant):
        raise AdapterError(f"attach needs a variant such as LoRA(rank=8), got {variant!r}")
    if variant.wants_calibration() and calibration is None:
        raise AdapterError(f"{variant.name} reads data at initialization; pass calibration= (batches of token ids)")
    if calibration is not None and not variant.wants_calibration():
        raise AdapterError(f"{variant!r} reads no calibration data, so calibration= would have no effect; leave it out")


def _views(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, Layer]:
    views = {path: layer_of(path, module) for path, module in modules.items()}
    for path, module in modules.items():
        if not is_linear_like(module):
            continue
        parent = model.get_submodule(path.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            raise AdapterError(
                f"{path}: nn.MultiheadAttention does not call forward() of this layer, so an adapter would do nothing"
            )
        if "forward" in module.__dict__:
            raise AdapterError(
                f"{path}.forward was replaced on the instance (accelerate hooks, a patch) and would hide the adapter; "
                "attach before the replacement"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise AdapterError(f"{path} is scripted; attach to the eager model")
        if views[path].stash is not None:
            raise AdapterError(f"{path} is merged; unmerge before attaching another adapter")
    return views


def _rng(seed: int, what: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {what}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _initial_tensors(
    variant: Variant, layer: Layer, seed: int, moments: Mapping[str, Tensor], tokens: int, widest: tuple[int, int]
) -> dict[str, Tensor]:
    # A layer's random stream depends only on the seed and its path, so other targets do not change it.
    variant.check(layer)
    ctx = Initialization(_rng(seed, layer.name), moments, tokens, widest, _rng(seed, "shared"))
    given = variant.initial(layer, ctx)
    specs = variant.specs(layer)
    unknown = set(given) - set(specs)
    assert not unknown, f"{variant.name}.initial() returns {unknown}, which specs() does not name"
    return {n: given[n] if n in given else torch.zeros(s.shape) for n, s in specs.items()}


def mount(
    model: nn.Module,
    variant: Variant,
    views: Mapping[str, Layer],
    tensors: Mapping[str, Mapping[str, Tensor]],
    matches: tuple[Match, ...],
    name: str | None,
    tokens: int = 0,
    whole: Mapping[str, Layer] | None = None,
) -> Adapter:
    """Install the tensors; after an error everything is removed again. ``whole``: modules that are trained whole."""
    taken = {s.adapter_name for m in model.modules() for s in slots_of(m)}
    name = name or next(n for i in range(len(taken) + 1) if (n := f"adapter{i}" if i else "default") not in taken)
    if name in taken:
        raise AdapterError(
            f"the model already has an adapter {name!r}; choose a name other than {', '.join(sorted(taken))}"
        )
    gate = AdapterGate()
    slots: dict[str, Slot] = {}
    base = [p for n, p in model.named_parameters() if SLOTS not in n.split(".")]
    with torch.inference_mode(False):
        kinds = dict.fromkeys(views, variant) | dict.fromkeys(whole or {}, WHOLE)
        for path, view in {**views, **(whole or {})}.items():
            _check_company(kinds[path], view)
            for key, spec in kinds[path].specs(view).items():
                got = tuple(tensors[path][key].shape)
                if got != spec.shape:
                    raise AdapterError(f"{path}.{key}: shape {got}, expected {spec.shape}")
            slots[path] = Slot(kinds[path], view, gate, tensors[path])
        mirrors = _mirrors(model, slots) if variant.uses("replace") else []
        for slot in (*slots.values(), *mirrors):
            slot.adapter_name = name
    trained = [p for s in slots.values() for p in s._parameters.values() if p is not None]
    frozen = [b for s in slots.values() for b in s._buffers.values() if b is not None]
    report = AttachReport(
        name=name,
        variant=variant.name,
        settings=variant.settings(),
        matches=matches,
        modules=tuple(slots),
        blocks=len({i for n in linears(model) if (i := block_index(n)) is not None}),
        trainable=sum(p.numel() for p in trained),
        frozen=sum(b.numel() for b in frozen),
        base=sum(p.numel() for p in base),
        base_dtype=str(next(iter(slots.values())).layer.dtype).removeprefix("torch."),
        kinds=tuple(sorted({s.layer.kind for s in slots.values()})),
        inactive=tuple(sorted(variant.inactive())),
        calibration_tokens=tokens,
    )
    with ExitStack() as undo:
        undo.callback(_freeze(base))
        undo.callback(_hook_reentrant(model))
        for slot in (*slots.values(), *mirrors):
            install(slot)
            undo.callback(uninstall, slot)
        remove = undo.pop_all().close
    return Adapter(model, variant, slots, gate, report, tuple(m.pattern for m in matches), remove, mirrors)


def _check_company(variant: Variant, layer: Layer) -> None:
    """Refuse a stack whose order would have no meaning: parameters under a map of inputs or outputs."""
    around = variant.uses("before") or variant.uses("after")
    for other in slots_of(layer.module):
        if (variant.uses("replace") and (other.has_before or other.has_after)) or (around and other.replaces):
            raise AdapterError(
                f"{layer.name}: {variant.name} cannot be stacked with the adapter {other.adapter_name!r} "
                f"({other.variant.name}) on one layer; merge that one into the weights first"
            )


def _mirrors(model: nn.Module, slots: Mapping[str, Slot]) -> list[Slot]:
    """A slot for each further module that holds a replaced parameter (a tied head): it shares the offset."""
    owner = {id(p): (slot, key) for slot in slots.values() for key, p in slot.layer.own().items()}
    found = []
    for path, module in own_modules(model).items():
        if path in slots:
            continue
        held = {k: owner[id(p)] for k, p in module._parameters.items() if p is not None and id(p) in owner}
        if held:
            first = next(iter(held.values()))[0]
            shared = {k: slot.tensors[key] for k, (slot, key) in held.items()}
            found.append(Slot(first.variant, layer_of(path, module), first.gate, shared, shared=True))
    return found


def _freeze(base: list[nn.Parameter]) -> Callable[[], None]:
    """Freeze base parameters. The returned function restores requires_grad once no adapter needs them frozen."""
    for p in base:
        entry = _LEDGER.setdefault(p, [p.requires_grad, 0])
        entry[1] += 1
        p.requires_grad_(False)

    def release() -> None:
        for p in base:
            entry = _LEDGER[p]
            entry[1] -= 1
            if entry[1] == 0:
                p.requires_grad_(entry[0])
                del _LEDGER[p]

    return release


def _hook_reentrant(model: nn.Module) -> Callable[[], None]:
    """Make the embedding's output require a gradient while reentrant checkpointing is on. Reentrant checkpointing drops
    the gradient if no *input* requires one, as with a frozen base. Every training forward looks again, because
    checkpointing may be switched on later."""
    get = getattr(model, "get_input_embeddings", None)
    embed = get() if callable(get) else None
    blocks = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
    if not isinstance(embed, nn.Module) or not blocks:
        return lambda: None

    def reentrant() -> bool:
        for m in blocks:
            if m.gradient_checkpointing and m.training:
                func = getattr(m, "_gradient_checkpointing_func", None)
                if getattr(func, "keywords", {}).get("use_reentrant", True):
                    return True
        return False

    def hook(_: nn.Module, __: Any, out: Any) -> Any:
        if torch.is_grad_enabled() and isinstance(out, Tensor) and not out.requires_grad and reentrant():
            return out.requires_grad_(True)
        return out

    return embed.register_forward_hook(hook).remove
