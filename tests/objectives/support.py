"""A batch with every role and signal, and a policy that consists of hidden states and a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from earnest.engines.vocabulary.eager import scalars as eager_scalars
from earnest.models.head import HeadSpec
from earnest.objectives import OBJECTIVES, Objective, Term
from earnest.objectives.needs import LogProb, Need, SpectralNorm
from earnest.objectives.view import Field
from earnest.signals import Batch, Hidden, Reference, Teacher

V, D = 13, 5

# Ragged: one-token completions, odd counts, groups of different sizes.
ROLES = ("rollout",) * 5 + ("chosen", "rejected", "rejected", "chosen") + ("demonstration",) * 2
LENGTHS = (3, 1, 5, 2, 4, 2, 4, 1, 3, 3, 1)
GROUPS = (0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7)
PAIRS = (-1,) * 5 + (0, 0, 1, 1) + (-1,) * 2


def _head(weight: Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(D, V, bias=False, dtype=weight.dtype).requires_grad_(False)
    linear.weight.copy_(weight)
    return linear


class Policy:
    """Hidden states of the active tokens as the only parameters, a frozen head, two spectral norms."""

    def __init__(self, batch: Batch, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        g = torch.Generator().manual_seed(seed)
        N = batch.active.shape[0]
        self.hidden = torch.randn(N, D, generator=g, dtype=dtype).requires_grad_()
        self.head = HeadSpec(_head(torch.randn(V, D, generator=g, dtype=dtype)), None, None, False)
        self.sigma = torch.tensor([0.7, 1.9], dtype=dtype).requires_grad_()

    def scalars(self, batch: Batch, needs: Sequence[Need], index: Tensor | None = None) -> dict[Need, Field]:
        hidden = self.hidden if index is None else self.hidden[index]
        tokens = [n for n in needs if not isinstance(n, SpectralNorm)]
        found = dict(eager_scalars(hidden, self.head, batch, tokens)) if tokens else {}
        return found | {n: Field(self.sigma, None, "given") for n in needs if isinstance(n, SpectralNorm)}

    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Tensor:
        need = LogProb(temperature)
        return self.scalars(batch, [need])[need].values.detach()

    def evaluate(self, batch: Batch, objective: Term | Objective, state: Mapping[str, Any] | None = None) -> Any:
        objective = Objective.of(objective)
        objective.check(batch)
        state = objective.initial_state() if state is None else state
        return objective.evaluate(batch, self.scalars(batch, objective.needs(batch, state)), state)

    def gradient(self, batch: Batch, objective: Term | Objective, state: Mapping[str, Any] | None = None) -> Tensor:
        """∂loss/∂(hidden, sigma), flat."""
        loss = self.evaluate(batch, objective, state).loss
        grads = torch.autograd.grad(loss, [self.hidden, self.sigma], allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip((self.hidden, self.sigma), grads, strict=True)]
        return torch.cat([p.flatten() for p in parts])


def full_batch(
    seed: int = 0, *, temperature: float = 1.0, holes: bool = True, perturb: float = 0.3
) -> tuple[Batch, Policy]:
    """Every role and signal; behaviour, proximal and reference differ from the policy and from each other."""
    g = torch.Generator().manual_seed(seed + 100)
    prompts = [[1 + r % 3, 2] for r in range(len(ROLES))]
    completions = [torch.randint(0, V, (n,), generator=g).tolist() for n in LENGTHS]
    batch = Batch.from_rows(
        prompts, completions, role=ROLES, group=GROUPS, pair=PAIRS, temperature=temperature, max_length=7
    )
    if holes:  # a masked token inside a long completion
        weight = batch.weight.clone()
        weight[2, 3] = 0.0
        weight[6, 2] = 0.0
        batch = batch.with_signals(weight=weight)
    policy = Policy(batch, seed)
    N = batch.active.shape[0]
    rollouts = batch.has_role(("rollout",))[batch.row]
    near = lambda: (policy.logprobs(batch, temperature) + perturb * torch.randn(N, generator=g).double()).clamp(max=0)  # noqa: E731
    advantage = torch.randn(len(batch), generator=g)
    correct = torch.tensor([True, False, True, True, False] + [False] * 6)
    at = (rollouts & (batch.row != 1)).nonzero()[:, 0]  # row 1 has no teacher
    batch = batch.with_signals(
        advantages=batch.per_token(advantage),
        behaviour=near(),
        proximal=near(),
        reference=Reference(near(), Hidden(policy.hidden.detach() + perturb * torch.randn(N, D, generator=g).double())),
        teacher=Teacher(
            Hidden(policy.hidden.detach()[at] + perturb * torch.randn(len(at), D, generator=g).double()), at, "live"
        ),
        correct=correct,
        kl_baseline=torch.full((len(batch),), 0.4),
    )
    return batch, policy


def examples() -> dict[str, Term]:
    """One instance of every registered term with settings that make it active on ``full_batch``."""
    special: dict[str, dict[str, Any]] = {
        "gspo": {"clip": 0.5, "clip_high": 0.5},
        "luspo": {"clip": 0.5, "clip_high": 0.5},
        "kl_barrier": {"tau": 0.01},
        "entropy_aware": {"threshold": 1.2},
        "sdpo": {"top_k": 4},
    }
    return {kind: cls(**special.get(kind, {})) for kind, cls in OBJECTIVES.items()}
