"""verl 0.9.1: the update of GMPO grows with the number of micro-batches. Needs verl's environment:

python benchmarks/audit_released.py --library verl
PYTHONPATH=.:src:earnest-audit/src .peers/verl/bin/python benchmarks/findings/verl_geo_mean.py
"""

from __future__ import annotations

import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

from benchmarks.released.verl import COMMON, micro_batches
from earnest_audit import audit

broken = audit(micro_batches(core_algos, ActorConfig, "geo_mean"))
fixed = audit(micro_batches(core_algos, ActorConfig, "vanilla"))
print(broken)
assert broken.failures and not fixed.failures, fixed

# By hand: eight equal rows in one piece, and in eight pieces.
config = ActorConfig(**COMMON, clip_ratio=0.2)
config.global_batch_info.update(dp_size=1, batch_num_tokens=32.0, global_batch_size=8, loss_scale_factor=None)
gradients = []
for pieces in (1, 8):
    logp = torch.full((8, 4), -1.0, requires_grad=True)
    for rows in torch.arange(8).chunk(pieces):
        given = {"old_log_prob": logp.detach()[rows], "log_prob": logp[rows], "response_mask": torch.ones(len(rows), 4)}
        core_algos.compute_policy_loss_geo_mean(advantages=torch.ones(len(rows), 4), config=config, **given)[
            0
        ].backward()
    assert logp.grad is not None
    gradients.append(float(logp.grad.norm()))
print("norm of the gradient in 1 and in 8 pieces:", gradients)
assert abs(gradients[1] / gradients[0] - 8) < 1e-4
