"""Right steps that are unusual: agents, packing, sharding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Metric, Setting
from tests.audit.blind2026.base import (
    PACKED_ROLES,
    POLICY_ROLES,
    VOCABULARY,
    Net,
    Thing,
    agent_batch,
    clipped,
    cross_entropy,
    logprobs,
    mean,
    packed_batch,
    policy,
    policy_loss,
    right,
    sft,
    sft_batch,
)  # fmt: skip
from tests.audit.blind2026.sharding import Routed


@right("agents")
def advantages_of_turns() -> Thing:
    """Each turn has an advantage of its own."""

    def loss(model: nn.Module, batch: Mapping[str, Any], clip: float) -> Tensor:
        return mean(clipped(logprobs(model, batch), batch["old"], batch["advantages"], clip), batch["mask"])

    model = Net()
    batch = agent_batch(model)
    first = torch.tensor([0.5, -0.2, 0.3, -0.9, 1.1])[:, None].expand(-1, 5)
    second = torch.tensor([-0.4, 0.8, 0.6, 0.2, -0.7])[:, None].expand(-1, 6)
    batch["advantages"] = torch.cat([first, second], 1).clone()
    return policy(loss, model=model, batch=batch)


@right("agents")
def mean_over_turns_then_rows() -> Thing:
    """Turns weigh the same within a row, and rows within a batch."""

    def loss(model: nn.Module, batch: Mapping[str, Any], clip: float) -> Tensor:
        surrogate = clipped(logprobs(model, batch), batch["old"], batch["advantages"][:, None], clip)
        turns = torch.stack([batch["mask"] * (batch["turns"] == k) for k in (0, 1)])
        counts = turns.sum(-1)
        means = (surrogate * turns).sum(-1) / counts.clamp(min=1)
        return (means.sum(0) / (counts > 0).sum(0).clamp(min=1)).mean()

    model = Net()
    batch = agent_batch(model)
    batch["turns"] = (torch.arange(1, 12)[None] > 7).long().expand(5, -1).clone()
    return policy(loss, model=model, batch=batch)


@right("agents")
def ratio_of_whole_sequences() -> Thing:
    """GSPO: one ratio per row, the geometric mean of its tokens' ratios."""

    def loss(model: nn.Module, batch: Mapping[str, Any], clip: float) -> Tensor:
        gap = (logprobs(model, batch) - batch["old"]) * batch["mask"]
        ratio = (gap.sum(-1) / batch["mask"].sum(-1).clamp(min=1)).exp()
        a = batch["advantages"]
        return -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a).mean()

    return policy(loss)


@right("agents")
def trust_region_on_probabilities() -> Thing:
    """DPPO: tokens whose probability moved far are left out, whatever the advantage; a squared log-ratio holds back."""

    def loss(model: nn.Module, batch: Mapping[str, Any], reach: float, tau: float) -> Tensor:
        logp = logprobs(model, batch)
        gap = logp - batch["old"]
        keep = ((logp.exp() - batch["old"].exp()).abs() < reach).detach()
        return mean(-gap.exp() * batch["advantages"][:, None] * keep + tau * gap.square(), batch["mask"])

    return policy(loss, settings={"reach": Setting(0.15, "bound"), "tau": Setting(0.01, "weight")}, drops_tokens=True)


@right("agents")
def stopped_ratio() -> Thing:
    """CISPO: the clipped ratio is a constant weight of the log-prob."""

    def loss(model: nn.Module, batch: Mapping[str, Any], clip_high: float) -> Tensor:
        logp = logprobs(model, batch)
        weight = (logp - batch["old"]).exp().clamp(max=1 + clip_high).detach()
        return mean(-weight * batch["advantages"][:, None] * logp, batch["mask"])

    return policy(loss, settings={"clip_high": Setting(0.28, "clip high")}, value_is_loss=False)


@right("agents")
def groups_without_signal() -> Thing:
    """Two rows of a group with equal rewards have the advantage 0."""
    model = Net()
    batch = agent_batch(model)
    batch["advantages"] = torch.tensor([0.9, 0.0, 0.0, -1.1, 0.7])
    return policy(policy_loss, model=model, batch=batch)


@right("agents")
def dual_clip() -> Thing:
    """The ratio of tokens with a negative advantage is bounded too, and the two sides of the clip differ."""

    def loss(model: nn.Module, batch: Mapping[str, Any], low: float, high: float, dual: float) -> Tensor:
        ratio = (logprobs(model, batch) - batch["old"]).exp()
        a = batch["advantages"][:, None].expand_as(ratio)
        plain = -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
        return mean(torch.where(a < 0, torch.minimum(plain, -dual * a), plain), batch["mask"])

    settings = {"low": Setting(0.2, "clip"), "high": Setting(0.3, "clip high"), "dual": Setting(3.0, "bound")}
    return policy(loss, settings=settings)


