"""Checks the weights of an adapter from elsewhere: every change of a weight is finite and not far larger
than the weight, and a forward pass gives a finite distribution that is not uniform."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from earnest.adapters.errors import AdapterError

if TYPE_CHECKING:
    from earnest.adapters import Adapter
    from earnest.serve.host import Host

LARGEST = 1000.0  # ‖ΔW‖ / ‖W‖; trained adapters stay below 10


@torch.no_grad()
def check_numbers(host: Host, adapter: Adapter) -> None:
    """Raise ``AdapterError`` with the layer and its numbers where the adapter cannot be used."""
    policy = host.policy
    with host.turn("chat", adapter) as turn:
        for path, delta in adapter.deltas():
            change, weight = float(delta.norm()), float(adapter.slots[path].layer.weight().float().norm())
            if not change <= LARGEST * weight:
                raise AdapterError(
                    f"the change of {path} has the norm {change:g}, its weight {weight:g}; at most {LARGEST:g} times "
                    "the weight is allowed. Check lora_alpha and the rank, or train it again"
                )
            turn.yield_turn()
        ids = torch.arange(min(8, policy.head.weight.shape[0]), device=policy.device)[None]
        logits = policy.head.logits(policy.hidden(ids)).float()
    if not bool(logits.isfinite().all()) or float(logits.max() - logits.min()) == 0.0:
        raise AdapterError("a forward pass with it gives logits that are not finite, or all equal; train it again")
