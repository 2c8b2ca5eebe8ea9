"""Adapters on disk: two files in PEFT's format, and two of earnest's own that keep the exact fp32 offsets.

    adapter_config.json, adapter_model.safetensors      PEFT's format (where the variant has one, or is exactly a LoRA)
    earnest_adapter.json, earnest_adapter.safetensors   variant, settings, base fingerprint, exact tensors

`load_adapter` reads either pair. Missing, unexpected and misshapen tensors are errors. Full-parameter training is
saved as a folder of the model's own format (`earnest.adapters.whole`) with earnest_adapter.json.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from earnest.adapters.adapter import Adapter, check_keys
from earnest.adapters.attach import _views, model_of, mount, saved_modules
from earnest.adapters.errors import AdapterError
from earnest.adapters.fingerprint import check_fingerprint
from earnest.adapters.layer import Layer
from earnest.adapters.linalg import gathered
from earnest.adapters.peft_format import CONFIG, MODEL, peft_files, read_peft, refuse_expressions, saved_paths
from earnest.adapters.targets import Match, adaptable, owners
from earnest.adapters.variant import Variant, get_variant
from earnest.adapters.whole import offsets, read_offsets, weight_files, write_merged
from earnest.disk import write_tensors, write_text

OWN_CONFIG, OWN_MODEL = "earnest_adapter.json", "earnest_adapter.safetensors"
FORMAT = 1


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(data, indent=2, sort_keys=True) + "\n")


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(str(path))
    except FileNotFoundError as e:
        raise AdapterError(f"{path} is missing; the folder is not a complete adapter") from e
    except SafetensorError as e:
        raise AdapterError(f"{path} is damaged ({e}); restore it from a copy") from e


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise AdapterError(f"{path} is missing; a folder written by adapter.save() or by PEFT has it") from e
    except ValueError as e:
        raise AdapterError(f"{path} is not JSON ({e}); restore it from a copy") from e
    if not isinstance(data, dict):
        raise AdapterError(f"{path} holds a {type(data).__name__}, expected an object")
    return data


def shared_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """The variant's shared tensors, each once: a layer holds a top-left corner of the largest."""
    out: dict[str, Tensor] = {}
    for name in sorted(adapter.variant.shared):
        parts = [slot.tensors[name] for slot in adapter.adapted.values()]
        largest = max(parts, key=lambda t: t.numel())
        for part in parts:
            corner = largest[tuple(slice(0, s) for s in part.shape)]
            assert torch.equal(corner.cpu(), part.cpu()), f"{name} is not shared"
        out[name] = largest
    return out


def save_adapter(adapter: Adapter, folder: Path, base_model: str | None) -> Path:
    """Write both pairs of files, at the adapter's current scale. If PEFT has no exact form, its pair is left out, and
    earnest's JSON gives the reason."""
    folder.mkdir(parents=True, exist_ok=True)
    base_model = base_model or loaded_from(adapter.model)
    if adapter.variant.uses("replace"):
        return _save_model(adapter, folder, base_model)
    shared = shared_tensors(adapter)
    own = {f"shared.{k}": v for k, v in shared.items()}
    own |= {k: gathered(v) for k, v in adapter.named_tensors().items() if k.rsplit(".", 1)[-1] not in shared}
    for stale in (CONFIG, MODEL, OWN_CONFIG, OWN_MODEL):
        (folder / stale).unlink(missing_ok=True)
    peft, why = peft_files(adapter, shared, _loadable(adapter.model, base_model))
    if peft is not None:
        write_tensors(folder / MODEL, peft[1], {"format": "pt"})
        write_json(folder / CONFIG, peft[0])
    write_tensors(folder / OWN_MODEL, own, {"format": "pt"})
    meta = _meta(adapter, base_model) | {
        "tensors_sha256": _sha(folder / OWN_MODEL),
        "peft_sha256": _sha(folder / MODEL) if peft is not None else None,
        "peft": why,
    }
    write_json(folder / OWN_CONFIG, meta)
    return folder


def _meta(adapter: Adapter, base_model: str | None) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "variant": adapter.variant.name,
        "settings": adapter.variant.settings(),
        "targets": list(adapter.targets),
        "modules": list(adapter.adapted),
        "modules_to_save": list(adapter.saved_modules),
        "scale": adapter.scale,
        "base": adapter.base_fingerprint,
        "base_model": base_model,
    }


