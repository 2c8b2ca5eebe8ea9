"""Agents: rollouts of several turns with tools, their masks, credit and templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit import GAE, ChatTemplate, Metric, Setting, Subject
from tests.audit.blind2026.base import (
    Net,
    Thing,
    agent_batch,
    case,
    clipped,
    logprobs,
    mean,
    policy,
    policy_loss,
)  # fmt: skip


@case("huggingface/trl#4975", "agents", "the fused path takes the loss on tool outputs too")
def fused_path_ignores_the_tool_mask(broken: bool) -> Thing:
    def fused(model: nn.Module, batch: Mapping[str, Any], clip: float) -> Tensor:
        mask = batch["attention"][:, 1:] * batch["completion"] if broken else batch["mask"]
        return mean(clipped(logprobs(model, batch), batch["old"], batch["advantages"][:, None], clip), mask)

    model = Net()
    batch = agent_batch(model)
    batch["completion"] = batch["mask"].clone()
    batch["completion"][:, 5:7] = 1.0
    return policy(policy_loss, model=model, batch=batch, paths={"fused": fused})


@case("huggingface/trl#6439", "agents", "truncated answers are masked but still counted in the denominator")
def truncated_answers_in_the_denominator(broken: bool) -> Thing:
    def loss(model: nn.Module, batch: Mapping[str, Any], clip: float) -> Tensor:
        surrogate = clipped(logprobs(model, batch), batch["old"], batch["advantages"][:, None], clip)
        counted = batch["sampled"] if broken else batch["mask"]
        return (surrogate * batch["mask"]).sum() / counted.sum()

    model = Net()
    batch = agent_batch(model)
    batch["sampled"] = batch["mask"].clone()
    batch["mask"][1] = 0.0  # its answer was cut at the limit
    return policy(loss, model=model, batch=batch, reduction="mean")


@case("NovaSky-AI/SkyRL#1492", "agents", "every turn of a trajectory gets the advantage at the last turn's tokens")
def advantage_at_the_last_turns_tokens(broken: bool) -> Thing:
    last = torch.tensor([1, 1, 4, 4, 4])  # rows are turns; rows 0-1 and 2-4 are two trajectories

    def loss(model: nn.Module, batch: Mapping[str, Any], clip: float) -> Tensor:
        where = batch["mask"][last[: len(batch["mask"])].clamp(max=len(batch["mask"]) - 1)] if broken else batch["mask"]
        advantages = batch["advantages"][:, None] * where
        return mean(clipped(logprobs(model, batch), batch["old"], advantages, clip), batch["mask"])

    model = Net()
    batch = agent_batch(model)
    place = torch.arange(1, batch["ids"].shape[1])
    for row, (begin, end) in enumerate([(2, 5), (6, 9), (2, 4), (4, 7), (8, 12)]):
        batch["mask"][row] = ((place >= begin) & (place < end)).float() * batch["attention"][row, 1:]
    return policy(loss, model=model, batch=batch)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, fault: str) -> tuple[Tensor, Tensor]:
    """Generalised advantages over the tokens of the mask; tokens between them are passed over."""
    advantages = torch.zeros_like(values)
    carry = torch.zeros(len(values))
    following = torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * following - values[:, t]
        step = delta + gamma * lam * carry
        if fault == "decays in holes":
            carry = torch.where(here != 0, step, gamma * lam * carry)
            following = torch.where(here != 0, values[:, t], gamma * following)
        elif fault == "resets in holes":
            carry = torch.where(here != 0, step, torch.zeros_like(carry))
            following = torch.where(here != 0, values[:, t], torch.zeros_like(following))
        elif fault == "reads masked values":
            carry = torch.where(here != 0, step, torch.zeros_like(carry))
            following = values[:, t]
        else:
            carry = torch.where(here != 0, step, carry)
            following = torch.where(here != 0, values[:, t], following)
        advantages[:, t] = torch.where(here != 0, step, torch.zeros_like(step))
    return advantages, (advantages + values) * mask


@case("radixark/miles#1827", "agents", "each token of a tool's output decays the credit once more")
def tool_output_decays_the_credit(broken: bool) -> Thing:
    fault = "decays in holes" if broken else ""
    return GAE(lambda r, v, m, g, n: gae(r, v, m, g, n, fault), holes=True)


@case("verl-project/verl#7278", "agents", "rewards do not reach the turns before a tool's output")
def rewards_stop_at_a_tool_output(broken: bool) -> Thing:
    fault = "resets in holes" if broken else ""
    return GAE(lambda r, v, m, g, n: gae(r, v, m, g, n, fault), holes=True)


@case("alibaba/ROLL#447", "agents", "a masked token's critic value bootstraps the last valid token")
def masked_values_bootstrap(broken: bool) -> Thing:
    fault = "reads masked values" if broken else ""
    return GAE(lambda r, v, m, g, n: gae(r, v, m, g, n, fault))


def words(text: str) -> list[int]:
    return [10 + sum(map(ord, word)) % 500 for word in text.split()]


START, END, BREAK, ROLES = 1, 2, 3, {"system": 4, "user": 5, "assistant": 6, "tool": 7}
TALK: list[Mapping[str, Any]] = [
    {"role": "system", "content": "use the tools"},
    {"role": "user", "content": "how warm is it in Oslo today"},
    {"role": "assistant", "content": "call weather Oslo"},
    {"role": "tool", "content": "minus four degrees"},
    {"role": "assistant", "content": "it is minus four degrees"},
]


def rendered(messages: Sequence[Mapping[str, Any]], header: bool, fault: str) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    mask: list[int] = []
    for message in messages:
        own = message["role"] == "assistant"
        head = [START, ROLES[message["role"]]]
        body = words(message["content"])
        tail = [END] if fault == "no separator" and own else [END, BREAK]
        ids += head + body + tail
        mask += [int(own and fault == "supervises the header")] * 2 + [int(own)] * len(body)
        mask += [int(own and fault != "end not supervised"), 0][: len(tail)]
    if header:
        ids += [START, ROLES["assistant"]]
        mask += [0, 0]
    return ids, mask


def template(fault: str, one_sided: bool = False) -> Subject:
    return ChatTemplate(
        tokens=lambda messages: rendered(messages, False, fault),
        prompt=lambda messages: rendered(messages, True, "" if one_sided else fault)[0],
        messages=TALK,
        end=END,
    )


@case("verl-project/verl#6921", "agents", "the separator after an answer is dropped in what is trained on")
def separator_dropped_between_turns(broken: bool) -> Thing:
    return template("no separator" if broken else "", one_sided=True)


@case("huggingface/trl#5988", "agents", "the end of an answer is outside the loss mask")
def end_of_turn_not_supervised(broken: bool) -> Thing:
    return template("end not supervised" if broken else "")


@case("NVIDIA-NeMo/Automodel#3352", "agents", "the loss mask begins at the turn header")
def header_supervised(broken: bool) -> Thing:
    return template("supervises the header" if broken else "")


@case("marin-community/marin#5676", "agents", "the entropy bonus is taken on answers that were filtered out")
def entropy_of_filtered_answers(broken: bool) -> Thing:
    def loss(model: nn.Module, batch: Mapping[str, Any], clip: float, bonus: float) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(batch["ids"], batch["attention"])[:, :-1].log_softmax(-1)
        logp = logits.gather(-1, batch["ids"][:, 1:, None])[..., 0]
        spread = -(logits.exp() * logits).sum(-1)
        entropy = mean(spread, batch["sampled"] if broken else batch["mask"])
        surrogate = mean(clipped(logp, batch["old"], batch["advantages"][:, None], clip), batch["mask"])
        return surrogate - bonus * entropy, {"entropy": entropy}

    model = Net()
    batch = agent_batch(model)
    batch["sampled"] = batch["mask"].clone()
    batch["mask"][3] = 0.0
    return policy(
        loss, model=model, batch=batch,
        settings={"clip": Setting(0.2, "clip"), "bonus": Setting(0.01, "weight")},
        metrics={"entropy": Metric(low=0.0, weight="bonus", raises=True)},
    )  # fmt: skip
