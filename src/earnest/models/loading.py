"""``en.load``: a name, an id or a folder to a `Policy` that is frozen, in eval mode, and complete.

Cases in which transformers only warns (tensors filled with random numbers, a tokenizer larger than the embedding) are
errors here.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from earnest.errors import EarnestError, UnusableModel, nearest
from earnest.models import hub, places, smollm2
from earnest.models.catalog import BUILT_IN
from earnest.models.device import choose_device, choose_dtype
from earnest.models.policy import Policy, eos_ids
from earnest.models.quantised import quantise
from earnest.models.quiet import quiet
from earnest.models.speech import Speech

Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "nf4"]
_log = logging.getLogger("earnest.models")
_LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}

_ONE_AT_A_TIME = threading.RLock()
"""While transformers loads, torch's default dtype and the level of the logs are those of the whole process."""


def load(
    name: str | os.PathLike[str],
    *,
    device: str = "auto",
    dtype: Dtype = "auto",
    say: Callable[[str], None] | None = None,
) -> Policy:
    """Load ``nano``, ``smollm2``, a Hugging Face folder or a Hugging Face id.

    device: ``auto`` (CUDA before MPS before CPU), or a torch device name.
    dtype: ``auto`` is float32 on CPU and MPS, and the checkpoint's own on CUDA. ``int8`` and ``nf4`` store the linear
    layers in 8 or 4 bits, to train an adapter on them; the rest, and the computation, is as with ``auto``.
    say: called with a message before slow work (a download); by default the log.
    """
    where, why = choose_device(device)
    precision = choose_dtype(dtype, where)
    folder, label, version, notes = _find(os.fspath(name), say or _log.info)
    _require_causal_lm(places.read_config(folder), folder)
    places.require_safetensors([p.name for p in folder.iterdir()], str(folder))

    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with _ONE_AT_A_TIME, quiet():
            how = {"dtype": precision or "auto", "use_safetensors": True, "output_loading_info": True}
            model, info = AutoModelForCausalLM.from_pretrained(str(folder), **how, **_LOCAL)
            tokenizer = AutoTokenizer.from_pretrained(str(folder), **_LOCAL)
    except EarnestError:
        raise
    except Exception as error:
        raise UnusableModel(
            f"{folder} cannot be loaded: {_sentence(error)} Check the folder, or save the model again."
        ) from error
    notes = (why, *notes, *_require_whole(info, folder))
    _require_fit(model, tokenizer, folder)
    if dtype == "int8" or dtype == "nf4":
        notes += (quantise(model, dtype),)
    policy = Policy.of(model.to(where), tokenizer, name=label, version=version)
    policy.notes = notes
    return policy


@dataclass(frozen=True)
class TextPolicy(Speech):
    """The tokenizer of a model, its end tokens and its context length in tokens, without the weights."""

    name: str
    tokenizer: Any
    eos_ids: frozenset[int]
    positions: int | None


def load_text(name: str | os.PathLike[str], say: Callable[[str], None] | None = None) -> TextPolicy:
    """What of ``load(name)`` turns messages into tokens."""
    folder, label, _, _ = _find(os.fspath(name), say or _log.info)
    raw = places.read_config(folder)
    try:
        with _ONE_AT_A_TIME, quiet():
            from transformers import AutoTokenizer, GenerationConfig

            tokenizer = AutoTokenizer.from_pretrained(str(folder), **_LOCAL)
            generation = (folder / "generation_config.json").is_file() and GenerationConfig.from_pretrained(str(folder))
    except Exception as error:
        raise UnusableModel(f"The tokenizer in {folder} cannot be loaded: {_sentence(error)}") from error
    _require_tokenizer(tokenizer, folder)
    ends = eos_ids(tokenizer, generation or None)
    limit = raw.get("max_position_embeddings") or raw.get("n_positions")
    return TextPolicy(label, tokenizer, ends, int(limit) if limit else None)


