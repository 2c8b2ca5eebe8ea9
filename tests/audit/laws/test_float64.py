"""Law F64: gradient hooks and random steps in the float64 copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Step, audit
from earnest_audit.laws import shadow
from tests.audit.steps import Tiny, dpo_step, logprobs, policy_step, sequence_logprobs, sft_loss, sft_step


def shadowed(change: Callable[[Any], Any], loss: Any = sft_loss) -> list[str]:
    model, step = Tiny(), sft_step()
    change(model)
    found = audit(Step(model=model, loss=loss, batch=step.batch, roles=step.roles), laws=[shadow.LAW]).findings
    return [f.outcome for f in found]


def test_gradient_hooks_act_on_the_shadow_too() -> None:
    """GLM shrinks the embedding's gradient by such a hook."""
    assert shadowed(lambda m: m.embed.weight.register_hook(lambda g: 0.1 * g)) == ["holds"] * 2


def test_a_random_step_is_not_held_against_its_shadow() -> None:
    """NEFTune: noise on embeddings, other numbers in float64."""

    def noisy(model: nn.Module) -> None:
        model.embed.register_forward_hook(lambda _, __, y: y + 0.5 * torch.rand_like(y))  # type: ignore[union-attr]

    def lossy(model: nn.Module, batch: Any) -> Tensor:
        """log(sigmoid) far out: what the law is for is seen all the same."""
        margin = model(batch["ids"], batch["attention"])[..., 0].mean() - 110
        return -torch.log(torch.sigmoid(margin))

    assert shadowed(noisy) == ["not applicable", "not applicable"]
    assert "fails" in shadowed(lambda m: None, lossy)


def test_a_saturated_loss_has_no_gradient_to_lose() -> None:
    """1 - sigmoid(x) far out: its gradient is next to 0 in both dtypes, and only one of them has it as 0."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return 1 - torch.sigmoid(-sft_loss(model, batch)[0])

    rows = {f.subject: f.outcome for f in audit(sft_step(loss), laws=[shadow.LAW]).findings}
    assert rows["confident outputs"] == "not applicable" and rows["the batch"] == "holds"


def far_out(of: Callable[[Tensor, Tensor], Tensor]) -> str:
    """The outcome on confident outputs of a loss of the probabilities and the ids."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return of(model(batch["ids"], batch["attention"])[:, :-1].softmax(-1), batch["ids"][:, 1:, None])

    step = sft_step()
    rows = audit(Step(Tiny(), loss, step.batch, step.roles), laws=[shadow.LAW]).findings
    return {f.subject: f.outcome for f in rows}["confident outputs"]


def test_far_out_a_lost_gradient_fails_and_an_inexact_one_warns() -> None:
    """The likeliest token becomes less likely: 1 - p has two digits where p is next to 1, and right code has it."""
    assert far_out(lambda p, ids: -(1 - p.amax(-1)).clamp_min(1e-30).log().mean()) == "warns"
    assert far_out(lambda p, ids: -p.gather(-1, ids).log().mean()) == "fails"  # log(softmax): 0/0


