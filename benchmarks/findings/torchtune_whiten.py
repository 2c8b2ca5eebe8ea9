"""torchtune 0.6.1: PPO's advantages keep their mean. Needs torchtune's environment:

python benchmarks/audit_released.py --library torchtune
PYTHONPATH=.:src:earnest-audit/src .peers/torchtune/bin/python benchmarks/findings/torchtune_whiten.py
"""

from __future__ import annotations

import torch
from torchtune.rlhf import estimate_advantages, whiten

from earnest_audit import AdvantageEstimator, audit


def centred(x: torch.Tensor) -> torch.Tensor:
    """The same, with the mean left out, as TRL's and verl's ``masked_whiten`` do for ``shift_mean=True``."""
    return (x - x.mean()) * torch.rsqrt(x.var() + 1e-8)


broken = audit(AdvantageEstimator(lambda rewards, groups: whiten(rewards), "free", over="batch"))
fixed = audit(AdvantageEstimator(lambda rewards, groups: centred(rewards), "free", over="batch"))
print(broken)
assert "shift of all rewards" in {f.subject for f in broken.failures}
assert not fixed.failures, fixed

# By hand: all rewards far below 0, values 0. Every advantage should be around 0; all of them are negative.
rewards = -10 + torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
advantages, _ = estimate_advantages(torch.zeros(4, 6), rewards, gamma=0.0, lmbda=0.0)
print("mean of the whitened advantages:", float(advantages.mean()))
assert float(advantages.max()) < 0