def load_config(name: str | os.PathLike[str], say: Callable[[str], None] | None = None) -> Any:
    """The transformers config of ``load(name)``: of a folder that needs nothing but config.json, or of an id."""
    text = os.fspath(name)
    local = text in BUILT_IN or Path(text).expanduser().is_dir() or not hub.looks_like_id(text)
    folder = _find(text, say or _log.info)[0] if local else hub.fetch_config(text)
    _require_causal_lm(places.read_config(folder), folder)
    from transformers import AutoConfig

    try:
        with quiet():
            return AutoConfig.from_pretrained(str(folder), **_LOCAL)
    except Exception as error:
        raise UnusableModel(f"The config in {folder} cannot be read: {_sentence(error)}") from error


def _find(name: str, say: Callable[[str], None]) -> tuple[Path, str, str, tuple[str, ...]]:
    """(folder, name, version, notes). The config of a folder may be copied from other weights (a merged model keeps its
    base's), so its version is not used."""
    if name == "nano":
        folder = places.nano_folder()
        return folder, "nano", str(places.read_config(folder)["earnest_version"]), ()
    if name == "smollm2":
        return smollm2.fetch(say), "smollm2", smollm2.VERSION, ()
    path = Path(name).expanduser()
    if path.is_dir():
        return path, str(path), "local folder", ()
    hub.require_name(name)
    say(f"{name}: asking the Hugging Face hub")
    folder, revision, notes = hub.fetch(name)
    return folder, name, revision, notes


def _require_causal_lm(raw: dict[str, Any], folder: Path) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    kind = raw.get("model_type")
    if kind not in KNOWN and "auto_map" in raw:
        raise UnusableModel(
            f"{folder} has its own Python code (auto_map), which earnest does not run; use an architecture that "
            "transformers has."
        )
    if kind not in KNOWN:
        raise UnusableModel(
            f"{folder} has model_type {kind!r}, which is not a causal LM of transformers; {nearest(str(kind), KNOWN)}"
        )
    classes = raw.get("architectures") or []
    heads = KNOWN[kind] if isinstance(KNOWN[kind], (list, tuple)) else (KNOWN[kind],)
    if classes and not any(c in heads for c in classes):
        raise UnusableModel(
            f"{folder} holds a {classes[0]}, not a causal LM ({heads[0]}); its head would be random numbers. Give one "
            "with its LM head."
        )


def _require_whole(info: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """Raise unless every tensor of the model is in the file. Unused tensors of the file give a note."""
    missing = sorted([*info["missing_keys"], *(str(m) for m in info.get("mismatched_keys", ()))])
    if missing:
        raise UnusableModel(
            f"The weights in {folder} lack {len(missing)} tensors of the model, or have them in another shape (first: "
            f"{missing[0]}); transformers would fill them with random numbers. Save or download the model again."
        )
    unused = sorted(info["unexpected_keys"])
    return (f"{len(unused)} tensors of the file are unused (first: {unused[0]})",) if unused else ()


def _require_tokenizer(tokenizer: Any, folder: Path) -> None:
    if not tokenizer.encode("a", add_special_tokens=False):
        raise UnusableModel(
            f"{folder} has no usable tokenizer: it turns text into no tokens. Copy the tokenizer's files "
            "(tokenizer.json, tokenizer_config.json) into the folder, or save the tokenizer there with save_pretrained."
        )


def _require_fit(model: Any, tokenizer: Any, folder: Path) -> None:
    _require_tokenizer(tokenizer, folder)
    rows = model.get_input_embeddings().weight.shape[0]
    top = max(tokenizer.get_vocab().values(), default=-1)
    if top >= rows:
        raise UnusableModel(
            f"The tokenizer in {folder} has ids up to {top}, the model's embedding only {rows} rows; they do not "
            "match. Use the tokenizer that was saved with the model, or resize_token_embeddings and save."
        )


def _sentence(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{first[:300].rstrip('.')}."
