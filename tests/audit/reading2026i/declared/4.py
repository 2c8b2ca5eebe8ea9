"""Declarations for the cases l106 to l140."""

import math
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import nn

from earnest_audit import (
    Accumulation,
    AdvantageEstimator,
    Census,
    Collator,
    Metric,
    OuterStep,
    Ranks,
    Resume,
    Schedule,
    Setting,
    Step,
    Update,
)
from tests.audit.reading2026i.reading import declare, no_subject  # noqa: F401


# helpers -------------------------------------------------------------------------------------------------------------


def token_logprobs(model, ids):
    """log p(ids[t] | before t) in column t; column 0 is 0."""
    lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return F.pad(lp, (1, 0))


def padded(rows, value):
    width = max(len(r) for r in rows)
    return torch.tensor([list(r) + [value] * (width - len(r)) for r in rows])


class Capture(torch.optim.SGD):
    """Its step moves nothing and keeps the gradients that it received."""

    seen = None

    def step(self, closure=None):
        self.seen = [None if p.grad is None else p.grad.detach().clone() for g in self.param_groups for p in g["params"]]


def leaves_gradients(run):
    """run(model, optimizer, batches) is an update; what the optimizer receives is left in .grad."""

    def accumulate(model, batches):
        params = list(model.parameters())
        for p in params:
            p.grad = None
        optimizer = Capture(params, lr=1.0)
        run(model, optimizer, [dict(b) for b in batches])
        for p, g in zip(params, optimizer.seen):
            p.grad = g

    return accumulate


