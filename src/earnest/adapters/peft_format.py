"""PEFT's checkpoint format, both ways (PEFT's developer guide, "checkpoint"), and a plain LoRA for servers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from earnest.adapters.errors import AdapterError
from earnest.adapters.layer import ExpertsLayer, Layer
from earnest.adapters.linalg import gathered
from earnest.adapters.merging import merged_parameters
from earnest.adapters.runtime import layer_of
from earnest.adapters.targets import _head, adaptable, block_index, linears, own_modules
from earnest.adapters.variant import VARIANTS, Variant

if TYPE_CHECKING:
    from earnest.adapters.adapter import Adapter


CONFIG, MODEL = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."

# PEFT settings that change the result and that earnest does not support: refused unless empty.
_UNREAD = (
    "rank_pattern", "alpha_pattern", "lambda_pattern", "layer_replication", "lora_bias",
    "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config",
    "trainable_token_indices", "velora_config", "monteclora_config", "kasa_config", "coft",
    "block_share", "use_orthogonal_share", "apply_GS", "init_weights_svd",
)  # fmt: skip

_CONV1D_TYPES = {"LORA", "IA3", "VERA"}  # the types whose PEFT layers accept GPT-2's Conv1D


def target_modules(model: nn.Module, modules: Mapping[str, Any]) -> list[str]:
    """The shortest list of names that selects exactly these modules by PEFT's rule (a path or its tail)."""
    names = linears(model)
    every = [n for n, _ in model.named_modules() if n]
    for depth in (1, 2):
        tails = sorted({".".join(n.split(".")[-depth:]) for n in modules})
        hit = {n for n in every if any(n == t or n.endswith("." + t) for t in tails)}
        if hit == set(modules) and hit <= set(names):
            return tails
    return sorted(modules)


def common_config(adapter: Adapter, base_model: str | None) -> dict[str, Any]:
    causal = hasattr(adapter.model, "get_output_embeddings")
    found = {
        "base_model_name_or_path": base_model,
        "target_modules": target_modules(
            adapter.model, {path: slot for path, slot in adapter.adapted.items() if not slot.of_experts}
        ),
        "task_type": "CAUSAL_LM" if causal else None,
        "inference_mode": True,
    }
    if stacks := [f"{path}.{name}" for path, slot in adapter.adapted.items() for name in slot.stacks]:
        found["target_parameters"] = stacks
    if adapter.saved_modules:
        found["modules_to_save"] = _saved_names(adapter.model, adapter.saved_modules)
    return found


def _saved_names(model: nn.Module, paths: Mapping[str, Any]) -> list[str]:
    """The shortest names that select exactly these modules by PEFT's rule for modules_to_save: the path ends so."""
    every, found = own_modules(model), []
    for path in paths:
        parts = path.split(".")
        tails = [".".join(parts[-depth:]) for depth in range(1, len(parts) + 1)]
        found.append(next((t for t in tails if {n for n in every if n.endswith(t)} <= set(paths)), path))
    return sorted(set(found))


def saved_paths(model: nn.Module, config: Mapping[str, Any]) -> list[str]:
    """The modules that a PEFT config's modules_to_save selects."""
    every, found = own_modules(model), []
    for name in config.get("modules_to_save") or ():
        found += [n for n in every if n.endswith(name)] or [name]
    return found


def _saved_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """The modules that are trained whole, as PEFT stores them: their weights in the base's dtype."""
    return {
        f"{PREFIX}{path}.{name}": gathered(value)
        for path, slot in adapter.saved_modules.items()
        for name, value in merged_parameters(slot.layer).items()
    }


def lora_factors(adapter: Adapter) -> dict[str, tuple[Tensor, Tensor]] | None:
    """(A [k, n], B [m, k]) in fp32 per module, with every scale folded into B; None if the variant is not exactly
    low-rank."""
    out = {}
    for path, slot in adapter.adapted.items():
        if slot.of_experts or adapter.variant.portable_rank(slot.layer) is None:
            return None
        with torch.no_grad():
            f = slot.variant.factors(slot.tensors, slot.layer, adapter.scale).plain()
            out[path] = (f.A.float(), f.left() * f.scale)
    return out


