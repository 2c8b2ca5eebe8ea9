"""Right machinery that is unusual: schedules, data stages, ranks, resumes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit import Accumulation, AdvantageEstimator, ChatTemplate, Collator, Ranks, Resume, Schedule
from tests.audit.blind2026.agents import BREAK, END, ROLES, START, words
from tests.audit.blind2026.base import Net, Thing, cross_entropy, right, sft_batch
from tests.audit.blind2026.metrics import token_rows

PEAK = 1e-3


@right("schedules")
def warmup_stable_decay() -> Thing:
    """A plateau of most of the run, then a root-shaped decay to a tenth."""

    def rates(total: int, ranks: int) -> list[float]:
        start = int(total * 0.8)
        fall = [1 - 0.9 * math.sqrt((k - start) / (total - 1 - start)) for k in range(start, total)]
        return [PEAK * min(1.0, (k + 1) / 4) for k in range(start)] + [PEAK * f for f in fall]

    return Schedule(rates, peak=PEAK, final=0.1 * PEAK, warmup=4)


@right("schedules")
def inverse_square_root() -> Thing:
    def rates(total: int, ranks: int) -> list[float]:
        return [PEAK * min((k + 1) / 8, math.sqrt(8 / (k + 1))) for k in range(total)]

    return Schedule(rates, peak=PEAK, final=PEAK * math.sqrt(8 / 40), warmup=8)


@right("schedules")
def two_groups_with_their_own_ends() -> Thing:
    """Matrices decay linearly to 0; the rest keeps its rate."""

    def rates(total: int, ranks: int) -> list[list[float]]:
        return [[0.02 * (1 - k / (total - 1)), 3e-4] for k in range(total)]

    return Schedule(rates, peak=[0.02, 3e-4], final=[0.0, 3e-4])


@right("schedules")
def cosine_with_restarts() -> Thing:
    def rates(total: int, ranks: int) -> list[float]:
        cycle = total // 4
        return [PEAK * 0.5 * (1 + math.cos(math.pi * (k % cycle) / (cycle - 1))) for k in range(total)]

    return Schedule(rates, peak=PEAK, final=0.0, restarts=True)


@right("schedules")
def fast_then_slow_decay() -> Thing:
    """A warm-up, a plateau, a steep decay to a fifth and a slow one to 0."""

    def rates(total: int, ranks: int) -> list[float]:
        out = []
        for k in range(total):
            if k < 4:
                out.append(PEAK * (k + 1) / 4)
            elif k < 8:
                out.append(PEAK)
            elif k < total // 2:
                out.append(PEAK * (1 - 0.8 * ((k - 8) / (total // 2 - 8)) ** 0.6))
            else:
                out.append(0.2 * PEAK * (1 - (k - total // 2) / (total - 1 - total // 2)))
        return out

    return Schedule(rates, peak=PEAK, final=0.0, warmup=4)


def ragged() -> list[dict[str, list[int]]]:
    return [{"ids": [3 + k] * n, "labels": [-100] + [3 + k] * (n - 1)} for k, n in enumerate((4, 7, 2, 5))]


@right("data stages")
def left_padding_to_a_multiple() -> Thing:
    """Rows are padded on the left, to a multiple of four."""

    def collate(examples: list[Any]) -> dict[str, Tensor]:
        width = -(-max(len(e["ids"]) for e in examples) // 4) * 4
        return {
            key: torch.tensor([[pad] * (width - len(e[key])) + e[key] for e in examples])
            for key, pad in (("ids", 0), ("labels", -100))
        }

    return Collator(collate, ragged(), pads={"ids": 0, "labels": -100})


@right("data stages")
def packs_into_one_row() -> Thing:
    """Examples become one row with documents."""

    def collate(examples: list[Any]) -> dict[str, Tensor]:
        ids = [i for e in examples for i in e["ids"]]
        documents = [k for k, e in enumerate(examples) for _ in e["ids"]]
        return {"ids": torch.tensor([ids]), "documents": torch.tensor([documents])}

    return Collator(collate, ragged(), rows=False)


@right("data stages")
def lengths_beside_the_rows() -> Thing:
    """A column of lengths and one of plain numbers stand beside padded rows."""

    def collate(examples: list[Any]) -> dict[str, Tensor]:
        width = max(len(e["ids"]) for e in examples)
        return {
            "ids": torch.tensor([e["ids"] + [0] * (width - len(e["ids"])) for e in examples]),
            "length": torch.tensor([len(e["ids"]) for e in examples]),
            "share": torch.tensor([1 / len(e["ids"]) for e in examples]),
        }

    return Collator(collate, ragged(), pads={"ids": 0})


@right("agents")
def earlier_reasoning_is_removed() -> Thing:
    """Only the last answer keeps its reasoning: what was sampled from is no prefix, by design."""
    talk: list[Mapping[str, Any]] = [
        {"role": "user", "content": "two plus three"},
        {"role": "assistant", "content": "five", "reasoning": "count up from two"},
        {"role": "user", "content": "and twice that"},
        {"role": "assistant", "content": "ten", "reasoning": "double five"},
    ]

    def tokens(messages: list[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        mask: list[int] = []
        for place, message in enumerate(messages):
            own = message["role"] == "assistant"
            last = place == len(messages) - 1
            thought = words(message.get("reasoning", "")) if last else []
            body = thought + words(message["content"])
            ids += [START, ROLES[message["role"]], *body, END, BREAK]
            mask += [0, 0, *[int(own)] * (len(body) + 1), 0]
        return ids, mask

    def prompt(messages: list[Mapping[str, Any]]) -> list[int]:
        return [*tokens(messages)[0], START, ROLES["assistant"]]

    return ChatTemplate(tokens, prompt, talk, end=END, prefix=False)


@right("metrics over ranks")
def median_of_all_rows() -> Thing:
    """Ranks send their rows; the median is taken once."""
    return Ranks(metric=lambda shards: float(torch.cat([s[:, 0].sum(-1) for s in shards]).median()), rows=token_rows())


@right("metrics over ranks")
def spread_from_sums() -> Thing:
    """The standard deviation over all rows, from each rank's count, sum and sum of squares."""

    def metric(shards: list[Tensor]) -> float:
        each = [s[:, 0].sum(-1).double() for s in shards]
        n = sum(len(e) for e in each)
        total, squares = sum(float(e.sum()) for e in each), sum(float((e * e).sum()) for e in each)
        return math.sqrt(max(0.0, squares / n - (total / n) ** 2))

    return Ranks(metric=metric, rows=token_rows())


