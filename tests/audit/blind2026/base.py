"""A second reading: defects that public issues of 2026 describe, each beside its fix, and right steps that are unusual.

Their author had read the declarations (``Step``, ``Setting``, ``Metric``, the fields and docstrings of the subjects)
and not the laws of steps. Every case is small and complete: ``make(True)`` is the step as the issue describes it,
``make(False)`` the step after the fix. Declarations are those that a user of the API would write for the right step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Setting, Step, Subject

Thing = Step | Subject
VOCABULARY, WIDTH, ROWS, LENGTH, PROMPT = 29, 16, 5, 12, 3


@dataclass(frozen=True)
class Case:
    """One defect and its fix. ``source``: repository and number of the issue or pull request."""

    id: str
    source: str
    family: str
    what: str
    make: Callable[[bool], Thing]


@dataclass(frozen=True)
class Right:
    """A right step that is unusual."""

    id: str
    family: str
    make: Callable[[], Thing]


CASES: list[Case] = []
RIGHT: list[Right] = []


def case(source: str, family: str, what: str) -> Callable[[Callable[[bool], Thing]], Callable[[bool], Thing]]:
    def add(make: Callable[[bool], Thing]) -> Callable[[bool], Thing]:
        CASES.append(Case(make.__name__, source, family, what, make))
        return make

    return add


def right(family: str) -> Callable[[Callable[[], Thing]], Callable[[], Thing]]:
    def add(make: Callable[[], Thing]) -> Callable[[], Thing]:
        RIGHT.append(Right(make.__name__, family, make))
        return make

    return add


class Net(nn.Module):
    """A causal language model of one layer, with learned positions, padding and packed documents."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(4 * LENGTH, WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        nn.init.normal_(self.head.weight, std=0.5)

    def forward(
        self,
        ids: Tensor,
        attention: Tensor | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        width = ids.shape[1]
        if positions is None:
            positions = torch.arange(width).expand_as(ids)
        return self.head(self.body(self.embed(ids), attention, documents, positions))

    def body(self, x: Tensor, attention: Tensor | None, documents: Tensor | None, positions: Tensor) -> Tensor:
        x = x + self.place(positions)
        q, k, v = self.mix(x).chunk(3, -1)
        width = x.shape[1]
        allowed = torch.ones(width, width, dtype=torch.bool).tril()[None]
        if attention is not None:
            allowed = allowed & (attention[:, None, :] != 0)
        if documents is not None:
            allowed = allowed & (documents[:, :, None] == documents[:, None, :])
        allowed = allowed | torch.eye(width, dtype=torch.bool)[None]
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=allowed[:, None])
        return torch.tanh(x + self.out(y[:, 0]))


def picked(logits: Tensor, ids: Tensor) -> Tensor:
    """log π of the next tokens, [B, T-1]."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def logprobs(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return picked(model(batch["ids"], batch["attention"]), batch["ids"])


def rows(seed: int = 0) -> dict[str, Tensor]:
    """Ragged rows with right padding: ids and attention [B, T], and a mask [B, T-1] of sampled tokens; tokens 6 and 7
    are a tool's output."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=rng)
    lengths = torch.tensor([12, 9, 11, 10, 12])
    place = torch.arange(LENGTH)
    attention = (place[None] < lengths[:, None]).long()
    sampled = (place >= PROMPT) & (place != 6) & (place != 7)
    return {"ids": ids * attention, "attention": attention, "mask": (attention * sampled)[:, 1:].float()}


def agent_batch(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    batch = rows(seed)
    rng = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        now = logprobs(model, batch)
    batch["old"] = (now + 0.05 * torch.randn(now.shape, generator=rng)).clamp(max=-1e-3)
    batch["advantages"] = torch.tensor([0.9, -0.6, 0.4, -1.1, 0.7])
    return batch


def clipped(logp: Tensor, old: Tensor, advantages: Tensor, clip: float) -> Tensor:
    ratio = (logp - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def policy_loss(model: nn.Module, batch: Mapping[str, Any], clip: float) -> Tensor:
    surrogate = clipped(logprobs(model, batch), batch["old"], batch["advantages"][:, None], clip)
    return mean(surrogate, batch["mask"])


POLICY_ROLES = {"ids": "ids", "attention": "attention", "mask": "mask", "behaviour": "old", "advantages": "advantages"}


def policy(loss: Callable[..., Any], **more: Any) -> Step:
    """A clipped policy-gradient step as a user declares it; ``more`` replaces or adds declarations."""
    model = more.pop("model", None) or Net()
    given: dict[str, Any] = {
        "batch": agent_batch(model),
        "roles": POLICY_ROLES,
        "settings": {"clip": Setting(0.2, "clip")},
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "max_grad_norm": 1.0,
        "logprobs": logprobs,
    }
    return Step(model=model, loss=loss, **{**given, **more})


def sft_batch(seed: int = 0) -> dict[str, Tensor]:
    batch = rows(seed)
    supervised = F.pad(batch.pop("mask"), (1, 0)) != 0
    batch["labels"] = torch.where(supervised, batch["ids"], -100)
    return batch


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction=reduction
    )


def sft_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return cross_entropy(model(batch["ids"], batch["attention"]), batch["labels"])


def sft(loss: Callable[..., Any] = sft_loss, **more: Any) -> Step:
    model = more.pop("model", None) or Net()
    given: dict[str, Any] = {
        "batch": sft_batch(),
        "roles": {"ids": "ids", "attention": "attention", "labels": "labels"},
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
    }
    return Step(model=model, loss=loss, **{**given, **more})


def packed_batch(seed: int = 0) -> dict[str, Tensor]:
    """Rows of two documents, whose positions begin again; a document's first token is not supervised."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (4, LENGTH), generator=rng)
    cut = torch.tensor([5, 7, 4, 6])
    place = torch.arange(LENGTH)[None].expand_as(ids)
    documents = (place >= cut[:, None]).long()
    positions = torch.where(documents == 1, place - cut[:, None], place)
    labels = torch.where(positions == 0, -100, ids)
    return {"ids": ids, "documents": documents, "positions": positions, "labels": labels}


PACKED_ROLES = {"ids": "ids", "documents": "documents", "positions": "positions", "labels": "labels"}
