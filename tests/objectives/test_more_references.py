"""Comparisons with TRL (RLOO, importance weights) and Liger (fused losses), and finite differences of every term."""

from __future__ import annotations

import inspect
import itertools
import math
import os
import re
import textwrap
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from liger_kernel.chunked_loss.dpo_loss import LigerFusedLinearDPOLoss
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss
from torch import Tensor

from earnest.engines.vocabulary import fused
from earnest.errors import ObjectiveError
from earnest.objectives import DPO, GRPO, OBJECTIVES, RLOO, Objective, ReferenceKL, TruncatedIS, build
from earnest.objectives.needs import Need, SpectralNorm
from earnest.objectives.view import Field
from earnest.signals import Batch, Reference, advantages
from tests.objectives.support import D, Policy, V, examples, full_batch
from tests.objectives.test_against_trl import LENGTHS, Case, same

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer


def lines_of(method: Any, first: str, last: str) -> str:
    """TRL's own lines, from the one that starts with ``first`` up to the one with ``last``; the test executes them."""
    lines = inspect.getsource(method).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    end = next(i for i, line in enumerate(lines) if i > begin and line.strip().startswith(last))
    return textwrap.dedent("\n".join(lines[begin:end]))


# --- TRL --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_importance_correction_equals_trls_at_both_levels(level: str, mode: str) -> None:
    """The weights come from TRL's lines, the loss from TRL's loss."""
    case = Case(1)
    names: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "self": SimpleNamespace(
            vllm_importance_sampling_mode=f"{level}_{mode}",
            vllm_importance_sampling_clip_min=0.9,
            vllm_importance_sampling_clip_max=1.3,
        ),
        "completion_mask": case.mask,
        "tool_mask": None,
        "old_per_token_logps": case.old,
        "sampling_per_token_logps": case.sampler,
    }
    exec(lines_of(GRPOTrainer._generate_and_score_completions, "mask = completion_mask if", "# Compute the per-token log probabilities for the reference"), names)  # fmt: skip  # noqa: E501
    weights = names["vllm_importance_sampling_ratio"]
    plain = (case.old - case.sampler).exp()
    assert (weights - (plain if level == "token" else plain[:, :1])).abs().max() > 0.01, "nothing was cut"
    batch = case.batch.with_signals(proximal=case.flat(case.old), behaviour=case.flat(case.sampler))
    correction = TruncatedIS(cap=1.3, floor=0.9, level=level, mode=mode)
    same(case.ours(GRPO(correction=correction), batch), case.theirs("grpo", ratio=weights))


def test_group_advantages_are_trls_up_to_their_1e_4() -> None:
    rewards, group = torch.tensor([1e-3, 2e-3, 4e-3, 0.0, 1.0, 0.0, 0.0, 3.0]), torch.arange(2).repeat_interleave(4)
    std = torch.stack([r.std() for r in rewards.view(2, 4)]).repeat_interleave(4)
    names: dict[str, Any] = {
        "torch": torch,
        "self": SimpleNamespace(scale_rewards="group"),
        "rewards": rewards,
        "mean_grouped_rewards": rewards.view(2, 4).mean(1).repeat_interleave(4),
        "std_rewards": std,
    }
    exec(lines_of(GRPOTrainer._generate_and_score_completions, "advantages = rewards - mean_grouped", "is_std_zero"), names)  # fmt: skip  # noqa: E501
    ours = advantages(rewards, group).values
    torch.testing.assert_close(names["advantages"] * (std + 1e-4) / std, ours, rtol=1e-4, atol=1e-6)
    assert (names["advantages"] - ours).abs().max() > 0.03, "on small rewards the 1e-4 shows"