def peft_files(
    adapter: Adapter, shared: Mapping[str, Tensor], base_model: str | None
) -> tuple[tuple[dict[str, Any], dict[str, Tensor]] | None, str]:
    """((config, tensors), how) in PEFT's form of the variant, or else as an exact LoRA; otherwise (None, why not).
    PEFT's forms have no gate. A scale other than 1 can be written only as a LoRA, folded into B."""
    if adapter.scale == 0.0:
        return None, "the scale is 0, so the adapter has no effect: set its scale and save again"
    config, own, kind = common_config(adapter, base_model), adapter.variant.peft_config(), adapter.variant.peft_type
    conv1d = any(slot.layer.kind == "conv1d" for slot in adapter.slots.values())
    refused = own is not None and kind not in _CONV1D_TYPES and conv1d
    if own is not None and adapter.scale == 1.0 and not refused:
        tensors = {f"base_model.{k}": v for k, v in adapter.variant.shared_to_peft(shared).items()}
        for path, slot in adapter.adapted.items():
            for suffix, value in adapter.variant.to_peft(slot.whole(), slot.layer).items():
                tensors[f"{PREFIX}{path}.{suffix}"] = value.float()
        if kind == "IA3" and own.pop("feedforward"):
            own["feedforward_modules"] = config["target_modules"]
        return (config | {"peft_type": kind} | own, tensors | _saved_tensors(adapter)), f"as PEFT's {kind}"
    factors = lora_factors(adapter)
    if factors is None:
        gated = "" if adapter.scale == 1.0 else f" at scale {adapter.scale:g}"
        gated += " for Conv1D layers (GPT-2)" if refused else ""
        return None, f"{adapter.variant.export_note()}: PEFT has no exact form{gated}; merge it instead"
    lora = lora_files(config, factors, max(a.shape[0] for a, _ in factors.values()))
    return (lora[0], lora[1] | _saved_tensors(adapter)), "as an exact LoRA"


