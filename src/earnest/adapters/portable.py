"""A plain LoRA for servers.

Every scale is folded into B, alpha = r, one rank for all modules, no rsLoRA, no init that names another base. vLLM,
TGI and llama.cpp ignore rank_pattern and init_lora_weights, so with other settings they would give wrong outputs
without an error. The export is exact for LoRA, rsLoRA, EVA, VeRA and AntiPaSTO (rank r), and for PiSSA, DeLoRA and HRA
(rank 2r if there is a frozen copy or an initial term).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from earnest.adapters.errors import AdapterError
from earnest.adapters.peft_format import CONFIG, MODEL, common_config, lora_factors, lora_files

if TYPE_CHECKING:
    from earnest.adapters.adapter import Adapter

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's config/lora.py: allowed values of max_lora_rank


def export_lora(adapter: Adapter, folder: Path, base_model: str | None = None, rank: int | None = None) -> Path:
    """Write the portable pair of files at the adapter's current scale. ``rank``: pad to this rank (default: the
    smallest one that vLLM accepts)."""
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
