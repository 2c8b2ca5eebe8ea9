"""Law GL: the optimizer's and the clipped set, frozen tensors, experts, losses that write into weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from earnest_audit import Step, StepError, Together, audit
from earnest_audit.law import Law
from earnest_audit.laws import (
    liveness,
)
from earnest_audit.verdict import Finding
from tests.audit.steps import (
    VOCABULARY,
    WIDTH,
    Tiny,
    grpo_loss,
    logprobs,
    policy_step,
    sft_loss,
    sft_step,
)


def outcomes(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {f.subject: f.outcome for f in findings}


@pytest.mark.parametrize(("left_out", "outcome"), [(0, "holds"), (1, "fails"), (None, "not declared")])
def test_the_clipped_set_is_what_is_trained(left_out: int | None, outcome: str) -> None:
    step = sft_step(max_grad_norm=1e-3)
    step.clipped = None if left_out is None else list(step.model.parameters())[left_out:]
    found = outcomes(audit(step, laws=[liveness.LAW]).findings)
    assert found["the clipped parameters"] == outcome and found["the optimizer's parameters"] == "holds"


def test_clipping_what_is_not_the_models_is_seen() -> None:
    step = sft_step(max_grad_norm=1.0)
    step.clipped = list(Tiny(1).parameters())  # made before the model was replaced
    (failure,) = audit(step, laws=[liveness.LAW]).failures
    assert failure.subject == "the clipped parameters" and "that are not the model's" in failure.measured


def split(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.1, momentum=0.9),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=1e-3),
    ]


@pytest.mark.parametrize("members", [2, 1])
def test_several_optimizers_own_the_model_together(members: int) -> None:
    step = sft_step()
    each = split(step.model)[:members]
    for optimizer in each:  # so that there is a state to restored
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


def test_optimizers_together_are_saved_and_loaded() -> None:
    def made() -> tuple[Together, nn.Linear]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        return Together(torch.optim.SGD([model.weight], 0.1, momentum=0.9), torch.optim.AdamW([model.bias])), model

    (one, model), (other, _) = made(), made()
    model(torch.ones(1, 2)).sum().backward()
    one.step()
    other.load_state_dict(one.state_dict())
    for mine, theirs in zip(one.members, other.members, strict=True):
        assert str(mine.state_dict()) == str(theirs.state_dict()) and mine.state_dict()["state"]


def test_optimizers_together_return_the_loss_of_their_closure() -> None:
    w = nn.Parameter(torch.ones(1))
    assert Together(torch.optim.SGD([w], 0.1)).step(lambda: 0.25) == 0.25


@pytest.mark.parametrize("frozen", [False, True])
def test_sparse_gradients_are_read_and_handed_on(frozen: bool) -> None:
    """They have no flatten(), and their optimizer takes no dense ones."""
    step = sft_step()
    table = nn.Embedding.from_pretrained(step.model.embed.weight.detach().clone(), freeze=False, sparse=True)
    step.model.embed = table
    rest = [p for n, p in step.model.named_parameters() if not n.startswith("embed")]
    rate = 0.0 if frozen else 0.1
    both = Together(torch.optim.SparseAdam([table.weight], 0.1), torch.optim.SGD(rest, 0.1))
    both.param_groups[0]["lr"] = rate
    rows = audit(replace(step, optimizer=both), laws=[liveness.LAW])
    assert not rows.errors and bool(rows.failures) == frozen, str(rows)
    alone = audit(replace(step, optimizer=None), laws=[liveness.LAW])
    assert not alone.errors and not alone.failures, str(alone)


def test_the_small_step_without_an_optimizer_leaves_a_small_parameter_its_sign() -> None:
    """A variance of 5e-4 under a root, beside a LoRA whose A waits for the second step."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.full((2, 4), 0.1)), nn.Parameter(torch.zeros(4, 2))
            self.variance = nn.Parameter(torch.tensor(5e-4))

        def forward(self, x: Tensor) -> Tensor:
            return (x + x @ self.a.T @ self.b.T) * (1 + self.variance.sqrt())

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        return model(batch["x"]).square().mean()

    rows = audit(Step(Scaled(), loss, {"x": torch.arange(12.0).reshape(3, 4) / 12}), laws=[liveness.LAW])
    assert not rows.failures, str(rows)


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


