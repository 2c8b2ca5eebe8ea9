"""A trained model as a folder of its own format: merged weights, config, tokenizer; and weights back into offsets.

The folder of full-parameter training has one more file, earnest_adapter.json, with the settings and the fingerprint of
the base. Loaded as a model it is the trained policy; loaded as an adapter on its base it is the same policy, bit for
bit, with the base as its reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from earnest.adapters.errors import AdapterError
from earnest.adapters.layer import Layer
from earnest.adapters.linalg import gathered, is_sharded
from earnest.adapters.merging import merged_parameters
from earnest.adapters.runtime import slots_of
from earnest.models.quiet import quiet

if TYPE_CHECKING:
    from earnest.adapters.adapter import Adapter


def weight_files(folder: Path) -> list[Path]:
    """The files of a model folder that hold weights, or list them."""
    return sorted([*folder.glob("model*.safetensors"), *folder.glob("model*.safetensors.index.json")])


def write_merged(adapter: Adapter, folder: Path) -> Path:
    """Write the model with the adapter merged into its weights, and the tokenizer, as transformers writes them."""
    model: Any = adapter.model
    if not callable(getattr(model, "save_pretrained", None)):
        raise AdapterError(f"{type(model).__name__} is not a transformers model, so it has no folder format")
    folder.mkdir(parents=True, exist_ok=True)
    for stale in weight_files(folder):
        stale.unlink()
    if any(is_sharded(p) for p in model.parameters()):
        with torch.no_grad(), quiet():
            _write_gathered(model, folder)
        return _with_tokenizer(adapter, folder)
    with torch.no_grad(), adapter.merged(), _untied(model), quiet():
        others = [s for m in model.modules() for s in slots_of(m) if s.gate.scale != 0.0 and s.layer.stash is None]
        if others:
            raise AdapterError(
                f"the adapter {others[0].adapter_name!r} is active on {others[0].layer.name} and would be left out; "
                "set its scale to 0, or merge and save it first"
            )
        model.save_pretrained(folder)
    return _with_tokenizer(adapter, folder)


def _with_tokenizer(adapter: Adapter, folder: Path) -> Path:
    if adapter.tokenizer is not None:
        adapter.tokenizer.save_pretrained(folder)
    return folder


def _write_gathered(model: Any, folder: Path) -> None:
    """The same for a model in shards: every rank takes part, and the first one writes."""
    first = next(p for p in model.parameters() if is_sharded(p)).device_mesh.get_rank() == 0
    state: dict[str, Tensor] = {}
    names: dict[int, str] = {}  # tied parameters are gathered once
    for key in model.state_dict(keep_vars=True):
        path, _, name = key.rpartition(".")
        module = model.get_submodule(path)
        known = names.setdefault(id(module._parameters.get(name, name)), key)
        value = gathered(_with_adapters(module, name)) if known == key else None
        if first:
            state[key] = state[known] if value is None else value.cpu()
    if first:
        model.save_pretrained(folder, state_dict=state)


def _with_adapters(module: nn.Module, name: str) -> Tensor:
    """A tensor of the module with all its active adapters."""
    active = [slot for slot in slots_of(module) if slot.gate.scale != 0.0]
    if all(slot.replaces for slot in active):
        return cast(Tensor, getattr(module, name)).detach()  # a property gives the replaced value
    return merged_parameters(active[0].layer)[name]


@contextmanager
def _untied(model: Any) -> Iterator[None]:
    """Inside the block the config describes the weights: not tied, if embedding and head now differ."""
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    configs = {id(c): c for c in (model.config, model.config.get_text_config(decoder=True))}.values()
    held = [(c, c.tie_word_embeddings) for c in configs if getattr(c, "tie_word_embeddings", False)]
    differ = embed is not None and head is not None and embed.weight is not head.weight
    keys = getattr(model, "all_tied_weights_keys", None)
    try:
        if held and differ:
            for config, _ in held:
                config.tie_word_embeddings = False
            if isinstance(keys, dict):
                model.all_tied_weights_keys = {}
        yield
    finally:
        for config, tied in held:
            config.tie_word_embeddings = tied
        if isinstance(keys, dict):
            model.all_tied_weights_keys = keys


def read_offsets(model: Any, folder: Path, layers: Mapping[str, Layer], scale: float) -> dict[str, dict[str, Tensor]]:
    """Per module, the offsets from the base to the model in ``folder``."""
    try:
        with quiet():
            other, info = type(model).from_pretrained(
                folder, local_files_only=True, output_loading_info=True, dtype="auto"
            )
    except Exception as error:  # transformers raises many kinds for a damaged folder
        raise AdapterError(f"{folder} cannot be loaded as a model ({str(error).splitlines()[0]})") from error
    if info["missing_keys"] or info.get("mismatched_keys"):
        lost = [*info["missing_keys"], *info.get("mismatched_keys", ())][0]
        raise AdapterError(f"the weights in {folder} have no {lost}, or have it in another shape; restore the folder")
    return {
        path: offsets(layer, dict(other.get_submodule(path).named_parameters(recurse=False)), scale)
        for path, layer in layers.items()
    }


@torch.no_grad()
def offsets(layer: Layer, values: Mapping[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
    """δ with round(W + scale·δ) = the given value, bit for bit in the base's dtype, for each of the module's
    parameters."""
    own = layer.own()
    if set(own) != set(values) or any(own[k].shape != values[k].shape for k in own):
        raise AdapterError(f"{layer.name}: the file has {sorted(values)} of other names or shapes than {sorted(own)}")
    return {key: _offset(f"{layer.name}.{key}", p, values[key].to(p.device), scale) for key, p in own.items()}


def _offset(name: str, base: nn.Parameter, value: Tensor, scale: float) -> Tensor:
    if not bool(torch.isfinite(value).all()):
        raise AdapterError(f"{name} has numbers that are not finite; the file is damaged or its training failed")
    want, start = value.to(base.dtype), base.detach().to(torch.promote_types(base.dtype, torch.float32))
    found = ((value.to(start.dtype) - start) / scale).float()

    def wrong(delta: Tensor) -> Tensor:
        return torch.add(start, delta, alpha=scale).to(base.dtype) != want

    for toward in (torch.inf, -torch.inf):  # the difference was rounded, so a neighbour may be the right one
        near = torch.nextafter(found, torch.full_like(found, toward))
        found = torch.where(wrong(found) & ~wrong(near), near, found)
    if bool(wrong(found).any()):
        raise AdapterError(
            f"{name}: {int(wrong(found).sum())} of its numbers are no fp32 offset from the base's; load the folder as "
            "a model: en.load(folder)"
        )
    return found
