"""Download a Hugging Face id to a local folder: one request without retries; an error becomes one sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from earnest.errors import UnknownModel, nearest
from earnest.models.catalog import BUILT_IN
from earnest.models.places import require_safetensors

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = ["*.json", "model*.safetensors", "tokenizer*", "*.model", "merges.txt", "vocab.txt", "*.jinja"]
_SECONDS = 10.0


def looks_like_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None


def fetch(name: str) -> tuple[Path, str, tuple[str, ...]]:
    """(folder, revision, notes). Without a network a cached snapshot is used, with a note."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    builtin = f"built in: {', '.join(BUILT_IN)}" if "/" in name else nearest(name, BUILT_IN).rstrip(".")
    info: Any = None
    try:
        info = HfApi().model_info(name, timeout=_SECONDS)
    except GatedRepoError:
        raise UnknownModel(
            f"{name} is gated: accept its terms on huggingface.co/{name}, then `hf auth login`, then load it again."
        ) from None
    except RepositoryNotFoundError:
        raise UnknownModel(
            f"Hugging Face has no model {name!r} (or it is private: `hf auth login`), and there is no such folder "
            f"({builtin})."
        ) from None
    except Exception as error:
        why = type(error).__name__
        try:
            folder = Path(snapshot_download(name, local_files_only=True))
        except (LocalEntryNotFoundError, OSError, ValueError):
            raise UnknownModel(
                f"{name!r} is not a folder and not in the Hugging Face cache, and the hub cannot be reached ({why}). "
                f"Download it where there is a network and give its folder, or use a built-in model ({builtin})."
            ) from None
        return folder, folder.name, (f"hub not reached ({why}): cached snapshot used",)
    require_safetensors([f.rfilename for f in info.siblings or ()], f"The model {name}")
    return Path(snapshot_download(name, revision=info.sha, allow_patterns=_FILES)), str(info.sha), ()


def fetch_config(name: str) -> Path:
    """The folder of a cached or downloaded config.json of this id; nothing else is downloaded."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json", etag_timeout=_SECONDS)).parent
    except Exception as error:
        raise UnknownModel(
            f"The config of {name!r} cannot be downloaded ({type(error).__name__}); give a folder with its config.json."
        ) from None
