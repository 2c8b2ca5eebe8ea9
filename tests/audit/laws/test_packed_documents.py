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
from tests.audit.steps import LENGTH, ROWS, VOCABULARY, WIDTH, Tiny, logprobs

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


class Placed(nn.Embedding):
    """Tokens and where they stand: without that, attention does not see in which order they are."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + super().forward(torch.arange(ids.shape[1]))


def unlabelled(seed: int, heeded: bool, leaks: bool = False, opening: int | None = None, **more: Any) -> Step:
    """The step makes its labels from the ids, as torchtune #2613 did over the whole row."""
    ids = torch.randint(2, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(seed))
    packs = torch.tensor([[0] * 5 + [1] * 7, [0] * 4 + [1] * 3 + [2] * 5])
    begins = packs != packs.roll(1, dims=-1)
    ids = torch.where(begins.roll(-1, dims=-1), 1, ids)  # an end
    ids = ids if opening is None else torch.where(begins, opening, ids)

    def loss(model: nn.Module, batch: Data) -> Tensor:
        logits = model(batch["ids"], documents=None if leaks else batch["documents"])[:, :-1]
        inside = batch["documents"][:, 1:] == batch["documents"][:, :-1]
        labels = torch.where(inside, batch["ids"][:, 1:], -100) if heeded else batch["ids"][:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    batch, model = {"ids": ids, "documents": packs}, Tiny(seed)
    model.embed = Placed(VOCABULARY, model.embed.embedding_dim)
    return Step(model, loss, batch, roles(batch), family="sft", all_supervised=True, **more)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_that_makes_its_labels_from_a_packed_row(seed: int) -> None:
    assert outcomes(unlabelled(seed, heeded=True)) == {documents.PACKED: "holds"}
    assert outcomes(unlabelled(seed, heeded=False)) == {documents.PACKED: "fails"}
    assert outcomes(unlabelled(seed, heeded=True, leaks=True)) == {documents.PACKED: "fails"}
    assert outcomes(unlabelled(seed, heeded=False, opening=0)) == {documents.PACKED: "holds"}  # the same after each end
    assert outcomes(unlabelled(seed, heeded=True, rows_interact=True)) == {documents.PACKED: "not applicable"}


def rollouts() -> tuple[nn.Module, dict[str, Tensor]]:
    """Two rows of two documents each."""
    model, at = Tiny(), torch.arange(12)
    ids = torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = (at[1:] % 6 >= 2).float()[None].expand(2, -1).clone()
    batch = {"ids": ids, "documents": (at // 6)[None].expand(2, -1).clone(), "mask": mask}
    batch["old"] = logprobs(model, batch).detach() - 0.02
    return model, batch


@pytest.mark.parametrize("row", ["one row of two documents", "rows"])
@pytest.mark.parametrize("heeded", [False, True])
def test_a_signal_that_is_averaged_over_the_whole_row(heeded: bool, row: str) -> None:
    """Both ways: the last document's signals must not reach the first one either."""
    model, batch = rollouts()
    batch = {k: v if row == "rows" else v[:1] for k, v in batch.items()}
    batch["advantages"] = torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(2))

    def loss(model: nn.Module, batch: Data) -> Tensor:
        a = batch["advantages"] * batch["mask"]
        centre = a - 0 if heeded else a - batch["advantages"].mean(-1, keepdim=True)
        return -((logprobs(model, batch) - batch["old"]).exp() * centre * batch["mask"]).sum() / batch["mask"].sum()

    named = {"behaviour": "old", **roles({k: v for k, v in batch.items() if k != "old"})}
    found = outcomes(Step(model=model, loss=loss, batch=batch, roles=named))
    assert found[documents.PACKED] == ("holds" if heeded else "fails")


class Absolute(nn.Module):
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
    model, batch = Absolute().to(dtype), packed_batch()
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
    assert found[documents.AGAIN] == ("holds" if again else "fails")
    assert found[documents.PACKED] == found[documents.FIRST] == "holds"


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
    assert outcomes(returns_step(ended, count))[documents.PACKED] == ("holds" if ended else "fails")
