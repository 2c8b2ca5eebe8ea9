"""Law MI-PACKED: documents that share a row; each defect beside a correct twin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Step, audit
from earnest_audit.laws import documents
from tests.audit.steps import LENGTH, ROWS, VOCABULARY, WIDTH, Tiny, logprobs, sft_step

DTYPES = [torch.float32, torch.bfloat16]


STARTS = torch.tensor([5, 6, 7, 4, 6])[:, None]


AT = torch.arange(LENGTH)[None]


Data = Mapping[str, Any]


def outcomes(step: Step) -> dict[str, str]:
    return {f.subject: f.outcome for f in audit(step, laws=[documents.LAW]).findings}


def packed_batch() -> dict[str, Tensor]:
    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    return {"ids": ids, "documents": (AT >= STARTS).long(), "labels": ids.clone(), "attention": torch.ones_like(ids)}


def roles(batch: Data) -> dict[str, str]:
    return {k: k for k in batch}


def boundary_step(heeded: bool, dtype: torch.dtype = torch.float32, opening: int | None = None) -> Step:
    model, batch = Tiny().to(dtype), packed_batch()
    if opening is not None:
        for key in ("ids", "labels"):
            batch[key] = torch.where(AT == STARTS, opening, batch[key])

    def loss(model: nn.Module, batch: Data) -> Tensor:
        logits, labels = model(batch["ids"], batch["attention"], batch["documents"])[:, :-1], batch["labels"][:, 1:]
        inside = batch["documents"][:, 1:] == batch["documents"][:, :-1]
        labels = torch.where(inside, labels, -100) if heeded else labels
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    return Step(model=model, loss=loss, batch=batch, roles=roles(batch), all_supervised=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heeded", [False, True])
def test_a_first_token_that_follows_from_another_document(heeded: bool, dtype: torch.dtype) -> None:
    found = outcomes(boundary_step(heeded, dtype))
    assert found.pop(documents.FIRST) == ("holds" if heeded else "fails")
    assert set(found.values()) == {"holds"}


def test_the_same_opening_token_everywhere_may_be_learned() -> None:
    assert outcomes(boundary_step(False, opening=1))[documents.FIRST] == "not applicable"


class Placed(nn.Module):
    """Absolute positions; inside a document, the mean of what came before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(positions)
        seen = (documents[:, :, None] == documents[:, None]).tril().to(x.dtype)
        return self.head(torch.tanh(torch.cat([x, seen @ x / seen.sum(-1, keepdim=True)], -1)))


def placed_step(again: bool, dtype: torch.dtype) -> Step:
    model, batch = Placed().to(dtype), packed_batch()
    batch["labels"] = torch.where((AT < 2) | ((AT >= STARTS) & (AT < STARTS + 2)), -100, batch["ids"])
    batch["positions"] = torch.where(AT >= STARTS, AT - STARTS, AT) if again else AT.expand(ROWS, LENGTH).clone()

    def loss(model: nn.Module, batch: Data) -> Tensor:
        logits = model(batch["ids"], batch["positions"], batch["documents"])[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)

    return Step(model=model, loss=loss, batch=batch, roles=roles(batch))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("again", [False, True])
def test_positions_begin_again_with_a_document(again: bool, dtype: torch.dtype) -> None:
    found = outcomes(placed_step(again, dtype))
    assert found[documents.ALONE] == ("holds" if again else "fails")
    assert found[documents.PACKED] == found[documents.FIRST] == "holds"


def test_batches_with_cu_seqlens_are_not_cut() -> None:
    """cu_seqlens would be another batch's, once columns are cut off."""
    step = sft_step(packed=True)
    batch = {**step.batch, "cu_seqlens": torch.tensor([0, 6, 12, 18])}
    found = outcomes(Step(model=step.model, loss=step.loss, batch=batch, roles=step.roles))
    assert found[documents.ALONE] == "not applicable" and found[documents.PACKED] == "holds"


def returns(rewards: Tensor, values: Tensor, on: Tensor, last: Tensor, fade: float = 0.9) -> Tensor:
    """Advantages by discounted sums from the end; where ``last`` is 1, nothing comes from after."""
    total = after = torch.zeros(len(rewards))
    found = []
    for t in reversed(range(rewards.shape[1])):
        going = 1 - last[:, t]
        fresh = rewards[:, t] + fade * after * going - values[:, t] + fade * fade * total * going
        total = torch.where(on[:, t] > 0, fresh, total)
        after = torch.where(on[:, t] > 0, values[:, t], after)
        found.append(total * on[:, t])
    return torch.stack(found[::-1], 1)


def returns_step(ended: bool, count: int) -> Step:
    """``count`` documents a row; a defect of recurrent PPO and of packed rollouts."""
    model = Tiny()
    ids = torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    size = 12 // count
    at = torch.arange(12)
    batch: dict[str, Tensor] = {
        "ids": ids,
        "documents": (at // size)[None].expand(2, -1).clone(),
        "mask": (at[1:] % size >= 2).float()[None].expand(2, -1).clone(),
    }
    rng = torch.Generator().manual_seed(1)
    batch["values"], batch["rewards"] = (torch.randn(2, 11, generator=rng) * batch["mask"] for _ in range(2))
    batch["old"] = logprobs(model, batch).detach() - 0.02

    def loss(model: nn.Module, batch: Data) -> Tensor:
        document = batch["documents"][:, 1:]
        last = F.pad((document[:, 1:] != document[:, :-1]).float(), (0, 1), value=1.0)
        ends = last if ended else torch.zeros_like(last)
        a = returns(batch["rewards"], batch["values"], batch["mask"], ends)
        ratio = (logprobs(model, batch) - batch["old"]).exp()
        return -(torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) * batch["mask"]).sum() / batch["mask"].sum()

    return Step(
        model=model, loss=loss, batch=batch, family="policy gradient", value_is_loss=True,
        roles={"behaviour": "old", **roles({k: v for k, v in batch.items() if k != "old"})},
    )  # fmt: skip


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("ended", [False, True])
def test_returns_end_with_their_document(ended: bool, count: int) -> None:
    found = outcomes(returns_step(ended, count))
    assert found[documents.SUMS] == ("holds" if ended else "fails")
    assert found[documents.PACKED] == "holds"


@pytest.mark.parametrize("row", ["one row of two documents", "rows"])
@pytest.mark.parametrize("heeded", [False, True])
def test_a_signal_that_is_averaged_over_the_whole_row(heeded: bool, row: str) -> None:
    """Both ways: the last document's signals must not reach the first one either."""
    step = returns_step(True, 2)
    one = row != "rows"
    batch = {k: v[:1] if one else v for k, v in step.batch.items() if k not in ("values", "rewards")}
    batch["advantages"] = torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(2))

    def loss(model: nn.Module, batch: Data) -> Tensor:
        a = batch["advantages"] * batch["mask"]
        centre = a - 0 if heeded else a - batch["advantages"].mean(-1, keepdim=True)
        return -((logprobs(model, batch) - batch["old"]).exp() * centre * batch["mask"]).sum() / batch["mask"].sum()

    named = {"behaviour": "old", **roles({k: v for k, v in batch.items() if k != "old"})}
    found = outcomes(Step(model=step.model, loss=loss, batch=batch, roles=named))
    assert found[documents.PACKED] == ("holds" if heeded else "fails")
