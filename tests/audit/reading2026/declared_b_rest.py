"""Declarations of reader b's other cases: data stages, schedules, metrics, updates, templates, advantages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from earnest_audit import (
    Accumulation,
    AdvantageEstimator,
    ChatTemplate,
    Collator,
    Ema,
    Ranks,
    Resume,
    Schedule,
    Update,
)  # fmt: skip
from tests.audit.reading2026.base import Thing, declare, no_subject, padded, spread_over, twinned, whole


@declare("b/d01")
def stepwise_broadcast_last_mask(m: Any, fn: Callable[..., Any]) -> Thing:
    given = m.make(0)
    last, mask = given["is_last_step"], given["response_mask"]
    own = torch.cat([torch.tensor([0]), last.long().cumsum(0)[:-1]])  # the trajectory of each row
    steps = [(last[own == k], mask[own == k]) for k in range(6)]

    def advantages(rewards: Tensor, groups: Tensor) -> Tensor:
        each = [steps[k % 6] for k in range(len(rewards))]  # as many trajectories as there are rewards
        ends, shown = torch.cat([e for e, _ in each]), torch.cat([s for _, s in each])
        row = torch.tensor([k for k, (e, _) in enumerate(each) for _ in e])
        out = fn(torch.where(ends, rewards[row], 0.0), groups[row], shown, ends)
        rows = [row == k for k in range(len(rewards))]
        return torch.stack([(out[r] * shown[r]).sum() / shown[r].sum() for r in rows])  # one scalar per trajectory

    return AdvantageEstimator(advantages, scale="free", groups=2, size=3)


@declare("b/d02")
def reinforce_pp_return_reset(m: Any, fn: Callable[..., Any]) -> Thing:
    masks = m.make(0)["response_mask"]
    mask = masks[masks.sum(1).argmax()]  # the longest row, for all rows: then each has the same number of tokens
    end = int(mask.nonzero()[-1])

    def advantages(rewards: Tensor, groups: Tensor) -> Tensor:
        rows = mask.expand(len(rewards), -1).to(rewards.dtype)
        tokens = torch.zeros_like(rows).index_fill(1, torch.tensor([end]), 1.0)
        out = fn(torch.where(tokens != 0, rewards[:, None], 0.0), rows)
        return (out * rows).sum(1) / rows.sum(1)

    return AdvantageEstimator(advantages, scale="free", over="batch")


@declare("b/d03")
def interleave_first_prefix(m: Any, fn: Callable[..., Any]) -> Thing:
    def stage(rows: list[Any]) -> dict[str, Tensor]:
        out = fn(rows)
        return {k: padded([r[k] for r in out], -1) for k in ("ids", "mask")}

    return Collator(stage, m.make(0)["rows"], rows=False)


@declare("b/d06")
def document_ids_from_absent_eos(m: Any, fn: Callable[..., Any]) -> Thing:
    def unpack(batch: Any) -> list[dict[str, Tensor]]:
        found = {k: torch.as_tensor(batch[k]).flatten() for k in ("input_ids", "labels", "positions", "document_ids")}
        documents = found.pop("document_ids")
        each = [documents == d for d in documents.unique()]
        return [{k: v[on] for k, v in found.items()} for on in each]

    return Collator(fn, m.make(0)["rows"], rows=False, unpack=unpack)


@declare("b/d07")
def local_token_denominator(m: Any, fn: Callable[..., Any]) -> list[Thing]:
    return spread_over(m, fn)


@declare("b/d08")
def replicated_grads_in_norm(m: Any, fn: Callable[..., Any]) -> Thing:
    given = m.make(0)
    model, optimizer = given["model"], given["optimizer"]
    return Update(
        model, optimizer, lambda batches, norm: fn(model, optimizer, list(batches), max_norm=norm),
        lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(), whole(given["batches"]),
        split=(6, 6),  # a mean over micro-batches, which have the same number of rows
    )  # fmt: skip


@declare("b/d09")
def constant_norm_without_dp(m: Any, fn: Callable[..., Any]) -> list[Thing]:
    return spread_over(m, fn)


@declare("b/d10")
def warmup_subtracted_twice(m: Any, fn: Callable[..., Any]) -> Thing:
    def rates(total: int, ranks: int, min_lr: float = 0.0) -> list[float]:
        return [fn(k, min_lr=min_lr, total_train_steps=total) for k in range(total)]

    return Schedule(rates, peak=1e-3, final=0.0, total=220, warmup=22, settings={"min_lr": 0.0})


@declare("b/d11")
def rampup_ignored_in_samples(m: Any, fn: Callable[..., Any]) -> Thing:
    def rates(total: int, ranks: int, wsd_decay_iters: float = 20) -> list[float]:
        return [fn(k, train_iters=total, wsd_decay_iters=int(wsd_decay_iters)) for k in range(total)]

    return Schedule(rates, peak=3e-4, final=0.0, total=100, warmup=10, settings={"wsd_decay_iters": 20.0})


@declare("b/d12")
def scheduler_length_in_batches(m: Any, fn: Callable[..., Any]) -> Thing:
    def rates(total: int, ranks: int) -> list[float]:
        optimizer = m.make(0)["optimizer"]
        scheduler = fn(optimizer, total * 32)  # two epochs, two optimizer steps per 128 prompts
        out = []
        for _ in range(total):
            out.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return out

    return Schedule(rates, peak=0.1, final=0.0, total=40, warmup=4)


@declare("b/d13")
def cumulative_shuffle_resume(m: Any, fn: Callable[..., Any]) -> Thing:
    rows = m.make(0)["rows"]

    def save(reader: Any, folder: Path) -> None:
        (folder / "state.json").write_text(json.dumps(reader.state_dict()))

    def restore(reader: Any, folder: Path) -> None:
        reader.load_state_dict(json.loads((folder / "state.json").read_text()))

    return Resume(
        make=lambda: fn(rows), run=lambda reader, n: [reader.next() for _ in range(n)], save=save, load=restore,
        state=lambda reader: torch.tensor(list(reader.state_dict().values())), steps=13,  # an epoch has ten rows
    )  # fmt: skip


@declare("b/d14")
def prompt_mask_off_by_one(m: Any, fn: Callable[..., Any]) -> Thing:
    def stage(rows: list[Any]) -> dict[str, Tensor]:
        out = fn(rows)
        ids = padded([r["input_ids"] for r in out], -1)
        return {"input_ids": ids, "labels": padded([r["labels"] for r in out], -100)}

    pads = {"input_ids": -1, "labels": -100}
    return Collator(stage, m.make(0)["rows"], pads=pads, targets=lambda row: row["tokens"][row["prompt_len"] :])


@declare("b/d15")
def filter_on_shaped_reward(m: Any, fn: Callable[..., Any]) -> Thing:
    def stage(rows: list[Any]) -> dict[str, Tensor]:
        out = fn(rows)
        return {k: torch.tensor([r[k] for r in out]) for k in out[0]}

    return Collator(stage, m.make(0)["rows"], rows=False)


@declare("b/d16")
def cp_max_loss_denominator(m: Any, fn: Callable[..., Any]) -> Thing:
    def ranks(shards: list[Tensor]) -> list[Any]:
        own = [{"nll": s[:, 0], "labels": s[:, 1].long()} for s in shards]
        before = sum(int((r["labels"] != m.IGNORE).sum()) for r in own)  # the count before the cut
        return [{**r, "local_valid_tokens": before} for r in own]

    given = m.make(0)["ranks"][:4]  # the four ranks of one sequence
    rows = torch.cat([torch.stack([r["nll"], r["labels"].float()], 1) for r in given])
    return twinned(fn, m.twin, ranks, rows, by_rank=True)


@declare("b/d17")
def eval_weights_twice(m: Any, fn: Callable[..., Any]) -> Thing:
    rows = whole(m.make(0)["ranks"])
    return twinned(
        fn, m.twin, lambda shards: [{"nll": s[:, 0], "loss_weight": s[:, 1]} for s in shards],
        torch.stack([rows["nll"], rows["loss_weight"]], 1),
    )  # fmt: skip


@declare("b/d20")
def length_shaped_baseline(m: Any, fn: Callable[..., Any]) -> Thing:
    def advantages(rewards: Tensor, groups: Tensor) -> Tensor:
        return fn(rewards, groups, torch.full((len(rewards),), 200))  # answers of one length: rows are permuted

    return AdvantageEstimator(advantages, scale="equal", values=(0.0, 1.0))


def words(text: str) -> list[int]:
    return [int(w) if w.isdigit() else 10 + sum(map(ord, w)) % 40 for w in text.split()]


@declare("b/r01")
def chat_template_turn_end(m: Any, fn: Callable[..., Any]) -> Thing:
    def tokens(messages: list[Any]) -> Any:
        return fn([{**message, "content": words(message["content"])} for message in messages])

    talk = [{**message, "content": " ".join(map(str, message["content"]))} for message in m.make(0)["messages"]]
    trained = [i for i, x in enumerate(talk) if x["role"] == "assistant" and x.get("train", True)]
    return ChatTemplate(
        tokens, lambda messages: [*tokens(messages)[0], m.START, m.ROLE["assistant"]], talk, end=m.END, prefix=False,
        trained=trained,
    )  # fmt: skip


no_subject("b/r02", "GAE gives a reward to each token, and this code takes one outcome per row")


@declare("b/r04")
def stream_chunks_overlap(m: Any, fn: Callable[..., Any]) -> Thing:
    def stage(rows: list[Any]) -> dict[str, Tensor]:
        out = fn(rows)
        return {k: torch.tensor([r[k] for r in out]) for k in out[0]}

    return Collator(stage, m.make(0)["rows"], rows=False)


@declare("b/r07")
def sum_over_tp_mean_over_dp(m: Any, fn: Callable[..., Any]) -> Thing:
    given = m.make(0)

    def accumulate(model: Any, ranks: Sequence[Any]) -> None:
        fn(model, torch.optim.SGD(model.parameters(), lr=0.0), list(ranks))

    # data-parallel ranks have the same number of tokens
    return Accumulation(given["model"], accumulate, whole(given["batches"]), split=(2, 2, 2), what="ranks")


no_subject("b/r09", "OuterStep gives the workers' weights, and this code trains the workers itself")


@declare("b/r10")
def wsd_one_minus_sqrt(m: Any, fn: Callable[..., Any]) -> Thing:
    def rates(total: int, ranks: int, decay: float = 40, floor: float = 0.0) -> list[float]:
        return [fn(k, decay=decay, total=total, floor=floor) for k in range(total)]

    return Schedule(rates, peak=2e-3, final=0.0, total=200, warmup=10, settings={"decay": 40.0, "floor": 0.0})


@declare("b/r11")
def lr_up_with_batch(m: Any, fn: Callable[..., Any]) -> Thing:
    def rates(total: int, ranks: int, base: float = 1e-3) -> list[float]:
        return [fn(k, base=base) for k in range(total)]

    # the peak is at the first growth of the batch: sqrt(2) times the cosine there
    return Schedule(rates, peak=1.34e-3, final=0.0, total=300, restarts=True, settings={"base": 1e-3})


class Average:
    """The average of b/r12: each call is one optimizer step."""

    def __init__(self, fn: Callable[..., float]) -> None:
        self.fn, self.step = fn, 0

    def __call__(self, average: Tensor, current: Tensor, rate: float) -> Tensor:
        d = self.fn(self.step, decay=1 - rate)
        self.step += 1
        return d * average + (1 - d) * current


@declare("b/r12")
def ema_decay_warmup(m: Any, fn: Callable[..., Any]) -> Thing:
    return Ema(Average(fn), rate=1 - 0.999, every=5)


@declare("b/r13")
def left_pad_collator(m: Any, fn: Callable[..., Any]) -> Thing:
    pads = {"input_ids": 1, "attention_mask": 0, "position_ids": 0, "labels": -100}
    return Collator(fn, m.make(0)["rows"], pads=pads)


@declare("b/r14")
def fill_in_middle(m: Any, fn: Callable[..., Any]) -> Thing:
    return Collator(
        lambda rows: {"tokens": padded([r["tokens"] for r in fn(rows)], -1)}, m.make(0)["rows"], pads={"tokens": -1}
    )


@declare("b/r15")
def seeds_shared_in_tp(m: Any, fn: Callable[..., Any]) -> Thing:
    return Ranks(draw=lambda group: torch.tensor(fn(4 * group, 7)))  # the data-parallel groups of four ranks each


@declare("b/r16")
def merged_moments(m: Any, fn: Callable[..., Any]) -> Thing:
    rows = whole(m.make(0)["ranks"])
    return twinned(
        fn, m.twin, lambda shards: [{"advantages": s[:, 0], "mask": s[:, 1]} for s in shards],
        torch.stack([rows["advantages"], rows["mask"]], 1),
    )  # fmt: skip


@declare("b/r17")
def bits_per_byte(m: Any, fn: Callable[..., Any]) -> Thing:
    rows = whole(m.make(0)["ranks"])
    return twinned(
        fn, m.twin, lambda shards: [{"nll": s[:, 0], "nbytes": s[:, 1].long()} for s in shards],
        torch.stack([rows["nll"], rows["nbytes"].float()], 1),
    )  # fmt: skip