def test_far_out_a_gradient_of_another_direction_fails() -> None:
    """Where p underflows in fp32, and not in float64, the sign changes: the gradient keeps its length."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits, ids = model(batch["ids"], batch["attention"])[:, :-1], batch["ids"][:, 1:, None]
        sign = torch.where(logits.detach().softmax(-1).gather(-1, ids) == 0, -1.0, 1.0)
        return -(sign * logits.log_softmax(-1).gather(-1, ids)).mean()

    step = sft_step()
    rows = audit(Step(Tiny(), loss, step.batch, step.roles), laws=[shadow.LAW]).findings
    assert {f.subject: f.outcome for f in rows}["confident outputs"] == "fails"


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_margins_without_a_reference_are_made_large(seed: int, coarse: bool) -> None:
    """A reward model (DeepSpeed-Chat): log(sigmoid(x)) is lost where the rejected answer is far ahead."""
    given = dpo_step(seed=seed)
    batch = {k: v for k, v in given.batch.items() if not k.startswith("ref_")}
    roles = {r: k for r, k in given.roles.items() if "reference" not in r}
    model = Tiny(seed)
    model.head = nn.Linear(model.head.in_features, 1)

    def scores(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=coarse):
            chosen, rejected = (model(batch[s], batch[f"{s}_attention"])[:, -1, 0] for s in ("chosen", "rejected"))
        return chosen, rejected

    def outcome(of: Callable[[Tensor], Tensor], **declared: Any) -> str:
        def loss(model: nn.Module, batch: Any) -> Tensor:
            chosen, rejected = scores(model, batch)
            return -of(chosen - rejected).mean()

        step = Step(model, loss, batch, roles, **declared)
        return {f.subject: f.outcome for f in audit(step, laws=[shadow.LAW]).findings}["far margins"]

    assert outcome(lambda x: F.logsigmoid(x.float()), logprobs=scores) == "holds"
    assert outcome(lambda x: x.sigmoid().log(), logprobs=scores) == "fails"
    assert outcome(lambda x: x.sigmoid().log()) == "not applicable"  # and the row says so


def test_a_step_whose_last_place_decides_is_not_judged() -> None:
    """Of which entries count, rounding in 16 bits decides, and one unit of the weights does in float64, too."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = model(batch["x"])
        return (found.square() * ((1e4 * found.detach().double()).sin() > 0)).sum()

    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.manual_seed(0)
    step = Step(model=nn.Linear(16, 4).bfloat16(), loss=loss, batch={"x": x})
    found = {f.subject: f for f in audit(step, laws=[shadow.LAW]).findings}["the batch"]
    assert found.outcome == "not applicable" and "moves the float64 gradient itself" in found.measured, found


def test_ratios_that_overflow() -> None:
    """r / (1 + r) is NaN where r overflows; PPO's clip, a sigmoid and a capped weight are not."""

    def outcome(of: Callable[[Tensor, Tensor], Tensor]) -> str | None:
        def loss(model: nn.Module, batch: Any, beta: float, clip: float) -> Tensor:
            value = of(logprobs(model, batch) - batch["old"], batch["advantages"][:, None])
            return -(value * batch["mask"]).sum() / batch["mask"].sum()

        step = replace(policy_step(loss), metrics={}, value_is_loss=False)
        return {f.subject: f.outcome for f in audit(step, laws=[shadow.LAW]).findings}["far ratios"]

    assert outcome(lambda x, a: x.exp() / (1 + x.exp()) * a) == "fails"
    assert outcome(lambda x, a: x.exp() * (x.exp().detach() < 2) * a) == "fails"  # a rejected token: inf · 0
    assert outcome(lambda x, a: torch.where(x < 1, x.exp(), 0.0) * a) == "holds"
    assert outcome(lambda x, a: x.sigmoid() * a) == "holds"
    assert outcome(lambda x, a: torch.minimum(x.exp() * a, x.exp().clamp(0.8, 1.2) * a)) == "holds"
    assert outcome(lambda x, a: x.exp() * a) == "not applicable"  # no fp32 number is as large


def test_the_margins_at_which_float64_overflows_leave_the_budget_for_the_last_one() -> None:
    """SimPO in 16 bits, with few declarations: of three margins only the smallest is one that float64 can follow."""

    def of(stable: bool) -> str:
        def loss(model: nn.Module, batch: Any) -> Tensor:
            x = 2.0 * (sequence_logprobs(model, batch)[0] - sequence_logprobs(model, batch)[1])
            return -(F.logsigmoid(x) if stable else torch.log(torch.sigmoid(x))).mean()

        given = dpo_step(dtype=torch.bfloat16)
        roles = {r: k for r, k in given.roles.items() if "reference" not in r}
        batch = {k: v for k, v in given.batch.items() if not k.startswith("ref_")}
        found = audit(Step(given.model, loss, batch, roles, logprobs=sequence_logprobs)).findings
        return {f.subject: f.outcome for f in found}["far margins"]

    assert (of(True), of(False)) == ("holds", "fails")
