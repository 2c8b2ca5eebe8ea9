"""Declarations of reader c's defects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from earnest_audit import (
    Census,
    ChatTemplate,
    Collator,
    Ranks,
    Resume,
    Schedule,
    Setting,
    Step,
)
from tests.audit.reading2026.base import Thing, documents, padded, parts, step_of, twinned
from tests.audit.reading2026b.reading import (
    accumulation,
    declare,
    line,
    of_the_loss,
    pairs,
    sides,
    stacked,
    text,
    traced,
    unpaired,
    words,
)

Fn = Callable[..., Any]


@declare("c/d01")
def truncated_flag(m: Any, fn: Fn) -> Thing:
    def stage(rows: list[Any]) -> dict[str, Tensor]:
        out = fn(rows)
        ids, mask = padded([r["ids"] for r in out], -1), padded([r["mask"] for r in out], 0)
        scalars = {k: torch.tensor([float(r[k]) for r in out]) for k in ("reward", "truncated")}
        return {"ids": ids, "mask": mask, "labels": torch.where(mask == 1, ids, -100), **scalars}

    return Collator(
        stage,
        m.make(0)["rows"],
        pads={"ids": -1, "mask": 0, "labels": -100},
        targets=lambda row: [i for turn in row["turns"] for i in turn["action_ids"]],
        columns={"truncated": lambda row: float(row["turns"][-1]["finish_reason"] == "length")},
    )


@declare("c/d02")
def merged_rollout(m: Any, fn: Fn) -> Thing:
    def collate(rows: list[Any]) -> dict[str, Tensor]:
        out = fn(rows)
        return {**out, "labels": torch.where(out["response_mask"] == 1, out["responses"], -100)}

    return Collator(
        collate,
        m.make(0)["rows"],
        pads={"prompts": 0, "responses": 0, "response_mask": 0, "old_logprobs": 0.0, "labels": -100},
        targets=lambda row: [i for step in row["steps"] for i in step["action_ids"]],
    )


@declare("c/d03")
def generation_prompt(m: Any, fn: Fn) -> Thing:
    talk = m.make(0)["messages"]

    def prompt(messages: list[Any]) -> list[int]:
        turn = talk[len(messages)] if len(messages) < len(talk) else talk[-1]
        think = "<think>" if turn.get("reasoning_content") else "<think></think>"
        return [*fn(messages)[0], *m.tok("<|im_start|>assistant\n" + think)]

    return ChatTemplate(fn, prompt, talk, end=m.SPECIAL.index("<|im_end|>"))


@declare("c/d04")
def state_of_packed_samples(m: Any, fn: Fn) -> Thing:
    model, batch = parts(m)
    batch["documents"] = documents(batch.pop("cu_seqlens"))

    def loss(model: Any, batch: Any) -> Any:
        row, bounds = line(batch, "ids", "loss_mask")
        return fn(model, {**row, "cu_seqlens": bounds})

    roles = {"ids": "ids", "mask": "loss_mask", "documents": "documents"}
    return Step(model=model, loss=loss, batch=batch, roles=roles, family="sft", reduction="mean")


@declare("c/d05")
def packed_multi_token_prediction(m: Any, fn: Fn) -> Thing:
    model, batch = parts(m)
    layout, true = batch.pop("cu_seqlens_padded"), batch.pop("cu_seqlens")
    batch["documents"] = documents(layout)
    inside = torch.arange(int(layout[-1])) - layout[batch["documents"][0]]
    batch["attention"] = (inside < true.diff()[batch["documents"][0]]).long()[None]

    def loss(model: Any, batch: Any, mtp_weight: float) -> Any:
        row, bounds = line(batch, "ids", "labels", "loss_mask", "attention")
        real = F.pad(row.pop("attention")[0].cumsum(0), (1, 0))
        return fn(model, {**row, "cu_seqlens": real[bounds], "cu_seqlens_padded": bounds}, mtp_weight=mtp_weight)

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={
            "ids": "ids",
            "labels": "labels",
            "mask": "loss_mask",
            "documents": "documents",
            "attention": "attention",
        },
        settings={"mtp_weight": Setting(0.3, "weight")},
        reduction="mean",
    )


@declare("c/d06")
def packed_trajectories(m: Any, fn: Fn) -> Thing:
    model, batch = parts(m)
    batch["documents"] = documents(batch.pop("cu_seqlens"))

    def loss(model: Any, batch: Any, clip: float = 0.2) -> Any:
        row, bounds = line(batch, "ids", "position_ids", "old_logprobs", "advantages", "loss_mask")
        return fn(model, {**row, "cu_seqlens": bounds}, clip=clip)

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={
            "ids": "ids",
            "positions": "position_ids",
            "documents": "documents",
            "behaviour": "old_logprobs",
            "advantages": "advantages",
            "mask": "loss_mask",
        },
        settings={"clip": Setting(0.2, "clip")},
        logprobs=of_the_loss(loss),
        reduction="mean",
    )


@declare("c/d07")
def context_shards(m: Any, fn: Fn) -> Thing:
    return step_of(
        m,
        fn,
        roles={"ids": "ids", "labels": "labels"},
        settings={"cp": Setting(4, "inert")},
        reduction="mean",
    )


@declare("c/d08")
def share_of_the_tokens(m: Any, fn: Fn) -> Thing:
    given = m.make(0)
    return accumulation(fn, given, stacked(given["batches"]))


@declare("c/d09")
def expert_parallel(m: Any, fn: Fn) -> Thing:
    given = m.make(0)
    model, (batch,) = given["model"], given["batches"]

    def loss(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["ids"])[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids"},
        family="sft",
        all_supervised=True,
        reduction="mean",
        may_idle=("experts.*",),
        backward=lambda settings: fn(model, torch.optim.SGD(model.parameters(), lr=0.0), [batch]),
    )


@declare("c/d10")
def no_warmup(m: Any, fn: Fn) -> Thing:
    def rates(total: int, ranks: int, max_lr: float = 1e-3, min_lr: float = 1e-5) -> list[float]:
        optimizer = m.make(0)["optimizer"]
        for group in optimizer.param_groups:
            group["lr"] = max_lr
        scheduler = fn(optimizer, max_lr=max_lr, min_lr=min_lr, warmup_steps=0, max_steps=total)
        return [rate for (rate,) in traced(optimizer, scheduler, total)]

    return Schedule(rates, peak=1e-3, final=1e-5, total=100, warmup=0, settings={"max_lr": 1e-3, "min_lr": 1e-5})


@declare("c/d11")
def two_groups(m: Any, fn: Fn) -> Thing:
    def rates(total: int, ranks: int, **settings: float) -> list[list[float]]:
        optimizer = m.make(0)["optimizer"]
        return traced(optimizer, fn(optimizer, total_num_steps=total, **settings), total)

    return Schedule(
        rates,
        peak=(1e-3, 1e-4),
        final=(1e-5, 1e-6),
        total=20,
        warmup=6,  # one step at 0 before the first one of the scheduler, then five
        settings={"warmup_min_ratio": 0.0, "cos_min_ratio": 0.01},
    )


@declare("c/d12")
def decay_to_the_last_step(m: Any, fn: Fn) -> Thing:
    def rates(total: int, ranks: int, min_lr: float = 1e-5, decay_start: float = 500) -> list[float]:
        return [fn(k, min_lr=min_lr, decay_start=decay_start, total=total) for k in range(total)]

    return Schedule(
        rates,
        peak=1e-3,
        final=1e-5,
        total=1000,
        warmup=100,
        ends=1000,
        settings={"min_lr": 1e-5, "decay_start": 500.0},
    )


@declare("c/d13")
def shuffled_samples(m: Any, fn: Fn) -> list[Thing]:
    given = m.make(0)
    data, entropy = given["data"], given["process_entropy"]

    def epoch(rank: int) -> list[str]:
        return [fn(rank, step, data, entropy) for step in range(len(data) // 4)]

    return [
        Ranks(draw=lambda rank: torch.tensor([data.index(sample) for sample in epoch(rank)])),
        Census(data, [s for rank in range(4) for s in epoch(rank)], what="samples of an epoch", once=True),
    ]


@declare("c/d14")
def end_of_the_conversation(m: Any, fn: Fn) -> list[Thing]:
    def tokens(messages: list[Any]) -> tuple[list[int], list[int]]:
        ids, excluded = fn([{**message, "ids": words(message["content"])} for message in messages])
        return ids, [int(not e) for e in excluded]

    def prompt(messages: list[Any]) -> list[int]:
        return tokens(messages)[0][:-1]

    given = m.make(0)["messages"]
    talk = [{"role": x["role"], "content": text(x["ids"]), "masked": x["masked"]} for x in given]
    # the end token follows the last message only: an answer has one where it is the only answer
    return [ChatTemplate(tokens, prompt, talk), ChatTemplate(tokens, prompt, talk[:2], end=2)]


class Pass:
    """A pass over a stream of c/d15 that may be stopped and resumed."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.rows: Any = None

    def run(self, n: int) -> list[Any]:
        self.rows = iter(self.stream) if self.rows is None else self.rows
        return [next(self.rows) for _ in range(n)]

    def save(self, folder: Path) -> None:
        (folder / "state.json").write_text(json.dumps(self.stream.state_dict()))

    def load(self, folder: Path) -> None:
        self.stream.load_state_dict(json.loads((folder / "state.json").read_text()))
        self.rows = None


