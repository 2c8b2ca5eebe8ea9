import copy
import math
from collections import Counter
from fractions import Fraction
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import nn

from tests.audit.reading2026h.reading import declare, no_subject  # noqa: F401
from earnest_audit import (
    Accumulation,
    Census,
    ChatTemplate,
    Collator,
    Metric,
    Ranks,
    Resume,
    Schedule,
    Setting,
    Step,
    Update,
)


# ---------------------------------------------------------------- helpers (form only)
def padded(rows, value, dtype=torch.long):
    width = max([len(r) for r in rows] + [1])
    return torch.tensor([list(r) + [value] * (width - len(r)) for r in rows], dtype=dtype)


def long(values):
    return torch.tensor(list(values), dtype=torch.long)


def own_index_logprobs(model, ids):
    """log-prob of each token at its own index, 0 in column 0."""
    lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return F.pad(lp, (1, 0))


class Caught:
    """An optimizer for code that steps by itself: the step keeps the gradients and moves nothing."""

    def __init__(self, model):
        self.real = torch.optim.SGD(model.parameters(), lr=0.0)
        self.grads = None

    def __getattr__(self, name):
        return getattr(self.real, name)

    def zero_grad(self, *args, **kwargs):
        self.real.zero_grad(*args, **kwargs)

    def step(self, *args, **kwargs):
        self.grads = [
            (p, None if p.grad is None else p.grad.detach().clone()) for g in self.real.param_groups for p in g["params"]
        ]

    def leave(self):
        for p, g in self.grads or []:
            p.grad = g


class Clips:
    """The run's optimizer; the code itself has no clip, so the clip of the audit is made right before its step."""

    def __init__(self, real, max_norm):
        self.real, self.max_norm = real, max_norm

    def __getattr__(self, name):
        return getattr(self.real, name)

    def zero_grad(self, *args, **kwargs):
        self.real.zero_grad(*args, **kwargs)

    def step(self, *args, **kwargs):
        if self.max_norm is not None and math.isfinite(self.max_norm):
            params = [p for g in self.real.param_groups for p in g["params"]]
            torch.nn.utils.clip_grad_norm_(params, self.max_norm)
        return self.real.step(*args, **kwargs)


# ---------------------------------------------------------------- schedules
@declare("w/r13")
def inverse_square_root(m, fn):
    total = 40000
    return Schedule(
        rates=lambda total, ranks, warmup=10000, scale=1.0: [fn(s, warmup=warmup, scale=scale) for s in range(total)],
        peak=0.01,
        final=1.0 / math.sqrt(total - 1),
        total=total,
        warmup=0,  # it never rises
        settings={"warmup": 10000, "scale": 1.0},
    )


@declare("x/d02")
def warmup_cosine_processes(m, fn):
    def by_ranks(total, ranks, lr=1e-4, warmup=10):
        batches = total // 3 * 4 * ranks  # 3 epochs, 4 micro-batches per optimizer step: `total` optimizer steps
        return [fn(s, lr=lr, warmup=warmup, epochs=3, batches=batches, accumulation=4, processes=ranks) for s in range(total)]

    def as_given(total, ranks, lr=1e-4, warmup=10, epochs=3, batches=240, accumulation=4):
        return [
            fn(s, lr=lr, warmup=warmup, epochs=epochs, batches=batches, accumulation=accumulation, processes=2)
            for s in range(total)
        ]

    return [
        Schedule(rates=by_ranks, peak=1e-4, final=0.0, total=90, warmup=10, settings={"lr": 1e-4, "warmup": 10}),
        Schedule(
            rates=as_given,
            peak=1e-4,
            final=0.0,
            total=90,
            warmup=10,
            settings={"lr": 1e-4, "warmup": 10, "epochs": 3, "batches": 240, "accumulation": 4},
        ),
    ]


@declare("x/r12")
def warmup_stable_cooldown(m, fn):
    def rates(total, ranks, lr=3e-4, warmup=20, cooldown=40, floor=0.1):
        return [fn(s, lr=lr, warmup=warmup, total=total, cooldown=cooldown, floor=floor) for s in range(total)]

    return Schedule(
        rates=rates,
        peak=3e-4,
        final=3e-5,
        total=200,
        warmup=20,
        settings={"lr": 3e-4, "warmup": 20, "cooldown": 40, "floor": 0.1},
    )


@declare("q/r12")
def second_moment_decay(m, fn):
    # the decay factor rises to 1; one minus it is a schedule that starts at 1 and never rises
    return Schedule(
        rates=lambda total, ranks, decay=-0.8: [1.0 - fn(t, decay=decay) for t in range(1, total + 1)],
        peak=1.0,
        final=40**-0.8,
        total=40,
        warmup=0,
        settings={"decay": -0.8},
    )