class Scored(Tiny):
    """A reward model; the bias of its head is added to both answers, and cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.score = torch.nn.Linear(23, 1)


def test_a_bias_that_cancels_in_every_pair_is_reported_and_is_legitimate() -> None:
    def loss(model: Any, batch: Mapping[str, Any]) -> Tensor:
        chosen, rejected = (model.score(model(batch[side])[:, -1]) for side in ("chosen", "rejected"))
        return -torch.nn.functional.logsigmoid(chosen - rejected).mean()

    rng = torch.Generator().manual_seed(0)
    batch = {side: torch.randint(1, 23, (4, 6), generator=rng) for side in ("chosen", "rejected")}
    step = Step(model=Scored(), loss=loss, batch=batch, roles={"chosen": "chosen", "rejected": "rejected"})
    verdict = audit(step)
    assert verdict.holds, str(verdict)
    assert any("head.bias, score.bias cancels in every pair" in f.measured for f in verdict.findings)


Data = Mapping[str, Any]


def outcome(step: Step, law: Law, subject: str) -> str | None:
    found = {f.subject: f.outcome for f in audit(step, laws=[law]).findings}
    return found.get(subject)


@pytest.mark.parametrize("how", ["data", "no_grad"])
def test_a_loss_that_writes_into_the_weights(how: str) -> None:
    def noisy(model: Any, batch: Data) -> Any:
        with torch.no_grad():
            weight = model.head.weight.data if how == "data" else model.head.weight
            weight.mul_(1 + 1e-3)
        return sft_loss(model, batch)

    subject = "the weights, after one call of the loss"
    step = sft_step(noisy)
    before = {k: v.clone() for k, v in step.model.state_dict().items()}
    assert outcome(step, liveness.LAW, subject) == "fails"
    assert all(torch.equal(v, before[k]) for k, v in step.model.state_dict().items())

    def clamped(model: Any, batch: Data) -> Any:
        with torch.no_grad():
            model.head.weight.clamp_(-100, 100)
        return sft_loss(model, batch)

    assert outcome(sft_step(clamped), liveness.LAW, subject) == "holds"


def test_a_norm_that_is_held_in_place_is_no_write_that_adds_up() -> None:
    step = sft_step()
    step.model.add_module("embed", nn.Embedding(VOCABULARY, WIDTH, max_norm=3.0))
    step.optimizer = None
    assert outcome(step, liveness.LAW, "the weights, after one call of the loss") == "holds"


def test_a_step_without_a_gradient_fails_by_this_law_alone() -> None:
    """Old log-probs of this forward pass, with their graph: the ratio is 1 and its gradient is 0."""

    def live(model: nn.Module, batch: Mapping[str, Any], beta: float, clip: float) -> Any:
        return grpo_loss(model, {**batch, "old": logprobs(model, batch)}, 0.0, clip)

    verdict = audit(policy_step(live))
    assert {f.law for f in verdict.failures} == {"GL"} and verdict.failures[0].subject == "the step"
    others = {f.measured for f in verdict.findings if f.law != "GL"}
    assert others == {"not checked", "not checked: the gradient is 0, see GL"}


class Headed(Tiny):
    """A model with a head that the loss does not use, or that it calls and detaches."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(16, 1)


@pytest.mark.parametrize("called", [False, True])
def test_a_head_that_no_loss_calls_is_not_declared_and_one_without_a_gradient_fails(called: bool) -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        assert isinstance(model, Headed)
        value = model.value(torch.ones(1, 16)).detach().sum() if called else 0.0
        return sft_loss(model, batch)[0] + value

    step = sft_step()
    step.model, step.loss, step.optimizer = Headed(), loss, None
    rows = {f.subject: f.outcome for f in audit(step, laws=[liveness.LAW]).findings}
    (found,) = [outcome for subject, outcome in rows.items() if "trainable parameters" in subject]
    assert found == ("fails" if called else "holds")
    assert rows.get("value, which the loss never calls") == (None if called else "not declared")


@pytest.mark.parametrize("gated", [False, True])
def test_a_parameter_whose_gradient_cancels_warns_and_a_gate_that_never_moves_fails(gated: bool) -> None:
    """A bias before a BatchNorm has a gradient of rounding noise; the weights' gradients beside it are real."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    if gated:
        model[0].weight.data.fill_(1e6)  # rounds every update away
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss(model: Any, batch: Data) -> Tensor:
        return (model(batch["x"]) - 1).square().mean()

    step = Step(model, loss, {"x": torch.randn(8, 3)}, optimizer=optimizer, rows_interact=True)
    verdict = audit(step, laws=[liveness.LAW])
    assert verdict.holds != gated, str(verdict)
    assert [f.subject for f in verdict.warnings] == ["parameters whose gradient cancels"], str(verdict)
    assert "0.bias" in verdict.warnings[0].meaning


@pytest.mark.parametrize("dead", [False, True])
def test_a_critics_output_bias_cancels_and_a_layer_without_a_gradient_fails(dead: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def loss(model: Any, batch: Data) -> Tensor:
        return model(batch["fake"]).mean() - model(batch["real"]).mean()

    if dead:
        model[0].weight.register_hook(torch.zeros_like)
    verdict = audit(Step(model, loss, {"real": torch.randn(4, 3), "fake": torch.randn(4, 3)}), laws=[liveness.LAW])
    assert verdict.holds != dead, str(verdict)
    assert any("2.bias" in f.meaning for f in verdict.warnings)


def test_a_loss_without_a_graph_leaves_every_parameter_dead() -> None:
    """A container of layers is not called itself, and is no head of another loss."""

    class Stacked(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(VOCABULARY, VOCABULARY)])

        def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
            return self.layers[0](super().forward(ids, attention))

    step = sft_step(lambda model, batch: sft_loss(model, batch)[0].detach())
    step.model, step.optimizer = Stacked(), None
    (row,) = (f for f in audit(step, laws=[liveness.LAW]).failures if f.subject.endswith("trainable parameters"))
    assert row.expected == "all" and "idle" not in row.measured and "may_idle" in row.meaning, row