class Clipping:
    """The run's optimizer, for an update without a clip of its own: clips right before the step."""

    def __init__(self, optimizer, max_grad_norm):
        self.optimizer, self.max_grad_norm = optimizer, max_grad_norm

    def step(self, *args, **kwargs):
        if self.max_grad_norm is not None and math.isfinite(self.max_grad_norm):
            params = [p for g in self.optimizer.param_groups for p in g["params"]]
            torch.nn.utils.clip_grad_norm_(params, self.max_grad_norm)
        return self.optimizer.step(*args, **kwargs)

    def zero_grad(self, *args, **kwargs):
        return self.optimizer.zero_grad(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


def joined(batches):
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


def first_rows(batch, n):
    return {k: v[:n] for k, v in batch.items()}


# losses --------------------------------------------------------------------------------------------------------------


@declare("v/r24")
def two_hot_critic(m, fn):
    given = m.make(0)
    return Step(
        model=given["model"],
        loss=fn,
        batch=given["batch"],
        roles={"mask": "mask", "returns": "returns"},
        settings={"bins": Setting(21, "setting")},
        metrics={"value": Metric(low=-math.expm1(10.0) * 1.001, high=math.expm1(10.0) * 1.001)},
        reduction="mean",
        wide=("states", "returns", "mask"),
        value_is_loss=True,
        all_supervised=True,
    )


@declare("u/r22")
def truncated_importance(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logprobs", "advantages": "advantages"},
        settings={"eps_high": Setting(0.28, "bound")},
        logprobs=lambda model, batch: token_logprobs(model, batch["ids"]),
        reduction="mean",
        wide=("ids", "loss_mask", "old_logprobs"),
        value_is_loss=False,
        family="policy gradient",
    )


@declare("t/r05")
def context_parallel(m, fn):
    given = m.make(0)
    model = given.pop("model")

    def loss(model, batch, cp=2):
        # the time has to be divisible by 2 * cp: a row of another length is filled up with what is not trained
        missing = -batch["ids"].shape[1] % (2 * int(cp))
        ids, labels = batch["ids"], batch["labels"]
        if missing:
            ids, labels = F.pad(ids, (0, missing)), F.pad(labels, (0, missing), value=-100)
        return fn(model, {**batch, "ids": ids, "labels": labels}, cp=cp)

    return Step(
        model=model,
        loss=loss,
        batch=given,
        roles={"ids": "ids", "labels": "labels"},
        settings={"cp": Setting(2, "inert", modes=(1, 4))},
        reduction="mean",
        wide=("ids", "labels"),
        value_is_loss=True,
        family="sft",
    )


def data_parallel(m, fn, loss, worlds):
    """Equal numbers of rows on every rank, which is what the words promise: the cut is even."""
    given = m.make(0)
    model, optimizer, batches = given["model"], given["optimizer"], given["batches"]
    whole = joined(batches)
    run = lambda model, optimizer, batches: fn(model, optimizer, batches)
    subjects = []
    for world, size in worlds:
        batch = first_rows(whole, world * size)
        assert len(batch["x"]) == world * size
        subjects.append(
            Accumulation(m.make(0)["model"], leaves_gradients(run), batch, split=[size] * world, what="ranks")
        )

    def update(batches, max_grad_norm):
        fn(model, Clipping(optimizer, max_grad_norm), [dict(b) for b in batches])

    world, size = worlds[0]
    subjects.append(
        Update(
            model=model,
            optimizer=optimizer,
            update=update,
            loss=loss,
            batch=first_rows(whole, world * size),
            split=[size] * world,
        )
    )
    return subjects


@declare("u/r09")
def predivide_fsdp(m, fn):
    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"])

    return data_parallel(m, fn, loss, ((8, 4), (6, 4), (3, 4), (2, 4), (12, 2)))


@declare("v/r10")
def predivide_regression(m, fn):
    def loss(model, batch):
        return (model(batch["x"]).squeeze(-1) - batch["y"]).pow(2).mean()

    return data_parallel(m, fn, loss, ((6, 5), (4, 5), (3, 5), (2, 5), (12, 2), (8, 3)))


# pass@k --------------------------------------------------------------------------------------------------------------


def pass_at_k(m, fn, k, least):
    """least: problems with fewer than k samples are left out of the mean."""
    rows = torch.tensor([[float(p), float(ok)] for rank in m.make(0)["ranks"] for p, ok in rank])

    def pairs(shard):
        return [(int(p), int(ok)) for p, ok in shard.tolist()]

    def metric(shards):
        return float(fn([pairs(s) for s in shards], k=k))

    def single(shards):
        by = {}
        for shard in shards:
            for p, ok in pairs(shard):
                by.setdefault(p, []).append(ok)
        values = []
        for answers in by.values():
            if len(answers) < k:
                assert least, "every problem has at least k samples"
                continue
            tries = list(combinations(answers, k))
            values.append(sum(any(t) for t in tries) / len(tries))
        return sum(values) / len(values)

    return Ranks(metric=metric, rows=rows, single=single)


@declare("u/r20")
def pass_at_three(m, fn):
    return [pass_at_k(m, fn, 3, False), pass_at_k(m, fn, 2, False)]


@declare("t/r20")
def pass_at_k_counters(m, fn):
    return [pass_at_k(m, fn, 3, True), pass_at_k(m, fn, 2, True)]


@declare("s/r21")
def pass_at_k_left_out(m, fn):
    return [pass_at_k(m, fn, 3, True), pass_at_k(m, fn, 2, True)]


@declare("s/d07")
def logged_loss(m, fn):
    rows = torch.cat(
        [
            torch.cat([b["logits"], b["labels"][:, None].float()], 1)
            for seed in (0, 1, 2)
            for rank in m.make(seed)["ranks"]
            for b in rank
        ]
    )

    def batch(part):
        return {"logits": part[:, :-1].contiguous(), "labels": part[:, -1].long()}

    def one(shards):
        return float(fn([[batch(s)] for s in shards]))

    def two(shards):
        if min(len(s) for s in shards) < 2:  # every rank has the same number of micro-batches
            return one(shards)
        return float(fn([[batch(s[:1]), batch(s[1:])] for s in shards]))

    def single(shards):
        part = batch(torch.cat(list(shards)))
        return F.cross_entropy(part["logits"], part["labels"]).item()

    return [Ranks(metric=one, rows=rows, single=single), Ranks(metric=two, rows=rows, single=single)]


# preference ----------------------------------------------------------------------------------------------------------


@declare("s/d09")
def simpo(m, fn):
    given = m.make(0)
    model = given.pop("model")
    batch = {
        "chosen": given["ids"][0::2].clone(),
        "rejected": given["ids"][1::2].clone(),
        "chosen_mask": given["response_mask"][0::2].clone(),
        "rejected_mask": given["response_mask"][1::2].clone(),
    }

    def rows(batch):
        width = max(batch["chosen"].shape[1], batch["rejected"].shape[1])

        def both(a, b):
            a, b = (F.pad(x, (0, width - x.shape[1])) for x in (batch[a], batch[b]))
            return torch.stack([a, b], 1).flatten(0, 1)

        return {"ids": both("chosen", "rejected"), "response_mask": both("chosen_mask", "rejected_mask")}

    def loss(model, batch, beta=2.0, gamma=0.5, ignore_eos=True):
        return fn(model, rows(batch), beta=beta, gamma=gamma, ignore_eos=ignore_eos)

    def with_end(model, batch, beta=2.0, gamma=0.5):
        return fn(model, rows(batch), beta=beta, gamma=gamma, ignore_eos=False)

    def means(ignore_eos):
        def side(model, ids, mask):
            lp = model(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
            mask = mask[:, 1:]
            if ignore_eos:
                mask = mask * (ids[:, 1:] != 1)
            return (lp * mask).sum(1) / mask.sum(1)

        def logprobs(model, batch):
            return (
                side(model, batch["chosen"], batch["chosen_mask"]),
                side(model, batch["rejected"], batch["rejected_mask"]),
            )

        return logprobs

    common = dict(
        roles={k: k for k in batch},
        reduction="mean",
        wide=tuple(batch),
        value_is_loss=True,
        empty_rows=False,
        family="preference",
    )
    beta, gamma = Setting(2.0, "setting"), Setting(0.5, "target")
    return [
        Step(
            model=model,
            loss=loss,
            batch=batch,
            settings={"beta": beta, "gamma": gamma, "ignore_eos": Setting(True, "setting", modes=(False,))},
            logprobs=means(True),
            drops_tokens=True,  # the end tokens are in the mask, and the loss leaves them out
            name="SimPO without the end tokens",
            **common,
        ),
        Step(
            model=model,
            loss=with_end,
            batch=batch,
            settings={"beta": beta, "gamma": gamma},
            logprobs=means(False),
            name="SimPO with the end tokens",
            **common,
        ),
    ]


# schedules -----------------------------------------------------------------------------------------------------------


@declare("u/d06")
def resumed_cosine(m, fn):
    def subject(checkpoint, resume, total):
        def rates(total, ranks=1, base_lr=1e-3, warmup=5):
            return [
                fn(
                    checkpoint + k,
                    base_lr=base_lr,
                    warmup=warmup,
                    max_steps=checkpoint + total,
                    resume_step=resume,
                    checkpoint_step=checkpoint,
                )
                for k in range(total)
            ]

        return Schedule(
            rates=rates, peak=1e-3, final=0.0, total=total, warmup=5, settings={"base_lr": 1e-3, "warmup": 5}
        )

    return [subject(60, None, 40), subject(60, 60, 40), subject(40, None, 60), subject(0, None, 100)]


@declare("u/r13")
def muon_momentum(m, fn):
    settings = {"low": 0.85, "high": 0.95, "warmup": 300, "cooldown": 50}

    def momentum(total, ranks=1, **given):
        return [fn(k, total=total, **{**settings, **given}) for k in range(total)]

    def share(total, ranks=1, **given):  # of the way from 0.85 to 0.95
        return [(v - 0.85) / (0.95 - 0.85) for v in momentum(total, ranks, **given)]

    return [
        Schedule(rates=momentum, peak=0.95, final=0.85, total=2000, warmup=300, settings=settings),
        Schedule(rates=share, peak=1.0, final=0.0, total=2000, warmup=300, settings=settings),
    ]


@declare("t/r13")
def cosine_with_restarts(m, fn):
    settings = {"lr": 1e-3, "warmup": 20, "every": 50, "restart_warmup": 5, "min_ratio": 0.1}

    def rates(total, ranks=1, **given):
        return [fn(k, total=total, **{**settings, **given}) for k in range(total)]

    def outer(total, ranks=1, **given):  # no restart in the run, which is longer than the cosine by 40 steps
        return [fn(k, total=total - 40, **{**settings, "every": 10**6, **given}) for k in range(total)]

    return [
        Schedule(rates=rates, peak=1e-3, final=1e-4, total=200, warmup=20, restarts=True, settings=settings),
        Schedule(
            rates=outer,
            peak=1e-3,
            final=1e-4,
            total=200,
            warmup=20,
            ends=160,
            settings={"lr": 1e-3, "warmup": 20, "min_ratio": 0.1},
        ),
    ]


@declare("v/r14")
def batch_size_ramp(m, fn):
    settings = {"start": 16, "increment": 16, "ramp_samples": 1200, "final": 80, "divisor": 12}

    def sizes(total, ranks=1, **given):
        return [fn(k, **{**settings, **given}) for k in range(total)]

    # four stages of 300 samples: 25 steps of 12, 13 of 24, 6 of 48, 5 of 60, then 72
    return Schedule(rates=sizes, peak=72.0, final=72.0, total=80, warmup=49, ends=49, settings=settings)


# data ----------------------------------------------------------------------------------------------------------------


@declare("v/d07")
def packed_chunks(m, fn):
    given = m.make(0)
    rows = given["rows"]
    names = ("input_ids", "labels", "positions")

    def tensors(out):
        return {n: torch.tensor([r[n] for r in out]) for n in names}

    def plain(examples):
        return tensors(fn(examples, seq_len=16))

    def one_row(examples):  # a row as long as the documents; one more token, so that the row is filled
        total = sum(len(e["ids"]) for e in examples)
        return tensors(fn([*examples, {"ids": [1]}], seq_len=total))

    def documents(batch):
        ids = batch["input_ids"].flatten().tolist()
        ends = [i + 1 for i, t in enumerate(ids) if t == 1]
        return [
            {n: batch[n].flatten()[a:b] for n in names} for a, b in zip([0, *ends[:-1]], ends)
        ]

    long = []
    for k in range(4):  # documents that fill two rows (of 16 inputs and one last label) each
        g = torch.Generator().manual_seed(k)
        long.append({"ids": torch.randint(2, 40, (33,), generator=g).tolist() + [1]})

    def two_rows(batch):
        n = len(batch["input_ids"]) // 2
        return [{c: batch[c][2 * i : 2 * i + 2].flatten() for c in names} for i in range(n)]

    return [
        Collator(fn=plain, examples=rows, rows=False),
        Collator(
            fn=one_row,
            examples=rows,
            rows=False,
            unpack=documents,
            targets=lambda e: e["ids"][1:],
            columns={
                "input_ids": lambda e: e["ids"],
                "positions": lambda e: list(range(len(e["ids"]))),
                "labels": lambda e: [*e["ids"][1:], -100],
            },
        ),
        Collator(
            fn=plain,
            examples=long,
            rows=False,
            unpack=two_rows,
            targets=lambda e: e["ids"][1:17] + e["ids"][18:34],
            columns={
                "input_ids": lambda e: e["ids"][:16] + e["ids"][17:33],
                "positions": lambda e: [*range(16), *range(17, 33)],
            },
        ),
    ]


@declare("s/r07")
def padding_free(m, fn):
    rows = m.make(0)["rows"]

    def documents(batch):
        ends = batch["cu_seqlens"].tolist()
        return [
            {n: batch[n][0, a:b] for n in ("input_ids", "labels", "position_ids")} for a, b in zip(ends, ends[1:])
        ]

    out = fn(m.make(0)["rows"])
    shape = {f"{n} rows": float(out[n].shape[0]) for n in ("input_ids", "labels", "position_ids")}
    lengths = {f"{n} tokens": float(out[n].shape[-1]) for n in ("input_ids", "labels", "position_ids")}
    found = {"max_length": float(out["max_length"]), "cu_seqlens": float(len(out["cu_seqlens"])), **shape, **lengths}
    total = float(sum(len(r["input_ids"]) for r in rows))
    wanted = {
        "max_length": float(max(len(r["input_ids"]) for r in rows)),
        "cu_seqlens": float(len(rows) + 1),
        **dict.fromkeys(shape, 1.0),
        **dict.fromkeys(lengths, total),
    }
    return [
        Collator(
            fn=fn,
            examples=rows,
            rows=False,
            unpack=documents,
            targets=lambda e: [t for t in e["labels"][1:] if t != -100],
            columns={
                "input_ids": lambda e: e["input_ids"],
                "position_ids": lambda e: list(range(len(e["input_ids"]))),
                "labels": lambda e: [-100, *e["labels"][1:]],
            },
        ),
        Census(wanted=wanted, found=found, what="sizes of the packed batch"),
    ]


@declare("v/r16")
def span_corruption(m, fn):
    given = m.make(0)
    rows = given["rows"]

    def restored(inputs, labels):
        """The row, from what was kept and what was corrupted; and how much was corrupted, in how many spans."""
        spans, now = {}, None
        for t in labels[:-1]:
            if t >= 40:
                now = t
                spans[now] = []
            elif now is not None:
                spans[now].append(t)
        row = []
        for t in inputs[:-1]:
            row += spans.get(t, [t]) if t >= 40 else [t]
        return row, sum(map(len, spans.values())), len(spans), min(map(len, spans.values()), default=0)

    def collate(examples, density, mean_span):
        out = fn(examples, density=density, mean_span=mean_span, seed=0)
        found = [restored(list(o["input_ids"]), list(o["labels"])) for o in out]
        return {
            "input_ids": padded([o["input_ids"] for o in out], 0),
            "labels": padded([o["labels"] for o in out], -100),
            "key": torch.tensor([o["key"] for o in out]),
            "restored": padded([f[0] for f in found], 0),
            "corrupted": torch.tensor([f[1] for f in found]),
            "spans": torch.tensor([f[2] for f in found]),
            "no_empty_span": torch.tensor([int(f[3] > 0) for f in found]),
            "ends": torch.tensor([[o["input_ids"][-1], o["labels"][-1]] for o in out]),
            # starts with a kept span, ends with a corrupted one
            "kept_first_corrupted_last": torch.tensor(
                [[int(o["input_ids"][0] < 40), int(o["input_ids"][-2] >= 40)] for o in out]
            ),
            "sentinels": padded([[t for t in o["labels"] if t >= 40] for o in out], 0),
            "sentinels_of_inputs": padded([[t for t in o["input_ids"] if t >= 40] for o in out], 0),
        }

    def subject(density, mean_span):
        def corrupted(e):
            n = len(e["ids"])
            return min(max(round(n * density), 1), n - 1)

        def spans(e):
            return max(round(corrupted(e) / mean_span), 1)

        return Collator(
            fn=lambda examples: collate(examples, density, mean_span),
            examples=rows,
            pads={"input_ids": 0, "labels": -100, "restored": 0, "sentinels": 0, "sentinels_of_inputs": 0},
            columns={
                "key": lambda e: e["key"],
                "restored": lambda e: e["ids"],
                "corrupted": corrupted,
                "spans": spans,
                "no_empty_span": lambda e: 1,
                "ends": lambda e: [1, 1],
                "kept_first_corrupted_last": lambda e: [1, 1],
                "sentinels": lambda e: [49 - k for k in range(spans(e))],
                "sentinels_of_inputs": lambda e: [49 - k for k in range(spans(e))],
            },
        )

    def by_seed(seed):
        return torch.cat([torch.tensor(o["input_ids"]) for o in fn(m.make(0)["rows"], 0.15, 3, seed=seed)])

    def by_key(key):
        return torch.tensor(fn([{"ids": list(rows[0]["ids"]), "key": key}], 0.15, 3, seed=0)[0]["input_ids"])

    return [
        subject(0.15, 3),
        subject(0.25, 2),  # both settings are read
        Ranks(draw=by_seed),  # another seed of the stage gives other spans, each repeatably
        Ranks(draw=by_key),  # another key likewise
    ]


@declare("u/r18")
def left_and_right_padding(m, fn):
    def collate(examples):
        out = dict(fn(examples))
        first = (out["labels"] != -100).long().argmax(1)
        out["completions_start_together"] = (first == max(len(e["prompt"]) for e in examples)).long()
        return out

    return Collator(
        fn=collate,
        examples=m.make(0)["rows"],
        pads={"input_ids": 0, "attention_mask": 0, "position_ids": 1, "labels": -100},
        targets=lambda e: e["completion"],
        columns={
            "input_ids": lambda e: e["prompt"] + e["completion"],
            "attention_mask": lambda e: [1] * len(e["prompt"] + e["completion"]),
            "position_ids": lambda e: list(range(len(e["prompt"] + e["completion"]))),
            "labels": lambda e: e["completion"],
            "completions_start_together": lambda e: 1,
        },
    )


@declare("u/r06")
def skipped_positions(m, fn):
    rows = [row for seed in range(4) for row in m.make(seed)["rows"]]

    def collate(examples):
        out = dict(fn(examples))
        pos = out["position_ids"]
        jumps = pos[:, 1:] - pos[:, :-1] - 1
        fine = (pos[:, 0] == 0) & ((jumps != 0).sum(1) <= 1) & (jumps >= 0).all(1) & (jumps.sum(1) <= 48)
        out["one_skip_of_at_most_48"] = fine.long()
        return out

    def draw(seed):
        return fn([{"ids": list(rows[0]["ids"]), "seed": seed}])["position_ids"]

    return [
        Collator(
            fn=collate,
            examples=rows,
            targets=lambda e: e["ids"],
            columns={
                "input_ids": lambda e: e["ids"],
                "labels": lambda e: e["ids"],
                "one_skip_of_at_most_48": lambda e: 1,
            },
        ),
        Ranks(draw=draw),  # another seed of a row gives other positions, each repeatably
    ]


@declare("u/r16")
def generation_batches(m, fn):
    rows = m.make(0)["rows"]
    blocks = []
    for k in range(4):  # complete batches of four prompts
        blocks.append([dict(r, id=10 * k + i) for i, r in enumerate(m.make(k)["rows"][:4])])

    def tensors(out):
        return {n: torch.tensor([o[n] for o in out]) for n in ("id", "prompt", "generation", "use")}

    def collate(examples):
        n = 24 * len(examples)
        found = tensors(fn([r for block in examples for r in block]))
        out = {}
        for name, v in found.items():
            v = torch.cat([v, torch.full((max(0, n - len(v)), *v.shape[1:]), -1)])[:n]
            out[name] = v.reshape(len(examples), 24, *v.shape[1:])
        return out

    def each(block, value):
        return [value(r, g, u) for u in range(2) for r in block for g in range(3)]

    out = fn(m.make(0)["rows"])
    return [
        Collator(
            fn=collate,
            examples=blocks,
            columns={
                "id": lambda b: each(b, lambda r, g, u: r["id"]),
                "prompt": lambda b: each(b, lambda r, g, u: r["prompt"]),
                "generation": lambda b: each(b, lambda r, g, u: g),
                "use": lambda b: each(b, lambda r, g, u: u),
            },
        ),
        Collator(fn=lambda examples: tensors(fn(examples)), examples=rows, rows=False),
        Census(
            wanted=[f"{i}/{g}/{u}" for i in range(8) for g in range(3) for u in range(2)],
            found=[f"{o['id']}/{o['generation']}/{o['use']}" for o in out],
            what="prompt/generation/use",
            once=True,
        ),
    ]


class Stream:
    def __init__(self, dataset):
        self.dataset, self.rows, self.last = dataset, None, None


@declare("s/d02")
def packed_state(m, fn):
    docs = m.make(0)["rows"]
    more = docs + m.make(1)["rows"]

    def subject(rows, steps):
        def run(x, n):
            seen = []
            if x.rows is None:
                x.rows = iter(x.dataset)
            for _ in range(n):
                row = next(x.rows, None)
                if row is None:
                    row = {"input_ids": torch.full((16,), -7), "doc": torch.full((16,), -7)}
                x.last = torch.cat([row["input_ids"], row["doc"]])
                seen.append(tuple(x.last.tolist()))
            return seen

        def save(x, folder):
            torch.save(x.dataset.state_dict(), folder / "state.pt")

        def load(x, folder):
            x.dataset.load_state_dict(torch.load(folder / "state.pt"))
            x.rows = None

        def state(x):
            return torch.zeros(32) if x.last is None else x.last.float()

        return Resume(
            make=lambda: Stream(fn([list(r) for r in rows], seq_len=16)),
            run=run,
            save=save,
            load=load,
            state=state,
            steps=steps,
        )

    def pack(examples):
        out = list(fn(examples, seq_len=16))
        return {n: torch.stack([o[n] for o in out]) for n in ("input_ids", "doc")}

    def documents(batch):
        found = []
        for ids, doc in zip(batch["input_ids"], batch["doc"]):
            for d in range(int(doc.max()) + 1):
                found.append({"input_ids": ids[doc == d]})
        return found

    return [
        subject(more, 3),
        subject(more, 2),
        subject(more, 1),
        subject(docs, 5),
        Collator(
            fn=pack, examples=docs, rows=False, unpack=documents, columns={"input_ids": lambda e: list(e)}
        ),
    ]


# packed losses -------------------------------------------------------------------------------------------------------


@declare("s/r05")
def packed_documents(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles={"ids": "ids", "documents": "doc"},
        reduction="mean",
        wide=("ids", "doc"),
        value_is_loss=True,
        all_supervised=True,
        family="sft",
    )


def rows_of(row_ids, row_mask):
    """Prompt and response of a row: what comes before the first supervised token, and the supervised tokens."""
    at = row_mask.nonzero().flatten()
    if not len(at):
        return None
    a, b = int(at[0]), int(at[-1]) + 1
    if len(at) != b - a or a == 0:
        raise ValueError("a response is one span after a prompt")
    return row_ids[:a], row_ids[a:b]


def by_prompt(batch):
    """Rows with the same prompt are packed behind one copy of it: a list of (prompt, responses, advantages)."""
    groups = {}
    for ids, mask, advantage in zip(batch["ids"], batch["mask"], batch["advantages"]):
        parts = rows_of(ids, mask)
        if parts is not None:
            groups.setdefault(tuple(parts[0].tolist()), []).append((parts[0], parts[1], advantage))
    if not groups:
        raise ValueError("no response")
    return [(g[0][0], [r for _, r, _ in g], torch.stack([a for _, _, a in g])) for g in groups.values()]


def unpacked(packs):
    """packs: (prompt, responses, advantages) each; rows of prompt + response, right padded."""
    rows = [(p, r) for p, rs, _ in packs for r in rs]
    width = max(len(p) + len(r) for p, r in rows)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width)
    for i, (p, r) in enumerate(rows):
        ids[i, : len(p) + len(r)] = torch.cat([p, r])
        mask[i, len(p) : len(p) + len(r)] = 1
    return {"ids": ids, "mask": mask, "advantages": torch.cat([a for _, _, a in packs])}


ROWS = dict(
    roles={"ids": "ids", "mask": "mask", "advantages": "advantages"},
    logprobs=lambda model, batch: token_logprobs(model, batch["ids"]),
    reduction="mean",
    wide=("ids", "mask"),
    value_is_loss=True,
    family="policy gradient",
)


@declare("v/r07")
def shared_prompt(m, fn):
    given = m.make(0)
    model = given["model"]

    def pack(prompt, responses, advantages):
        segment = torch.cat([torch.full((len(x),), i) for i, x in enumerate([prompt, *responses])])
        p = len(prompt)
        positions = torch.cat([torch.arange(p)] + [torch.arange(p, p + len(r)) for r in responses])[None]
        return {
            "ids": torch.cat([prompt, *responses])[None],
            "segment": segment,
            "positions": positions,
            "advantages": advantages,
        }

    def loss(model, batch):  # mean over responses
        packs = by_prompt(batch)
        return sum(len(rs) * fn(model, pack(p, rs, a)) for p, rs, a in packs) / sum(len(rs) for _, rs, _ in packs)

    def separate(model, batch):  # "equal to G separate rows prompt + response"
        ids, seg = batch["ids"][0], batch["segment"]
        terms = []
        for g, a in enumerate(batch["advantages"], 1):
            row = torch.cat([ids[seg == 0], ids[seg == g]])[None]
            where = torch.cat([batch["positions"][0][seg == 0], batch["positions"][0][seg == g]])[None]
            lp = model(row, where)[:, :-1].log_softmax(-1).gather(-1, row[:, 1:, None])[0, :, 0]
            terms.append(-a * lp[int((seg == 0).sum()) - 1 :].mean())
        return torch.stack(terms).mean()

    packs = []
    for seed in (0, 1):
        b = m.make(seed)["batch"]
        ids, seg = b["ids"][0], b["segment"]
        packs.append((ids[seg == 0], [ids[seg == g] for g in range(1, 4)], b["advantages"] * (1.0, 1.3)[seed]))
    return [
        Step(model=model, loss=loss, batch=unpacked(packs), name="responses as rows", **ROWS),
        Step(
            model=model,
            loss=fn,
            batch=given["batch"],
            roles={"positions": "positions", "advantages": "advantages"},
            paths={"separate rows": separate},
            rows_interact=True,
            value_is_loss=True,
            all_supervised=None,
            family="policy gradient",
            name="one packed row",
        ),
    ]


@declare("u/r07")
def shared_prompt_tokens(m, fn):
    model = m.make(0)["model"]

    def pack(prompt, responses, advantages):
        return {
            "prompt": prompt,
            "responses": torch.cat(responses),
            "owner": torch.cat([torch.full((len(r),), i) for i, r in enumerate(responses)]),
            "advantages": advantages,
        }

    def loss(model, batch):  # mean over response tokens
        packs = by_prompt(batch)
        tokens = [sum(len(r) for r in rs) for _, rs, _ in packs]
        return sum(n * fn(model, pack(p, rs, a)) for n, (p, rs, a) in zip(tokens, packs)) / sum(tokens)

    packs = []
    for seed in (0, 1):
        b = m.make(seed)
        packs.append((b["prompt"], [b["responses"][b["owner"] == g] for g in range(3)], b["advantages"]))
    return Step(model=model, loss=loss, batch=unpacked(packs), name="responses as rows", **ROWS)


# sharded vocabularies ------------------------------------------------------------------------------------------------


def vocabulary_parallel(m, fn, name, value, modes, **more):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=given.get("batch", given),
        roles={"ids": "ids", "labels": "labels"},
        settings={name: Setting(value, "inert", modes=modes)},
        reduction="mean",
        wide=("ids", "labels"),
        value_is_loss=True,
        family="sft",
        **more,
    )