@declare("w/r15")
def samples_and_batch_ramp(m, fn):
    names = {
        "lr": 6e-4,
        "min_lr": 6e-5,
        "warmup_samples": 400,
        "decay_samples": 4000,
        "start_batch": 8,
        "increment": 8,
        "full_batch": 32,
        "ramp_samples": 600,
    }
    # consumed samples before a step, from the words: 8 per step, 8 more after each 200 samples, up to 32
    consumed, before = 0, []
    for _ in range(200):
        before.append(consumed)
        consumed += min(32, 8 + consumed // 200 * 8)
    warmup = sum(c <= 400 for c in before)
    ends = next(i for i, c in enumerate(before) if c > 4000)
    return Schedule(
        rates=lambda total, ranks, **settings: [fn(s, **{**names, **settings}) for s in range(total)],
        peak=6e-4,
        final=6e-5,
        total=200,
        warmup=warmup,
        ends=ends,
        settings=names,
    )


@declare("r/r14")
def stepped_per_process(m, fn):
    def run(total, world, single_warmup, single_total, between=0):
        optimizer = m.make(0)["optimizer"]
        scheduler = fn(optimizer, world=world, single_warmup=single_warmup, single_total=single_total)
        rates = []
        for _ in range(total):
            for _ in range(between):
                scheduler.step(stepped=False)  # accumulation steps
            rates.append(float(scheduler.get_last_lr()[0]))
            optimizer.step()
            scheduler.step(stepped=True)
        return rates

    return [
        Schedule(
            rates=lambda total, ranks: run(total, ranks, 10 * ranks, total * ranks),
            peak=0.01,
            final=0.0,
            total=100,
            warmup=10,
        ),
        Schedule(
            rates=lambda total, ranks: run(total, ranks, 10 * ranks, total * ranks, between=3),
            peak=0.01,
            final=0.0,
            total=100,
            warmup=10,
        ),
        Schedule(
            rates=lambda total, ranks, single_warmup=40, single_total=400: run(total, 4, single_warmup, single_total),
            peak=0.01,
            final=0.0,
            total=100,
            warmup=10,
            settings={"single_warmup": 40, "single_total": 400},
        ),
    ]


# ---------------------------------------------------------------- data stages and collators
@declare("r/r04")
def rows_of_turns(m, fn):
    def collate(examples):
        rows = list(fn(examples))
        ids, masks, labels, at = [], [], [], 0
        for i, e in enumerate(examples):  # the rows of a conversation: one per assistant turn, in order
            stop = len(rows) if i + 1 == len(examples) else at + len(e["turns"])
            mine, at = rows[at:stop], stop
            ids.append([t for r in mine for t in r["ids"]])
            masks.append([t for r in mine for t in r["loss_mask"]])
            labels.append([t if k else -100 for r in mine for t, k in zip(r["ids"], r["loss_mask"])])
        return {"ids": padded(ids, 0), "loss_mask": padded(masks, -1), "labels": padded(labels, -100)}

    def trained(turn):
        return [4] + turn["think"] + [5] + turn["answer"] + [3]

    def parts(example):
        for k, turn in enumerate(example["turns"]):
            prompt = []
            for past in example["turns"][:k]:
                prompt += [1] + past["user"] + [3, 2] + past["answer"] + [3]
            yield prompt + [1] + turn["user"] + [3, 2], trained(turn)

    return Collator(
        fn=collate,
        examples=m.make(0)["rows"] + m.make(1)["rows"],
        pads={"ids": 0, "loss_mask": -1, "labels": -100},
        targets=lambda e: [t for turn in e["turns"] for t in trained(turn)],
        columns={
            "ids": lambda e: long(t for p, a in parts(e) for t in p + a),
            "loss_mask": lambda e: long(t for p, a in parts(e) for t in [0] * len(p) + [1] * len(a)),
        },
    )


@declare("r/r16")
def rotated_completions(m, fn):
    rows = [r for s in range(4) for r in m.make(s)["rows"]]
    names = ("prompt", "completion", "kl_completion")

    def flat(part, name):
        return [t for r in part for t in list(r[name]) + [-1]]

    def table(parts):
        out = {n: padded([flat(p, n) for p in parts], 0) for n in names}
        out["label"] = padded([[int(r["label"]) for r in p] for p in parts], -1)
        return out

    def rotated(batch):
        return [batch[-1]["completion"]] + [r["completion"] for r in batch[:-1]]

    def expected(size):
        return lambda e: long(t for i in range(0, len(e), size) for c in rotated(e[i : i + size]) for t in list(c) + [-1])

    pads = {"prompt": 0, "completion": 0, "kl_completion": 0, "label": -1}
    same = {
        "prompt": lambda e: long(flat(e, "prompt")),
        "completion": lambda e: long(flat(e, "completion")),
        "label": lambda e: long(int(r["label"]) for r in e),
    }

    def batches(examples):  # an example is one whole batch of four rows
        out = fn([r for e in examples for r in e], batch_size=4)
        return table([out[4 * i : 4 * i + 4] for i in range(len(examples))])

    def unchanged(examples):  # an example is a row
        out = fn(examples, batch_size=4)
        return {k: v for k, v in table([[r] for r in out]).items() if k != "kl_completion"}

    def alone(examples):  # batches of one row
        return table([[r] for r in fn(examples, batch_size=1)])

    def sets(examples):  # an example is a data set with a last batch that is not full
        return table([fn(e, batch_size=4) for e in examples])

    one = {k: (lambda f: lambda r: f([r]))(f) for k, f in same.items()}
    return [
        Collator(
            fn=batches,
            examples=[rows[4 * i : 4 * i + 4] for i in range(5)],
            pads=pads,
            columns={**same, "kl_completion": expected(4)},
        ),
        Collator(fn=unchanged, examples=rows[:10], pads={k: v for k, v in pads.items() if k != "kl_completion"}, columns=one),
        Collator(
            fn=alone,
            examples=rows[:6],
            pads=pads,
            columns={**one, "kl_completion": lambda r: long(list(r["completion"]) + [-1])},
        ),
        Collator(
            fn=sets,
            examples=[rows[:10], rows[10:15], rows[15:22], rows[22:30]],
            pads=pads,
            columns={**same, "kl_completion": expected(4)},
        ),
    ]


@declare("w/r18")
def capped_mixture(m, fn):
    rows = m.make(0)["rows"]

    def shares(budget, cap):  # an even share for each language, at most cap epochs; what is left goes to the others
        size = Counter(r["lang"] for r in rows)
        full = set()
        while True:
            open_ = [k for k in size if k not in full]
            level = Fraction(budget - sum(cap * size[k] for k in full), max(1, len(open_)))
            more = {k for k in open_ if cap * size[k] <= level}
            if not more:
                return {k: cap * n if k in full else int(level) for k, n in size.items()}
            full |= more

    def subjects(budget, cap):
        out = fn(copy.deepcopy(rows), budget=budget, cap=cap)
        want = shares(budget, cap)
        pools = {k: [r["id"] for r in rows if r["lang"] == k] for k in want}
        wanted, found, at = [], [], Counter()
        for k, n in want.items():
            wanted += [f"{k} {j}: {pools[k][j % len(pools[k])]}, epoch {j // len(pools[k])}" for j in range(n)]
        for r in out:
            j = at[r["lang"]]
            at[r["lang"]] += 1
            found.append(f"{r['lang']} {j}: {r['id']}, epoch {r.get('epoch', j // len(pools[r['lang']]))}")
        return [
            Census(wanted=want, found=dict(Counter(r["lang"] for r in out)), what="rows of a language"),
            Census(wanted=wanted, found=found, what="rows of a language in their order"),
            Census(
                wanted=[r for r in ("at most the budget",)],
                found=["at most the budget" if len(out) <= budget else f"{len(out)} rows"],
                what="length of the mixture",
            ),
        ]

    place = {r["id"]: i for i, r in enumerate(rows)}
    return [
        *subjects(240, 3),
        *subjects(500, 2),
        *subjects(5000, 2),
        Collator(
            fn=lambda examples: {"id": long(place[r["id"]] for r in fn(examples, budget=240, cap=3))},
            examples=rows,
            rows=False,
        ),
    ]


@declare("r/r07")
def position_hole(m, fn):
    rows = m.make(0)["rows"]

    def collate(window, epoch):
        def go(examples):
            out = dict(fn(examples, window=window, epoch=epoch))
            p = out["position_ids"]
            step = p[:, 1:] - p[:, :-1]
            out["first"] = p[:, :1]
            out["increases"] = (step >= 1).all(1, keepdim=True).long()
            out["inside"] = (p < window).all(1, keepdim=True).long()
            out["one_jump"] = ((step > 1).sum(1, keepdim=True) <= 1).long()
            return out

        return go

    columns = {
        "input_ids": lambda e: long(e["input_ids"]),
        "labels": lambda e: long(e["input_ids"]),
        "first": lambda e: long([0]),
        "increases": lambda e: long([1]),
        "inside": lambda e: long([1]),
        "one_jump": lambda e: long([1]),
    }
    more = rows + m.make(1)["rows"]
    return [
        *(
            Collator(fn=collate(w, k), examples=more, targets=lambda e: e["input_ids"], columns=columns)
            for w, k in ((64, 0), (64, 1), (24, 2))
        ),
        Ranks(draw=lambda epoch: fn(copy.deepcopy(rows), window=64, epoch=epoch)["position_ids"]),  # epochs differ
        Ranks(draw=lambda i: fn([copy.deepcopy(rows[i])], window=64, epoch=0)["position_ids"]),  # so do rows
    ]


@declare("q/r15")
def span_corruption(m, fn):
    def source(e):
        x, at = [], 0
        for k, (a, b) in enumerate(e["spans"]):
            x, at = x + e["ids"][at:a] + [49 - k], b
        return x + e["ids"][at:] + [1]

    def target(e):
        return [t for k, (a, b) in enumerate(e["spans"]) for t in [49 - k] + e["ids"][a:b]] + [1]

    def collate(examples):
        out = dict(fn(examples))
        real = out["labels"] != -100
        raw = out["decoder_input_ids"]
        out["decoder_legal"] = (raw >= 0).all(1, keepdim=True).long()
        out["decoder_input_ids"] = torch.where(real, raw, torch.full_like(raw, -1))  # only where there is a label
        return out

    return Collator(
        fn=collate,
        examples=m.make(0)["rows"] + m.make(1)["rows"],
        pads={"input_ids": 0, "attention_mask": 0, "labels": -100, "decoder_input_ids": -1},
        targets=target,
        columns={
            "input_ids": lambda e: long(source(e)),
            "attention_mask": lambda e: long([1] * len(source(e))),
            "labels": lambda e: long(target(e)),
            "decoder_input_ids": lambda e: long([0] + target(e)[:-1]),
            "decoder_legal": lambda e: long([1]),
        },
    )


@declare("x/r17")
def whole_passes(m, fn):
    rows = m.make(0)["rows"]

    def subjects(budget, cap):
        out = fn(copy.deepcopy(rows), budget=budget, max_epochs=cap)
        pools = {}
        for r in rows:
            pools.setdefault(r["source"], []).append(r)
        names = sorted(pools, key=lambda n: (len(pools[n]), n))
        left, want = budget, {}
        for i, n in enumerate(names):
            want[n] = min(left // (len(names) - i), cap * len(pools[n]))
            left -= want[n]
        order = [pools[n][k % len(pools[n])] for n in names for k in range(want[n])]
        say = lambda rs: [f"{i}: {r['source']} {r['id']} {r['ids']}" for i, r in enumerate(rs)]  # noqa: E731
        return [
            Census(wanted=want, found=dict(Counter(r["source"] for r in out)), what="rows of a source"),
            Census(
                wanted=dict(Counter(str(r["id"]) for r in order)),
                found=dict(Counter(str(r["id"]) for r in out)),
                what="times of a row",
            ),
            Census(wanted=say(order), found=say(out), what="rows in their order"),
        ]

    return [
        *subjects(60, 4),
        *subjects(150, 2),
        *subjects(1000, 4),  # the cap binds for all sources
        Collator(fn=lambda examples: {"id": long(r["id"] for r in fn(examples))}, examples=rows, rows=False),
    ]


@declare("q/d08")
def left_prompts(m, fn):
    def collate(examples):
        out = dict(fn(examples))
        labels = out["labels"]
        out["label_of_token"] = torch.where(out["attention_mask"] == 1, labels, torch.full_like(labels, -7))
        return out

    return Collator(
        fn=collate,
        examples=m.make(0)["rows"] + m.make(1)["rows"],
        pads={"input_ids": 0, "attention_mask": 0, "labels": -100, "label_of_token": -7},
        targets=lambda e: e["completion"],
        columns={
            "input_ids": lambda e: long(e["prompt"] + e["completion"]),
            "attention_mask": lambda e: long([1] * len(e["prompt"] + e["completion"])),
            "label_of_token": lambda e: long([-100] * len(e["prompt"]) + e["completion"]),
        },
    )


@declare("x/r15")
def end_equals_padding(m, fn):
    def collate(examples):
        raw = fn(examples, pad=0)
        ids, real, done = raw["input_ids"], raw["attention_mask"] == 1, raw["completion_mask"] == 1
        answer = ids[:, ids.shape[1] - done.shape[1] :]
        return {
            "input_ids": torch.where(real, ids, torch.full_like(ids, -1)),  # the end id equals the padding id
            "attention_mask": raw["attention_mask"],
            "position_ids": torch.where(real, raw["position_ids"], torch.full_like(ids, -1)),
            "completion_mask": raw["completion_mask"],
            "labels": torch.where(done, answer, torch.full_like(answer, -100)),
            "padding": (real | (ids == 0)).all(1, keepdim=True).long(),
        }

    return Collator(
        fn=collate,
        examples=m.make(0)["rows"] + m.make(1)["rows"],
        pads={"input_ids": -1, "attention_mask": 0, "position_ids": -1, "completion_mask": 0, "labels": -100},
        targets=lambda e: e["completion"],
        columns={
            "input_ids": lambda e: long(e["prompt"] + e["completion"]),
            "attention_mask": lambda e: long([1] * len(e["prompt"] + e["completion"])),
            "position_ids": lambda e: long(range(len(e["prompt"] + e["completion"]))),
            "completion_mask": lambda e: long([1] * len(e["completion"])),
            "padding": lambda e: long([1]),
        },
    )


@declare("r/d01")
def overlong_penalty(m, fn):
    def subject(limit, buffer, factor):
        def collate(examples):
            out = fn(examples, max_new_tokens=limit, buffer=buffer, factor=factor)
            return {
                "ids": padded([r["ids"] for r in out], 0),
                "action_mask": padded([r["action_mask"] for r in out], -1),
                "response_length": long(r["response_length"] for r in out)[:, None],
                "reward": torch.tensor([[float(r["reward"])] for r in out]),
            }

        def reward(e):
            exceed = sum(e["action_mask"]) - (limit - buffer)
            return torch.tensor([e["reward"] - min(max(exceed, 0), buffer) / buffer * factor])

        return Collator(
            fn=collate,
            examples=[r for s in range(3) for r in m.make(s)["rows"]],
            pads={"ids": 0, "action_mask": -1},
            columns={
                "ids": lambda e: long(e["ids"]),
                "action_mask": lambda e: long(e["action_mask"]),
                "response_length": lambda e: long([sum(e["action_mask"])]),
                "reward": reward,
            },
        )

    return [subject(24, 8, 1.0), subject(16, 8, 0.5)]


@declare("w/r17")
def best_fit(m, fn):
    def cut(row):  # the documents of a row: each begins with BOS = 1
        starts = [i for i, t in enumerate(row) if t == 1]
        if not starts or starts[0] != 0:
            starts = [0] + starts
        return [tuple(row[a:b]) for a, b in zip(starts, starts[1:] + [len(row)])]

    def subjects(rows, capacity, buffer, all_kept=False):
        out = [list(r["ids"]) for r in fn(copy.deepcopy(rows), capacity=capacity, buffer=buffer)]
        docs = [tuple(r["ids"]) for r in rows]
        used, named, pieces = set(), {}, [(i, j, p, j + 1 == len(ps)) for i, ps in enumerate(map(cut, out)) for j, p in enumerate(ps)]
        for i, j, p, _ in pieces:  # whole documents first
            fits = [k for k, d in enumerate(docs) if d == p]
            pick = next((k for k in fits if k not in used), fits[0] if fits else None)
            if pick is not None:
                used.add(pick)
                named[i, j] = f"document {pick}"
        for i, j, p, last in sorted(pieces, key=lambda x: -len(x[2])):  # then prefixes, which end a row; long ones first
            if (i, j) in named or not last:
                continue
            fits = [k for k, d in enumerate(docs) if d[: len(p)] == p]
            pick = next((k for k in fits if k not in used), fits[0] if fits else None)
            if pick is not None:
                used.add(pick)
                named[i, j] = f"document {pick}"
        found = [named.get((i, j), f"not a document, nor a prefix at the end of a row: {list(p)}") for i, j, p, _ in pieces]
        wanted = {f"document {k}" for k in (range(len(docs)) if all_kept else used)}
        return [
            Census(
                wanted={f"row {i}": capacity for i in range(len(out))},
                found={f"row {i}": len(r) for i, r in enumerate(out)},
                what="tokens of a row",
            ),
            Census(
                wanted={f"row {i} begins with 1" for i in range(len(out))},
                found=[f"row {i} begins with {r[0] if r else None}" for i, r in enumerate(out)],
                what="begin of a row",
            ),
            Census(wanted=wanted, found=found, what="documents in the rows", once=True),
        ]

    doc = lambda k, n: {"ids": [1] + [2 + (7 * k + 3 * i) % 48 for i in range(n - 1)]}  # noqa: E731
    rows = m.make(0)["rows"]
    return [
        *subjects(rows, 24, 8),
        *subjects(m.make(1)["rows"], 24, 8),
        *subjects(rows, 16, 4),
        *subjects([doc(k, 8) for k in range(12)], 24, 8, all_kept=True),  # all fit, nothing may be dropped
        *subjects([doc(k, 16 if k % 2 else 8) for k in range(12)], 24, 8, all_kept=True),
        Collator(
            fn=lambda examples: {"ids": padded([r["ids"] for r in fn(examples, capacity=24, buffer=8)], 0)},
            examples=rows,
            rows=False,
            pads={"ids": 0},
        ),
    ]


@declare("q/r02")
def shared_tool_turn(m, fn):
    # contents are texts here: one character per token
    def texts(messages):
        return [{"role": x["role"], "content": "".join(chr(80 + t) for t in x["content"])} for x in messages]

    def call(messages):
        given = [{**x, "content": [ord(c) % 40 for c in x["content"]]} for x in messages]
        before = copy.deepcopy(given)
        out = fn(given)
        if given != before:  # what the code writes into its messages is written into these
            for x, a, b in zip(messages, given, before):
                if a != b:
                    x["content"] = "".join(chr(80 + t) for t in a["content"])
            del messages[len(given) :]
        return out

    def prompt(messages):
        return list(call(messages)[0]) + [40, 45, 42]

    talk = m.make(0)["messages"]
    other = m.make(1)["messages"]
    talk = talk + [other[1], other[2]]

    def render(e):
        ids = []
        for tool, run in groupby(e, key=lambda x: x["role"] == "tool"):
            if tool:
                ids += [40, 44, 42] + [t for x in run for t in [46] + x["content"] + [47]] + [41, 42]
            else:
                for x in run:
                    ids += [40, {"system": 43, "user": 44, "assistant": 45}[x["role"]], 42] + x["content"] + [41, 42]
        return ids

    def collate(examples):
        out = [fn(e) for e in examples]
        return {
            "ids": padded([a for a, _ in out], -1),
            "mask": padded([k for _, k in out], -1),
            "labels": padded([[t if k else -100 for t, k in zip(a, b)] for a, b in out], -100),
        }

    return [
        ChatTemplate(tokens=call, prompt=prompt, messages=texts(talk), end=41),
        Collator(
            fn=collate,
            examples=[talk, other, m.make(2)["messages"][:3], m.make(3)["messages"][:5], m.make(4)["messages"]],
            pads={"ids": -1, "mask": -1, "labels": -100},
            targets=lambda e: [t for x in e if x["role"] == "assistant" for t in x["content"] + [41]],
            columns={"ids": lambda e: long(render(e))},
        ),
    ]


# ---------------------------------------------------------------- ranks
@declare("q/d03")
def largest_gradient(m, fn):
    def rows(seed):
        full = m.make(seed)["full"]
        return torch.cat([torch.stack([t, torch.full_like(t, i)], 1) for i, t in enumerate(full)])

    return [
        Ranks(
            metric=lambda shards: fn([[s[s[:, 1] == i, 0] for i in range(3)] for s in shards]),
            rows=rows(seed),
            single=lambda shards: torch.cat(list(shards))[:, 0].abs().max().item(),
        )
        for seed in range(4)
    ]


@declare("q/r20")
def norm_of_tensor_parallel(m, fn):
    full = m.make(0)["full"]

    def metric(shards):
        return fn(
            [
                {
                    "w1": {"grad": s[:, :4].clone(), "sharded": True},
                    "norm": {"grad": full["norm"].clone(), "sharded": False},
                    "w2": {"grad": s[:, 4:].clone(), "sharded": True},
                    "bias": {"grad": full["bias"].clone(), "sharded": False},
                }
                for s in shards
            ]
        )

    def single(shards):
        return torch.cat([torch.cat(list(shards)).flatten(), full["norm"], full["bias"]]).norm().item()

    return Ranks(metric=metric, rows=torch.cat([full["w1"], full["w2"]], 1), single=single)


@declare("x/r20")
def accuracy_without_repeats(m, fn):
    def metric(shards):  # the data set's rows, in order, wrapped around to full batches of 4 on every rank
        correct, world, batch = torch.cat(list(shards)), len(shards), 4
        rounds = -(-len(correct) // (batch * world))
        order = [i % len(correct) for i in range(rounds * batch * world)]
        take = lambda k, r: correct[torch.tensor(order[(k * world + r) * batch : (k * world + r + 1) * batch])]  # noqa: E731
        return fn([{"rounds": [take(k, r) for k in range(rounds)], "length": len(correct)} for r in range(world)])

    def rows(n):
        g = torch.Generator().manual_seed(n)
        out = (torch.rand(n, generator=g) < 0.4).float()
        out[:3] = 1.0
        return out

    return [
        Ranks(metric=metric, rows=rows(n), single=lambda shards: torch.cat(list(shards)).mean().item()) for n in (21, 24, 29)
    ]


@declare("r/r18")
def prompts_of_ranks(m, fn):
    def batch(step):
        return [i for rank in range(4) for i in fn(rank, step)]

    def epoch(e):  # five batches of two prompts, two optimizer steps each
        return [i for k in range(5) for i in dict.fromkeys(batch(10 * e + 2 * k))]

    times, sizes = {}, {}
    for k in range(10):
        for j, (_, n) in enumerate(Counter(batch(2 * k)).items()):
            times[f"batch {k}: prompt {j}"] = n
    for rank in range(4):
        sizes[f"rank {rank}"] = len(fn(rank, 0))
    return [
        # every rank has a prompt of its own where it holds all samples of it
        Ranks(draw=lambda rank: torch.tensor(fn(rank, 0, world=4, per_device=4, num_generations=4))),
        Ranks(draw=lambda k: torch.tensor(batch(2 * k))),  # batches of an epoch differ
        Ranks(draw=lambda e: torch.tensor(epoch(e))),  # a new permutation per epoch
        Census(
            wanted={f"batch {k}: prompt {j}": 4 for k in range(10) for j in range(2)}, found=times, what="samples of a prompt"
        ),
        Census(wanted={f"rank {r}": 2 for r in range(4)}, found=sizes, what="samples of a rank"),
        Census(
            wanted=[f"batch {k}, rank {r}: {fn(r, 2 * k)}" for k in range(10) for r in range(4)],
            found=[f"batch {k}, rank {r}: {fn(r, 2 * k + 1)}" for k in range(10) for r in range(4)],
            what="prompts of the second step of a batch",
        ),
        *(
            Census(wanted={str(i) for i in epoch(e)}, found=[str(i) for i in epoch(e)], what="prompts of an epoch", once=True)
            for e in range(3)
        ),
        Census(
            wanted={f"epoch {e}": 10 for e in range(3)},
            found={f"epoch {e}": len(set(epoch(e)) & set(range(11))) for e in range(3)},
            what="prompts that an epoch sees",
        ),
    ]


@declare("r/r19")
def pass_at_k(m, fn):
    def rows(seed):
        ranks = m.make(seed)["ranks"]
        return torch.cat([torch.stack([r["problem"], r["correct"]], 1) for r in ranks])

    def single(k):
        def go(shards):
            right = {}
            for p, c in torch.cat(list(shards)).tolist():
                right.setdefault(int(p), []).append(int(c))
            return sum(1 - math.comb(len(v) - sum(v), k) / math.comb(len(v), k) for v in right.values()) / len(right)

        return go

    def metric(k):
        return lambda shards: fn([{"problem": s[:, 0].long(), "correct": s[:, 1].long()} for s in shards], k=k)

    return [Ranks(metric=metric(k), rows=rows(seed), single=single(k)) for seed, k in ((0, 3), (1, 3), (0, 2))]


# ---------------------------------------------------------------- updates and state
@declare("x/r11")
def ragged_ranks(m, fn):
    torch.manual_seed(1)
    given = m.make(0)
    model = given["model"]
    batch = {"ids": torch.randint(0, 40, (9, 8))}

    def accumulate(arrange):
        def go(model, batches):
            caught = Caught(model)
            fn(model, caught, arrange(list(batches)))
            caught.leave()

        return go

    def ranks(batches):
        return [[b] for b in batches]

    def micro(batches):
        return [batches]

    def mixed(batches):  # ranks with different numbers of micro-batches
        return [part for part in (batches[:-1], batches[-1:]) if part]

    def ragged(batches):  # every row is a micro-batch of its own length
        return [[{"ids": b["ids"][i : i + 1, : int(b["length"][i])]} for i in range(len(b["ids"]))] for b in batches]

    def loss(model, b):
        logits = model(b["ids"])[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), b["ids"][:, 1:].flatten())

    def update(arrange):
        def go(batches, max_grad_norm):
            fn(model, Clips(given["optimizer"], max_grad_norm), arrange([{"ids": b["ids"]} for b in batches]))

        return go

    long_batch = {"ids": torch.randint(0, 40, (9, 12)), "length": torch.tensor([12, 5, 8, 3, 10, 6, 12, 4, 9])}
    split = (1, 3, 5)
    return [
        Accumulation(model, accumulate(ranks), batch, split=split, what="ranks"),
        Accumulation(model, accumulate(micro), batch, split=split),
        Accumulation(model, accumulate(mixed), batch, split=split, what="ranks with different numbers of micro-batches"),
        Accumulation(model, accumulate(ragged), long_batch, split=(2, 3, 4), what="ranks"),
        *(
            Update(model=model, optimizer=given["optimizer"], update=update(a), loss=loss, batch=batch, split=split)
            for a in (ranks, micro, mixed)
        ),
    ]


@declare("x/r25")
def bias_of_experts(m, fn):
    given = m.make(0)
    model, optimizer = given["model"], given["optimizer"]
    batch = {"ids": torch.cat([b["ids"] for b in given["batches"]])}

    def accumulate(model, batches):
        caught, bias = Caught(model), model.bias.clone()
        fn(model, caught, list(batches))
        with torch.no_grad():
            model.bias.copy_(bias)  # the gradients are judged at one bias
        caught.leave()

    class Moves(nn.Module):  # the step of the bias, as the gradient of a parameter
        def __init__(self, inner):
            super().__init__()
            self.inner, self.bias_step = inner, nn.Parameter(torch.zeros_like(inner.bias))

    def accumulate_bias(holder, batches):
        caught, bias = Caught(holder.inner), holder.inner.bias.clone()
        fn(holder.inner, caught, list(batches))
        with torch.no_grad():
            step = holder.inner.bias - bias
            holder.inner.bias.copy_(bias)
        caught.leave()
        holder.bias_step.grad = step

    def update(batches, max_grad_norm):
        bias = model.bias.clone()
        fn(model, Clips(optimizer, max_grad_norm), list(batches))
        with torch.no_grad():
            model.bias.copy_(bias)

    def loss(model, b):
        logits, _ = model(b["ids"], 2)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten())

    # the bias of an expert with too few tokens rises, that of one with too many falls, and the mean stays
    fresh = m.make(0)
    with torch.no_grad():
        counts = sum(fresh["model"](b["ids"], 2)[1] for b in fresh["batches"])
    sign = torch.sign(counts.mean() - counts)
    moved = {}
    for rate in (0.01, 0.05):
        again = m.make(0)
        fn(again["model"], again["optimizer"], again["batches"], rate=rate)
        for e, x in enumerate(again["model"].bias.tolist()):
            moved[f"rate {rate}: expert {e}"] = round(x / rate, 3)
    wanted = {
        f"rate {rate}: expert {e}": round(x, 3) for rate in (0.01, 0.05) for e, x in enumerate((sign - sign.mean()).tolist())
    }
    split = (2, 2, 2)  # micro-batches have equal sizes
    return [
        Accumulation(model, accumulate, batch, split=split),
        Accumulation(Moves(m.make(0)["model"]), accumulate_bias, batch, split=split, what="micro-batches (the bias)"),
        Update(model=model, optimizer=optimizer, update=update, loss=loss, batch=batch, split=split),
        Census(wanted=wanted, found=moved, what="steps of the experts' biases"),
    ]


@declare("w/d04")
def resumed_trainer(m, fn):
    def subject(steps, from_saved):
        def make():
            given = m.make(0)
            return fn(given["model"], given["batches"], save_every=steps)

        def run(x, n):
            if getattr(x, "going_on", None) is not None:  # a run that was not stopped goes on where it was
                x.start = x.going_on
            before = len(x.log)
            x.run(10**6, stop_after=n)
            epoch, k = x.log[-1]
            x.going_on = (epoch, k + 1) if k + 1 < len(x.batches) else (epoch + 1, 0)
            return list(x.log[before:])

        def save(x, folder):
            torch.save(x.saved if from_saved else x.state_dict(), folder / "state.pt")

        def load(x, folder):
            x.load_state_dict(torch.load(folder / "state.pt", weights_only=False))
            x.going_on = None
            return x

        return Resume(
            make=make,
            run=run,
            save=save,
            load=load,
            state=lambda x: torch.cat([p.detach().flatten() for p in x.model.parameters()]),
            steps=steps,
        )

    return [subject(3, True), subject(5, False), subject(7, True), subject(9, True)]


# ---------------------------------------------------------------- losses
@declare("r/r08")
def shared_prompt(m, fn):
    given = m.make(0)
    model = given["model"]
    p, (rows, n, c) = given["prompt"].shape[1], given["answers"].shape
    flat = lambda t: t.reshape(rows * n, *t.shape[2:])  # noqa: E731
    mask = flat(given["answer_mask"])
    batch = {  # a row is a prompt and one of its answers
        "ids": torch.cat([given["prompt"].repeat_interleave(n, 0), flat(given["answers"])], 1),
        "mask": torch.cat([torch.zeros(rows * n, p), mask], 1),
        "advantages": flat(given["advantages"]),
    }

    def grouped(model, b):  # rows with one prompt are its answers; missing answers have mask 0
        prompts, answers, kept = b["ids"][:, :p], b["ids"][:, p:], b["mask"][:, p:]
        groups = {}
        for i, key in enumerate(map(tuple, prompts.tolist())):
            groups.setdefault(key, []).append(i)
        width = max(map(len, groups.values()))
        index = torch.tensor([g + [g[0]] * (width - len(g)) for g in groups.values()])
        real = torch.tensor([[1.0] * len(g) + [0.0] * (width - len(g)) for g in groups.values()]).to(kept.dtype)
        return fn(
            model,
            {
                "prompt": prompts[index[:, 0]],
                "answers": answers[index],
                "answer_mask": kept[index] * real[..., None],
                "advantages": b["advantages"][index] * real.to(b["advantages"].dtype),
            },
        )

    def each(model, b):
        return fn(
            model,
            {
                "prompt": b["ids"][:, :p],
                "answers": b["ids"][:, None, p:],
                "answer_mask": b["mask"][:, None, p:],
                "advantages": b["advantages"][:, None],
            },
        )

    def plain(model, b):  # NOTES: equal to running every pair as a row of its own
        lp = own_index_logprobs(model, b["ids"])
        return -(b["advantages"][:, None] * lp * b["mask"]).sum() / b["mask"].sum()

    return Step(
        model=model,
        loss=grouped,
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "advantages": "advantages"},
        logprobs=lambda model, b: own_index_logprobs(model, b["ids"]),
        paths={"one answer per prompt": each, "every pair as a row": plain},
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "mask"),
    )


