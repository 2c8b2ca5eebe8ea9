import copy
import itertools
import math
import random

import torch
import torch.nn.functional as F
from torch import nn

from tests.audit.reading2026c.reading import declare, no_subject
from earnest_audit import (Accumulation, AdvantageEstimator, Census, ChatTemplate, Collator, Ema, Grader, Metric, OuterStep, Ranks, Schedule,
                           Setting, Step, Update)


# ---- helpers that only change form -------------------------------------------------------------------------------------------------
def taken(ids, logits):
    """Log-prob of each token at its own place, 0 at the first: [B, T]."""
    return F.pad(logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0], (1, 0))


def joined(batches):
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


class Clipping:
    """An optimizer as the update sees it; where the case has no clip of its own, the declared one is applied just before the step."""

    def __init__(self, optimizer, max_norm=None):
        self.optimizer, self.max_norm = optimizer, max_norm

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def zero_grad(self, *a, **k):
        self.optimizer.zero_grad(*a, **k)

    def step(self, *a, **k):
        if self.max_norm is not None and math.isfinite(self.max_norm):
            torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], self.max_norm)
        return self.optimizer.step(*a, **k)


class Recorder(torch.optim.SGD):
    """Steps with rate 0 and keeps the gradients that it was given."""

    def __init__(self, params):
        super().__init__(params, lr=0.0)
        self.seen = None

    def step(self, closure=None):
        self.seen = [None if p.grad is None else p.grad.detach().clone() for g in self.param_groups for p in g["params"]]


def recorded(model, run):
    """Run an update and leave in .grad what its optimizer received."""
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    optimizer = Recorder(model.parameters())
    run(optimizer)
    if optimizer.seen is not None:
        for p, g, old in zip(model.parameters(), optimizer.seen, before):
            p.grad = g


def finite(x):
    return 1e30 if x is None else float(x)


def padded(lists, pad, dtype=torch.long):
    width = max([1, *map(len, lists)])
    return torch.tensor([list(x) + [pad] * (width - len(x)) for x in lists], dtype=dtype)


# ---- k41 … k50 ---------------------------------------------------------------------------------------------------------------------
@declare("f/d09")
def tensor_parallel_q_norm(m, fn):
    given = m.make(0)
    model, batch = given["model"], joined(given["batches"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def loss(model, batch):
        # the copies are one weight: each copy's gradient is the sum over all copies
        own = dict(model.q_norm.named_parameters())
        one = {f"q_norm.{n}": p + sum(q - q.detach() for k, q in own.items() if k != n) for n, p in own.items()}
        logits = torch.func.functional_call(model, one, (batch["ids"],))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())

    return [
        Update(model, optimizer, lambda batches, norm: fn(model, Clipping(optimizer, norm), batches), loss, batch, split=(3, 3)),
        Accumulation(model, lambda mod, batches: recorded(mod, lambda o: fn(mod, o, batches)), batch, split=(3, 3)),
    ]


@declare("e/r18")
def macro_accuracy(m, fn):
    names = ["math", "code", "trivia"]
    rows = [(names.index(t), h) for seed in (0,) for rank in m.make(seed)["ranks"] for t, hits in rank.items() for h in hits]

    def ranks(shards):
        out = []
        for i, shard in enumerate(shards):
            own = {}
            for t, h in shard.long().tolist():
                own.setdefault(names[t], []).append(h)
            if i % 2 == 1:
                own["empty"] = []
            out.append(own)
        return out

    def single(shards):
        every = torch.cat(list(shards)).double()
        scores = [every[every[:, 0] == t, 1].mean() for t in every[:, 0].unique()]
        return float(torch.stack(scores).mean())

    return Ranks(metric=lambda shards: fn(ranks(shards)), rows=torch.tensor(rows), single=single)


@declare("f/r03")
def agent_with_observations(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given, family="policy gradient",
        roles={"ids": "ids", "mask": "action_mask", "behaviour": "old_logprobs", "advantages": "advantages"},
        masks=("observation_mask",),
        settings={"observation_weight": Setting(0.05, "weight"), "clip": Setting(2.0, "bound")},
        metrics={"policy": Metric(), "observation_nll": Metric(low=0.0, weight="observation_weight")},
        logprobs=lambda mod, b: taken(b["ids"], mod(b["ids"])),
        wide=("ids", "action_mask", "observation_mask", "old_logprobs"), reduction="mean", value_is_loss=False,
    )


@declare("e/r01")
def turn_returns(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given, family="policy gradient",
        roles={"ids": "ids", "mask": "action_mask", "rewards": "turn_rewards"},
        settings={"gamma": Setting(0.9, "setting")},
        logprobs=lambda mod, b: taken(b["ids"], mod(b["ids"])),
        wide=("ids", "action_mask", "turn"), reduction="mean", value_is_loss=True,
    )


@declare("e/r10")
def stages(m, fn):
    peaks, floors, lengths = (1e-3, 4e-4, 1e-4), (1e-5, 1e-4, 4e-5, 1e-5), (100, 60, 40)
    settings = {**{f"peak{i}": p for i, p in enumerate(peaks)}, **{f"floor{i}": p for i, p in enumerate(floors)},
                **{f"length{i}": n for i, n in enumerate(lengths)}, "warmup": 10}

    def rate(step, warmup=10, **s):
        return fn(step, peaks=tuple(s.get(f"peak{i}", p) for i, p in enumerate(peaks)),
                  floors=tuple(s.get(f"floor{i}", p) for i, p in enumerate(floors)),
                  lengths=tuple(s.get(f"length{i}", n) for i, n in enumerate(lengths)), warmup=warmup)

    out = [Schedule(lambda total, ranks, **s: [rate(k, **s) for k in range(total)], peak=1e-3, final=1e-5, total=230, warmup=10, ends=200,
                    restarts=True, settings=settings)]
    for i, start in enumerate((0, 100, 160)):
        out.append(Schedule(lambda total, ranks, start=start: [rate(start + k) for k in range(total)], peak=peaks[i], final=floors[i + 1],
                            total=lengths[i], warmup=10))
    return out


@declare("e/d02")
def template_of_ids(m, fn):
    code = lambda text: [10 + ord(c) for c in text]
    text = lambda ids: "".join(chr(max(0, i - 10)) for i in ids)

    def tokens(messages):
        inner = [{**x, "content": code(x["content"])} for x in messages]
        kept = copy.deepcopy(inner)
        out = fn(inner)
        if inner != kept:  # what is written into the messages is written into the caller's
            messages[:] = [{**x, "content": text(x["content"])} for x in inner]
        return out

    messages = [{"role": x["role"], "content": "".join(chr(i + 60) for i in x["content"])} for x in m.make(0)["messages"]]
    return ChatTemplate(tokens=tokens, prompt=lambda messages: list(tokens(messages)[0]) + [2, 7, 4], messages=messages, end=3)


class Walk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, goal, shape):
        ctx.save_for_backward(w, goal)
        return torch.zeros(*shape, 4)

    @staticmethod
    def backward(ctx, grad):
        w, goal = ctx.saved_tensors
        return w - goal, None, None