@declare("c/d15")
def resumed_stream(m: Any, fn: Fn) -> list[Thing]:
    rows = m.make(0)["rows"]

    def resumed() -> Pass:
        first, second = Pass(fn(rows)), Pass(fn(rows))
        first.run(2)
        second.stream.load_state_dict(first.stream.state_dict())
        return second

    def state(x: Pass) -> Tensor:
        read = x.stream.state_dict()  # None before the first row
        return torch.tensor(list(read["examples"].values()) if read else [0, 0])

    def declared(make: Callable[[], Pass]) -> Thing:
        return Resume(make=make, run=Pass.run, save=Pass.save, load=Pass.load, state=state)

    return [declared(lambda: Pass(fn(rows))), declared(resumed)]  # any number of cycles


@declare("c/d16")
def mean_over_samples(m: Any, fn: Fn) -> Thing:
    rows = torch.tensor([batch for rank in m.make(0)["per_rank"] for batch in rank])
    return twinned(fn, m.single, lambda shards: [[(v, int(n)) for v, n in s.tolist()] for s in shards], rows)


@declare("c/d17")
def loss_of_the_step(m: Any, fn: Fn) -> Thing:
    rows = torch.stack(m.make(0)["per_rank"])  # a row is a micro-batch: they have the same size
    return twinned(fn, m.single, lambda shards: [micro for s in shards for micro in s], rows)


@declare("c/d18")
def average_precision(m: Any, fn: Fn) -> Thing:
    images = [image for rank in m.make(0)["per_rank"] for image in rank]
    return twinned(
        fn, m.single, lambda shards: [[images[i] for i in s.tolist()] for s in shards], torch.arange(len(images))
    )


@declare("c/d19")
def preference(m: Any, fn: Fn) -> Thing:
    model, flat = parts(m)
    batch = pairs(flat)
    return Step(
        model=model,
        loss=lambda model, batch, beta, loss_type: fn(model, unpaired(batch), beta=beta, loss_type=loss_type),
        batch=batch,
        roles={k: k for k in batch},
        settings={"beta": Setting(0.1), "loss_type": Setting("ipo", modes=("sigmoid", "hinge"))},
        logprobs=sides(m.sequence_logps),
        reduction="mean",
    )


@declare("c/d20")
def on_policy_distillation(m: Any, fn: Fn) -> Thing:
    return step_of(
        m,
        fn,
        roles={"ids": "ids", "mask": "loss_mask", "teacher": "teacher_logits"},
        settings={"beta": Setting(1.0, "mixture")},
        student=lambda model, batch: model(batch["ids"]),
        reduction="mean",
    )
