"""Ordinary steps that the laws once took for broken ones, and beside each the broken one that must still be seen."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from earnest.audit import Step, StepError, Together, Verdict, audit
from earnest.audit.laws import clipping, coverage, documents, liveness, on_policy, splits
from earnest.audit.trainers import step_of_trainer
from tests.audit.steps import Tiny, grpo_loss, policy_step, sft_loss, sft_step
from tests.audit.trainer_cases import llama

EVERY = "every supervised position"


def outcomes(verdict: Verdict) -> dict[str, str]:
    return {f.subject: f.outcome for f in verdict.findings}


def with_advantages(values: list[float], loss: Any = grpo_loss) -> Step:
    """GRPO without its penalty, which has a gradient of its own."""
    step = policy_step(lambda m, b, **knobs: loss(m, b, **{**knobs, "beta": 0.0}))
    step.batch = {**step.batch, "advantages": torch.tensor(values)}
    return step


# --- CV: a group without variance has advantage 0 ---------------------------------------------------------------------


def without_the_last(model: nn.Module, batch: Mapping[str, Any], **knobs: Any) -> Any:
    """The last supervised token of every row is lost."""
    mask: Tensor = batch["mask"]
    last = mask.cumsum(-1) == mask.sum(-1, keepdim=True)
    return grpo_loss(model, {**batch, "mask": mask * ~last}, **knobs)


@pytest.mark.parametrize(
    ("advantages", "loss", "outcome"),
    [
        ([0.0, 0.0, 0.7, -1.2, 0.0], grpo_loss, "holds"),
        ([0.0, 0.0, 0.0, 0.0, 0.0], grpo_loss, "not applicable"),
        ([0.0, 0.0, 0.7, -1.2, 0.0], without_the_last, "fails"),
    ],
)
def test_rows_of_advantage_zero_are_left_out(advantages: list[float], loss: Any, outcome: str) -> None:
    verdict = audit(with_advantages(advantages, loss), laws=[coverage.LAW])
    assert outcomes(verdict)[EVERY] == outcome, str(verdict)


# --- LAW, SE: advantages that are whitened in the step ----------------------------------------------------------------


def whitened(model: nn.Module, batch: Mapping[str, Any], **knobs: Any) -> Any:
    a: Tensor = batch["advantages"]
    return grpo_loss(model, {**batch, "advantages": (a - a.mean()) / (a.std() + 1e-8)}, **knobs)


def centred(model: nn.Module, batch: Mapping[str, Any], **knobs: Any) -> Any:
    return grpo_loss(model, {**batch, "advantages": batch["advantages"] - batch["advantages"].mean()}, **knobs)


def turned(model: nn.Module, batch: Mapping[str, Any], **knobs: Any) -> Any:
    return whitened(model, {**batch, "advantages": -batch["advantages"]}, **knobs)


LAWS = [on_policy.LAW, clipping.LAW, splits.LAW]


@pytest.mark.parametrize("loss", [whitened, centred])
def test_whitened_advantages_are_no_fault_where_rows_interact(loss: Any) -> None:
    verdict = audit(policy_step(loss, rows_interact=True), laws=LAWS)
    assert verdict.holds, str(verdict)
    assert {"on-policy gradient = REINFORCE", "clip"} <= {
        f.subject for f in verdict.findings if f.outcome == "not applicable"
    }


def test_a_lost_sign_is_seen_through_the_whitening() -> None:
    verdict = audit(policy_step(turned, rows_interact=True), laws=[on_policy.LAW])
    assert [f.subject for f in verdict.failures] == ["descending raises what was better"], str(verdict)


def test_rows_that_interact_elsewhere_keep_their_laws() -> None:
    """Only advantages that are treated over the batch take the laws of a plain policy gradient away."""
    found = outcomes(audit(policy_step(rows_interact=True), laws=LAWS))
    assert found["on-policy gradient = REINFORCE"] == "holds"
    assert found["clip: outside, to be undone"] == "holds"


# --- LAW: what is a clip, by its name ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["smooth_eps", "huber_delta", "reward_clip", "cliprange_value"])
def test_a_setting_with_a_part_of_a_clips_name_is_no_clip(name: str) -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float, clip: float, **more: float) -> Any:
        value, metrics = grpo_loss(model, batch, beta, clip)
        return value / (1 + more[name]), metrics  # acts at ratio 1, lawfully

    step = policy_step(loss)
    step.knobs = {**step.knobs, name: 1.0}
    verdict = audit(step, laws=[on_policy.LAW])
    assert verdict.holds, str(verdict)
    assert {s for s in outcomes(verdict) if s.startswith("clip ")} == {"clip clip at ratio 1"}


def test_a_clip_that_acts_at_ratio_one_is_seen() -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float, eps_clip: float) -> Any:
        value, metrics = grpo_loss(model, batch, beta, eps_clip)
        return value * eps_clip, metrics

    step = policy_step()
    step.loss, step.knobs = loss, {"beta": 0.04, "eps_clip": 0.2}
    assert outcomes(audit(step, laws=[on_policy.LAW]))["clip eps_clip at ratio 1"] == "fails"


# --- GL: two optimizers, running statistics, experts without a token --------------------------------------------------


def split(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.1, momentum=0.9),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=1e-3),
    ]


@pytest.mark.parametrize("members", [2, 1])
def test_several_optimizers_own_the_model_together(members: int) -> None:
    step = sft_step()
    each = split(step.model)[:members]
    for optimizer in each:  # so that there is a state to put back
        sft_loss(step.model, step.batch)[0].backward()
        optimizer.step()
    before = [{i: {k: v.clone() for k, v in s.items()} for i, s in o.state_dict()["state"].items()} for o in each]
    weights = [p.detach().clone() for p in step.model.parameters()]
    given: Any = each
    verdict = audit(
        Step(model=step.model, loss=sft_loss, batch=step.batch, roles=step.roles, optimizer=given), laws=[liveness.LAW]
    )
    assert verdict.holds == (members == 2), str(verdict)
    for optimizer, kept in zip(each, before, strict=True):
        now = optimizer.state_dict()["state"]
        assert now.keys() == kept.keys()
        assert all(torch.equal(now[i][k], v) for i, s in kept.items() for k, v in s.items() if isinstance(v, Tensor))
    assert all(torch.equal(p, w) for p, w in zip(step.model.parameters(), weights, strict=True))


def test_no_optimizers_together_say_so() -> None:
    with pytest.raises(ValueError, match="holds no optimizer"):
        Together()


class Normed(Tiny):
    """With a BatchNorm, whose statistics run, and a buffer that is a frozen weight."""

    def __init__(self) -> None:
        super().__init__(0)
        self.head = nn.Linear(16, 23, bias=False)  # a bias before a BatchNorm has no effect
        self.norm = nn.BatchNorm1d(23)
        self.basis = nn.Buffer(torch.ones(3))

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return self.norm(super().forward(ids, attention, documents).mT).mT


class Reaching(torch.optim.SGD):
    """Its step moves a buffer, too."""

    buffer: Tensor | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if self.buffer is not None:
            self.buffer.add_(1)


@pytest.mark.parametrize("pushed", [False, True])
def test_running_statistics_run_and_frozen_buffers_do_not(pushed: bool) -> None:
    step, model = sft_step(), Normed()
    optimizer = Reaching(model.parameters(), lr=0.1)
    optimizer.buffer = model.basis if pushed else None
    verdict = audit(
        Step(model=model, loss=sft_loss, batch=step.batch, roles=step.roles, optimizer=optimizer, rows_interact=True),
        laws=[liveness.LAW],
    )
    assert [f.subject for f in verdict.failures] == ["0 frozen parameters, 4 buffers"] * pushed, str(verdict)
    assert "3 buffers did in the forward pass" in str([f.measured for f in verdict.findings])


class Routed(Tiny):
    """Two experts; every token goes to the first."""

    def __init__(self) -> None:
        super().__init__(0)
        self.experts = nn.ModuleList(nn.Linear(23, 23) for _ in range(2))

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return self.experts[0](super().forward(ids, attention, documents))


@pytest.mark.parametrize(("may_idle", "holds"), [((), False), (("experts.1.*",), True), (("experts.0.*",), False)])
def test_an_expert_without_a_token_may_be_declared(may_idle: tuple[str, ...], holds: bool) -> None:
    step, model = sft_step(), Routed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    verdict = audit(
        Step(model=model, loss=sft_loss, batch=step.batch, roles=step.roles, optimizer=optimizer, may_idle=may_idle),
        laws=[liveness.LAW],
    )
    assert verdict.holds == holds, str(verdict)


def test_one_text_is_no_sequence_of_patterns() -> None:
    with pytest.raises(StepError, match="is one text"):
        sft_step(may_idle="experts")


# --- trainers: packed rows and routers --------------------------------------------------------------------------------


def trainers_step(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    trainer = SimpleNamespace(args=SimpleNamespace(seed=0), optimizer=None)
    return step_of_trainer(
        trainer, model, inputs, lambda m, batch, num_items_in_batch: m(**batch, use_cache=False).loss
    )


@pytest.mark.parametrize("shown", [False, True])
def test_a_packed_row_is_known_by_its_positions(shown: bool) -> None:
    """transformers keeps packed documents apart by their position ids, unless an all-ones mask says otherwise."""
    ids = torch.randint(3, 19, (1, 16), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in (7, 5, 4)])[None]
    inputs = {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}
    step = trainers_step(llama(0, torch.float32), inputs | ({"attention_mask": torch.ones_like(ids)} if shown else {}))
    assert step.batch[step.roles["documents"]].tolist() == [[0] * 7 + [1] * 5 + [2] * 4]
    verdict = audit(step, laws=[documents.LAW])
    assert outcomes(verdict)[documents.PACKED] == ("fails" if shown else "holds"), str(verdict)


def test_padding_is_no_document_and_a_plain_row_declares_none() -> None:
    ids = torch.randint(3, 19, (2, 6), generator=torch.Generator().manual_seed(0))
    padded = torch.tensor([[1, 1, 0, 1, 2, 3], [0, 1, 2, 3, 0, 0]])
    shown = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    inputs = {"input_ids": ids, "labels": ids.clone(), "position_ids": padded, "attention_mask": shown}
    step = trainers_step(llama(0, torch.float32), inputs)
    assert "documents" not in step.roles
    verdict = audit(step, laws=[documents.LAW])
    assert outcomes(verdict)[documents.PACKED] == "not declared", str(verdict)


@pytest.mark.parametrize("balanced", [False, True])
def test_a_router_that_is_balanced_couples_the_rows(balanced: bool) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=19, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=32,
        output_router_logits=balanced, router_aux_loss_coef=0.5,
    )  # fmt: skip
    ids = torch.randint(3, 19, (4, 8), generator=torch.Generator().manual_seed(0))
    step = trainers_step(MixtralForCausalLM(config), {"input_ids": ids, "labels": ids.clone()})
    assert step.rows_interact == balanced
    assert step.may_idle == ("*.experts.*",) and not trainers_step(llama(0, torch.float32), dict(step.batch)).may_idle
    verdict = audit(step, laws=[splits.LAW])
    assert verdict.holds, str(verdict)
