"""Sharding: parts of a model or of a loss on several devices, and weights that are sent to a sampler."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Accumulation, Merge, Metric, Setting, WeightSync
from tests.audit.blind2026.base import VOCABULARY, WIDTH, Net, Thing, case, cross_entropy, picked, rows, sft, sft_batch


@case("NVIDIA-NeMo/Automodel#2931", "sharding", "cutting the embeddings for context parallelism detaches them")
def shards_are_detached(broken: bool) -> Thing:
    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        assert isinstance(model, Net)
        embedded = model.embed(batch["ids"])
        halves = embedded.detach().chunk(2, 1) if broken else embedded.chunk(2, 1)
        positions = torch.arange(batch["ids"].shape[1]).expand_as(batch["ids"])
        hidden = model.body(torch.cat(halves, 1), batch["attention"], None, positions)
        return cross_entropy(model.head(hidden), batch["labels"])

    return sft(loss)


class Routed(nn.Module):
    """A language model whose head is a mixture of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Net()
        self.router = nn.Linear(VOCABULARY, 4)
        self.experts = nn.Linear(VOCABULARY, 4 * VOCABULARY)

    def forward(self, ids: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
        x = self.base(ids, attention)
        gate = self.router(x).softmax(-1)
        return (gate[..., None] * self.experts(x).unflatten(-1, (4, VOCABULARY))).sum(-2), gate


def balance(gate: Tensor, attention: Tensor) -> Tensor:
    weight = (attention / attention.sum())[..., None]
    load = (F.one_hot(gate.argmax(-1), 4) * weight).sum((0, 1))
    return 4 * (load * (gate * weight).sum((0, 1))).sum()


def routed(fault: str) -> Thing:
    def loss(model: nn.Module, batch: Mapping[str, Any], aux: float) -> tuple[Tensor, dict[str, Tensor]]:
        logits, gate = model(batch["ids"], batch["attention"])
        nll, load = cross_entropy(logits, batch["labels"]), balance(gate, batch["attention"].float())
        if fault == "orphaned":
            return nll + aux * load.detach(), {"load": load}
        if fault == "not weighed":
            return nll + (load if aux > 0 else 0.0), {"load": load}
        return nll + aux * load, {"load": load}

    return sft(
        loss,
        model=Routed(),
        settings={"aux": Setting(0.01, "weight")},
        metrics={"load": Metric(low=0.0, weight="aux")},
        rows_interact=True,
    )


@case("NVIDIA-NeMo/Automodel#1408", "sharding", "the balancing loss is added to the value and has no gradient")
def balancing_loss_has_no_gradient(broken: bool) -> Thing:
    return routed("orphaned" if broken else "")


@case("NVIDIA-NeMo/Automodel#1412", "sharding", "the balancing coefficient only switches the term on")
def balancing_coefficient_not_applied(broken: bool) -> Thing:
    return routed("not weighed" if broken else "")


@case(
    "NVIDIA/Megatron-LM#5047",
    "sharding",
    "the z-loss is scaled by each shard's own tokens, so it grows with the shards",
)
def z_loss_grows_with_the_shards(broken: bool) -> Thing:
    def accumulate(model: nn.Module, shards: Sequence[Mapping[str, Any]]) -> None:
        tokens = sum((s["labels"][:, 1:] != -100).sum() for s in shards)
        for shard in shards:
            logits = model(shard["ids"], shard["attention"])
            here = (shard["labels"][:, 1:] != -100).float()
            z = (logits[:, :-1].logsumexp(-1) ** 2 * here).sum()
            nll = cross_entropy(logits, shard["labels"], "sum") / tokens
            (nll + 1e-2 * z / (here.sum() if broken else tokens)).backward()

    return Accumulation(Net(), accumulate, sft_batch(), what="tensor-parallel shards")


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.head.weight, std=0.3)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids))))


def synced(trainer: nn.Module, sampler: nn.Module, push: Any, wake: Any = lambda: None) -> WeightSync:
    ids = rows()["ids"]
    before = copy.deepcopy(trainer.state_dict())

    def perturb() -> None:
        with torch.no_grad():
            for p in trainer.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(7)))

    def sampled() -> Tensor:
        wake()
        with torch.no_grad():
            return picked(sampler(ids), ids)

    def trained() -> Tensor:
        with torch.no_grad():
            return picked(trainer(ids), ids)

    push()
    return WeightSync(
        perturb=perturb, push=push, trainer=trained, sampler=sampled, undo=lambda: trainer.load_state_dict(before),
        model=trainer,
    )  # fmt: skip


@case("vllm-project/vllm#56689", "sharding", "a tied head is not sent to the stage that holds it")
def tied_head_not_sent(broken: bool) -> Thing:
    trainer, sampler = Tied(True), Tied(False)

    def push() -> None:
        named = dict(trainer.named_parameters(remove_duplicate=broken))
        with torch.no_grad():
            for name, p in sampler.named_parameters():
                if name in named:
                    p.copy_(named[name])

    sampler.head.weight.data.copy_(trainer.head.weight.data)
    return synced(trainer, sampler, push)


@case("huggingface/trl#5313", "sharding", "a sampler that wakes up reads the weights from disk again")
def wakes_with_old_weights(broken: bool) -> Thing:
    trainer, sampler = Net(), Net()
    disk = copy.deepcopy(sampler.state_dict())
    asleep = [True]

    def push() -> None:
        sampler.load_state_dict(trainer.state_dict())
        asleep[0] = broken

    def wake() -> None:
        if asleep[0]:
            sampler.load_state_dict(disk)
            asleep[0] = False

    return synced(trainer, sampler, push, wake)


@case("huggingface/peft#3449", "sharding", "a combined adapter inherits rank-stabilised scaling and is √r too large")
def combined_adapter_is_rescaled(broken: bool) -> Thing:
    torch.manual_seed(0)
    down, up, rank = torch.randn(4, 8) * 0.2, torch.randn(8, 4) * 0.2, 4
    scaling = 8 / rank**0.5

    def delta(weight: float) -> Tensor:
        own = rank**0.5 if broken else 1.0
        return own * (up * weight * scaling) @ down

    return Merge(delta=delta, applied=lambda weight: weight * scaling * up @ down)