def test_rloo_is_trls_on_policy() -> None:
    """Leave-one-out advantages by their lines; on-policy their clipped ratio has the gradient of our log-probs.

    Off-policy theirs clips a ratio of whole sequences; earnest's is REINFORCE, and a correction is a separate setting.
    """
    rewards, group = torch.tensor([1.0, 0.0, 0.5, 2.0]).double(), torch.tensor([0, 0, 1, 1])
    names: dict[str, Any] = {"torch": torch, "grouped_rewards": rewards.view(2, 2), "rewards": rewards}
    names |= {"num_generations": 2}
    exec(lines_of(RLOOTrainer._generate_and_score_completions, "scorable_counts", "# Normalize advantages"), names)
    found = advantages(rewards, group, estimator="leave_one_out")
    torch.testing.assert_close(found.values.double(), names["advantages"], rtol=1e-6, atol=1e-7)

    case = Case(3)
    old = (case.lp * case.mask).sum(1).detach()
    stub = SimpleNamespace(
        aux_loss_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.0,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x, num_processes=1
        ),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (case.lp, case.entropy, None),
    )
    ids = torch.ones(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :2],
        "prompt_mask": ids[:, :2],
        "completion_ids": ids,
        "completion_mask": case.mask,
        "advantages": found.values.double(),
        "old_logps": old,
    }
    (theirs,) = torch.autograd.grad(RLOOTrainer._compute_loss(stub, None, inputs), case.lp)
    per_token = case.flat(found.values.double()[:, None].expand(case.mask.shape))
    batch = case.batch.with_signals(advantages=per_token, estimator="leave_one_out")
    _, ours = case.ours(RLOO(), batch)
    assert theirs.abs().max() > 0.01
    torch.testing.assert_close(ours[: len(LENGTHS)], theirs, rtol=1e-9, atol=1e-12)


def test_every_loss_type_of_trl_is_compared_or_refused() -> None:
    """TRL's trainer lists them in its source; a new one fails this test until it is implemented or listed as
    refused."""
    source = inspect.getsource(GRPOTrainer._compute_loss)
    tests = re.findall(r"self\.loss_type (?:==|in) (\[[^\]]*\]|\"\w+\")", source)
    found = set(re.findall(r"\"(\w+)\"", " ".join(tests)))
    compared = {"grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo"}
    assert found == compared | {"vespo"}
    assert compared <= set(OBJECTIVES)
    with pytest.raises(ObjectiveError, match="vespo"):
        build("vespo")


# --- Liger ------------------------------------------------------------------------------------------------------------


class Rows:
    """Four rows of hidden states with a frozen head, for losses that take them."""

    T = 5

    def __init__(self, roles: tuple[str, ...], pairs: tuple[int, ...]) -> None:
        g = torch.Generator().manual_seed(5)
        ids = torch.randint(0, V, (4, self.T), generator=g)
        self.ids, self.batch = ids, Batch.from_rows([[1]] * 4, ids.tolist(), role=roles, pair=pairs)  # type: ignore[arg-type]
        self.policy = Policy(self.batch, 2)
        self.reference = Policy(self.batch, 9).hidden.detach() * 0.3 + self.policy.hidden.detach()

    def logps(self, states: Tensor) -> Tensor:
        return (
            self.policy.head.logits(states).log_softmax(-1).gather(-1, self.batch.token_target[:, None])[:, 0].detach()
        )

    def shaped(self, flat: Tensor) -> Tensor:
        return flat.float().view(4, self.T, *flat.shape[1:])


def test_ligers_grpo() -> None:
    rows = Rows(("rollout",) * 4, (-1,) * 4)
    g = torch.Generator().manual_seed(1)
    old, ref = (
        (rows.logps(rows.policy.hidden) + 0.3 * torch.randn(20, generator=g)).clamp(max=0),
        rows.logps(rows.reference),
    )
    advantage = torch.randn(4, generator=g)
    batch = rows.batch.with_signals(
        advantages=rows.batch.per_token(advantage).double(), behaviour=old, reference=Reference(ref)
    )
    ours = rows.policy.gradient(batch, GRPO(clip=0.2) + 0.04 * ReferenceKL(estimator="k3"))[: 20 * D].view(20, D)
    hidden = rows.policy.hidden.detach().float().requires_grad_()
    loss = LigerFusedLinearGRPOLoss(beta=0.04, loss_type="grpo", compiled=False, use_ref_model=True, chunk_size=2)
    value = loss(
        hidden.view(4, rows.T, D),
        rows.policy.head.weight.float(),
        rows.ids,
        torch.ones(4, rows.T),
        advantage,
        ref_per_token_logps=rows.shaped(ref),
        old_per_token_logps=rows.shaped(old),
    )[0]
    (theirs,) = torch.autograd.grad(value, hidden)
    assert theirs.abs().max() > 1e-3
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-4, atol=1e-6)