@right("agents")
def corrected_for_the_sampler() -> Thing:
    """The ratio is to the trainer's own log-probs; a truncated weight corrects for the sampler's."""

    def loss(model: nn.Module, batch: Mapping[str, Any], clip: float, cap: float) -> Tensor:
        weight = (batch["proximal"] - batch["old"]).exp().clamp(max=cap)
        surrogate = clipped(logprobs(model, batch), batch["proximal"], batch["advantages"][:, None], clip)
        return mean(weight * surrogate, batch["mask"])

    model = Net()
    batch = agent_batch(model)
    noise = torch.randn(batch["old"].shape, generator=torch.Generator().manual_seed(8))
    batch["proximal"] = (batch["old"] + 0.03 * noise).clamp(max=-1e-3)
    return policy(
        loss, model=model, batch=batch, roles={**POLICY_ROLES, "proximal": "proximal"},
        settings={"clip": Setting(0.2, "clip"), "cap": Setting(1.02, "bound")},
    )  # fmt: skip


@right("agents")
def rows_weighed_by_age() -> Thing:
    """Answers of an older policy weigh less."""

    def loss(model: nn.Module, batch: Mapping[str, Any], clip: float) -> Tensor:
        surrogate = clipped(logprobs(model, batch), batch["old"], batch["advantages"][:, None], clip)
        return mean(surrogate * batch["weights"][:, None], batch["mask"])

    model = Net()
    batch = agent_batch(model)
    batch["weights"] = torch.tensor([1.0, 0.5, 1.0, 0.25, 0.5])
    return policy(loss, model=model, batch=batch, roles={**POLICY_ROLES, "weights": "weights"})