@declare("r/r22")
def capped_weight(m, fn):
    batch = m.make(0)
    model = batch.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logp", "advantages": "advantages"},
        settings={"eps_high": Setting(0.3, "bound")},
        metrics={"clipped": Metric(low=0.0, high=1.0, neutral=0.0)},
        logprobs=lambda model, b: own_index_logprobs(model, b["ids"]),
        value_is_loss=False,
        reduction="mean",
        wide=("ids", "loss_mask", "old_logp"),
    )


@declare("q/r25")
def squared_margin(m, fn):
    given = m.make(0)
    model = given["model"]
    half = len(given["ids"]) // 2
    batch = {}
    for name, key in (("", "ids"), ("_mask", "mask")):
        batch["chosen" + name], batch["rejected" + name] = given[key][:half], given[key][half:]
    batch["ref_chosen"], batch["ref_rejected"] = given["ref_logps"][:half], given["ref_logps"][half:]

    def loss(model, b, beta=0.1):
        return fn(
            model,
            {
                "ids": torch.cat([b["chosen"], b["rejected"]]),
                "mask": torch.cat([b["chosen_mask"], b["rejected_mask"]]),
                "ref_logps": torch.cat([b["ref_chosen"], b["ref_rejected"]]),
            },
            beta=beta,
        )

    def average(model, ids, mask):
        return (own_index_logprobs(model, ids)[:, 1:] * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1)

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={
            "chosen": "chosen",
            "rejected": "rejected",
            "chosen_mask": "chosen_mask",
            "rejected_mask": "rejected_mask",
            "reference_chosen": "ref_chosen",
            "reference_rejected": "ref_rejected",
        },
        settings={"beta": Setting(0.1, "setting")},
        logprobs=lambda model, b: (
            average(model, b["chosen"], b["chosen_mask"]),
            average(model, b["rejected"], b["rejected_mask"]),
        ),
        family="preference",
        reduction="mean",
        value_is_loss=True,
        empty_rows=False,
        wide=("chosen", "rejected", "chosen_mask", "rejected_mask"),
    )