@declare("v/r12")
def vocabulary_parallel_attention(m, fn):
    return vocabulary_parallel(m, fn, "tp", 4, (1, 2, 8))


@declare("t/r10")
def vocabulary_parallel_gru(m, fn):
    def plain(model, batch, tp=3):  # "equals mean cross-entropy over trained tokens"
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    return vocabulary_parallel(m, fn, "tp", 3, (1, 2, 5), paths={"mean cross-entropy": plain})


@declare("s/r11")
def vocabulary_slices(m, fn):
    return vocabulary_parallel(m, fn, "ranks", 4, (1, 2, 8))


# updates -------------------------------------------------------------------------------------------------------------


@declare("u/r11")
def tensor_parallel_clip(m, fn):
    given = m.make(0)
    model, optimizer = given["model"], given["optimizer"]
    batch = joined(given["batches"] + m.make(1)["batches"])

    def run(model, optimizer, batches, max_grad_norm=None):
        names = getattr(fn, "__globals__", vars(m))
        before = names["MAX_NORM"]
        names["MAX_NORM"] = math.inf if max_grad_norm is None else max_grad_norm
        try:
            fn(model, optimizer, [dict(b) for b in batches])
        finally:
            names["MAX_NORM"] = before

    def clipped(model, optimizer, batches):
        fn(model, optimizer, batches)

    def update(batches, max_grad_norm):
        run(model, optimizer, batches, max_grad_norm)

    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"])

    return [
        # micro-batches of equal size, as the words promise
        Accumulation(m.make(0)["model"], leaves_gradients(run), batch, split=[4] * 4),
        Accumulation(m.make(0)["model"], leaves_gradients(clipped), batch, split=[8] * 2),
        Update(model=model, optimizer=optimizer, update=update, loss=loss, batch=batch, split=[4] * 4),
    ]


