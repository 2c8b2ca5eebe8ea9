"""Download a Hugging Face id to a local folder. One request, no retries; an error is one sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from earnest.errors import UnknownModel, UnusableModel, nearest
from earnest.models.catalog import BUILT_IN
from earnest.models.places import read_config, require_safetensors

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = ["*.json", "model*.safetensors", "tokenizer*", "*.model", "merges.txt", "vocab.txt", "*.jinja"]
_SECONDS = 10.0


def looks_like_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None


def require_name(name: str) -> None:
    """Raise if ``name`` is neither a built-in, nor a folder, nor of the form of a Hugging Face id."""
    path = Path(name).expanduser()
    if path.is_file():
        raise UnknownModel(f"{name} is a file; give the folder with config.json, the weights and the tokenizer.")
    if not path.is_dir() and not looks_like_id(name):
        raise UnknownModel(
            f"There is no folder {name!r}; give a folder that exists, a Hugging Face id, or a built-in: "
            f"{', '.join(BUILT_IN)}."
        )


def require_model(name: str) -> None:
    """Raise unless ``name`` is a built-in, a folder with config.json, or an id whose config.json is in the cache or on
    the hub. No weights are read or downloaded."""
    require_name(name)
    if name not in BUILT_IN:
        path = Path(name).expanduser()
        read_config(path if path.is_dir() else fetch_config(name))


def fetch(name: str) -> tuple[Path, str, tuple[str, ...]]:
    """(folder, revision, notes). Without a network a cached snapshot is used, with a note."""
    from huggingface_hub import snapshot_download

    info = _model_info(name)
    if isinstance(info, Exception):
        folder = _cached(name, info)
        return folder, folder.name, (f"hub not reached ({type(info).__name__}): cached snapshot used",)
    require_safetensors([f.rfilename for f in info.siblings or ()], f"The model {name}")
    return Path(snapshot_download(name, revision=info.sha, allow_patterns=_FILES)), str(info.sha), ()


def fetch_config(name: str) -> Path:
    """The folder of a cached or downloaded config.json of this id; nothing else is downloaded."""
    from huggingface_hub import hf_hub_download

    info = _model_info(name)
    if isinstance(info, Exception):
        return _cached(name, info)
    if "config.json" not in [f.rfilename for f in info.siblings or ()]:
        raise UnusableModel(f"The model {name} has no config.json on the hub; give a model of transformers.")
    return Path(hf_hub_download(name, "config.json", revision=info.sha)).parent


def _model_info(name: str) -> Any:
    """What the hub knows of the id, or the exception if the hub cannot be reached. There is one request."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return HfApi().model_info(name, timeout=_SECONDS)
    except GatedRepoError:
        raise UnknownModel(
            f"{name} is gated: accept its terms on huggingface.co/{name}, then `hf auth login`, then load it again."
        ) from None
    except RepositoryNotFoundError:
        raise UnknownModel(
            f"Hugging Face has no model {name!r} (or it is private: `hf auth login`), and there is no such folder "
            f"({_built_in(name)})."
        ) from None
    except Exception as error:
        return error


def _cached(name: str, error: Exception) -> Path:
    """The cached snapshot of an id; ``error`` is the reason why the hub was not reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        raise UnknownModel(
            f"{name!r} is not a folder and not in the Hugging Face cache, and the hub cannot be reached "
            f"({type(error).__name__}). Download it where there is a network and give its folder, or use a built-in "
            f"model ({_built_in(name)})."
        ) from None


def _built_in(name: str) -> str:
    return f"built in: {', '.join(BUILT_IN)}" if "/" in name else nearest(name, BUILT_IN).rstrip(".")
