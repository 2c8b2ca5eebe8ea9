"""The published rules of the LoRA loaders of vLLM, SGLang, TGI and llama.cpp, for the tests of the export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from earnest.adapters.errors import AdapterError
from earnest.adapters.files import read_json, read_tensors
from earnest.adapters.peft_format import CONFIG, MODEL, PREFIX, VLLM_RANKS
from earnest.adapters.targets import block_index

VLLM_DEFAULT_RANK = 16  # max_lora_rank of a vLLM that is started without the option
# SGLang stacks these (srt/lora/lora.py): any of the first in a block needs all of the second. A missing k_proj is
# filled with zeros (the first versions wanted it too); a missing up_proj only under some backends.
_STACKED = (
    ({"q_proj", "k_proj", "v_proj"}, {"q_proj", "v_proj"}),
    ({"gate_proj", "up_proj"}, {"gate_proj", "up_proj"}),
)


def validate_portable(folder: str | Path, server: str = "vllm", max_rank: int | None = None) -> list[str]:
    """Sentences about what the server's loader would refuse or read wrongly, one each.

    ``server``: vllm, sglang, tgi or llama.cpp. ``max_rank``: vLLM's --max-lora-rank; None is its default, 16.
    """
    if server not in ("vllm", "sglang", "tgi", "llama.cpp"):
        raise AdapterError(f"unknown server {server!r}; known: vllm, sglang, tgi, llama.cpp")
    if max_rank is not None and max_rank not in VLLM_RANKS:
        raise AdapterError(f"max_rank={max_rank}: vLLM's --max-lora-rank is one of {', '.join(map(str, VLLM_RANKS))}")
    config, tensors = read_json(Path(folder) / CONFIG), read_tensors(Path(folder) / MODEL)
    faults = _config_faults(config, server, max_rank)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, value in tensors.items():
        tail = next((t for t in ("lora_A", "lora_B") if key.endswith(f".{t}.weight")), None)
        if tail is None:
            faults.append(f"tensor {key}: only …lora_A.weight and …lora_B.weight are read")
            continue
        if not key.startswith(PREFIX):
            faults.append(f"tensor {key}: does not start with {PREFIX}")
        shapes.setdefault(key.removesuffix(f".{tail}.weight").removeprefix(PREFIX), {})[tail] = tuple(value.shape)
    for path, pair in shapes.items():
        if set(pair) != {"lora_A", "lora_B"}:
            faults.append(f"{path}: has {', '.join(pair)} only")
        elif not pair["lora_A"][0] == pair["lora_B"][1] == config.get("r"):
            faults.append(
                f"{path}: rank {pair['lora_A'][0]} is not r = {config.get('r')}, and rank_pattern is not read"
            )
        if server == "vllm" and path.rsplit(".", 1)[-1] == "lm_head":
            faults.append(f"{path}: vLLM serves no LoRA on lm_head in general")
    if not shapes:
        faults.append("no LoRA tensors at all")
    if server == "sglang":
        faults += _half_stacks(shapes)
    if server == "tgi":
        faults += _uneven_blocks(shapes)
    return faults


def _config_faults(config: dict[str, Any], server: str, max_rank: int | None) -> list[str]:
    faults = [
        f"config: {k} is missing" for k in ("r", "lora_alpha", "target_modules", "peft_type") if config.get(k) is None
    ]
    if config.get("peft_type") not in (None, "LORA"):
        faults.append(f"config: peft_type {config['peft_type']!r} is not LORA")
    if config.get("use_dora"):
        faults.append("config: use_dora is not served")
    if config.get("bias", "none") != "none":
        faults.append(f"config: bias={config['bias']!r} is refused")
    if config.get("modules_to_save"):
        faults.append("config: modules_to_save is refused")
    if config.get("init_lora_weights", True) not in (True, False, "gaussian", "eva", "orthogonal"):
        faults.append(f"config: init_lora_weights={config['init_lora_weights']!r} means another base, and is not read")
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        faults += ["config: rank_pattern and alpha_pattern are not read"] if server != "sglang" else []
    if server == "llama.cpp" and config.get("use_rslora"):
        faults.append("config: llama.cpp scales by alpha/r also under use_rslora")
    rank = config.get("r")
    if server == "vllm" and isinstance(rank, int):
        limit = max_rank or VLLM_DEFAULT_RANK
        if rank > limit:
            needed = next((r for r in VLLM_RANKS if r >= rank), None)
            way = "no vLLM holds it" if needed is None else f"start vLLM with --max-lora-rank {needed}"
            faults.append(f"config: r={rank} exceeds max_lora_rank={limit}; {way}")
    if not isinstance(config.get("target_modules"), (list, type(None))):
        faults.append("config: target_modules must be a list of names")
    return faults


def _half_stacks(shapes: dict[str, Any]) -> list[str]:
    by_parent: dict[str, set[str]] = {}
    for path in shapes:
        parent, _, name = path.rpartition(".")
        by_parent.setdefault(parent, set()).add(name)
    return [
        f"{parent}: SGLang stacks {', '.join(sorted(group))} and needs {' and '.join(sorted(needed))}, here only "
        f"{', '.join(sorted(group & names))}"
        for parent, names in by_parent.items()
        for group, needed in _STACKED
        if group & names and not needed <= names
    ]


def _uneven_blocks(shapes: dict[str, Any]) -> list[str]:
    by_kind: dict[str, set[int | None]] = {}
    for path in shapes:
        by_kind.setdefault(path.rsplit(".", 1)[-1], set()).add(block_index(path))
    every = set().union(*by_kind.values()) if by_kind else set()
    gaps = {k: sorted(i for i in every - v if i is not None) for k, v in by_kind.items()}
    return [f"{k}: TGI needs every layer of a type, missing {gap}" for k, gap in gaps.items() if gap]
