"""Locations of model folders: the package, the user's cache, a path, the Hugging Face cache."""

from __future__ import annotations

import json
import math
import os
import struct
from importlib.resources import files
from pathlib import Path
from typing import Any

from earnest.errors import UnusableModel

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def cache_dir() -> Path:
    """``EARNEST_CACHE``, or ``~/.cache/earnest``."""
    return Path(os.environ.get("EARNEST_CACHE") or Path.home() / ".cache" / "earnest").expanduser()


def nano_folder() -> Path:
    """The folder of the embedded model inside the installed package."""
    return Path(str(files("earnest.models").joinpath("nano")))


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json, or an error with the reason why it is not a model folder."""
    path = folder / "config.json"
    if not path.is_file():
        run = folder.parent if (folder.parent / "run.json").is_file() else folder
        if (run / "run.json").is_file() or (folder / "adapter_config.json").is_file():
            raise UnusableModel(
                f"{folder} is a run or an adapter, not a model; merge it with `earnest export {run}`, and give "
                f"model={run / 'export' / 'merged'} (in Python, en.load_adapter loads it onto its base model)."
            )
        raise UnusableModel(
            f"{folder} has no config.json, so it is not a model folder; give the folder that save_pretrained wrote."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnusableModel(f"{path} is not valid JSON ({error}); save or download the model again.") from None
    if not isinstance(config, dict):
        raise UnusableModel(f"{path} is not a JSON object; save or download the model again.")
    return config


def require_safetensors(names: list[str], place: str) -> None:
    """Refuse weights that are not safetensors: a pickle runs code when it is opened."""
    if any(n.startswith("model") and n.endswith(".safetensors") for n in names):
        return
    pickled = sorted(n for n in names if n.endswith(PICKLED) and n != "training_args.bin")
    if pickled:
        raise UnusableModel(
            f"{place} has its weights as {pickled[0]}, a pickle, which can run code when opened. Convert it once where "
            "you trust it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder) writes safetensors."
        )
    raise UnusableModel(
        f"{place} has no weights (no model*.safetensors); it needs the files that save_pretrained writes."
    )


def count_parameters(folder: Path) -> int:
    """The number of elements of all tensors, from the safetensors headers; no tensor is loaded, and torch is not
    imported."""
    total = 0
    for path in sorted(folder.glob("model*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total
