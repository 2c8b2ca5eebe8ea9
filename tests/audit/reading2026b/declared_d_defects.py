"""Declarations of reader d's defects."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from earnest_audit import (
    AdvantageEstimator,
    Collator,
    Grader,
    Metric,
    Resume,
    Schedule,
    Setting,
    Step,
    Update,
)
from tests.audit.reading2026.base import Thing, documents, parts, plain_logps, step_of, twinned, whole
from tests.audit.reading2026b.reading import (
    accumulation,
    declare,
    line,
    no_subject,
)

Fn = Callable[..., Any]


@declare("d/d01")
def last_number_of_the_policy(m: Any, fn: Fn) -> Thing:
    row = m.make(0)["row"]
    answer = row["answer"]

    def grade(written: str) -> float:
        """The policy's words; the tool gives its result after each call of calc."""
        tokens: list[str] = []
        own: list[int] = []
        for word in written.split():
            result = ["result", answer] if word == "calc" else []
            tokens += [word, *result]
            own += [1, *[0] * len(result)]
        pad = max(0, 12 - len(tokens))
        completion = {
            "tokens": tokens + ["<pad>"] * pad,
            "attention_mask": [1] * len(tokens) + [0] * pad,
            "response_mask": own + [0] * pad,
        }
        return fn(row, completion)

    return Grader(
        grade,
        right=[f"I think 150 call calc so {answer}", f"so {answer}"],
        wrong=["I think 150 call calc", "I think 150", "call calc so 150"],
    )


no_subject(
    "d/d02",
    "AdvantageEstimator takes no KL per token, and GAE takes values and λ, which this code does not have",
)


@declare("d/d03")
def groups_of_task_and_role(m: Any, fn: Fn) -> Thing:
    def advantages(rewards: Tensor, groups: Tensor) -> Tensor:
        rows = torch.arange(len(rewards))
        return fn(rewards, groups, torch.zeros_like(rows), 100 + rows)  # one role; each trajectory has its own id

    return AdvantageEstimator(advantages, scale="free")


@declare("d/d04")
def recurrent_layer(m: Any, fn: Fn) -> Thing:
    model, batch = parts(m)
    batch["documents"] = documents(batch.pop("cu_seqlens"))

    def loss(model: Any, batch: Any) -> Any:
        row, bounds = line(batch, "ids", "labels", "positions")
        return fn(model, {**row, "cu_seqlens": bounds})

    roles = {k: k for k in batch}
    return Step(model=model, loss=loss, batch=batch, roles=roles, reduction="mean")


@declare("d/d05")
def padding_free_pairs(m: Any, fn: Fn) -> Thing:
    model, batch = parts(m)
    # the sequences are negatives of each other, so they are not independent documents
    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"ids": "ids", "positions": "position_ids"},
        settings={"temperature": Setting(0.1)},
        rows_interact=True,
    )


@declare("d/d06")
def balance_of_each_depth(m: Any, fn: Fn) -> Thing:
    return step_of(
        m,
        fn,
        roles={"ids": "ids", "documents": "documents"},
        settings={
            "mtp_weight": Setting(0.3, "weight"),
            "aux_weight": Setting(0.05, "weight"),
            "top_k": Setting(1),
        },
        family="sft",
        all_supervised=True,
        reduction="mean",
        rows_interact=True,
        may_idle=("experts.*",),
    )