class Walker(nn.Module):
    """A worker whose inner step at rate 1 goes to the goal that its batch names."""

    def __init__(self, start, goals):
        super().__init__()
        self.w = nn.Parameter(start.clone())
        self.goals = goals

    def forward(self, ids):
        return Walk.apply(self.w, self.goals[int(ids[0, 0]) * 4 + int(ids[0, 1])], ids.shape)


class Round:
    def __init__(self, fn):
        self.fn, self.model, self.optimizer = fn, None, None

    def __call__(self, start, locals, lr=0.7, momentum=0.9):
        goals = torch.stack([start + (end - start) * (k / 4) if k < 4 else end for end in locals for k in range(1, 5)])
        if self.model is None:
            self.model = Walker(start, goals)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)
        self.model.goals = goals
        self.model.w.data.copy_(start)
        self.optimizer.param_groups[0].update(lr=lr, momentum=momentum)
        batches = [[{"ids": torch.tensor([[i, k, 0, 1]])} for k in range(4)] for i in range(len(locals))]
        with torch.enable_grad():
            self.fn(self.model, self.optimizer, batches, inner_lr=1.0)
        return self.model.w.detach().clone()


@declare("f/r08")
def local_sgd(m, fn):
    given = m.make(0)
    model = given["model"].double()  # weights are subtracted: their rounding is not the gradient's
    batch = joined([own[0] for own in given["batches"]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.7)

    def loss(mod, b, lr=0.1):
        return lr * F.cross_entropy(mod(b["ids"])[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten())

    return [
        OuterStep(step=Round(fn), knobs={"lr": 0.7, "momentum": 0.9}),
        Update(model, optimizer, lambda batches, norm: fn(model, Clipping(optimizer, norm), [[b] for b in batches], inner_lr=0.1), loss,
               batch, split=(2, 2, 2), precision=torch.float32),
        Accumulation(model, lambda mod, batches: recorded(mod, lambda o: fn(mod, o, [[b] for b in batches], inner_lr=0.1)), batch,
                     split=(2, 2, 2), what="workers", precision=torch.float32),
    ]


@declare("e/d16")
def mismatched_kl(m, fn):
    rows = torch.cat([torch.stack([b["policy_logps"], b["ref_logps"]], 1) for b in m.make(0)["ranks"]])
    low = rows.clone()
    low[:7] = rows[:7].flip(1)  # parts in which the policy is below the reference

    def metric(shards):
        return fn([{"policy_logps": s[:, 0], "ref_logps": s[:, 1]} for s in shards])

    def single(shards):
        return sum(max(0.0, float((s[:, 0] - s[:, 1]).double().mean())) for s in shards) / len(shards)

    return [Ranks(metric=metric, rows=r, single=single, by_rank=True) for r in (rows, low, low.flip(0))]


@declare("f/r10")
def wsd_s(m, fn):
    def rates(total, ranks, peak=0.002, floor=0.0002, warmup=10, decay=0.2, end0=40, end1=70, end2=100):
        return [fn(k, peak=peak, floor=floor, warmup=warmup, ends=(end0, end1, end2), decay=decay) for k in range(min(total, int(end2)))]

    settings = {"peak": 0.002, "floor": 0.0002, "warmup": 10, "decay": 0.2, "end0": 40, "end1": 70, "end2": 100}
    out = [Schedule(rates, peak=0.002, final=0.0002, total=100, warmup=10, restarts=True, settings=settings)]
    for start, end, warmup in ((0, 40, 10), (40, 70, None), (70, 100, None)):
        out.append(Schedule(lambda total, ranks, start=start: [fn(start + k) for k in range(total)], peak=0.002, final=0.0002,
                            total=end - start, warmup=warmup))
    return out


@declare("e/d03")
def boxed(m, fn):
    given = m.make(0)
    row, n = given["row"], int(given["row"]["answer"])
    return Grader(
        grade=lambda answer: fn(row, answer), question=row["question"],
        right=[f"\\boxed{{{n}}}", f"The sum is \\boxed{{{n}}}.", f"First \\boxed{{{n + 1}}}, no: \\boxed{{{n}}}", f"\\boxed{{\\text{{{n}}}}}",
               f"We have {n - 5} + 5, so \\boxed{{{n}}} and not {n + 2}."],
        wrong=[given["completion"], f"{n}", f"The answer is {n}.", f"\\boxed{{{n + 1}}}", f"\\boxed{{{n}}} or rather \\boxed{{{n + 1}}}",
               f"It is {n}, so \\boxed{{{n + 1}}}", f"\\boxed{{-{n}}}", f"\\boxed{{1{n}}}", f"\\boxed{{}} {n}", f"\\boxed{{{n + 1}}} = {n}", f"\\boxed{{{n}"],
    )


# ---- k51 … k60 ---------------------------------------------------------------------------------------------------------------------
@declare("e/d04")
def best_fit(m, fn):
    rows = m.make(0)["rows"]
    many = 150  # long enough for every conversation of the cycled source to come

    def batch(examples):
        out = fn(examples, out_rows=many)
        return {"ids": padded([r["ids"] for r in out], 0), "mask": padded([r["mask"] for r in out], 0)}

    def unpack(b):
        found = {}
        for ids, mask in zip(b["ids"].tolist(), b["mask"].tolist()):
            cuts = [t for t in range(len(ids)) if ids[t] != 0 and mask[t] == 0 and (t == 0 or mask[t - 1] == 1)]  # [0, 0, 1, …] each
            for at, end in zip(cuts, [*cuts[1:], len(ids)]):
                own = [t for t in range(at, end) if ids[t] != 0]
                found.setdefault(tuple((ids[t], mask[t]) for t in own), None)
        return [{"ids": torch.tensor([i for i, _ in d]), "mask": torch.tensor([k for _, k in d])} for d in found]

    name = lambda ids, mask: " ".join(f"{i}/{k}" for i, k in zip(ids, mask))
    wanted = {name(r["ids"][:16], r["mask"][:16]) for r in rows}
    made = fn(rows)
    return [
        Collator(fn=batch, examples=rows, pads={"ids": 0, "mask": 0}, rows=False, unpack=unpack),
        Census(wanted, [name(d["ids"].tolist(), d["mask"].tolist()) for d in unpack(batch(rows))], what="conversations"),
        Census({**{f"ids of row {i}": 16 for i in range(12)}, **{f"mask of row {i}": 16 for i in range(12)}, "trained padding": 0},
               {**{f"ids of row {i}": len(r["ids"]) for i, r in enumerate(made)}, **{f"mask of row {i}": len(r["mask"]) for i, r in enumerate(made)},
                "trained padding": sum(k for r in made for i, k in zip(r["ids"], r["mask"]) if i == 0)}, what="packed rows"),
    ]


@declare("e/d05")
def packed_hybrid(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given, family="sft", roles={"ids": "ids", "documents": "seq_idx", "mask": "loss_mask"},
        logprobs=lambda mod, b: taken(b["ids"], mod(b["ids"], b["seq_idx"])),
        wide=("ids", "seq_idx", "loss_mask"), reduction="mean", value_is_loss=True, rows_interact=True, all_supervised=None,
    )


def fim_collator(fn, rows, sentinels, undo, whole, extra):
    def batch(examples):
        out = fn(examples)
        made = {"ids": padded([r["ids"] for r in out], 0), "document": padded([undo(r["ids"]) for r in out], 0),
                "whole": torch.tensor([[int(whole([i for i in r["ids"] if i in sentinels]))] for r in out])}
        return {**made, **{k: torch.tensor([[f(r)] for r in out]) for k, f in extra.items()}}

    return Collator(fn=batch, examples=rows, pads={"ids": 0, "document": 0},
                    columns={"document": lambda e: list(e["ids"]), "whole": lambda e: [1], **{k: lambda e, f=f: [f(e)] for k, f in extra.items()}})


@declare("e/r14")
def fim_by_id(m, fn):
    def undo(ids):
        if 1 not in ids:
            return ids
        try:
            pre, suf, mid, end = (ids.index(i) for i in (1, 2, 3, 4))
        except ValueError:
            return ids
        return ids[pre + 1:suf] + ids[mid + 1:end] + ids[suf + 1:mid]

    rows = m.make(0)["rows"] + m.make(1)["rows"]
    many = [{"id": f"many-{i}", "ids": [10 + (i + j) % 40 for j in range(4 + i % 8)]} for i in range(4000)]
    count = lambda **k: sum(r["ids"][0] == 1 for r in fn(copy.deepcopy(many), **k))
    return [
        fim_collator(fn, rows, (1, 2, 3, 4), undo, lambda s: s in ([], [1, 2, 3, 4]), {"id": lambda r: int(r["id"].split("-")[2]) + 100 * int(r["id"].split("-")[1])}),
        Census({"at rate 0": 0, "at rate 1": 4000, "at rate 0.6, in tenths": 6},
               {"at rate 0": count(rate=0.0), "at rate 1": count(rate=1.0), "at rate 0.6, in tenths": round(count() / 400)}, what="transformed documents"),
    ]


@declare("f/d14")
def sampler(m, fn):
    epoch = lambda e, world=4, rows=64, **k: [str(fn(r, e * (rows // world) + s, world=world, rows=rows, **k)) for s in range(rows // world) for r in range(world)]
    names = [str(i) for i in range(64)]
    return [
        Ranks(draw=lambda rank: torch.tensor([fn(rank, s) for s in range(16)])),
        Ranks(draw=lambda e: torch.tensor([fn(1, 16 * e + s) for s in range(16)])),  # each epoch has an order of its own
        Ranks(draw=lambda r: torch.tensor([fn(1, s, seed=1234 + 1000 * r) for s in range(16)])),  # and so has each seed of a run
        *(Census(names, epoch(e), what=f"rows of epoch {e}", once=True) for e in range(3)),
        Census(names[:24], epoch(0, world=3, rows=24), what="rows of three ranks", once=True),
    ]


@declare("e/d01")
def stop_mask(m, fn):
    rows = m.make(0)["rows"] + [
        {"prompt_ids": [11, 12], "completion_ids": [15, 7, 20, 2, 21, 22, 23, 24, 25, 26]},
        {"prompt_ids": [13, 14, 15, 16, 17], "completion_ids": [18, 19, 2, 20, 7, 21, 22, 23, 24, 25]},
        {"prompt_ids": [19], "completion_ids": [7, 0, 0, 0, 0, 0, 0, 0, 0, 0]},
    ]

    def stop(e):
        return next((i + 1 for i, t in enumerate(e["completion_ids"]) if t in (2, 7)), None)

    def kept(e):
        return e["completion_ids"][:stop(e)]

    def strip(ids):
        ids = list(ids)
        while ids and ids[-1] == 0:
            ids.pop()
        return ids

    def batch(examples):
        out = dict(fn(examples))
        out["truncated"] = out["truncated"].reshape(-1, 1)
        out["labels"] = torch.where(out["completion_mask"] > 0, out["completion_ids"], torch.tensor(-100))
        return out

    return Collator(
        fn=batch, examples=rows, pads={"prompt_ids": 0, "prompt_mask": 0, "completion_ids": 0, "completion_mask": 0, "labels": -100},
        targets=kept,
        columns={"prompt_ids": lambda e: e["prompt_ids"], "prompt_mask": lambda e: [1] * len(e["prompt_ids"]),
                 "completion_ids": lambda e: strip(e["completion_ids"]), "completion_mask": lambda e: [1] * len(kept(e)),
                 "truncated": lambda e: [int(stop(e) is None)]},
    )


@declare("f/d19")
def multi_token(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given, family="sft", roles={"ids": "ids", "mask": "loss_mask"},
        settings={"mtp_weight": Setting(0.1, "weight")},
        logprobs=lambda mod, b: taken(b["ids"], mod(b["ids"])[0]),
        wide=("ids", "loss_mask"), reduction="mean", value_is_loss=True,
    )


@declare("e/d11")
def warmup_of_the_run(m, fn):
    def run(num_batches, accum, epochs, warmup_ratio, **given):
        optimizer = m.make(0)["optimizer"]
        scheduler = fn(optimizer, num_batches=num_batches, accum=accum, epochs=epochs, warmup_ratio=warmup_ratio)
        rates = []
        for _ in range(epochs):
            for i in range(num_batches):
                if (i + 1) % accum == 0 or i + 1 == num_batches:
                    rates.append(optimizer.param_groups[0]["lr"])
                    optimizer.step()
                    scheduler.step()
        return rates

    whole = lambda num_batches, accum, epochs, warmup_ratio: run(max(1, int(num_batches)), max(1, int(accum)), max(1, int(epochs)), warmup_ratio)
    return [
        Schedule(lambda total, ranks: whole(36, 16, total // 3, 0.1), peak=0.1, final=0.1, total=60, warmup=6),
        Schedule(lambda total, ranks: whole(17, 16, total // 2, 0.2), peak=0.1, final=0.1, total=60, warmup=12),
        Schedule(lambda total, ranks, **s: whole(**{"num_batches": 360, "accum": 16, "epochs": total // 23, "warmup_ratio": 0.1, **s}), peak=0.1,
                 final=0.1, total=460, warmup=46, settings={"num_batches": 360, "accum": 16, "epochs": 20, "warmup_ratio": 0.1}),
    ]


@declare("f/r19")
def gspo(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given, family="policy gradient",
        roles={"ids": "ids", "mask": "answer_mask", "behaviour": "old_logprobs", "advantages": "advantages"},
        settings={"clip_low": Setting(0.03, "clip"), "clip_high": Setting(0.04, "clip high")},
        logprobs=lambda mod, b: taken(b["ids"], mod(b["ids"])),
        wide=("ids", "answer_mask", "old_logprobs"), reduction="mean", value_is_loss=True, empty_rows=False,
    )


@declare("e/r20")
def top_k_teacher(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given, family="divergence", roles={"ids": "ids", "mask": "loss_mask", "teacher": "teacher_logps"},
        student=lambda mod, b: mod(b["ids"]).log_softmax(-1).gather(-1, b["teacher_ids"]),
        wide=("ids", "loss_mask", "teacher_ids", "teacher_logps"), reduction="mean", value_is_loss=True,
    )


@declare("f/d08")
def expert_parallel(m, fn):
    given, more = m.make(0), m.make(1)
    model = given["model"]
    batch, wide = joined(given["batches"]), joined(given["batches"] + more["batches"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def loss(mod, b):
        return ((mod(b["x"]) - b["y"]) ** 2).mean()

    def update(batches, norm):
        fn(model, optimizer, batches, max_norm=finite(norm))

    def accumulate(max_norm):
        return lambda mod, batches: recorded(mod, lambda o: fn(mod, o, batches, max_norm=max_norm))

    return [
        Update(model, optimizer, update, loss, batch, split=(8, 8)),
        Update(model, optimizer, update, loss, wide, split=(8, 8, 8, 8)),
        Accumulation(model, accumulate(1e9), batch, split=(8, 8), what="ranks"),
        Accumulation(model, accumulate(0.1), batch, split=(8, 8), what="ranks"),
    ]


# ---- k61 … k70 ---------------------------------------------------------------------------------------------------------------------
@declare("f/d02")
def parallel_tools(m, fn):
    return ChatTemplate(tokens=fn, prompt=lambda messages: m.tokenize(m.template(messages) + "<|im_start|>assistant\n"),
                        messages=m.make(0)["messages"], end=2)


@declare("e/r09")
def sharded_adamw(m, fn):
    given = m.make(0)
    model = given["model"].double()  # the gradient is read from the change of the weights
    batch = {"x": torch.cat([b["x"] for b in given["batches"]]).double(), "y": torch.cat([b["y"] for b in given["batches"]])}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    big = 2.0 ** 30  # AdamW's first step at rate = eps = big is the gradient itself

    def loss(mod, b):
        return F.cross_entropy(mod(b["x"]), b["y"])

    def change(mod, hyper, batches, **settings):
        params = list(mod.parameters())
        start = [p.detach().clone() for p in params]
        fn(mod, torch.optim.AdamW(params, **hyper), batches, **settings)
        out = [s - p.detach() for s, p in zip(start, params)]
        for p, s in zip(params, start):
            p.data.copy_(s)
        return out

    def update(batches, norm):
        got = change(model, {"lr": big, "eps": big, "weight_decay": 0.0}, [joined(batches)], max_norm=finite(norm))
        for p, g in zip(model.parameters(), got):
            p.grad = g
        optimizer.step()

    def accumulate(mod, batches):  # as many ranks as there are parts, four steps; the rows are the same for all ranks
        got = change(mod, {"lr": 0.02, "weight_decay": 0.1}, [joined(batches)] * 4, world=len(batches), max_norm=0.5)
        for p, g in zip(mod.parameters(), got):
            p.grad = g

    fixed = [torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i, p in enumerate(model.parameters())]
    parts = lambda shards: [{"x": s[:, :-1].double(), "y": s[:, -1].long()} for s in shards]
    dot = lambda mod: float(sum((p.detach() * f).sum() for p, f in zip(mod.parameters(), fixed)))

    def metric(shards, world=3):
        mod = m.make(0)["model"].double()
        fn(mod, torch.optim.AdamW(mod.parameters(), lr=0.02, weight_decay=0.1), parts(shards), world=world, max_norm=0.5)
        return dot(mod)

    def single(shards):
        mod = m.make(0)["model"].double()
        one = torch.optim.AdamW(mod.parameters(), lr=0.02, weight_decay=0.1)
        for b in parts(shards):
            one.zero_grad()
            loss(mod, b).backward()
            torch.nn.utils.clip_grad_norm_(mod.parameters(), 0.5)
            one.step()
        return dot(mod)

    rows = torch.cat([batch["x"], batch["y"][:, None].double()], 1)
    return [
        Update(model, optimizer, update, loss, batch, precision=torch.float32),
        Accumulation(model, accumulate, batch, what="ranks", precision=torch.float32),
        Ranks(metric=metric, rows=rows, single=single, by_rank=True),  # a shard is the batch of one step
    ]


@declare("f/r02")
def rollouts_to_rows(m, fn):
    def parts(rollout):  # the words of NOTES
        out = []
        for s in rollout["steps"]:
            if out and s["prompt"][:len(out[-1][0])] == out[-1][0]:
                ids, mask = out[-1]
                new = s["prompt"][len(ids):]
            else:
                ids, mask = [], []
                out.append((ids, mask))
                new = list(s["prompt"])
            ids.extend(new + s["completion"])
            mask.extend([0] * len(new) + [1] * len(s["completion"]))
        return out

    micro = lambda x: round(float(x) * 1e6)

    def batch(examples):
        by = {}
        for r in fn(examples):
            by.setdefault(r["advantage"], []).append(r)
        rows = list(by.values())
        flat = lambda of: [[x for p in row for x in [*of(p), -1]] for row in rows]  # -1 ends each row of a rollout
        return {
            "ids": padded(flat(lambda p: p["ids"]), -2), "mask": padded(flat(lambda p: p["mask"]), -2),
            "labels": padded([[i if k else -100 for p in row for i, k in zip(p["ids"], p["mask"])] for row in rows], -100),
            "weight": padded([[micro(p["weight"]) for p in row] for row in rows], -2),
            "total": torch.tensor([[round(sum(p["weight"] for p in row) * 1e4)] for row in rows]),
            "advantage": padded([[micro(p["advantage"]) + 10 ** 7 for p in row] for row in rows], -2),
        }

    def weights(e):
        made = parts(e)
        total = sum(sum(k) for _, k in made)
        return [micro(sum(k) / total) for _, k in made]

    return Collator(
        fn=batch, examples=m.make(0)["rows"] + m.make(1)["rows"], pads={"ids": -2, "mask": -2, "labels": -100, "weight": -2, "advantage": -2},
        targets=lambda e: [t for s in e["steps"] for t in s["completion"]],
        columns={"ids": lambda e: [x for ids, _ in parts(e) for x in [*ids, -1]], "mask": lambda e: [x for _, k in parts(e) for x in [*k, -1]],
                 "weight": weights, "total": lambda e: [10000], "advantage": lambda e: [micro(e["advantage"]) + 10 ** 7] * len(parts(e))},
    )


@declare("f/d11")
def two_optimizers(m, fn):
    def rates(total, ranks, **s):
        return [[fn(k, part=part, total=total, **s) for part in ("muon", "adamw")] for k in range(total)]

    return Schedule(rates, peak=(0.02, 0.0003), final=(0.0, 0.0), total=60, warmup=10, settings={"muon_lr": 0.02, "adamw_lr": 0.0003, "warmup": 10})


@declare("e/d06")
def dpo_left_padded(m, fn):
    given = m.make(0)
    model = given.pop("model")
    half = given["ids"].shape[0] // 2
    batch = {}
    for side, own in (("chosen", slice(None, half)), ("rejected", slice(half, None))):
        batch |= {side: given["ids"][own], f"{side}_attention": given["attention_mask"][own], f"{side}_mask": given["completion_mask"][own],
                  f"reference_{side}": given["ref_logps"][own]}

    def rows(b, key):
        two = [b[key.format("chosen")], b[key.format("rejected")]]
        if two[0].dim() > 1:
            width = max(x.shape[1] for x in two)
            two = [F.pad(x, (width - x.shape[1], 0)) for x in two]
        return torch.cat(two)

    def loss(mod, b, beta):
        return fn(mod, {"ids": rows(b, "{}"), "attention_mask": rows(b, "{}_attention"), "completion_mask": rows(b, "{}_mask"),
                        "ref_logps": rows(b, "reference_{}")}, beta=beta)

    def logprobs(mod, b):
        out = []
        for side in ("chosen", "rejected"):
            ids, attention = b[side], b[f"{side}_attention"].long()
            logits = mod(ids, attention, attention.cumsum(1) - attention)
            out.append((taken(ids, logits)[:, 1:] * b[f"{side}_mask"][:, 1:]).sum(1))
        return tuple(out)

    return Step(
        model=model, loss=loss, batch=batch, family="preference", roles={k: k for k in batch}, settings={"beta": Setting(0.1, "setting")},
        logprobs=logprobs, wide=tuple(k for k in batch if not k.startswith("reference")), reduction="mean", value_is_loss=True,
    )


@declare("e/d12")
def kl_schedule(m, fn):
    def inputs():
        given = m.make(0)
        model = given.pop("model")
        given["ref_logps"] = F.pad(given["ref_logps"], (1, 0))  # at the token's own place, like the mask
        return model, given

    def loss(mod, b, **s):
        return fn(mod, {**b, "ref_logps": b["ref_logps"][:, 1:]}, **s)

    model, batch = inputs()
    common = dict(
        model=model, batch=batch, family="policy gradient",
        roles={"ids": "ids", "mask": "loss_mask", "advantages": "advantages", "reference": "ref_logps"},
        logprobs=lambda mod, b: taken(b["ids"], mod(b["ids"])),
        wide=("ids", "loss_mask", "ref_logps"), reduction="mean", value_is_loss=False,
    )

    def scheduled(mod, b, epoch, total_epochs, kl_coef, kl_coef_end, kl_schedule):
        return loss(mod, b, epoch=epoch, total_epochs=total_epochs, kl_coef=kl_coef, kl_coef_end=kl_coef_end, kl_schedule=kl_schedule)

    def constant(mod, b, coef):  # from coef to coef: the schedule has one value, the weight of the KL
        return loss(mod, b, kl_coef=coef, kl_coef_end=coef)

    def coefficients(schedule):
        def rates(total, ranks, **s):
            mod, b = inputs()
            mod, b = mod.double(), {k: v.double() if v.is_floating_point() else v for k, v in b.items()}
            out = []
            with torch.no_grad():
                base = float(loss(mod, b, kl_coef=0.0, kl_coef_end=0.0)[0])
                for k in range(total):
                    value, logged = loss(mod, b, epoch=k + 1, total_epochs=total, kl_schedule=schedule, **s)
                    out.append((float(value) - base) / logged["kl"])
            return out
        return rates

    return [
        Step(loss=scheduled, metrics={"kl": Metric(low=0.0)}, settings={
            "epoch": Setting(7, "setting"), "total_epochs": Setting(10, "setting"), "kl_coef": Setting(0.2, "setting"),
            "kl_coef_end": Setting(0.02, "setting"), "kl_schedule": Setting("cosine", modes=("linear", "constant"))}, **common),
        Step(loss=constant, metrics={"kl": Metric(low=0.0, weight="coef")}, settings={"coef": Setting(0.1, "weight")}, **common),
        Schedule(coefficients("cosine"), peak=0.2, final=0.02, total=10, settings={"kl_coef": 0.2, "kl_coef_end": 0.02}),
        Schedule(coefficients("linear"), peak=0.2, final=0.02, total=10, settings={"kl_coef": 0.2, "kl_coef_end": 0.02}),
        Schedule(coefficients("constant"), peak=0.2, final=0.2, total=10, settings={"kl_coef": 0.2}),
    ]


@declare("e/d19")
def truncated_support(m, fn):
    given = m.make(0)
    model = given.pop("model")
    given["sampling_logps"] = F.pad(given["sampling_logps"], (1, 0))  # at the token's own place, like the mask
    given["kept"] = F.pad(given["kept"], (0, 0, 1, 0), value=1)

    def loss(mod, b, cap):
        return fn(mod, {**b, "sampling_logps": b["sampling_logps"][:, 1:], "kept": b["kept"][:, 1:]}, cap=cap)

    def logprobs(mod, b):
        logits = mod(b["ids"])[:, :-1].masked_fill(b["kept"][:, 1:] == 0, -1e9)
        return F.pad(logits.log_softmax(-1).gather(-1, b["ids"][:, 1:, None])[..., 0], (1, 0))

    return Step(
        model=model, loss=loss, batch=given, family="policy gradient",
        roles={"ids": "ids", "mask": "completion_mask", "behaviour": "sampling_logps", "advantages": "advantages"},
        settings={"cap": Setting(3.0, "bound")}, metrics={"ratio": Metric(low=0.0, neutral=1.0)}, logprobs=logprobs,
        wide=("ids", "completion_mask", "sampling_logps", "kept"), reduction="mean", value_is_loss=False,
    )


class PerRow(nn.Module):
    """One number per row decides on the log-prob of token 1."""

    def __init__(self, rows):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(rows))

    def forward(self, ids):
        one = self.w[:, None].expand(ids.shape)
        return torch.stack([torch.zeros_like(one), one], -1)


@declare("e/r19")
def rloo(m, fn):
    given = m.make(0)
    model = given.pop("model")

    def advantages(rewards, groups):
        n = len(rewards)
        mod = PerRow(n)
        mask = torch.tensor([[0, 1]]).expand(n, 2)
        with torch.enable_grad():
            loss = fn(mod, {"ids": torch.ones(n, 2, dtype=torch.long), "completion_mask": mask, "rewards": rewards.float()}, k=4)
            (grad,) = torch.autograd.grad(loss, [mod.w])
        return -2 * n * grad

    return [
        Step(
            model=model, loss=fn, batch=given, family="policy gradient",
            roles={"ids": "ids", "mask": "completion_mask", "rewards": "rewards"},
            settings={"k": Setting(4, "setting", modes=(2, 8)), "clip": Setting(0.2, "inert")},
            logprobs=lambda mod, b: taken(b["ids"], mod(b["ids"])),
            wide=("ids", "completion_mask"), reduction="mean", value_is_loss=False, rows_interact=True,
        ),
        AdvantageEstimator(advantages, scale="equal", over="group", groups=3, size=4, interleaved=False),
    ]


@declare("f/r17")
def explained_variance(m, fn):
    rows = torch.cat([torch.stack([r["returns"], r["values"], r["mask"]], 1) for r in m.make(0)["ranks"]])

    def metric(shards):
        return float(fn([{"returns": s[:, 0], "values": s[:, 1], "mask": s[:, 2]} for s in shards]))

    def single(shards):
        every = torch.cat(list(shards)).double()
        keep = every[:, 2] > 0
        returns, values = every[:, 0][keep], every[:, 1][keep]
        return float(1 - (returns - values).var(unbiased=False) / returns.var(unbiased=False))

    return Ranks(metric=metric, rows=rows, single=single)


@declare("e/d13")
def cut_responses(m, fn):
    draw = lambda n, start: [5 + (start + i) % 35 for i in range(n)]
    rows = m.make(0)["rows"] + [
        {"prompt": draw(10, 1), "chosen": draw(14, 3), "rejected": draw(15, 7)},
        {"prompt": draw(23, 2), "chosen": draw(1, 4), "rejected": draw(2, 9)},
        {"prompt": draw(1, 5), "chosen": draw(30, 6), "rejected": draw(23, 8)},
    ]

    def batch(examples):
        out = fn(examples)
        return {k: padded([r[k] for r in out], 0) for k in ("prompt", "chosen", "rejected")}

    cut = lambda key: lambda e: e[key][:24 - len(e["prompt"])]
    return Collator(fn=batch, examples=rows, pads={"prompt": 0, "chosen": 0, "rejected": 0},
                    columns={"prompt": lambda e: e["prompt"], "chosen": cut("chosen"), "rejected": cut("rejected")})


# ---- k71 … k80 ---------------------------------------------------------------------------------------------------------------------
@declare("f/r14")
def fim_joint(m, fn):
    def undo(ids):
        ids = ids[:-1] if ids and ids[-1] == 4 else ids
        if 1 not in ids:
            return ids
        try:
            pre, suf, mid = (ids.index(i) for i in (1, 2, 3))
        except ValueError:
            return ids
        return ids[pre + 1:suf] + ids[mid + 1:] + ids[suf + 1:mid]  # suffix first: the prefix stands before the middle

    rng = random.Random(5)
    many = [{"ids": [rng.randint(10, 49) for _ in range(rng.randint(6, 14))]} for _ in range(4000)]
    made = lambda **k: [r["ids"] for r in fn(copy.deepcopy(many), **k)]
    moved = lambda out: sum(ids[0] == 1 for ids in out)
    default, spm = made(), made(rate=1.0, spm_rate=1.0)
    return [
        fim_collator(fn, m.make(0)["rows"], (1, 2, 3, 4), undo, lambda s: s in ([4], [1, 2, 3, 4]), {}),
        Census({"rows": 4000, "at rate 0": 0, "at rate 1": 4000, "at rate 0.5, in tenths": 5, "suffix first at 1": 4000},
               {"rows": len(default), "at rate 0": moved(made(rate=0.0)), "at rate 1": moved(made(rate=1.0)),
                "at rate 0.5, in tenths": round(moved(default) / 400), "suffix first at 1": sum(ids[:2] == [1, 2] for ids in spm)},
               what="rearranged documents"),
    ]


@declare("f/r01")
def turn_baseline(m, fn):
    def one_turn(rewards, groups):
        turn = torch.tensor([[-1, 0, 0, -1]]).expand(len(rewards), 4)
        return fn(rewards[:, None], groups, turn)[:, 1]

    def later(rewards, groups):  # the reward comes in the third turn, the advantage is that of the first
        turn = torch.tensor([[-1, 0, -1, 1, 2]]).expand(len(rewards), 5)
        zero = torch.zeros_like(rewards)
        return fn(torch.stack([zero, zero, rewards], 1), groups, turn)[:, 1]

    def reached(rewards, groups):  # in each group one more row, which never reached the second turn
        names = groups.unique()
        n, k = len(rewards), len(names)
        full = torch.zeros(n + k, 2, dtype=rewards.dtype)
        full[:n, 1] = rewards
        full[n:, 0] = 3.0
        turn = torch.cat([torch.tensor([[-1, 0, -1, 1]]).expand(n, 4), torch.tensor([[-1, 0, -1, -1]]).expand(k, 4)])
        return fn(full, torch.cat([groups, names]), turn)[:n, 3]

    return [AdvantageEstimator(f, scale="equal", over="group") for f in (one_turn, later, reached)]


@declare("f/r16")
def pass_at_k(m, fn):
    rows = torch.tensor([s for rank in m.make(0)["ranks"] for s in rank])

    def single(shards):
        by = {}
        for problem, solved in torch.cat(list(shards)).long().tolist():
            by.setdefault(problem, []).append(solved)
        rate = lambda results: (lambda draws: sum(any(d) for d in draws) / len(draws))(list(itertools.combinations(results, 3)))
        return sum(map(rate, by.values())) / len(by)

    return Ranks(metric=lambda shards: fn([[tuple(r) for r in s.long().tolist()] for s in shards], k=3), rows=rows, single=single)


@declare("e/r04")
def packed_rotary(m, fn):
    given = m.make(0)
    model = given.pop("model")
    doc = given["doc"]
    batch = {"ids": given["ids"], "documents": torch.where(doc >= 0, doc, doc.max(1, keepdim=True).values + 1), "position_ids": given["position_ids"],
             "attention": (doc >= 0).long()}

    def loss(mod, b):  # padding is document -1 in the case
        return fn(mod, {"ids": b["ids"], "doc": torch.where(b["attention"] > 0, b["documents"], torch.tensor(-1)), "position_ids": b["position_ids"]})

    return Step(
        model=model, loss=loss, batch=batch, family="sft",
        roles={"ids": "ids", "documents": "documents", "positions": "position_ids", "attention": "attention"},
        wide=tuple(batch), reduction="mean", value_is_loss=True, all_supervised=True,
    )


@declare("e/r05")
def windows(m, fn):
    rows = m.make(0)["rows"] + [{"ids": [5 + (i * 7 + n) % 35 for i in range(n)]} for n in (13, 21, 1, 2, 28)]

    def batch(examples):
        docs = []
        for w in fn(examples):  # a window that begins at 0 begins a document
            if not docs or w["position_ids"][:1] == [0]:
                docs.append([])
            docs[-1].append(w)
        flat = lambda key, end: [[x for w in d for x in [*w[key], *end]] for d in docs]
        return {
            "ids": padded(flat("ids", [-1]), -2), "position_ids": padded(flat("position_ids", [-1]), -2), "labels": padded(flat("labels", []), -100),
            "trained_at": padded([[p for w in d for p, t in zip(w["position_ids"], w["labels"]) if t != -100] for d in docs], -2),
            "aligned": torch.tensor([[int(all(len(w["ids"]) == len(w["labels"]) and all(t in (-100, i) for i, t in zip(w["ids"], w["labels"])) for w in d))]
                                     for d in docs]),
        }

    def cut(n):
        starts = [0]
        while starts[-1] + 12 < n:
            starts.append(starts[-1] + 8)
        return [range(s, min(n, s + 12)) for s in starts]

    return Collator(
        fn=batch, examples=rows, pads={"ids": -2, "position_ids": -2, "labels": -100, "trained_at": -2}, targets=lambda e: e["ids"][1:],
        columns={"ids": lambda e: [x for w in cut(len(e["ids"])) for x in [*(e["ids"][i] for i in w), -1]],
                 "position_ids": lambda e: [x for w in cut(len(e["ids"])) for x in [*w, -1]],
                 "trained_at": lambda e: list(range(1, len(e["ids"]))), "aligned": lambda e: [1]},
    )


def runs(documents, attention):
    """The lengths of a row's documents; padding at the end belongs to none."""
    out = []
    for docs, real in zip(documents.tolist(), attention.tolist()):
        while real and not real[-1]:
            real, docs = real[:-1], docs[:-1]
        out.append([len(list(own)) for _, own in itertools.groupby(zip(docs, real))])
    return out


@declare("f/r06")
def packed_by_lengths(m, fn):
    given = m.make(0)
    model, time = given.pop("model"), given["ids"].shape[1]
    ends = given["lengths"].cumsum(1)
    at = torch.arange(time)[None].expand(given["ids"].shape)
    documents = (at[:, :, None] >= ends[:, None, :-1]).sum(-1)  # padding stays with the last document
    batch = {"ids": given["ids"], "documents": documents, "attention": (at < ends[:, -1:]).long(), "trained": given["trained"]}

    def lengths(b):
        rows = runs(b["documents"], b["attention"])
        most = max([1, *map(len, rows)])
        return torch.tensor([[0] * (most - len(r)) + r for r in rows])

    def loss(mod, b):
        return fn(mod, {"ids": b["ids"], "lengths": lengths(b), "trained": b["trained"]})

    def logprobs(mod, b):
        docs, n = b["documents"], b["ids"].shape[1]
        same = docs[:, :, None] == docs[:, None, :]
        first = same.int().argmax(-1)
        return taken(b["ids"], mod(b["ids"], torch.arange(n) - first, same))

    return Step(
        model=model, loss=loss, batch=batch, family="sft",
        roles={"ids": "ids", "documents": "documents", "attention": "attention", "mask": "trained"},
        logprobs=logprobs, wide=tuple(batch), reduction="mean", value_is_loss=True,
    )


@declare("f/r20")
def kto(m, fn):
    given = m.make(0)
    model = given.pop("model")
    width = given["prompts"].shape[1]
    good = given["good"] > 0
    batch = {}
    for side, own in (("chosen", good), ("rejected", ~good)):
        answers = given["answers"][own]
        batch |= {side: torch.cat([given["prompts"][own], answers], 1), f"{side}_mask": F.pad((answers != 0).float(), (width, 0)),
                  f"reference_{side}": given["ref_logprobs"][own],
                  f"mismatched_{side}": given["ref_kl_logprobs"][own]}

    def rows(b, side):
        ids, mask = b[side], b[f"{side}_mask"]
        return ids[:, :width], torch.where(mask[:, width:] > 0, ids[:, width:], torch.tensor(0))

    def both(a, b):  # wanted and unwanted rows in turn, as in the case
        if a.dim() > 1:
            most = max(a.shape[1], b.shape[1])
            a, b = (F.pad(x, (0, most - x.shape[1])) for x in (a, b))
        return torch.stack([a, b], 1).flatten(0, 1)

    def loss(mod, b, beta, good_weight, bad_weight):
        (p, a), (q, c) = rows(b, "chosen"), rows(b, "rejected")
        ref = both(b["reference_chosen"], b["reference_rejected"])
        return fn(mod, {"prompts": both(p, q), "answers": both(a, c), "good": torch.tensor([1.0, 0.0]).repeat(len(p)), "ref_logprobs": ref,
                        "ref_kl_logprobs": both(b["mismatched_chosen"], b["mismatched_rejected"])},
                  beta=beta, good_weight=good_weight, bad_weight=bad_weight)

    def logprobs(mod, b):
        out = []
        for side in ("chosen", "rejected"):
            prompts, answers = rows(b, side)
            ids = torch.cat([prompts, answers], 1)
            out.append((taken(ids, mod(ids))[:, width:] * (answers != 0)).sum(1))
        return tuple(out)

    return Step(
        model=model, loss=loss, batch=batch, family="preference", roles={k: k for k in batch if not k.startswith("mismatched")},
        settings={"beta": Setting(0.2, "setting"), "good_weight": Setting(1.0, "weight"), "bad_weight": Setting(1.5, "weight")},
        metrics={"kl": Metric(low=0.0, moves=False)}, logprobs=logprobs, wide=("chosen", "chosen_mask", "rejected", "rejected_mask"),
        reduction="mean", value_is_loss=False, rows_interact=True, pairwise=False,
    )


@declare("f/d20")
def grpo_rejected(m, fn):
    def tokens(scores, lengths, kept):
        time = 5
        mask = (torch.arange(time)[None] < lengths[:, None]).to(scores.dtype)
        rewards = torch.zeros(len(scores), time, dtype=scores.dtype)
        rewards[torch.arange(len(scores)), lengths - 1] = scores
        return rewards, mask * kept[:, None].to(scores.dtype)

    def plain(rewards, groups):
        lengths = 2 + torch.arange(len(rewards)) % 4
        full, mask = tokens(rewards, lengths, torch.ones(len(rewards)))
        return fn(full, groups, mask)[:, 0]

    def with_rejected(rewards, groups):  # in each group one more row, which is not trained
        names = groups.unique()
        scores = torch.cat([rewards, torch.full((len(names),), 5.0, dtype=rewards.dtype)])
        kept = torch.cat([torch.ones(len(rewards)), torch.zeros(len(names))])
        lengths = 2 + torch.arange(len(scores)) % 4
        full, mask = tokens(scores, lengths, kept)
        out = fn(full, torch.cat([groups, names]), mask)
        return out[torch.arange(len(scores)), lengths - 1][:len(rewards)]

    return [AdvantageEstimator(f, scale="free", over="group") for f in (plain, with_rejected)]


class Averaged:
    """The average that NOTES defines, with the decay of the case; `ramp` is so large that the warm-up is over early."""

    def __init__(self, fn):
        self.fn, self.step = fn, 0

    def __call__(self, average, current, rate):
        half = 0.0 if rate >= 1 else math.inf if rate <= 0 else -32 / math.log2(1 - rate)
        decay = self.fn(self.step, half_life=half, ramp=1.0, batch=32)
        self.step += 1
        return decay * average + (1 - decay) * current


@declare("f/r12")
def ema_ramp(m, fn):
    final = 1 - 0.5 ** (32 / 5000)
    return [
        Schedule(lambda total, ranks, **s: [1 - fn(k, **s) for k in range(total)], peak=1.0, final=final, total=4000, ends=3125,
                 settings={"half_life": 5000, "ramp": 0.05, "batch": 32}),
        Ema(Averaged(fn), rate=final),
    ]


@declare("f/d18")
def on_policy_distillation(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given, family="divergence", roles={"ids": "ids", "mask": "response_mask", "teacher": "teacher_logprobs"},
        settings={"k": Setting(6, "setting", modes=(3, 12))},
        student=lambda mod, b: F.pad(mod(b["ids"])[:, :-1], (0, 0, 1, 0)).log_softmax(-1),
        wide=("ids", "response_mask", "teacher_logprobs"), reduction="mean", value_is_loss=True,
    )
