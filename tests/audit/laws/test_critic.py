"""Laws IG and PG-ONPOLICY: clipped value losses and advantages that are not detached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from earnest_audit import Metric, Step, Verdict, audit
from earnest_audit.laws import LAWS, inputs, on_policy
from tests.audit.steps import VOCABULARY, Tiny, logprobs, most, policy_batch

FAR = "input values (values), far away"
DTYPES = (torch.float32, torch.bfloat16)


ROLES = {"ids": "ids", "attention": "attention", "mask": "mask", "behaviour": "old", "rewards": "rewards"}


def failures(verdict: Verdict) -> set[str]:
    return {f.subject for f in verdict.failures}


def mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()


def clipped(r: Tensor, a: Tensor, clip: float, pick: Any = torch.minimum) -> Tensor:
    return -pick(r * a, r.clamp(1 - clip, 1 + clip) * a)


class ActorCritic(Tiny):
    """With a value head of its own."""

    def __init__(self) -> None:
        super().__init__(0)
        self.states = nn.Embedding(VOCABULARY, 8)
        self.value = nn.Linear(8, 1)

    def values(self, ids: Tensor) -> Tensor:
        return self.value(self.states(ids))[:, :-1, 0]


def ppo(how: str, dtype: torch.dtype = torch.float32) -> Step:
    """ "max": the usual pessimistic value loss. "clipped": only the clipped error, as some do. "min": the defect."""

    def loss(model: ActorCritic, b: Mapping[str, Any], clip: float, cliprange_value: float, vf_coef: float) -> Any:
        m, v = b["mask"], model.values(b["ids"]).float()
        a = b["returns"] - v if how == "attached" else b["advantages"]
        policy = mean(clipped((logprobs(model, b).float() - b["old"]).exp(), a, clip), m)
        near = b["values"] + (v - b["values"]).clamp(-cliprange_value, cliprange_value)
        errors = (v - b["returns"]).square(), (near - b["returns"]).square()
        pick = {"min": torch.minimum(*errors), "clipped": errors[1]}.get(how, torch.maximum(*errors))
        return policy + vf_coef * mean(pick, m), {"value_loss": mean(pick, m)}

    model = ActorCritic().to(dtype)
    batch = policy_batch(model)
    rng = torch.Generator().manual_seed(7)
    for key in ("advantages", "values"):
        batch[key] = torch.randn(batch["mask"].shape, generator=rng) * batch["mask"]
    batch["returns"] = batch["advantages"] + batch["values"]
    roles = {k: v for k, v in ROLES.items() if k != "rewards"}
    roles |= {"advantages": "advantages", "values": "values", "returns": "returns"}
    return Step(model=model, loss=loss, batch=batch, roles=roles, metrics={"value_loss": Metric(weight="vf_coef")},
                settings={"clip": 0.2, "cliprange_value": 0.2, "vf_coef": 0.5}, logprobs=logprobs,
                value_is_loss=True)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("how", "seen"),
    [
        ("max", set()),
        ("clipped", set()),
        ("min", {FAR}),  # openai/baselines #765
        ("attached", {"descending the loss raises Σ A·lp"}),  # encode-attend-navigate #3
    ],
)
def test_a_critics_laws(how: str, seen: set[str], dtype: torch.dtype) -> None:
    verdict = audit(ppo(how, dtype), laws=[inputs.LAW, on_policy.LAW])
    assert failures(verdict) & {FAR, on_policy.RAISES} == seen, str(verdict)


def test_a_right_actor_and_critic_hold_in_full() -> None:
    step = ppo("max")
    verdict = audit(step, laws=LAWS)
    assert verdict.holds, str(verdict)
    assert verdict.cost <= most(step)