@right("agents")
def squared_penalty_to_a_reference() -> Thing:
    """A penalty of half the squared log-ratio to a reference."""

    def loss(model: nn.Module, batch: Mapping[str, Any], clip: float, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
        logp = logprobs(model, batch)
        kl = mean((logp - batch["ref"]).square() / 2, batch["mask"])
        surrogate = mean(clipped(logp, batch["old"], batch["advantages"][:, None], clip), batch["mask"])
        return surrogate + beta * kl, {"kl": kl}

    model = Net()
    batch = agent_batch(model)
    with torch.no_grad():
        batch["ref"] = logprobs(Net(3), batch)
    return policy(
        loss, model=model, batch=batch, roles={**POLICY_ROLES, "reference": "ref"},
        settings={"clip": Setting(0.2, "clip"), "beta": Setting(0.05, "weight")},
        metrics={"kl": Metric(low=0.0, weight="beta")},
    )  # fmt: skip


def packed_logits(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    out = model(batch["ids"], batch.get("attention"), batch["documents"], batch["positions"])
    assert isinstance(out, Tensor)
    return out


@right("packing")
def packed_documents() -> Thing:
    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        return cross_entropy(packed_logits(model, batch), batch["labels"])

    return sft(loss, batch=packed_batch(), roles=PACKED_ROLES, all_supervised=True)


@right("packing")
def documents_weigh_the_same() -> Thing:
    """The mean of the documents' means."""

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        labels = batch["labels"][:, 1:]
        each = F.cross_entropy(
            packed_logits(model, batch)[:, :-1].transpose(1, 2), labels, ignore_index=-100, reduction="none"
        )
        known = (labels != -100).float()
        own = torch.stack([known * (batch["documents"][:, 1:] == k) for k in (0, 1)])
        counts = own.sum(-1)
        return ((each * own).sum(-1) / counts.clamp(min=1)).sum() / (counts > 0).sum()

    return sft(loss, batch=packed_batch(), roles=PACKED_ROLES, all_supervised=True)


@right("packing")
def rows_weighed_by_root_of_length() -> Thing:
    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        labels = batch["labels"][:, 1:]
        logits = model(batch["ids"], batch["attention"])[:, :-1]
        each = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        root = (labels != -100).sum(-1).float().sqrt()
        return (each.sum(-1) / root.clamp(min=1)).sum() / root.sum()

    return sft(loss)


@right("packing")
def padding_is_a_document() -> Thing:
    """The rest of a packed row is a document of padding, without labels."""

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        return cross_entropy(packed_logits(model, batch), batch["labels"])

    batch = packed_batch()
    rest = torch.arange(12)[None] >= torch.tensor([12, 10, 11, 9])[:, None]
    batch["documents"] = torch.where(rest, 2, batch["documents"])
    batch["ids"] = torch.where(rest, 0, batch["ids"])
    batch["labels"] = torch.where(rest, -100, batch["labels"])
    batch["attention"] = (~rest).long()
    return sft(loss, batch=batch, roles={**PACKED_ROLES, "attention": "attention"}, all_supervised=True)


@right("packing")
def two_tokens_ahead() -> Thing:
    """A second term predicts the token after the next one."""

    def loss(model: nn.Module, batch: Mapping[str, Any], ahead: float) -> Tensor:
        logits = model(batch["ids"], batch["attention"])
        further = F.cross_entropy(logits[:, :-2].flatten(0, 1), batch["labels"][:, 2:].flatten(), ignore_index=-100)
        return cross_entropy(logits, batch["labels"]) + ahead * further

    return sft(loss, settings={"ahead": Setting(0.3, "weight")})


@right("packing")
def smoothed_labels() -> Thing:
    def loss(model: nn.Module, batch: Mapping[str, Any], smoothing: float) -> Tensor:
        logits = model(batch["ids"], batch["attention"])[:, :-1]
        return F.cross_entropy(
            logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100, label_smoothing=smoothing
        )

    return sft(loss, settings={"smoothing": Setting(0.1)})


@right("packing")
def tokens_with_weights() -> Thing:
    """Every token has a weight; the loss divides by the sum of the weights."""

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        logits = model(batch["ids"], batch["attention"])[:, :-1]
        labels = batch["labels"][:, 1:]
        each = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        weights = batch["weights"][:, 1:] * (labels != -100)
        return (each * weights).sum() / weights.sum()

    batch = sft_batch()
    batch["weights"] = 0.25 + torch.rand(batch["ids"].shape, generator=torch.Generator().manual_seed(2))
    roles = {"ids": "ids", "attention": "attention", "labels": "labels", "weights": "weights"}
    return sft(loss, batch=batch, roles=roles)


class PrefixNet(Net):
    """Tokens of the prompt see each other in both directions."""

    def body(self, x: Tensor, attention: Tensor | None, documents: Tensor | None, positions: Tensor) -> Tensor:
        x = x + self.place(positions)
        q, k, v = self.mix(x).chunk(3, -1)
        place = torch.arange(x.shape[1])
        allowed = (place[:, None] >= place[None]) | ((place[:, None] < 3) & (place[None] < 3))
        allowed = (
            allowed[None] & (torch.ones(len(x), 1, len(place)) if attention is None else attention[:, None]).bool()
        )
        allowed = allowed | torch.eye(len(place), dtype=torch.bool)[None]
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=allowed[:, None])
        return torch.tanh(x + self.out(y[:, 0]))


@right("packing")
def prompt_sees_itself() -> Thing:
    return sft(model=PrefixNet())


@right("sharding")
def vocabulary_in_two_shards() -> Thing:
    """Cross-entropy from two halves of the vocabulary; the plain loss claims the same gradient."""

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        logits = model(batch["ids"], batch["attention"])[:, :-1]
        labels = batch["labels"][:, 1:]
        halves = logits.split([15, VOCABULARY - 15], -1)
        norm = torch.logsumexp(torch.stack([h.logsumexp(-1) for h in halves]), 0)
        known = labels != -100
        target = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return ((norm - target) * known).sum() / known.sum()

    def plain(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        return cross_entropy(model(batch["ids"], batch["attention"]), batch["labels"])

    return sft(loss, paths={"plain": plain})


@right("sharding")
def sequence_in_chunks() -> Thing:
    """The head runs on chunks of the sequence; their length must not matter."""

    def loss(model: nn.Module, batch: Mapping[str, Any], chunk: int) -> Tensor:
        logits = model(batch["ids"], batch["attention"])[:, :-1]
        labels = batch["labels"][:, 1:]
        total = logits.new_zeros(())
        for part, target in zip(logits.split(chunk, 1), labels.split(chunk, 1), strict=True):
            total = total + F.cross_entropy(part.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
        return total / (labels != -100).sum()

    return sft(loss, settings={"chunk": Setting(4, "inert")})


@right("sharding")
def one_expert_per_token() -> Thing:
    """Each token uses its first expert alone; experts that no token chose have no gradient."""

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        assert isinstance(model, Routed)
        x = model.base(batch["ids"], batch["attention"])
        gate = model.router(x).softmax(-1)
        best = gate.argmax(-1)
        outputs = model.experts(x).unflatten(-1, (4, VOCABULARY))
        chosen = outputs.gather(-2, best[..., None, None].expand(*best.shape, 1, VOCABULARY))[..., 0, :]
        return cross_entropy(gate.gather(-1, best[..., None]) * chosen, batch["labels"])

    return sft(loss, model=Routed(), may_idle=("experts.*",))


@right("sharding")
def half_of_the_model_is_frozen() -> Thing:
    model = Net()
    model.embed.requires_grad_(False)
    model.place.requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    return sft(model=model, optimizer=torch.optim.AdamW(trainable, lr=1e-3))


@right("sharding")
def autocast_in_16_bits() -> Thing:
    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch["ids"], batch["attention"])
        return cross_entropy(logits.float(), batch["labels"])

    return sft(loss, precision=torch.bfloat16)


@right("sharding")
def summed_over_all_tokens() -> Thing:
    """A sum, which an update divides by the tokens of all ranks."""

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        return cross_entropy(model(batch["ids"], batch["attention"]), batch["labels"], "sum")

    return sft(loss, reduction="sum")


@right("sharding")
def z_loss_on_supervised_tokens() -> Thing:
    def loss(model: nn.Module, batch: Mapping[str, Any], z: float) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(batch["ids"], batch["attention"])
        known = (batch["labels"][:, 1:] != -100).float()
        square = mean(logits[:, :-1].logsumexp(-1) ** 2, known)
        return cross_entropy(logits, batch["labels"]) + z * square, {"z": square}

    return sft(loss, settings={"z": Setting(1e-3, "weight")}, metrics={"z": Metric(low=0.0, weight="z")})
