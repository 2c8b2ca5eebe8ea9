"""Differential tests against the code that TRL ships, called with crafted inputs through a stub trainer.

Where earnest differs intentionally, a test states the difference and the reason.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from earnest.objectives import (
    BNPO,
    CISPO,
    DAPO,
    DPO,
    GRPO,
    GSPO,
    KTO,
    LUSPO,
    SAPO,
    SDPO,
    DrGRPO,
    EntropyBonus,
    Objective,
    ReferenceKL,
    SimPO,
)
from earnest.objectives.needs import Divergence, Entropy, LogProb
from earnest.objectives.view import Field
from earnest.signals import Batch, FullLogits, Reference, Teacher
from tests.objectives.support import V, full_batch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # otherwise its import warns, and warnings are errors here

from trl.experimental.cpo import CPOTrainer
from trl.experimental.sdpo.loss_utils import apply_importance_sampling_clipping, compute_topk_self_distillation_loss
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

LENGTHS = (3, 1, 4, 2)
MAX_LENGTH = 6


class Case:
    """Rollouts with ragged lengths: the same numbers flat (ours) and padded (theirs)."""

    def __init__(self, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        R, T = len(LENGTHS), max(LENGTHS)
        self.mask = torch.tensor([[1.0] * n + [0.0] * (T - n) for n in LENGTHS]).double()
        draw = lambda: -0.3 - torch.rand(R, T, generator=g).double()  # noqa: E731
        self.lp, self.old, self.ref, self.sampler = draw().requires_grad_(), draw(), draw(), draw()
        self.entropy = torch.rand(R, T, generator=g).double().requires_grad_()
        self.advantages = torch.randn(R, generator=g).double()
        completions = [torch.randint(0, V, (n,), generator=g).tolist() for n in LENGTHS]
        self.batch = Batch.from_rows([[1, 2]] * R, completions, max_length=MAX_LENGTH).with_signals(
            advantages=self.flat(self.advantages[:, None].expand(R, T)),
            behaviour=self.flat(self.old),
            reference=Reference(self.flat(self.ref)),
        )

    def flat(self, values: Tensor) -> Tensor:
        return values[self.mask.bool()]

    def ours(self, objective: Any, batch: Batch | None = None) -> tuple[float, Tensor]:
        """(loss, ∂loss/∂(lp, entropy))."""
        batch = self.batch if batch is None else batch
        objective = Objective.of(objective)
        objective.check(batch)
        scalars = {LogProb(): Field(self.flat(self.lp)), Entropy(): Field(self.flat(self.entropy))}
        return self._with_gradient(objective.evaluate(batch, scalars, {}).loss)

    def theirs(
        self, loss_type: str, *, level: str = "token", ratio: Tensor | None = None, **settings: Any
    ) -> tuple[float, Tensor]:
        """TRL's own ``GRPOTrainer._compute_loss`` on a stub trainer."""
        wanted = {
            "beta": 0.0,
            "epsilon": 0.2,
            "epsilon_high": 0.2,
            "delta": None,
            "bias_correction": False,
            "entropy": 0.0,
        } | settings
        args = SimpleNamespace(
            delta=wanted["delta"],
            use_bias_correction_kl=wanted["bias_correction"],
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        )
        stub = SimpleNamespace(
            args=args,
            loss_type=loss_type,
            importance_sampling_level=level,
            beta=wanted["beta"],
            epsilon_low=wanted["epsilon"],
            epsilon_high=wanted["epsilon_high"],
            max_completion_length=MAX_LENGTH,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            use_vllm=ratio is not None,
            vllm_importance_sampling_correction=ratio is not None,
            current_gradient_accumulation_steps=1,
            aux_loss_enabled=False,
            use_adaptive_entropy=False,
            entropy_coef=wanted["entropy"],
            _entropy_bonus_enabled=wanted["entropy"] != 0,
            model=SimpleNamespace(training=True),
            accelerator=SimpleNamespace(
                num_processes=1,
                gather=lambda x: x,
                gather_for_metrics=lambda x: x,
                reduce=lambda x, reduction: x,
                sync_gradients=True,
            ),
            _metrics={"train": defaultdict(list)},
            _get_per_token_logps_and_entropies=lambda *a, **k: (self.lp, self.entropy, None),
        )
        R = len(LENGTHS)
        ids = torch.ones(R, max(LENGTHS), dtype=torch.long)
        inputs = {
            "prompt_ids": torch.ones(R, 2, dtype=torch.long),
            "prompt_mask": torch.ones(R, 2, dtype=torch.long),
            "completion_ids": ids,
            "completion_mask": self.mask,
            "advantages": self.advantages,
            "old_per_token_logps": self.old,
            "ref_per_token_logps": self.ref,
            "num_items_in_batch": self.mask.sum(),
        }
        if ratio is not None:
            inputs["importance_sampling_ratio"] = ratio
        return self._with_gradient(GRPOTrainer._compute_loss(stub, None, inputs))

    def _with_gradient(self, loss: Tensor) -> tuple[float, Tensor]:
        grads = torch.autograd.grad(loss, [self.lp, self.entropy], allow_unused=True)
        return float(loss.detach()), torch.cat([torch.zeros_like(self.lp) if x is None else x for x in grads])