def lora_files(
    config: dict[str, Any], factors: Mapping[str, tuple[Tensor, Tensor]], rank: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A plain LoRA: scales folded into B, alpha = r, one rank for all (padded with zeros)."""
    tensors = {}
    for path, (a, b) in factors.items():
        pad = rank - a.shape[0]
        tensors[f"{PREFIX}{path}.lora_A.weight"] = nn.functional.pad(a, (0, 0, 0, pad))
        tensors[f"{PREFIX}{path}.lora_B.weight"] = nn.functional.pad(b, (0, pad))
    lora = {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "use_rslora": False, "use_dora": False,
        "init_lora_weights": True, "lora_dropout": 0.0, "bias": "none",
    }  # fmt: skip
    return config | lora, tensors


def _expected(model: nn.Module, config: Mapping[str, Any]) -> set[str]:
    """The linear layers that a PEFT config selects."""
    names, want = linears(model), config.get("target_modules")

    def hit(rule: Any, name: str) -> bool:
        if isinstance(rule, str):
            return re.fullmatch(rule, name) is not None
        return any(name == r or name.endswith("." + r) for r in rule or ())

    if want == "all-linear":
        head = _head(model)
        found = {n for n, m in names.items() if m is not head}
    else:
        found = {n for n in names if hit(want, n)}
    only = config.get("layers_to_transform")
    if only is not None:
        only = {only} if isinstance(only, int) else set(only)
        found = {n for n in found if block_index(n) in only}
    return {n for n in found if not hit(config.get("exclude_modules"), n)}


def _experts(model: nn.Module, config: Mapping[str, Any]) -> dict[str, ExpertsLayer]:
    """The modules whose 3-D parameters a PEFT config's target_parameters names: all of them, or none."""
    wanted = list(config.get("target_parameters") or ())
    found: dict[str, ExpertsLayer] = {}
    used: set[str] = set()
    for path, module in adaptable(model).items():
        layer = layer_of(path, module)
        if not isinstance(layer, ExpertsLayer):
            continue
        own = {name: f"{path}.{name}" for name in layer.stacks()}
        hits = {name: w for name, full in own.items() for w in wanted if full == w or full.endswith("." + w)}
        if hits and len(hits) < len(own):
            left = next(full for name, full in own.items() if name not in hits)
            raise AdapterError(f"target_parameters leaves {left} out; name all 3-D parameters of a module, or none")
        if hits:
            found[path] = layer
            used |= set(hits.values())
    if unknown := [w for w in wanted if w not in used]:
        raise AdapterError(f"target_parameters names {unknown[0]!r}, no 3-D parameter of {type(model).__name__}")
    return found


def refuse_expressions(config: Mapping[str, Any]) -> None:
    """Raise if a PEFT config selects modules by regular expression instead of by name."""
    for key in ("target_modules", "exclude_modules"):
        if isinstance(config.get(key), str) and config[key] != "all-linear":
            raise AdapterError(
                f"{key} is the regular expression {config[key][:80]!r}, which is not evaluated here; "
                "replace it by the list of module names, or by 'all-linear'"
            )


def variant_of(config: Mapping[str, Any]) -> Variant:
    """The variant that a PEFT config describes. Settings that change the result and are not supported are refused."""
    for key in _UNREAD:
        if config.get(key):
            raise AdapterError(
                f"this PEFT adapter uses {key}={config[key]!r}, which is not supported; merge it with PEFT and use the "
                "merged model, or train it again without"
            )
    if config.get("modules_to_save") and config.get("ensure_weight_tying"):
        raise AdapterError(
            "this PEFT adapter ties its modules_to_save (ensure_weight_tying), which is not supported; merge it with "
            "PEFT and use the merged model"
        )
    if config.get("bias", "none") != "none":
        raise AdapterError(
            f"this PEFT adapter trains biases (bias={config['bias']!r}), which is not supported; use bias='none'"
        )
    for cls in VARIANTS.values():
        if cls.peft_type == config.get("peft_type") and (variant := cls.from_peft_config(config)) is not None:
            return variant
    init = config.get("init_lora_weights")
    if config.get("peft_type") == "LORA" and isinstance(init, str):
        raise AdapterError(
            f"init_lora_weights={init!r} changes the base weights in a way that the file does not record; convert it "
            "in PEFT: save_pretrained(…, path_initial_model_for_weight_conversion=…)"
        )
    raise AdapterError(
        f"PEFT type {config.get('peft_type')!r} is not supported; known adapters: {', '.join(sorted(VARIANTS))}"
    )


def read_peft(
    model: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor], whole: Mapping[str, Layer]
) -> tuple[Variant, dict[str, dict[str, Tensor]], dict[str, dict[str, Tensor]]]:
    """(variant, tensors per adapted module, values per module trained ``whole``) from a PEFT checkpoint; strict."""
    variant = variant_of(config)
    suffixes = sorted(variant.peft_names.values(), key=len, reverse=True)
    groups: dict[str, dict[str, Tensor]] = {}
    shared: dict[str, Tensor] = {}
    values: dict[str, dict[str, Tensor]] = {path: {} for path in whole}
    unexpected = []
    common = set(variant.shared_to_peft({name: torch.empty(0) for name in variant.shared}))
    for key, value in tensors.items():
        if not bool(torch.isfinite(value).all()):
            raise AdapterError(f"{key} has numbers that are not finite; the file is damaged or its training failed")
        path = key.removeprefix(PREFIX)
        if key.startswith(PREFIX) and (owner := path.rpartition(".")[0]) in whole:
            values.setdefault(owner, {})[path.rpartition(".")[2]] = value
            continue
        suffix = next((s for s in suffixes if path.endswith("." + s)), None)
        if key.startswith(PREFIX) and suffix is not None:
            groups.setdefault(path[: -len(suffix) - 1], {})[suffix] = value
        elif key.startswith("base_model.") and key.removeprefix("base_model.") in common:
            shared[key.removeprefix("base_model.")] = value
        else:
            unexpected.append(key)
    if unexpected:
        raise AdapterError(
            f"unexpected tensor {unexpected[0]} (and {len(unexpected) - 1} more) for a {variant.name} adapter"
        )
    experts = _experts(model, config)
    if experts and not variant.uses("experts"):
        raise AdapterError(f"{variant.name} has no form for target_parameters ({next(iter(experts))})")
    for path, stack in experts.items():
        nested = {depth: f"{path}{'.base_layer' * depth}" for depth in range(len(stack.stacks()))}
        if lost := [place for place in nested.values() if place not in groups]:
            raise AdapterError(f"the file has no tensors for {lost[0]}, which target_parameters names")
        parts = {depth: groups.pop(place) for depth, place in nested.items()}
        groups[path] = {f"{'base_layer.' * depth}{k}": v for depth, part in parts.items() for k, v in part.items()}
    expected, known = _expected(model, config) | set(experts), adaptable(model)
    if not expected:
        raise AdapterError(
            f"target_modules={config.get('target_modules')!r} matches no linear layer of {type(model).__name__}"
        )
    strange, lost = sorted(set(groups) - expected), sorted(expected - set(groups))
    if strange:
        raise AdapterError(
            f"the file has tensors for {strange[0]} (and {len(strange) - 1} more), which target_modules does not name"
        )
    if lost:
        raise AdapterError(
            f"the file has no tensors for {lost[0]} (and {len(lost) - 1} more), which target_modules names"
        )
    out = {}
    for path in known:
        if path not in groups:
            continue
        absent = [s for s in suffixes if path not in experts and s not in groups[path]]
        if absent:
            raise AdapterError(f"{PREFIX}{path}.{absent[0]} is missing")
        layer = layer_of(path, known[path])
        given = {k: v.to(layer.device).float() for k, v in groups[path].items()}
        out[path] = variant.from_peft(layer, given, {k: v.to(layer.device).float() for k, v in shared.items()})
    return variant.as_read(), out, values


VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's config/lora.py: allowed values of max_lora_rank


def export_lora(adapter: Adapter, folder: Path, base_model: str | None = None, rank: int | None = None) -> Path:
    """Write a plain LoRA for servers, at the adapter's current scale. ``rank``: pad to this rank (default: the smallest
    one that vLLM accepts).

    Every scale is folded into B, alpha = r, one rank for all modules, no rsLoRA, no init that names another base: vLLM,
    TGI and llama.cpp ignore rank_pattern and init_lora_weights, so with other settings they would give wrong outputs
    without an error. The export is exact for LoRA, rsLoRA, EVA, VeRA and AntiPaSTO (rank r), and for PiSSA, DeLoRA and
    HRA (rank 2r if there is a frozen copy or an initial term).
    """
    from earnest.adapters.files import OWN_CONFIG, OWN_MODEL, loaded_from, write_json, write_tensors

    if adapter.scale == 0.0:
        raise AdapterError(
            f"adapter {adapter.name!r} is off (scale 0), and the export would be the base; set its scale"
        )
    if adapter.saved_modules:
        raise AdapterError(
            f"a plain LoRA holds no modules_to_save ({', '.join(adapter.saved_modules)}), and servers would leave them "
            "out; serve the merged weights, or save() for PEFT"
        )
    if experts := [path for path, slot in adapter.slots.items() if slot.of_experts]:
        raise AdapterError(
            f"a plain LoRA for servers has no form for the experts in {experts[0]}; serve the merged weights (`earnest "
            "export RUN --as merged`), or save() for PEFT"
        )
    factors = lora_factors(adapter)
    if factors is None:
        raise AdapterError(
            f"{adapter.variant.name} cannot be exported as a LoRA: {adapter.variant.export_note()}; "
            "serve the merged weights instead (`earnest export RUN --as merged`)"
        )
    needed = max(a.shape[0] for a, _ in factors.values())
    fits = next((r for r in VLLM_RANKS if r >= needed), None)
    rank = rank or fits or needed
    if rank < needed:
        raise AdapterError(
            f"rank={rank} is too small: this {adapter.variant.name} adapter is exactly a LoRA of rank {needed}"
        )
    config, tensors = lora_files(common_config(adapter, base_model or loaded_from(adapter.model)), factors, rank)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (OWN_CONFIG, OWN_MODEL):
        (folder / stale).unlink(missing_ok=True)
    write_tensors(folder / MODEL, tensors)
    write_json(folder / CONFIG, config)
    return folder