class Landing(nn.Module):
    """Inner training of this model ends on the weights that its batch carries (at an inner rate of 0)."""

    def __init__(self, weights):
        super().__init__()
        self.w = nn.Parameter(weights.detach().clone())

    def forward(self, x):
        self.w.data.copy_(x)
        return self.w * 1.0


class Round:
    """One outer step on given replicas; keeps the outer momentum for the next round."""

    def __init__(self, fn):
        self.fn, self.buffer = fn, None

    def __deepcopy__(self, memo):
        other = Round(self.fn)
        other.buffer = None if self.buffer is None else self.buffer.clone()
        return other

    def __call__(self, start, locals, lr=0.7, momentum=0.9):
        model = Landing(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
        if self.buffer is not None and momentum > 0:
            optimizer.state[model.w]["momentum_buffer"] = self.buffer.clone()
        workers = [[{"x": q.detach().clone(), "y": q.detach().clone()}] for q in locals]
        self.fn(model, optimizer, workers, inner_lr=0.0)
        kept = optimizer.state[model.w].get("momentum_buffer")
        self.buffer = None if kept is None else kept.detach().clone()
        return model.w.detach().clone()


@declare("s/r12")
def outer_step(m, fn):
    given = m.make(0)
    batch = joined([b for worker in given["batches"] for b in worker])

    def workers(model, optimizer, batches):  # one worker per batch, three inner steps on it
        fn(model, optimizer, [[dict(b)] * 3 for b in batches], inner_lr=0.01)

    return [
        OuterStep(step=Round(fn), knobs={"lr": 0.7, "momentum": 0.9}),
        # the pseudo-gradient of two equal workers is that of one; rows are coupled by the inner AdamW
        Accumulation(given["model"], leaves_gradients(workers), batch, what="workers", rows_interact=True),
    ]


# advantages ----------------------------------------------------------------------------------------------------------


def steps_of(count):
    """A row is an episode of 1, 2 or 3 steps: the episode of every step, and the last step of every episode."""
    lengths = torch.tensor([1 + i % 3 for i in range(count)])
    return torch.repeat_interleave(torch.arange(count), lengths), lengths.cumsum(0) - 1


@declare("s/r01")
def gigpo(m, fn):
    def single_step(rewards, groups):  # every step in a state of its own: the step part is 0
        at = torch.arange(len(rewards))
        return fn(rewards, groups, at, at)

    def several_steps(rewards, groups):  # the episode part, of episodes with different numbers of steps
        episode, last = steps_of(len(rewards))
        own = torch.zeros(len(episode), dtype=rewards.dtype)
        own[last] = rewards
        return fn(own, groups[episode], episode, torch.zeros_like(episode), omega=0.0)[last]

    def same_state(rewards, groups):
        # the step part: all episode returns are 0 (r, then -r), first steps are in one state, which all tasks have
        n = len(rewards)
        own = torch.stack([rewards, -rewards], 1).flatten()
        episode = torch.arange(n).repeat_interleave(2)
        state = torch.stack([torch.zeros(n, dtype=torch.long), 1 + torch.arange(n)], 1).flatten()
        return fn(own, groups.repeat_interleave(2), episode, state, gamma=0.5)[0::2]

    return [
        AdvantageEstimator(fn=single_step, scale="free"),
        AdvantageEstimator(fn=several_steps, scale="free"),
        AdvantageEstimator(fn=same_state, scale="equal"),
    ]


@declare("t/r03")
def gigpo_mean_only(m, fn):
    def single_step(rewards, groups):  # every step in a state of its own: the step part is 0
        at = torch.arange(len(rewards))
        return fn(rewards, groups, at, rewards, at)

    def both_parts(rewards, groups):  # one state, which all tasks have
        at = torch.arange(len(rewards))
        return fn(rewards, groups, at, rewards, torch.zeros_like(at))

    def same_state(rewards, groups):  # the step part alone
        at = torch.arange(len(rewards))
        return fn(rewards, groups, at, torch.zeros_like(rewards), torch.zeros_like(at))

    def several_steps(rewards, groups):  # the episode part, of trajectories with different numbers of steps
        trajectory, last = steps_of(len(rewards))
        returns = rewards[trajectory]
        state = torch.arange(len(trajectory))
        return fn(torch.zeros_like(returns), groups[trajectory], trajectory, returns, state)[last]

    return [
        AdvantageEstimator(fn=single_step, scale="equal"),
        AdvantageEstimator(fn=both_parts, scale="equal"),
        AdvantageEstimator(fn=same_state, scale="equal"),
        AdvantageEstimator(fn=several_steps, scale="equal"),
    ]


# distillation, GSPO, agents ------------------------------------------------------------------------------------------


@declare("v/r25")
def k2_distillation(m, fn):
    given = m.make(0)
    batch = dict(given["batch"])
    batch["teacher_logprobs"] = F.pad(batch["teacher_logprobs"], (1, 0))  # aligned with the ids and the mask

    def loss(model, batch):
        return fn(model, {**batch, "teacher_logprobs": batch["teacher_logprobs"][:, 1:]})

    return Step(
        model=given["model"],
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "mask": "response_mask", "teacher": "teacher_logprobs"},
        student=lambda model, batch: token_logprobs(model, batch["ids"]),
        reduction="mean",
        wide=("ids", "response_mask", "teacher_logprobs"),
        value_is_loss=True,
        family="divergence",
    )