def same(a: tuple[float, Tensor], b: tuple[float, Tensor]) -> None:
    assert b[1].abs().max() > 1e-3, "a comparison of zeros proves nothing"
    assert a[0] == pytest.approx(b[0], rel=1e-5, abs=1e-7)
    torch.testing.assert_close(a[1], b[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (GRPO(clip=0.2), {"loss_type": "grpo"}),
        (GRPO(clip=0.1, clip_high=0.4), {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.4}),
        (GRPO(clip=0.2, dual_clip=1.4), {"loss_type": "grpo", "delta": 1.4}),
        (DAPO(clip=0.2, clip_high=0.28), {"loss_type": "dapo", "epsilon_high": 0.28}),
        (DrGRPO(clip=0.2), {"loss_type": "dr_grpo"}),
        (BNPO(clip=0.2), {"loss_type": "bnpo"}),
        (
            GSPO(clip=0.1, clip_high=0.1),
            {"loss_type": "grpo", "level": "sequence", "epsilon": 0.1, "epsilon_high": 0.1},
        ),
        (
            GSPO(clip=0.3, clip_high=0.3, level="token"),
            {"loss_type": "grpo", "level": "sequence", "epsilon": 0.3, "epsilon_high": 0.3},
        ),
        (
            LUSPO(clip=0.1, clip_high=0.1),
            {"loss_type": "luspo", "level": "sequence", "epsilon": 0.1, "epsilon_high": 0.1},
        ),
        (CISPO(max_ratio=1.3), {"loss_type": "cispo", "epsilon_high": 1.3}),
        (SAPO(), {"loss_type": "sapo"}),
        (GRPO() + 0.3 * ReferenceKL(estimator="k3"), {"loss_type": "grpo", "beta": 0.3}),
        (DAPO(clip_high=0.2) + 0.3 * ReferenceKL(estimator="k3", per="token"), {"loss_type": "dapo", "beta": 0.3}),
        (
            GRPO() + 0.3 * ReferenceKL(estimator="k3", importance="attached"),
            {"loss_type": "grpo", "beta": 0.3, "bias_correction": True},
        ),
        (GRPO() + 0.05 * EntropyBonus(), {"loss_type": "grpo", "entropy": 0.05}),
    ],
    ids=lambda x: None if isinstance(x, dict) else "+".join(w.term.kind for w in Objective.of(x).terms),
)
def test_policy_losses_equal_trls(ours: Any, theirs: dict[str, Any], seed: int) -> None:
    case = Case(seed)
    same(case.ours(ours), case.theirs(**theirs))


# --- differences on purpose -----------------------------------------------------------------------------------------