@declare("w/r10")
def vocabulary_shards(m, fn):
    batch = m.make(0)
    model = batch.pop("model")
    batch["loss_mask"][:, 0] = 0.0  # nothing predicts the first token

    def plain(model, b, tp=4):  # cross entropy in one piece, mean over trained tokens
        k = b["loss_mask"][:, 1:]
        return -(own_index_logprobs(model, b["ids"])[:, 1:] * k).sum() / k.sum()

    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"ids": "ids", "mask": "loss_mask"},
        settings={"tp": Setting(4, "inert", modes=(1, 2, 8))},
        logprobs=lambda model, b: own_index_logprobs(model, b["ids"]),
        paths={"one shard": plain},
        family="sft",
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "loss_mask"),
    )


@declare("x/d10")
def block_drafter(m, fn):
    given = m.make(0)
    model, block = given["model"], 4
    index = given["anchors"][:, None] + torch.arange(block)
    batch = {  # a row is an anchor with its draft slots
        "anchor_ids": given["ids"][given["anchors"]],
        "verifier": given["verifier_logits"][index],
        "mask": given["loss_mask"][index + 1],
    }

    def loss(model, b):  # the rows behind each other in one sequence, block + 1 places each
        n, size, vocab = b["verifier"].shape
        ids = torch.zeros(n, size + 1, dtype=torch.long)
        ids[:, 0] = b["anchor_ids"]
        verifier = torch.cat([b["verifier"], torch.zeros_like(b["verifier"][:, :1])], 1)
        mask = torch.cat([torch.ones_like(b["mask"][:, :1]), b["mask"]], 1)
        return fn(
            model,
            {
                "ids": ids.flatten(),
                "verifier_logits": verifier.reshape(n * (size + 1), vocab),
                "loss_mask": mask.flatten(),
                "anchors": torch.arange(n) * (size + 1),
            },
            block=size,
        )

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"teacher": "verifier", "mask": "mask"},
        student=lambda model, b: model(b["anchor_ids"]),
        family="divergence",
        reduction="mean",
        value_is_loss=True,
        wide=(),  # the number of slots is that of the model
    )