@right("metrics over ranks")
def perplexity_of_all_tokens() -> Thing:
    def metric(shards: list[Tensor]) -> float:
        return math.exp(sum(float(s[:, 0].sum()) for s in shards) / sum(float(s[:, 1].sum()) for s in shards))

    def draw(rank: int) -> Tensor:
        stream = torch.Generator().manual_seed(9)
        return torch.randn(4, 8, generator=stream)[rank]  # one stream, of which each rank takes its own part

    return Ranks(draw=draw, metric=metric, rows=token_rows())


@right("agents")
def leave_one_out_baseline() -> Thing:
    """A row's baseline is the mean of the others of its group."""

    def fn(rewards: Tensor, groups: Tensor) -> Tensor:
        same = (groups[:, None] == groups[None]).to(rewards.dtype)
        counts = same.sum(-1)
        return rewards - (same @ rewards - rewards) / (counts - 1)

    return AdvantageEstimator(fn, scale="equal")


@right("sharding")
def tokens_counted_over_all_shards() -> Thing:
    """Each shard's sum is divided by the tokens of all shards; backward runs in the reverse order."""

    def accumulate(model: nn.Module, shards: Sequence[Mapping[str, Any]]) -> None:
        tokens = sum((s["labels"][:, 1:] != -100).sum() for s in shards)
        losses = [cross_entropy(model(s["ids"], s["attention"]), s["labels"], "sum") / tokens for s in shards]
        for loss in reversed(losses):
            loss.backward()

    return Accumulation(Net(), accumulate, sft_batch(), what="shards")


@right("data stages")
def resumed_noise() -> Thing:
    """A run whose data and noise come from one generator, which is saved with the weights."""

    class Noisy:
        def __init__(self) -> None:
            torch.manual_seed(1)
            self.weight = torch.zeros(3)
            self.stream = torch.Generator().manual_seed(5)

    def run(x: Noisy, n: int) -> list[int]:
        seen = []
        for _ in range(n):
            row = int(torch.randint(0, 100, (), generator=x.stream))
            x.weight = 0.9 * x.weight + 0.01 * row + 0.1 * torch.randn(3, generator=x.stream)
            seen.append(row)
        return seen

    def save(x: Noisy, folder: Path) -> None:
        torch.save({"weight": x.weight, "stream": x.stream.get_state()}, folder / "x.pt")

    def load(x: Noisy, folder: Path) -> None:
        state = torch.load(folder / "x.pt")
        x.weight = state["weight"]
        x.stream.set_state(state["stream"])

    return Resume(Noisy, run, save, load, state=lambda x: x.weight)