def _save_model(adapter: Adapter, folder: Path, base_model: str | None) -> Path:
    """The model with its trained weights, at the adapter's current scale."""
    if adapter.scale == 0.0:
        raise AdapterError(
            f"adapter {adapter.name!r} is off (scale 0), and the folder would be the base; set its scale"
        )
    (folder / OWN_CONFIG).unlink(missing_ok=True)
    write_merged(adapter, folder)
    files = {path.name: _sha(path) for path in weight_files(folder)}
    write_json(folder / OWN_CONFIG, _meta(adapter, base_model) | {"files_sha256": files})
    return folder


def loaded_from(model: nn.Module) -> str | None:
    return getattr(getattr(model, "config", None), "_name_or_path", None) or None


def _loadable(model: nn.Module, name: str | None) -> str | None:
    """The base model's name as transformers and PEFT can load it: a hub id, or else its folder."""
    where = loaded_from(model)
    if where is None or not Path(where).is_dir() or (name and "/" in name and not Path(name).expanduser().exists()):
        return name
    return str(Path(where).absolute())


def adapter_folder(place: str | Path) -> Path:
    """The folder with an adapter's files: ``place`` itself, or the adapter of the run in ``place``."""
    path = Path(place)
    if not path.is_dir():
        raise AdapterError(f"there is no folder {path}; give a run folder or its adapter/")
    for folder in (path, path / "adapter"):
        if (folder / OWN_CONFIG).is_file() or (folder / CONFIG).is_file():
            return folder
    raise AdapterError(
        f"{path} holds no {CONFIG}, nor does {path / 'adapter'}: it is not an adapter folder.{_what_it_is(path)}"
    )


def _what_it_is(folder: Path) -> str:
    """The way out for a folder without an adapter, by what else it holds."""
    if (folder / "run.json").exists():
        return " The run has not finished; resume it first."
    if runs := sorted(path.parent for path in folder.glob("*/run.json")):
        return f" It holds {len(runs)} runs; give one of them, such as {runs[0]}."
    if (folder / "config.json").exists():
        return " It is a whole model; give it as the model (--model, model=)."
    return ""


def base_model_of(place: str | Path) -> str | None:
    """The model that an adapter was trained on, as its files name it."""
    folder = adapter_folder(place)
    for file, key in ((OWN_CONFIG, "base_model"), (CONFIG, "base_model_name_or_path")):
        if (folder / file).is_file() and (name := read_json(folder / file).get(key)):
            return str(name)
    return None


def load_adapter(
    model_or_policy: Any,
    folder: str | Path,
    *,
    check_base: bool = True,
    name: str | None = None,
    expressions: bool = True,
) -> Adapter:
    """Attach a saved adapter from a folder of earnest's, a folder of PEFT's, or a run folder.

    ``check_base=False`` skips the comparison of the base's fingerprint.
    ``expressions=False`` refuses a PEFT config whose module names are regular expressions. Use it for files from
    somebody else: Python's engine needs exponential time for some expressions.
    """
    model, path = model_of(model_or_policy), adapter_folder(folder)
    adapter = _load(model, path, check_base, name, expressions)
    adapter.tokenizer = getattr(model_or_policy, "tokenizer", None)
    return adapter


def _load(model: nn.Module, path: Path, check_base: bool, name: str | None, expressions: bool) -> Adapter:
    if (path / OWN_CONFIG).exists():
        return _load_own(model, path, check_base, name)
    config, tensors = read_json(path / CONFIG), read_tensors(path / MODEL)
    if not expressions:
        refuse_expressions(config)
    whole = saved_modules(model, saved_paths(model, config), ())
    variant, per_module, values = read_peft(model, config, tensors, whole)
    lost = [path for path in whole if not values[path]]
    if lost:
        raise AdapterError(f"the file has no tensors for {lost[0]}, which modules_to_save names")
    views = _known(model, adaptable(model), per_module, "linear layer")
    per_module |= {p: offsets(layer, values[p]) for p, layer in whole.items()}
    return _mount(model, variant, views, per_module, "(from the file)", name, whole)