@declare("x/r21")
def detached_weight(m, fn):
    batch = m.make(0)
    model = batch.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "behaviour": "old_logprobs", "advantages": "advantages"},
        settings={"high": Setting(0.3, "bound")},
        metrics={"clipped": Metric(low=0.0, high=1.0, neutral=0.0)},
        logprobs=lambda model, b: own_index_logprobs(model, b["ids"]),
        value_is_loss=False,
        reduction="mean",
        wide=("ids", "mask", "old_logprobs"),
    )


@declare("w/r23")
def desirable_and_undesirable(m, fn):
    settings = {
        "beta": Setting(0.1, "setting"),
        "desirable": Setting(1.0, "weight"),
        "undesirable": Setting(1.33, "weight"),
    }

    def rows():
        batch = m.make(SEED_129)
        model = batch.pop("model")
        return Step(
            model=model,
            loss=fn,
            batch=batch,
            roles={"ids": "ids", "mask": "answer_mask", "reference": "ref_logps", "correct": "label"},
            settings=settings,
            metrics={"kl": Metric(low=0.0)},
            family="preference",
            pairwise=False,
            rows_interact=True,  # the KL is a mean over the batch
            value_is_loss=False,  # and a constant
            empty_rows=False,
            reduction="mean",
            wide=("ids", "kl_ids", "answer_mask"),
        )

    def pairs():  # the same rows, a desirable one beside an undesirable one
        given = m.make(SEED_129)
        model, half = given["model"], 3
        batch = {}
        for key, name in (
            ("ids", ""),
            ("answer_mask", "_mask"),
            ("ref_logps", "_ref"),
            ("kl_ids", "_kl_ids"),
            ("ref_kl_logps", "_ref_kl"),
        ):
            batch["chosen" + name], batch["rejected" + name] = given[key][:half], given[key][half:]

        def loss(model, b, beta=0.1, desirable=1.0, undesirable=1.33):
            both = lambda name: torch.cat([b["chosen" + name], b["rejected" + name]])  # noqa: E731
            n = len(b["chosen"])
            return fn(
                model,
                {
                    "ids": both(""),
                    "kl_ids": both("_kl_ids"),
                    "answer_mask": both("_mask"),
                    "label": torch.tensor([1] * n + [0] * n),
                    "ref_logps": both("_ref"),
                    "ref_kl_logps": both("_ref_kl"),
                },
                beta=beta,
                desirable=desirable,
                undesirable=undesirable,
            )

        def total(model, ids, mask):
            return (own_index_logprobs(model, ids)[:, 1:] * mask[:, 1:]).sum(1)

        return Step(
            model=model,
            loss=loss,
            batch=batch,
            roles={
                "chosen": "chosen",
                "rejected": "rejected",
                "chosen_mask": "chosen_mask",
                "rejected_mask": "rejected_mask",
                "reference_chosen": "chosen_ref",
                "reference_rejected": "rejected_ref",
            },
            settings=settings,
            metrics={"kl": Metric(low=0.0)},
            logprobs=lambda model, b: (
                total(model, b["chosen"], b["chosen_mask"]),
                total(model, b["rejected"], b["rejected_mask"]),
            ),
            family="preference",
            pairwise=False,
            rows_interact=True,
            value_is_loss=False,
            empty_rows=False,
            reduction="mean",
            wide=("chosen", "rejected", "chosen_mask", "rejected_mask", "chosen_kl_ids", "rejected_kl_ids"),
            name="the step (pairs)",
        )

    return [rows(), pairs()]


