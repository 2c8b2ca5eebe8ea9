"""An engine on nano whose adapter is not at its initialization."""

from __future__ import annotations

import torch

import earnest as en


def perturbed_nano() -> en.LocalEngine:
    policy = en.load("nano")
    engine = en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=2), targets=("q_proj",), seed=0))
    torch.manual_seed(0)
    with torch.no_grad():
        for p in engine.parameters:
            p.add_(0.05 * torch.randn_like(p))
    return engine