def _known(model: nn.Module, among: Mapping[str, nn.Module], paths: Iterable[str], what: str) -> dict[str, Layer]:
    """The layers of these modules, which must be ``among`` the model's."""
    if lost := [path for path in paths if path not in among]:
        raise AdapterError(
            f"the model has no {what} {lost[0]} (and {len(lost) - 1} more missing); is it another model?"
        )
    return _views(model, {path: among[path] for path in paths})


def _load_own(model: nn.Module, path: Path, check_base: bool, name: str | None) -> Adapter:
    meta = read_json(path / OWN_CONFIG)
    if meta.get("format") != FORMAT:
        raise AdapterError(f"{path / OWN_CONFIG} has format {meta.get('format')!r}; this version reads {FORMAT}")
    if "files_sha256" in meta:
        return _load_model(model, path, meta, check_base, name)
    tensors = read_tensors(path / OWN_MODEL)
    if _sha(path / OWN_MODEL) != meta["tensors_sha256"]:
        raise AdapterError(
            f"{path / OWN_MODEL} is not the file that {OWN_CONFIG} was written with; restore it from a copy"
        )
    if meta["peft_sha256"] is not None and (path / MODEL).exists() and _sha(path / MODEL) != meta["peft_sha256"]:
        raise AdapterError(
            f"{path / MODEL} was changed after {OWN_CONFIG} was written, so the two disagree; delete {OWN_CONFIG} and "
            f"{OWN_MODEL} to load the PEFT files, or save again"
        )
    variant = get_variant(meta["variant"], **meta["settings"])
    views = _known(model, adaptable(model), meta["modules"], "linear layer")
    whole = saved_modules(model, meta.get("modules_to_save", ()), meta["modules"])
    want: dict[str, Tensor] = {f"{m}.{k}": p for m, view in whole.items() for k, p in view.own().items()}
    for module, view in views.items():
        for key, spec in variant.specs(view).items():
            if key not in variant.shared:
                want[f"{module}.{key}"] = torch.empty(spec.shape, device="meta")
    shared = {k: tensors.pop(f"shared.{k}") for k in variant.shared if f"shared.{k}" in tensors}
    if set(shared) != set(variant.shared):
        raise AdapterError(f"missing: {', '.join(f'shared.{k}' for k in sorted(variant.shared - set(shared)))}")
    check_keys(want, tensors)
    if check_base:
        check_fingerprint(meta["base"], views | whole)
    per_module = {m: {k: tensors[f"{m}.{k}"] for k in view.own()} for m, view in whole.items()}
    for module, view in views.items():
        per_module[module] = {
            key: shared[key][tuple(slice(0, s) for s in spec.shape)] if key in shared else tensors[f"{module}.{key}"]
            for key, spec in variant.specs(view).items()
        }
    adapter = _mount(model, variant, views, per_module, " ".join(meta["targets"]), name, whole)
    adapter.scale = float(meta.get("scale", 1.0))
    return adapter


def _load_model(model: nn.Module, path: Path, meta: Mapping[str, Any], check_base: bool, name: str | None) -> Adapter:
    """Full-parameter training: the offsets from the model in memory to the model in the folder."""
    for file, sha in meta["files_sha256"].items():
        if not (path / file).is_file() or _sha(path / file) != sha:
            raise AdapterError(
                f"{path / file} is not the file that {OWN_CONFIG} was written with; restore it, or load the "
                "folder as a model: en.load(folder)"
            )
    variant, scale = get_variant(meta["variant"], **meta["settings"]), float(meta["scale"])
    views = _known(model, owners(model), meta["modules"], "module with weights")
    if check_base:
        check_fingerprint(meta["base"], views)
    found = read_offsets(model, path, views, scale)
    adapter = _mount(model, variant, views, found, " ".join(meta["targets"]), name)
    adapter.scale = scale
    return adapter


def _mount(
    model: nn.Module,
    variant: Variant,
    views: Mapping[str, Layer],
    tensors: Mapping[str, Mapping[str, Tensor]],
    targets: str,
    name: str | None,
    whole: Mapping[str, Layer] | None = None,
) -> Adapter:
    for view in views.values():
        variant.check(view)
    return mount(model, variant, views, tensors, (Match(targets, tuple(views)),), name, whole=whole)