SEED_129 = 0


@declare("r/r09")
def context_parallel(m, fn):
    batch = m.make(0)
    model = batch.pop("model")

    def loss(model, b, cp=2):
        extra = -b["ids"].shape[1] % (2 * cp)  # time must be divisible by 2 * cp
        return fn(model, {"ids": F.pad(b["ids"], (0, extra)), "loss_mask": F.pad(b["loss_mask"], (0, extra))}, cp=cp)

    def plain(model, b, cp=2):  # NOTES: equal to the plain causal loss
        k = b["loss_mask"][:, 1:]
        return -(own_index_logprobs(model, b["ids"])[:, 1:] * k).sum() / k.sum()

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "mask": "loss_mask"},
        settings={"cp": Setting(2, "inert", modes=(1, 4, 8))},
        logprobs=lambda model, b: own_index_logprobs(model, b["ids"]),
        paths={"plain causal loss": plain},
        family="sft",
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "loss_mask"),
    )


@declare("r/r05")
def packed_and_shifted(m, fn):
    given = [m.make(0), m.make(1)]
    model = given[0]["model"]
    ids = torch.cat([g["ids"] for g in given])
    shifted = torch.cat([g["labels"] for g in given])
    documents = torch.zeros_like(ids)  # 0 = padding
    for i, lens in enumerate(torch.cat([g["seq_lens"] for g in given]).tolist()):
        start = 0
        for k, n in enumerate(lens):
            documents[i, start : start + n] = k + 1
            start += n
    # labels at the token itself here; the loss gets them shifted
    labels = torch.cat([torch.full_like(shifted[:, :1], -100), shifted[:, :-1]], 1)

    def loss(model, b):
        lens = []
        for row in b["documents"].tolist():
            runs = [(k, len(list(r))) for k, r in groupby(row)]
            if len(runs) > 1 and runs[-1][0] <= 0:
                runs = runs[:-1]
            lens.append([n for _, n in runs])
        nexts = torch.cat([b["labels"][:, 1:], torch.full_like(b["labels"][:, :1], -100)], 1)
        return fn(model, {"ids": b["ids"], "labels": nexts, "seq_lens": padded(lens, 0)})

    return Step(
        model=model,
        loss=loss,
        batch={"ids": ids, "labels": labels, "documents": documents},
        roles={"ids": "ids", "labels": "labels", "documents": "documents"},
        family="sft",
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "labels", "documents"),
    )


@declare("q/r23")
def two_hot_critic(m, fn):
    given = [m.make(0), m.make(1)]
    model = given[0]["model"]
    batch = {k: torch.cat([g[k] for g in given]) for k in ("obs", "returns", "mask")}
    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"returns": "returns", "mask": "mask"},
        metrics={"value_mae": Metric(low=0.0)},
        reduction="mean",
        value_is_loss=True,
        wide=("obs", "returns", "mask"),
    )