def test_ligers_dpo() -> None:
    rows = Rows(("chosen", "chosen", "rejected", "rejected"), (0, 1, 0, 1))
    batch = rows.batch.with_signals(reference=Reference(rows.logps(rows.reference)))
    ours = rows.policy.gradient(batch, DPO(beta=0.3))[: 20 * D].view(20, D)
    hidden = rows.policy.hidden.detach().float().requires_grad_()
    weight = rows.policy.head.weight.float()
    loss = LigerFusedLinearDPOLoss(beta=0.3, compute_nll_loss=False, compiled=False, use_ref_model=True)
    value = loss(
        weight,
        hidden.view(4, rows.T, D),
        rows.ids,
        ref_input=rows.shaped(rows.reference),
        ref_weight=weight,
    )
    value = value[0] if isinstance(value, tuple) else value
    (theirs,) = torch.autograd.grad(value, hidden)
    assert theirs.abs().max() > 1e-3
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-4, atol=1e-6)


# --- every term -------------------------------------------------------------------------------------------------------


# What holds the student fixed (SDPO's ratio, TAID's blend) is switched off; other tests show that it has no
# gradient. By definition the values of the three are not integrals of their gradients; reference code checks them.
HELD: dict[str, dict[str, Any]] = {"sdpo": {"importance_clip": None}, "taid": {"t_start": 1.0}}
SURROGATES = {"reinforce", "rloo", "cispo"}


def test_only_surrogates_are_exempt_from_finite_differences() -> None:
    assert {k for k, cls in OBJECTIVES.items() if "stop_gradient" in cls.laws} - set(HELD) == SURROGATES


@pytest.mark.parametrize("kind", sorted(set(OBJECTIVES) - SURROGATES))
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    """gradcheck in float64, by hidden states and spectral norms."""
    term = replace(examples()[kind], **HELD.get(kind, {}))
    batch, policy = full_batch()

    def loss(hidden: Tensor, sigma: Tensor) -> Tensor:
        policy.hidden, policy.sigma = hidden, sigma
        return policy.evaluate(batch, term).loss

    start = (policy.hidden.detach().requires_grad_(), policy.sigma.detach().requires_grad_())
    assert torch.autograd.gradcheck(loss, start, fast_mode=True, eps=1e-7, atol=1e-6, rtol=1e-4)


class FusedPolicy(Policy):
    """The same policy through the vocabulary pass, as in an engine."""

    def scalars(self, batch: Batch, needs: Any, index: Tensor | None = None) -> dict[Need, Field]:
        hidden = self.hidden if index is None else self.hidden[index]
        tokens = [n for n in needs if not isinstance(n, SpectralNorm)]
        found = dict(fused.scalars(hidden, self.head, batch, tokens, budget_bytes=3 * V * 8)) if tokens else {}
        return found | {n: Field(self.sigma, None, "given") for n in needs if isinstance(n, SpectralNorm)}


@pytest.mark.slow
def test_every_pair_through_the_fused_pass() -> None:
    """A single need uses tiles, several use rows: both equal the eager pass for every pair of terms."""
    batch, policy = full_batch()
    fast = FusedPolicy(batch, 0)
    torch.testing.assert_close(fast.hidden, policy.hidden)
    for first, second in itertools.combinations_with_replacement(sorted(OBJECTIVES), 2):
        terms = examples()
        objective = Objective.of(terms[first]) if first == second else terms[first] + 0.5 * terms[second]
        torch.testing.assert_close(
            fast.gradient(batch, objective),
            policy.gradient(batch, objective),
            rtol=1e-8,
            atol=1e-10,
            msg=lambda text, pair=(first, second): f"{pair}: {text}",
        )
