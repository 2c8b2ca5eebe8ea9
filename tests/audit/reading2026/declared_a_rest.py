"""Declarations of reader a's other cases: data stages, schedules, metrics, updates, templates, advantages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from earnest_audit import (
    Accumulation,
    AdvantageEstimator,
    Census,
    ChatTemplate,
    Collator,
    Ranks,
    Resume,
    Schedule,
    Update,
)  # fmt: skip
from tests.audit.reading2026.base import Thing, declare, no_subject, padded, twinned, whole


@declare("a/d02")
def stop_token_becomes_padding(m: Any, fn: Callable[..., Any]) -> Thing:
    return Collator(fn, m.make(0)["rows"], pads={"inputs": 1, "targets": -1})


@declare("a/d05")
def overflow_requeued_as_rows(m: Any, fn: Callable[..., Any]) -> Thing:
    def stage(rows: list[Any]) -> dict[str, Tensor]:
        out = fn(rows)
        return {k: padded([r[k] for r in out], -1) for k in ("ids", "seq_lengths")}

    def unpack(batch: Any) -> list[dict[str, Tensor]]:
        cuts = [[n for n in lengths if n > 0] for lengths in batch["seq_lengths"].tolist()]
        return [{"ids": d} for row, n in zip(batch["ids"], cuts, strict=True) for d in row[: sum(n)].split(n)]

    return Collator(stage, m.make(0)["rows"], rows=False, unpack=unpack)


@declare("a/d06")
def mrope_positions_over_whole_pack(m: Any, fn: Callable[..., Any]) -> list[Thing]:
    def collate(rows: list[Any]) -> dict[str, Tensor]:
        out = fn(rows)
        return {**out, "position_ids": out["position_ids"].permute(1, 2, 0)}  # [rows, time, 3]

    def pack(samples: list[Any]) -> dict[str, Tensor]:
        row = {
            "ids": [i for s in samples for i in s["ids"]], "seq_lengths": [len(s["ids"]) for s in samples],
            "grids": [s["grids"] for s in samples],
        }  # fmt: skip
        return collate([row])

    def unpack(batch: Any) -> list[dict[str, Tensor]]:
        index = batch["attention_mask"][0]
        return [{k: batch[k][0, index == s] for k in ("ids", "position_ids")} for s in index[index > 0].unique()]

    rows = m.make(0)["rows"]
    samples = [
        {"ids": part.tolist(), "grids": grids}
        for row in rows
        for part, grids in zip(torch.tensor(row["ids"]).split(row["seq_lengths"]), row["grids"], strict=True)
    ]
    return [
        Collator(collate, rows, pads={"ids": 0, "attention_mask": 0, "position_ids": 0}),
        Collator(pack, samples, rows=False, unpack=unpack),
    ]


@declare("a/d08")
def router_loss_times_world_size(m: Any, fn: Callable[..., Any]) -> Thing:
    given = m.make(0)

    def accumulate(model: Any, ranks: Sequence[Any]) -> None:
        fn(model, torch.optim.SGD(model.parameters(), lr=0.0), list(ranks))

    # the load-balancing loss is local by its definition
    return Accumulation(given["model"], accumulate, whole(given["batches"]), what="ranks", rows_interact=True)


@declare("a/d09")
def sharded_twice(m: Any, fn: Callable[..., Any]) -> list[Thing]:
    seen = [str(i) for rank in range(4) for step in range(8) for i in fn(rank, step)]
    return [
        Ranks(draw=lambda rank: torch.tensor(fn(rank, 0))),
        Census([str(i) for i in range(64)], seen, what="samples of an epoch", once=True),
    ]


@declare("a/d10")
def scheduler_kwargs_not_forwarded(m: Any, fn: Callable[..., Any]) -> Thing:
    def rates(total: int, ranks: int, num_warmup_steps: float = 10, timescale: float = 1000) -> list[float]:
        optimizer = m.make(0)["optimizer"]
        scheduler = fn(optimizer, num_warmup_steps=num_warmup_steps, scheduler_specific_kwargs={"timescale": timescale})
        out = []
        for _ in range(total):
            out.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return out

    end = 1e-3 / ((200 + 1000 - 10) / 1000) ** 0.5
    return Schedule(
        rates, peak=1e-3, final=end, total=200, warmup=10, settings={"num_warmup_steps": 10.0, "timescale": 1000.0}
    )


@declare("a/d11")
def progress_counts_micro_batches(m: Any, fn: Callable[..., Any]) -> Thing:
    def rates(total: int, ranks: int, warmdown: float = 0.5) -> list[float]:
        return [fn(k, num_iterations=total, warmdown=warmdown) for k in range(total)]

    return Schedule(rates, peak=1.0, final=0.0, total=64, settings={"warmdown": 0.5})


@declare("a/d12")
def rate_from_local_progress(m: Any, fn: Callable[..., Any]) -> Thing:
    consumed = m.make(0)["consumed"]

    def rates(total: int, ranks: int, share: float = 400, warmdown: float = 0.5, rank: int = 0) -> list[float]:
        return [fn(k, rank, consumed, share=share, warmdown=warmdown) for k in range(total)]

    furthest = max(track[-1] for track in consumed) / 400
    return Schedule(
        rates, peak=1.0, final=1 - (furthest - 0.5) / 0.5, total=40, settings={"share": 400.0, "warmdown": 0.5},
        of_rank=lambda total, rank: rates(total, 4, rank=rank),
    )  # fmt: skip


@declare("a/d13")
def history_eos_still_trained(m: Any, fn: Callable[..., Any]) -> Thing:
    def prompt(messages: list[Any]) -> Any:
        return fn([*messages, {"role": "assistant", "content": ""}])[0][:-1]  # without the end of the empty answer

    return ChatTemplate(fn, prompt, m.make(0)["messages"], end=2, trained=(5,))  # the last answer only


class Loop:
    """A run over the loader of a/d14: ``resume(epoch, done)`` gives the rest of an epoch, ``epochs`` a whole one."""

    def __init__(self, resume: Callable[[int, int], list[Any]], epochs: Callable[[int], list[Any]]) -> None:
        self.resume, self.epochs = resume, epochs
        self.epoch, self.done, self.rest = 0, 0, list(epochs(0))

    def step(self) -> Any:
        if not self.rest:
            self.epoch, self.done = self.epoch + 1, 0
            self.rest = list(self.epochs(self.epoch))
        self.done += 1
        return self.rest.pop(0)

    def load(self, epoch: int, done: int) -> None:
        self.epoch, self.done, self.rest = epoch, done, list(self.resume(epoch, done))


@declare("a/d14")
def resumed_loader_back_to_epoch_zero(m: Any, fn: Callable[..., Any]) -> Thing:
    def make() -> Loop:
        return Loop(lambda epoch, done: fn(20, 4, 0, epoch, done), lambda epoch: m.uninterrupted(20, 4, 0, epoch, 0))

    def save(run: Loop, folder: Path) -> None:
        (folder / "state.json").write_text(json.dumps([run.epoch, run.done]))

    def restore(run: Loop, folder: Path) -> None:
        run.load(*json.loads((folder / "state.json").read_text()))

    return Resume(
        make=make, run=lambda run, n: [run.step() for _ in range(n)], save=save, load=restore,
        state=lambda run: torch.tensor([run.epoch, run.done]), steps=7,
    )  # fmt: skip


@declare("a/d15")
def mean_of_rank_means(m: Any, fn: Callable[..., Any]) -> Thing:
    rows = whole(m.make(0)["per_rank"])
    return twinned(
        fn, m.single, lambda shards: [{"kl": s[:, 0], "mask": s[:, 1]} for s in shards],
        torch.stack([rows["kl"], rows["mask"]], 1),
    )  # fmt: skip


@declare("a/d16")
def tokens_counted_per_tensor_parallel_rank(m: Any, fn: Callable[..., Any]) -> Thing:
    rows = whole(m.make(0)["per_rank"][::2])["attention_mask"]
    return twinned(fn, m.single, lambda shards: [{"attention_mask": s} for s in shards for _ in range(2)], rows)


@declare("a/d17")
def entropy_over_other_tokens_than_the_loss(m: Any, fn: Callable[..., Any]) -> Thing:
    rows = whole(m.make(0)["per_rank"])

    def ranks(shards: list[Tensor]) -> list[Any]:
        return [{"logits": s[..., 2:], "labels": s[..., 0].long(), "attention_mask": s[..., 1].long()} for s in shards]

    stacked = torch.cat([rows["labels"][..., None].float(), rows["attention_mask"][..., None], rows["logits"]], -1)
    return twinned(fn, m.single, ranks, stacked)


@declare("a/d20")
def unscored_completion_gets_reward_zero(m: Any, fn: Callable[..., Any]) -> Thing:
    return AdvantageEstimator(lambda rewards, groups: fn(torch.stack([rewards, rewards], 1), groups), scale="free")


no_subject("a/r01", "GAE gives a reward to each token, and this code takes one outcome per row")


@declare("a/r03")
def one_row_per_turn_with_stripped_thoughts(m: Any, fn: Callable[..., Any]) -> Thing:
    def stage(rows: list[Any]) -> dict[str, Tensor]:
        out = fn(rows)
        same = {k: torch.tensor([r[k] for r in out]) for k in ("advantage", "weight", "trajectory")}
        return {**same, **{k: padded([r[k] for r in out], -1) for k in ("ids", "loss_mask")}}

    return Collator(stage, m.make(0)["rows"], rows=False)


@declare("a/r04")
def positions_with_gaps(m: Any, fn: Callable[..., Any]) -> Thing:
    return Collator(
        fn, m.make(0)["rows"], pads={"ids": 0, "labels": -100, "position_ids": 0, "document_ids": -1}
    )  # fmt: skip


@declare("a/r07")
def local_sum_times_world_over_global_count(m: Any, fn: Callable[..., Any]) -> list[Thing]:
    def loss(model: Any, batch: Any) -> Tensor:
        logits, labels = model(batch["ids"])[:, :-1], batch["labels"][:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    def declared(spread: Callable[[Any], list[Any]]) -> Thing:
        given = m.make(0)
        model, optimizer = given["model"], given["optimizer"]
        return Update(
            model, optimizer, lambda batches, norm: fn(model, optimizer, spread(batches), max_norm=norm), loss,
            whole([micro for rank in given["batches"] for micro in rank]),
        )  # fmt: skip

    return [declared(lambda batches: [[b] for b in batches]), declared(lambda batches: [list(batches)])]


@declare("a/r10")
def warmup_stable_one_minus_sqrt(m: Any, fn: Callable[..., Any]) -> Thing:
    def rates(total: int, ranks: int, cooldown: float = 200) -> list[float]:
        return [fn(k, total=total, cooldown=cooldown) for k in range(total)]

    return Schedule(rates, peak=1e-3, final=0.0, total=1000, warmup=50, settings={"cooldown": 200.0})


@declare("a/r11")
def jagged_cosine_with_restarts(m: Any, fn: Callable[..., Any]) -> Thing:
    def rates(total: int, ranks: int, every: float = 200, ramp: float = 10, floor: float = 0.1) -> list[float]:
        return [fn(k, total=total, every=every, ramp=ramp, floor=floor) for k in range(total)]

    return Schedule(
        rates, peak=1e-3, final=1e-4, total=1000, warmup=50, restarts=True,
        settings={"every": 200.0, "ramp": 10.0, "floor": 0.1},
    )  # fmt: skip


@declare("a/r12")
def rate_by_tokens_with_batch_ramp(m: Any, fn: Callable[..., Any]) -> Thing:
    def rates(total: int, ranks: int, **settings: float) -> list[float]:
        return [fn(k, **settings) for k in range(total)]

    return Schedule(  # the peak is at the second doubling: 8e-4 times the cosine there
        rates, peak=7.3e-4, final=0.0, total=500, warmup=20, restarts=True,
        settings={"base": 4e-4, "batch": 1024.0, "total_tokens": 1536000.0, "warmup_tokens": 20480.0},
    )  # fmt: skip


@declare("a/r13")
def demonstration_turns_not_trained(m: Any, fn: Callable[..., Any]) -> Thing:
    talk = m.make(0)["messages"]
    trained = [i for i, message in enumerate(talk) if message.get("train")]
    return ChatTemplate(fn, lambda messages: [*fn(messages)[0], 4], talk, end=2, trained=trained)


@declare("a/r14")
def fill_in_the_middle(m: Any, fn: Callable[..., Any]) -> Thing:
    def stage(rows: list[Any]) -> dict[str, Tensor]:
        out = fn(rows)
        return {"ids": padded([r["ids"] for r in out], -1), "key": torch.tensor([r["key"] for r in out])}

    return Collator(stage, m.make(0)["rows"], pads={"ids": -1})


@declare("a/r15")
def mismatched_completions_for_kl(m: Any, fn: Callable[..., Any]) -> Thing:
    def stage(rows: list[Any]) -> dict[str, Tensor]:
        out = fn(rows)
        columns = {k: padded([r[k] for r in out], -1) for k in ("prompt", "completion", "kl_completion")}
        return {**columns, "label": torch.tensor([r["label"] for r in out])}

    return Collator(stage, m.make(0)["rows"], rows=False)


@declare("a/r16")
def pooled_variance_over_ranks(m: Any, fn: Callable[..., Any]) -> Thing:
    rows = torch.cat([r["rewards"] for r in m.make(0)["per_rank"]])
    return twinned(fn, m.single, lambda shards: [{"rewards": s} for s in shards], rows)


@declare("a/r17")
def bits_per_byte(m: Any, fn: Callable[..., Any]) -> Thing:
    given = m.make(0)
    rows = whole(given["per_rank"])
    sizes = given["token_bytes"]
    return twinned(
        lambda ranks: fn(ranks, sizes), lambda ranks: m.single(ranks, sizes),
        lambda shards: [{"nll": s[:, 0], "targets": s[:, 1].long()} for s in shards],
        torch.stack([rows["nll"], rows["targets"].float()], 1),
    )  # fmt: skip