def test_trls_cispo_default_clamps_the_ratio_to_epsilon() -> None:
    """TRL clamps ρ at ``epsilon_high`` itself, by default 0.2: on-policy its gradient is 0.2 × REINFORCE.

    earnest's bound is absolute and at least 1, so the on-policy law holds.
    """
    case = Case()
    case.old = case.lp.detach()
    batch = case.batch.with_signals(behaviour=case.flat(case.old))
    theirs, ours = case.theirs("cispo"), case.ours(CISPO(), batch)
    torch.testing.assert_close(theirs[1], 0.2 * ours[1], rtol=1e-5, atol=1e-8)


def test_trl_becomes_reinforce_without_old_log_probs() -> None:
    """TRL falls back to old = sg[lp].

    earnest raises and names the signal (test_registry), because that is another objective.
    """
    case = Case()
    case.old = None  # type: ignore[assignment]
    theirs = case.theirs("grpo")
    batch = case.batch.with_signals(behaviour=case.flat(case.lp.detach()))
    same(case.ours(GRPO(), batch), theirs)


# --- preferences ----------------------------------------------------------------------------------------------------


class Pairs:
    """Three pairs with rows in mixed order; TRL wants chosen rows first, then rejected."""

    def __init__(self, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        lengths = (3, 1, 4, 2, 2, 5)
        self.roles = ("chosen", "rejected", "rejected", "chosen", "chosen", "rejected")
        self.pair = (7, 7, 2, 2, 5, 5)
        completions = [torch.randint(0, V, (n,), generator=g).tolist() for n in lengths]
        self.batch = Batch.from_rows([[1, 2]] * 6, completions, role=self.roles, pair=self.pair)
        N = sum(lengths)
        self.lp = (-3 * torch.rand(N, generator=g).double()).requires_grad_()
        self.ref = -3 * torch.rand(N, generator=g).double()
        self.batch = self.batch.with_signals(reference=Reference(self.ref))
        self.chosen = [0, 3, 4]
        self.rejected = [1, 2, 5]

    def sums(self, values: Tensor, rows: list[int]) -> Tensor:
        return torch.stack([values[self.batch.row == r].sum() for r in rows])

    def ours(self, term: Any) -> tuple[float, Tensor]:
        Objective.of(term).check(self.batch)
        loss = Objective.of(term).evaluate(self.batch, {LogProb(): Field(self.lp)}, {}).loss
        return float(loss.detach()), torch.autograd.grad(loss, self.lp)[0]


def _trl_dpo(pairs: Pairs, loss_type: str, beta: float, smoothing: float) -> tuple[float, Tensor]:
    """``DPOTrainer._compute_loss`` on a stub whose model returns the pairs' log-probs, chosen rows first."""
    T = 7  # two prompt tokens and at most five of the completion
    order = pairs.chosen + pairs.rejected
    mask = torch.zeros(6, T, dtype=torch.long)
    place = torch.full((6, T - 1), -1, dtype=torch.long)
    for i, row in enumerate(order):
        tokens = (pairs.batch.row == row).nonzero()[:, 0]
        mask[i, 2 : 2 + len(tokens)] = 1
        place[i, 1 : 1 + len(tokens)] = tokens  # position t predicts the token at t+1
    nothing = torch.zeros(6, T - 1).double()
    outputs = SimpleNamespace(
        log_probs=torch.where(place >= 0, pairs.lp[place.clamp(min=0)], 0.0),
        entropy=nothing,
        mean_logits=nothing,
        is_top1=nothing.bool(),
    )
    stub = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x),
        beta=beta,
        label_smoothing=smoothing,
        loss_types=[loss_type],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        use_weighting=False,
        precompute_ref_logps=True,
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    ids = torch.ones(6, T, dtype=torch.long)
    inputs = {
        "input_ids": ids,
        "attention_mask": ids,
        "completion_mask": mask,
        "ref_chosen_logps": pairs.sums(pairs.ref, pairs.chosen),
        "ref_rejected_logps": pairs.sums(pairs.ref, pairs.rejected),
    }
    loss = DPOTrainer._compute_loss(stub, lambda **_: outputs, inputs, return_outputs=False)
    return float(loss.detach()), torch.autograd.grad(loss, pairs.lp)[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("term", "loss_type", "smoothing"),
    [
        (DPO(beta=0.3), "sigmoid", 0.0),
        (DPO(beta=0.3, loss="hinge"), "hinge", 0.0),
        (DPO(beta=0.3, loss="ipo"), "ipo", 0.0),
        (DPO(beta=0.3, loss="robust", smoothing=0.2), "robust", 0.2),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_dpo_equals_trls(term: DPO, loss_type: str, smoothing: float, seed: int) -> None:
    pairs = Pairs(seed)
    same(pairs.ours(term), _trl_dpo(pairs, loss_type, 0.3, smoothing))


def test_trls_sigmoid_dpo_ignores_label_smoothing() -> None:
    """TRL 1.16 accepts ``label_smoothing`` with loss_type 'sigmoid' and does nothing with it.

    Ours is cDPO's, as CPO's is.
    """
    pairs = Pairs(1)
    ignored, plain = _trl_dpo(pairs, "sigmoid", 0.3, 0.2), _trl_dpo(pairs, "sigmoid", 0.3, 0.0)
    torch.testing.assert_close(ignored[1], plain[1])
    ours = pairs.ours(DPO(beta=0.3, smoothing=0.2))
    assert (ours[1] - plain[1]).abs().max() > 1e-3
    stub = SimpleNamespace(
        alpha=0.0, loss_type="sigmoid", beta=0.3, label_smoothing=0.2, accelerator=SimpleNamespace(device="cpu")
    )
    gap = pairs.lp - pairs.ref
    losses, *_ = CPOTrainer.cpo_loss(stub, pairs.sums(gap, pairs.chosen), pairs.sums(gap, pairs.rejected))
    same(ours, (float(losses.mean().detach()), torch.autograd.grad(losses.mean(), pairs.lp)[0]))


def _trl_kto(pairs: Pairs, loss_type: str, z: float) -> tuple[float, Tensor]:
    """``KTOTrainer._compute_loss`` on a stub. Its KL rows have a log-ratio of ``z`` each."""
    T = 7
    mask = torch.zeros(6, T, dtype=torch.long)
    place = torch.full((6, T - 1), -1, dtype=torch.long)
    for row in range(6):
        tokens = (pairs.batch.row == row).nonzero()[:, 0]
        mask[row, 2 : 2 + len(tokens)] = 1
        place[row, 1 : 1 + len(tokens)] = tokens
    nothing = torch.zeros(6, T - 1).double()
    outputs = SimpleNamespace(
        log_probs=torch.where(place >= 0, pairs.lp[place.clamp(min=0)], 0.0), entropy=nothing, mean_logits=nothing
    )
    stub = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        beta=0.3,
        desirable_weight=1.4,
        undesirable_weight=0.7,
        loss_type=loss_type,
        calculate_KL=loss_type == "kto",
        precompute_ref_logps=True,
        aux_loss_enabled=False,
        _compute_kl_logps=lambda model, batch: torch.full((6,), z - 5.0).double(),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    ids = torch.ones(6, T, dtype=torch.long)
    inputs = {
        "input_ids": ids,
        "attention_mask": ids,
        "completion_mask": mask,
        "label": torch.tensor([role == "chosen" for role in pairs.roles]),
        "ref_logps": pairs.sums(pairs.ref, list(range(6))),
        "ref_KL_logps": torch.full((6,), -5.0).double(),
    }
    loss = KTOTrainer._compute_loss(stub, lambda **_: outputs, inputs, return_outputs=False)
    return float(loss.detach()), torch.autograd.grad(loss, pairs.lp)[0]


@pytest.mark.parametrize("seed", range(3))
def test_kto_equals_trls(seed: int) -> None:
    """With a KL baseline, and without one ('apo_zero_unpaired')."""
    pairs = Pairs(seed)
    pairs.batch = pairs.batch.with_signals(kl_baseline=torch.full((6,), 1.25).double())
    term = KTO(beta=0.3, desirable_weight=1.4, undesirable_weight=0.7)
    same(pairs.ours(term), _trl_kto(pairs, "kto", 1.25))
    same(pairs.ours(replace(term, baseline="zero")), _trl_kto(pairs, "apo_zero_unpaired", 0.0))


@pytest.mark.parametrize("smoothing", [0.0, 0.15])
def test_simpo_equals_trls_cpo(smoothing: float) -> None:
    """CPO's loss_type 'simpo' on mean log-probs: β(Δ - γ/β) = βΔ - γ."""
    pairs = Pairs(3)
    stub = SimpleNamespace(
        alpha=0.0,
        loss_type="simpo",
        simpo_gamma=0.7,
        beta=2.0,
        label_smoothing=smoothing,
        accelerator=SimpleNamespace(device="cpu"),
    )
    length = lambda rows: torch.tensor([float((pairs.batch.row == r).sum()) for r in rows]).double()  # noqa: E731
    chosen = pairs.sums(pairs.lp, pairs.chosen) / length(pairs.chosen)
    rejected = pairs.sums(pairs.lp, pairs.rejected) / length(pairs.rejected)
    losses, *_ = CPOTrainer.cpo_loss(stub, chosen, rejected)
    theirs = (float(losses.mean().detach()), torch.autograd.grad(losses.mean(), pairs.lp)[0])
    same(pairs.ours(SimPO(beta=2.0, gamma=0.7, smoothing=smoothing)), theirs)


# --- self-distillation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
def test_sdpo_equals_trls_loss_utils(alpha: float, tail: str) -> None:
    """Student's top-K, tail bucket or renormalised, times the clipped ratio, mean over the covered tokens."""
    batch, policy = full_batch()
    assert batch.teacher is not None and batch.teacher.at is not None and batch.behaviour is not None
    at = batch.teacher.at
    logits = policy.hidden @ policy.head.weight.T
    teacher = batch.teacher.distribution.states @ policy.head.weight.T  # type: ignore[union-attr]
    per_token = compute_topk_self_distillation_loss(
        logits[at], teacher, distillation_topk=4, distillation_alpha=alpha, distillation_add_tail=tail == "bucket"
    )
    lp = logits.log_softmax(-1).gather(-1, batch.token_target[:, None])[:, 0]
    per_token = apply_importance_sampling_clipping(per_token, lp[at], batch.behaviour[at], 1.2)
    loss = per_token.mean()
    theirs = (float(loss.detach()), torch.autograd.grad(loss, policy.hidden)[0].flatten())
    term = SDPO(alpha=alpha, top_k=4, tail=tail, importance_clip=1.2)
    ours = policy.gradient(batch, term)[: policy.hidden.numel()]
    same((float(policy.evaluate(batch, term).loss.detach()), ours), theirs)


def test_trl_clamps_the_log_ratio_and_earnest_does_not() -> None:
    """TRL clamps lp - q to ±20, so a token with a probability near 0 keeps a ratio of 2e-9; earnest does not clamp."""
    one = torch.ones(1).double()
    theirs = apply_importance_sampling_clipping(one, torch.tensor([-60.0]).double(), torch.tensor([-1.0]).double(), 2.0)
    batch = Batch.from_rows([[1]], [[2]], behaviour=[[-1.0]]).with_signals(
        teacher=Teacher(FullLogits(torch.zeros(1, 4)))
    )
    term = SDPO(support="full")
    need = Divergence("teacher", 0.5)
    ours = (
        Objective.of(term)
        .evaluate(batch, {need: Field(one), LogProb(): Field(torch.tensor([-60.0]).double())}, {})
        .loss
    )
    assert float(theirs) == pytest.approx(math.exp(-20)) and float(ours) == pytest.approx(math.exp(-59), rel=1e-6)
