"""Second moments of the targets' inputs on calibration data: Σ x xᵀ / tokens without padding, one per distinct
input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from earnest.adapters.errors import AdapterError

MAX_TOKENS = 65_536  # more calibration tokens do not change the top directions


@torch.no_grad()
def input_moments(
    model: nn.Module, modules: Mapping[str, nn.Module], calibration: Iterable[Any]
) -> tuple[dict[str, Tensor], int]:
    """(moments by module name, tokens). A batch is a dict for ``model(**batch)`` or a tensor of token ids."""
    sums: dict[str, Tensor] = {}
    alias: dict[str, str] = {}  # q, k and v read the same tensor: one matrix for the three
    seen: dict[tuple[int, int, int], str] = {}
    keep: list[Tensor] = []  # holds the inputs of one forward pass, so that addresses are not reused
    mask_now: list[Tensor] = []

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else next(iter(kwargs.values()))
            key = (id(x), x.data_ptr(), x._version)
            first = seen.setdefault(key, name)
            if alias.setdefault(name, first) != first:
                raise AdapterError(
                    f"{name} shares its input with {first} in some batches only; calibrate with equal shapes"
                )
            if first != name:
                return
            keep.append(x)
            if x.shape[:-1] != mask_now[0].shape:
                raise AdapterError(
                    f"{name}: its input {tuple(x.shape)} does not match the batch {tuple(mask_now[0].shape)}"
                )
            rows = x[mask_now[0].to(x.device)].float()
            total = rows.t() @ rows
            sums[name] = sums[name] + total if name in sums else total

        return hook

    handles = [m.register_forward_pre_hook(watch(n), with_kwargs=True) for n, m in modules.items()]
    modes, tokens = {m: m.training for m in model.modules()}, 0
    model.eval()
    try:
        for batch in calibration:
            inputs = batch if isinstance(batch, Mapping) else {"input_ids": batch}
            ids = inputs.get("input_ids", inputs.get("inputs_embeds"))
            if not isinstance(ids, Tensor):
                raise AdapterError("a calibration batch is a tensor of token ids or a dict with input_ids")
            mask = inputs.get("attention_mask")
            mask = torch.ones(ids.shape[:2], device=ids.device).bool() if mask is None else mask.bool()
            seen.clear()
            keep.clear()
            mask_now[:] = [mask]
            model(**inputs)
            tokens += int(mask.sum())
            if tokens >= MAX_TOKENS:
                break
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    if tokens == 0:
        raise AdapterError("the calibration data has no tokens; give at least one batch that is not all padding")
    missing = sorted(set(modules) - set(alias))
    if missing:
        raise AdapterError(
            f"calibration never reached {missing[0]} (and {len(missing) - 1} more); is it used by the model?"
        )
    return {n: sums[alias[n]] / tokens for n in modules}, tokens
