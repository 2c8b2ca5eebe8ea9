"""A batch that every term can train on: all roles and signals, ragged rows, prompts that several rows share."""

from __future__ import annotations

import torch

from earnest.engines import HiddenWanted, LocalEngine, LogProbsWanted
from earnest.signals import Batch, Hidden, Reference, Teacher
from tests.engines.conftest import VOCABULARY

ROLES = ("rollout",) * 6 + ("chosen", "rejected", "chosen", "rejected") + ("demonstration",) * 2
PROMPTS = (0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 5)
LENGTHS = (6, 1, 4, 9, 2, 5, 3, 7, 1, 2, 5, 8)


def every_signal(engine: LocalEngine, seed: int = 0) -> Batch:
    """Behaviour, proximal, reference and teacher differ from the engine's policy and from each other."""
    g = torch.Generator().manual_seed(seed + 100)
    prompts = [torch.randint(3, VOCABULARY, (3 + 2 * i,), generator=g).tolist() for i in range(max(PROMPTS) + 1)]
    completions = [torch.randint(3, VOCABULARY, (n,), generator=g).tolist() for n in LENGTHS]
    batch = Batch.from_rows(
        [prompts[i] for i in PROMPTS],
        completions,
        role=ROLES,
        group=PROMPTS,
        pair=[-1] * 6 + [0, 0, 1, 1] + [-1] * 2,
        correct=[True, False, True, True, False, False] + [False] * 6,
        max_length=9,
    )
    weight = batch.weight.clone()
    weight[3, 8] = 0.0  # a masked token inside a completion
    weight[5, batch.lengths[5] - 1] = 0.0  # and one at the end of a row
    batch = batch.with_signals(weight=weight)
    own = engine.score(batch, LogProbsWanted())
    states = engine.score(batch, HiddenWanted())
    assert isinstance(own, torch.Tensor) and isinstance(states, Hidden)
    N = batch.active.shape[0]

    def near() -> torch.Tensor:
        return (own + 0.3 * torch.randn(N, generator=g).double()).clamp(max=0)

    def close_to(rows: torch.Tensor) -> Hidden:
        return Hidden(states.states[rows] + 0.3 * torch.randn(len(rows), states.states.shape[1], generator=g).double())

    at = (batch.has_role(("rollout",))[batch.row] & (batch.row != 1)).nonzero()[:, 0]  # row 1 has no teacher
    return batch.with_signals(
        advantages=batch.per_token(torch.randn(len(batch), generator=g)),
        behaviour=near(),
        proximal=near(),
        reference=Reference(near(), close_to(torch.arange(N))),
        teacher=Teacher(close_to(at), at, "live"),
        kl_baseline=torch.full((len(batch),), 0.4),
    )