@declare("t/d01")
def gspo(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logprobs", "advantages": "advantages"},
        settings={"eps_clip": Setting(0.2, "clip")},
        logprobs=lambda model, batch: token_logprobs(model, batch["ids"]),
        reduction="mean",
        wide=("ids", "loss_mask", "old_logprobs", "advantages"),
        value_is_loss=True,
        family="policy gradient",
    )


@declare("t/r24")
def top_k_distillation(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles={"ids": "ids", "mask": "loss_mask", "teacher": "topk_logprobs"},
        student=lambda model, batch: model(batch["ids"]).log_softmax(-1).gather(-1, batch["topk_ids"]),
        reduction="mean",
        wide=("ids", "loss_mask", "topk_ids", "topk_logprobs"),
        value_is_loss=True,
        family="divergence",
    )


@declare("v/r04")
def actions_and_observations(m, fn):
    given = m.make(0)
    return Step(
        model=given["model"],
        loss=fn,
        batch=given["batch"],
        roles={"ids": "ids", "mask": "action_mask"},
        masks=("observation_mask",),
        settings={"obs_weight": Setting(0.1, "weight")},
        metrics={
            "action": Metric(low=0.0, weight=1.0),
            "observation": Metric(low=0.0, weight="obs_weight"),
        },
        reduction="mean",
        wide=("ids", "action_mask", "observation_mask"),
        value_is_loss=True,
        family="sft",
    )
