"""Law F64: gradient hooks and random steps in the float64 copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit import Step, audit
from earnest_audit.laws import shadow
from tests.audit.steps import Tiny, sft_loss, sft_step


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