def next_token_loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["ids"])[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


@declare("d/d07")
def norm_of_all_experts(m: Any, fn: Fn) -> Thing:
    given = m.make(0)
    model, optimizer = given["model"], given["optimizer"]
    return Update(
        model,
        optimizer,
        lambda batches, norm: fn(model, optimizer, list(batches), max_norm=norm),
        next_token_loss,
        whole(given["batches"]),
        split=(3, 3),  # a mean over ranks, which have the same number of rows
    )


@declare("d/d08")
def vocabulary_parallel(m: Any, fn: Fn) -> Thing:
    return step_of(
        m,
        fn,
        roles={"ids": "ids"},
        settings={"tp": Setting(2, "inert")},
        family="sft",
        all_supervised=True,
        reduction="mean",
    )


@declare("d/d09")
def adapter_over_ranks(m: Any, fn: Fn) -> Thing:
    given = m.make(0)

    def one_step(model: Any, optimizer: Any, ranks: list[Any]) -> None:
        fn(model, optimizer, [ranks])

    rows = whole([batch for step in given["batches"] for batch in step])
    return accumulation(one_step, given, rows, split=(6, 6), what="ranks")  # ranks have the same number of rows


@declare("d/d10")
def scheduler_with_accumulation(m: Any, fn: Fn) -> Thing:
    def rates(total: int, ranks: int) -> list[float]:
        return [fn(k, total=total, accumulation=4) for k in range(total)]

    return Schedule(rates, peak=1e-3, final=0.0, total=24, warmup=4)


class Resumed:
    """A run of d/d11: a weight that moves by the rate of each step."""

    def __init__(self, fn: Fn) -> None:
        self.fn, self.step, self.weight, self.resumed = fn, 0, 0.0, 10**9

    def run(self, n: int) -> list[int]:
        seen = list(range(self.step, self.step + n))
        self.weight += sum(self.fn(k, resume_at=self.resumed) for k in seen)
        self.step += n
        return seen

    def save(self, folder: Path) -> None:
        (folder / "state").write_bytes(pickle.dumps((self.step, self.weight)))

    def load(self, folder: Path) -> None:
        self.step, self.weight = pickle.loads((folder / "state").read_bytes())
        self.resumed = self.step


@declare("d/d11")
def schedule_of_a_resumed_run(m: Any, fn: Fn) -> list[Thing]:
    def rates(total: int, ranks: int) -> list[float]:
        return [fn(k, total=total) for k in range(total)]

    return [
        Schedule(rates, peak=1e-3, final=0.0, total=100, warmup=10),
        Resume(
            make=lambda: Resumed(fn),
            run=Resumed.run,
            save=Resumed.save,
            load=Resumed.load,
            state=lambda x: torch.tensor([x.weight]),
            steps=20,  # an epoch
        ),
    ]


@declare("d/d12")
def rates_of_groups(m: Any, fn: Fn) -> Thing:
    def moved(before: Tensor, after: Tensor) -> float:
        """The rate of a step without a decay: of an orthogonalised step and of the first step of Adam."""
        change = (after - before).double()
        return float(torch.linalg.matrix_norm(change, 2) if change.ndim == 2 else change.abs().max())

    def rates(total: int, ranks: int) -> list[list[float]]:
        given = m.make(0)
        model, optimizer, batch = given["model"], given["optimizer"], given["batches"][0]
        base = [group["lr"] for group in optimizer.param_groups]
        start = {p: p.detach().clone() for p in model.parameters()}
        out = []
        for k in range(total):
            for group, rate in zip(optimizer.param_groups, base, strict=True):
                group.update(lr=rate * (1 - k / total), weight_decay=0.0)  # the caller's own groups
            fn(model, optimizer, [batch])
            groups = optimizer.param_groups
            out.append([max(moved(start[p], p.detach()) for p in group["params"]) for group in groups])
            for p, old in start.items():
                p.data.copy_(old)
        return out

    return Schedule(rates, peak=(1e-2, 1e-3, 1e-3), final=0.0, total=10)


class Stream:
    """A pass over a stream of d/d13 that may be stopped and resumed."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.rows = stream, iter(stream)

    def run(self, n: int) -> list[int]:
        return [next(self.rows)["id"] for _ in range(n)]

    def save(self, folder: Path) -> None:
        (folder / "state").write_bytes(pickle.dumps(self.stream.state_dict()))

    def load(self, folder: Path) -> None:
        self.stream.load_state_dict(pickle.loads((folder / "state").read_bytes()))
        self.rows = iter(self.stream)


@declare("d/d13")
def shuffled_stream(m: Any, fn: Fn) -> Thing:
    rows = m.make(0)["rows"]
    return Resume(
        make=lambda: Stream(fn(rows)),
        run=Stream.run,
        save=Stream.save,
        load=Stream.load,
        state=lambda x: torch.tensor([x.stream.state_dict()["at"]]),
        steps=10,
    )


@declare("d/d14")
def padding_is_end_of_text(m: Any, fn: Fn) -> Thing:
    def collate(rows: list[Any]) -> dict[str, Tensor]:
        out = fn(rows)
        return {**out, "supervised": torch.where(out["loss_mask"] == 1, out["labels"], -100)}

    return Collator(
        collate,
        m.make(0)["rows"],
        pads={"ids": 0, "labels": 0, "loss_mask": 0, "supervised": -100},
        targets=lambda row: row["ids"][1:],
        labels="supervised",
    )


@declare("d/d15")
def perplexity_of_batches(m: Any, fn: Fn) -> Thing:
    rows = whole(m.make(0)["parts"])
    return twinned(
        fn,
        m.single,
        lambda shards: [{"token_loss": s[:, 0], "mask": s[:, 1]} for s in shards],
        torch.stack([rows["token_loss"], rows["mask"]], 1),
    )


@declare("d/d16")
def perplexity_of_references(m: Any, fn: Fn) -> Thing:
    given = m.make(0)["parts"]
    model = given[0]["model"]
    return twinned(
        fn,
        m.single,
        lambda shards: [{"model": model, "ids": s[:, 0], "attention_mask": s[:, 1]} for s in shards],
        torch.cat([torch.stack([p["ids"], p["attention_mask"]], 1) for p in given]),
    )


@declare("d/d17")
def reward_of_a_window(m: Any, fn: Fn) -> Thing:
    given = m.make(0)["parts"]
    rows = [(float(w), reward) for p in given for w, window in enumerate(p["windows"]) for reward in window]

    def ranks(shards: list[Tensor]) -> list[Any]:
        return [{"windows": [[v for at, v in s.tolist() if at == w] for w in range(5)]} for s in shards]

    return twinned(fn, m.single, ranks, torch.tensor(rows, dtype=torch.float64))


@declare("d/d18")
def positive_examples(m: Any, fn: Fn) -> Thing:
    model, batch = parts(m)
    batch["rewards"] = batch["rewards"] > 0

    def loss(model: Any, batch: Any, clip: float, nll_weight: float) -> Any:
        return fn(model, {**batch, "rewards": batch["rewards"].float()}, clip=clip, nll_weight=nll_weight)

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={
            "ids": "ids",
            "mask": "loss_mask",
            "behaviour": "old_logps",
            "advantages": "advantages",
            "correct": "rewards",
        },
        settings={"clip": Setting(0.2, "clip"), "nll_weight": Setting(0.1, "weight")},
        metrics={"positive_nll_loss": Metric(low=0.0, weight="nll_weight")},
        logprobs=plain_logps,
        reduction="mean",
    )


@declare("d/d19")
def pairs_that_differ(m: Any, fn: Fn) -> Thing:
    return step_of(
        m,
        fn,
        roles={"chosen": "chosen", "rejected": "rejected"},
        reduction="mean",
        drops_tokens=True,
    )


@declare("d/d20")
def leave_one_out(m: Any, fn: Fn) -> Thing:
    return AdvantageEstimator(fn, scale="free", scaled_over="row", size=8)
