import copy
import math
import random
import re
from itertools import combinations

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.audit.reading2026f.reading import declare, no_subject
from earnest_audit import (Accumulation, AdapterStart, AdvantageEstimator, Census, ChatTemplate, Collator, Grader, MergedLayer,
                           OuterStep, Ranks, Resume, RoundTrip, Schedule, Setting, Step, Update)


class Recorder(torch.optim.SGD):
    """An optimizer that moves nothing and adds up the gradients with which it is stepped."""

    def __init__(self, params):
        super().__init__(params, lr=0.0)
        self.seen = None

    def step(self, closure=None):
        now = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for g in self.param_groups for p in g["params"]]
        self.seen = now if self.seen is None else [a + b for a, b in zip(self.seen, now)]


def leave(model, run):
    """run(optimizer); what the optimizer was stepped with is left in .grad"""
    opt = Recorder(model.parameters())
    run(opt)
    for p, g in zip(model.parameters(), opt.seen):
        p.grad = g


def surrogate(model, run):
    """a loss whose gradient is what the optimizer of run(copy, optimizer) is stepped with"""
    with torch.enable_grad():
        twin = copy.deepcopy(model)
        for p in twin.parameters():
            p.grad = None
        opt = Recorder(twin.parameters())
        run(twin, opt)
        return sum((p * g).sum() for p, g in zip(model.parameters(), opt.seen))


def flat(shards):
    return torch.cat([torch.as_tensor(s) if torch.is_tensor(s) else torch.stack(list(s)) for s in shards])


@declare("j/r26")
def goldfish(m, fn):
    given = m.make(0); model = given.pop("model")
    return Step(model=model, loss=fn, batch=given, roles={"ids": "ids", "labels": "labels"},
                settings={"k": Setting(4, "setting", modes=(2, 3)), "h": Setting(3, "setting", modes=(2, 4))},
                reduction="mean", drops_tokens=True, value_is_loss=True, family="sft", name="goldfish loss")


@declare("j/r27")
def token_mean(m, fn):
    def fresh(empty=False):
        given = m.make(0)
        batch = {k: torch.cat([b[k] for b in given["batches"]]) for k in ("ids", "labels")}
        if empty:
            batch = {"ids": torch.cat([batch["ids"], batch["ids"][:1]]), "labels": torch.cat([batch["labels"], torch.full((1, 10), -100)])}
        return given["model"], given["optimizer"], batch

    def accumulate(model, batches):
        leave(model, lambda opt: fn(model, opt, list(batches), max_norm=1e9))

    def clipped(model, batches):
        leave(model, lambda opt: fn(model, opt, list(batches)))

    def loss(model, batch):
        return F.cross_entropy(model(batch["ids"])[:, :-1].transpose(1, 2), batch["labels"][:, 1:], ignore_index=-100)

    a, _, batch = fresh()
    d, _, _ = fresh()
    b, _, holes = fresh(True)
    c, opt, whole = fresh()
    return [Accumulation(a, accumulate, batch),
            Accumulation(d, clipped, batch, what="micro-batches, with the clip"),
            Accumulation(b, accumulate, holes, split=(2, 4, 1), what="micro-batches, the last without a trained token"),
            Update(c, opt, lambda batches, max_grad_norm: fn(c, opt, list(batches), max_norm=max_grad_norm), loss, whole)]


@declare("j/r28")
def gradient_surgery(m, fn):
    def tasks(model, batch):
        dtype = next(model.parameters()).dtype
        return [{"x": batch["x"][:, k].to(dtype), "y": batch["y"][:, k].to(dtype)} for k in range(batch["x"].shape[1])]

    def loss(model, batch, seed=0):
        return surrogate(model, lambda twin, opt: fn(twin, opt, tasks(twin, batch), seed=seed))

    def plain(model, batch):
        return sum((model(b["x"], k) - b["y"]).square().mean() for k, b in enumerate(tasks(model, batch)))

    def accumulate(model, batches):
        whole = {k: torch.cat([b[k] for b in batches]) for k in ("x", "y")}
        leave(model, lambda opt: fn(model, opt, tasks(model, whole), seed=0))

    given = m.make(0); model = given["model"]
    batch = {k: torch.stack([b[k] for b in given["batches"]], 1) for k in ("x", "y")}
    # tasks that agree (the same rows, the same head): no gradient conflicts, so the update is that of the sum of the tasks' means
    agree = m.make(0)["model"]
    for h in list(agree.heads)[1:]:
        h.load_state_dict(agree.heads[0].state_dict())
    torch.manual_seed(1)
    x, y = torch.randn(7, 1, 6).repeat(1, 3, 1), 2 * torch.randn(7, 1).repeat(1, 3)
    return [Step(model=model, loss=loss, batch=batch, settings={"seed": Setting(0, "setting", modes=MODES)}, reduction="mean",
                 rows_interact=True, value_is_loss=False, name="projected gradients of tasks"),
            Step(model=agree, loss=lambda model, batch: loss(model, batch), batch={"x": x, "y": y}, paths={"sum of the tasks' means": plain},
                 reduction="mean", value_is_loss=False, rows_interact=True, name="tasks that do not conflict"),
            Accumulation(m.make(0)["model"], accumulate, batch, rows_interact=True, what="calls")]


MODES = (1,)  # a seed with another order of the other tasks


class Lands(nn.Module):
    """A replica whose inner step ends on given weights: with an inner learning rate of 0 they stay there."""

    def __init__(self, size):
        super().__init__()
        self.w, self.to = nn.Parameter(torch.zeros(size)), []

    def forward(self, ids):
        with torch.no_grad():
            self.w.copy_(self.to[int(ids[0, 0])])
        return (0 * self.w.sum()).expand(*ids.shape, 31)


class Round:
    def __init__(self, fn, size=7):
        self.fn, self.model = fn, Lands(size)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def __call__(self, start, locals, lr=0.7, momentum=0.9):
        with torch.no_grad():
            self.model.w.copy_(start)
        self.model.to = [x.detach().clone() for x in locals]
        for g in self.opt.param_groups:
            g["lr"], g["momentum"] = lr, momentum
        self.fn(self.model, self.opt, [[torch.full((1, 2), r)] for r in range(len(locals))], inner_lr=0.0)
        return self.model.w.detach().clone()


@declare("j/r29")
def diloco(m, fn):
    given = m.make(0); model = given["model"]
    ids = torch.stack([torch.stack(own) for own in given["batches"] + m.make(1)["batches"][:1]])  # [ranks, inner steps, rows, time]

    def loss(model, batch, inner_lr=0.001):
        return surrogate(model, lambda twin, opt: fn(twin, opt, [list(own) for own in batch["inner"]], inner_lr=inner_lr))

    return [OuterStep(Round(fn), knobs={"lr": 0.7, "momentum": 0.9}),
            Step(model=model, loss=loss, batch={"inner": ids}, wide=(), settings={"inner_lr": Setting(0.001, "setting")}, reduction="mean",
                 value_is_loss=False, all_supervised=True, name="pseudo-gradient, mean over ranks")]


@declare("j/r30")
def grad_cache(m, fn):
    def fresh():
        given = m.make(0)
        return given["model"], given["optimizer"], {k: torch.cat([b[k] for b in given["batches"]]) for k in ("queries", "keys")}

    def direct(model, batch, temperature=0.1):
        q, k = F.normalize(model(batch["queries"]), dim=-1), F.normalize(model(batch["keys"]), dim=-1)
        return F.cross_entropy(q @ k.T / temperature, torch.arange(len(q)))

    def accumulate(model, batches):
        leave(model, lambda opt: fn(model, opt, list(batches)))

    class Clips:
        """hands the optimizer on; the clip, which the case has not, is made before its step"""

        def __init__(self, model, opt, bound):
            self.model, self.opt, self.bound = model, opt, bound

        def step(self):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.bound)
            self.opt.step()

        def __getattr__(self, name):
            return getattr(self.opt, name)

    def loss(model, batch, temperature=0.1):
        def run(twin, opt):
            dtype, n = next(twin.parameters()).dtype, len(batch["queries"])
            b = {k: v.to(dtype) for k, v in batch.items()}
            cuts = [slice(0, n // 3), slice(n // 3, n)] if n >= 3 else [slice(0, n)]
            fn(twin, opt, [{k: v[c] for k, v in b.items()} for c in cuts], temperature=temperature)
        return surrogate(model, run)

    a, _, batch = fresh()
    c, opt, _ = fresh()
    e, _, _ = fresh()
    return [Accumulation(a, accumulate, batch, what="chunks"),
            Update(c, opt, lambda batches, max_grad_norm: fn(c, Clips(c, opt, max_grad_norm), list(batches)), direct, batch),
            Step(model=e, loss=loss, batch=batch, settings={"temperature": Setting(0.1, "setting")}, rows_interact=True, reduction="mean",
                 paths={"InfoNCE over all rows": direct}, value_is_loss=False, name="cached InfoNCE")]


@declare("j/r31")
def wsd(m, fn):
    def rates(total, ranks, **settings):
        return [fn(k, **{"total": total, **settings}) for k in range(total)]

    def longer(total, ranks, **settings):
        return [fn(k, total=total - 20, **settings) for k in range(total)]

    kinds = {"peak": 0.001, "warmup": 10, "decay": 20}
    return [Schedule(rates, peak=0.001, final=0.0, total=100, warmup=10, settings=kinds),
            Schedule(longer, peak=0.001, final=0.0, total=120, warmup=10, ends=100, settings=kinds)]


@declare("j/r32")
def teacher_momentum(m, fn):
    # the share of the student, 1 - momentum: it starts at 1 - base, never rises and ends at 0
    def rates(total, ranks, **settings):
        return [1 - fn(k, total=total, **settings) for k in range(total)]

    def longer(total, ranks, **settings):
        return [1 - fn(k, total=total - 200, **settings) for k in range(total)]

    return [Schedule(rates, peak=0.004, final=0.0, total=1000, warmup=0, settings={"base": 0.996}),
            Schedule(longer, peak=0.004, final=0.0, total=1200, warmup=0, ends=1000, settings={"base": 0.996})]


@declare("j/r33")
def left_padding(m, fn):
    def collate(pad):
        def run(rows):
            out = dict(fn(rows) if pad == 0 else fn(rows, pad_id=pad))
            out["last_id"], out["last_mask"] = out["input_ids"][:, -1:], out["attention_mask"][:, -1:]
            return out
        return run

    columns = {"input_ids": lambda r: list(r["prompt"]), "attention_mask": lambda r: [1] * len(r["prompt"]),
               "position_ids": lambda r: list(range(len(r["prompt"]))), "last_id": lambda r: [r["prompt"][-1]], "last_mask": lambda r: [1]}
    plain = [{"prompt": p} for p in ([5, 0, 9, 3], [7], [2, 0, 0, 11, 4, 29, 6], [8, 1, 0, 0, 13], [3, 17, 21])]
    zeros = [{"prompt": p} for p in ([0, 0, 9, 0], [7], [2, 0, 0, 11, 4, 29, 6], [0, 1, 0, 0, 13], [3, 17, 0])]
    return [Collator(collate(0), plain, pads={"input_ids": 0, "attention_mask": 0, "position_ids": 1}, columns=columns),
            Collator(collate(31), zeros, pads={"input_ids": 31, "attention_mask": 0, "position_ids": 1}, columns=columns)]


@declare("j/r34")
def span_corruption(m, fn):
    rows = [r for s in (0, 1, 2) for r in m.make(s)["rows"]] + [{"ids": [5, 6, 7, 8, 9, 10], "spans": [(1, 3)]}]

    def made(first, eos, pad):
        def split(r):
            x, y, at = [], [], 0
            for k, (a, b) in enumerate(r["spans"]):
                x += list(r["ids"][at:a]) + [first - k]
                y += [first - k] + list(r["ids"][a:b])
                at = b
            return x + list(r["ids"][at:]) + [eos], y + [eos]

        def collate(rows):
            out = dict(fn(rows) if (first, eos, pad) == (49, 1, 0) else fn(rows, first_sentinel=first, eos=eos, pad=pad))
            # where nothing is supervised, the decoder's input is padding (a shorter row's eos stands there)
            out["decoder_input_ids"] = out["decoder_input_ids"].masked_fill(out["labels"] == -100, -1)
            return out

        return Collator(collate, copy.deepcopy(rows), pads={"input_ids": pad, "attention_mask": 0, "labels": -100, "decoder_input_ids": -1},
                        targets=lambda r: split(r)[1],
                        columns={"input_ids": lambda r: split(r)[0], "attention_mask": lambda r: [1] * len(split(r)[0]),
                                 "labels": lambda r: split(r)[1], "decoder_input_ids": lambda r: [pad] + split(r)[1][:-1]})

    return [made(49, 1, 0), made(99, 41, 40)]


def codes(s):
    return [ord(c) for c in s]


def stack(lists, pad=-1):
    n = max(1, *map(len, lists))
    return torch.tensor([list(x) + [pad] * (n - len(x)) for x in lists])


@declare("j/r35")
def fill_in_the_middle(m, fn):
    PRE, SUF, MID, EOT = "<PRE>", "<SUF>", "<MID>", "<EOT>"

    def restored(t):
        assert t.endswith(EOT)
        t = t[: -len(EOT)]
        if not t.startswith(PRE):
            return t
        head, middle = t[len(PRE):].split(MID)
        prefix, suffix = head.split(SUF)
        return prefix + middle + suffix

    def stage(**settings):
        def run(rows):
            out = fn(rows, **settings)
            return {"id": stack([codes(r["id"]) for r in out]), "text": stack([codes(r["text"]) for r in out]),
                    "restored": stack([codes(restored(r["text"]) + "$") for r in out]),
                    "short": stack([codes(r["text"]) if len(restored(r["text"])) < 3 else [0] for r in out]),
                    "form": torch.tensor([[r["text"].startswith(PRE) + r["text"].startswith(PRE + SUF)] for r in out])}
        return run

    columns = {"id": lambda r: codes(r["id"]), "restored": lambda r: codes(r["text"] + "$"),
               "short": lambda r: codes(r["text"] + EOT) if len(r["text"]) < 3 else [0]}
    pads = {"id": -1, "text": -1, "restored": -1, "short": -1}
    rows = m.make(0)["rows"]
    give = lambda more={}, **settings: Collator(stage(**settings), copy.deepcopy(rows), pads=pads, columns={**columns, **more})
    return [give(), give(rate=0.0, more={"text": lambda r: codes(r["text"] + EOT)}),
            give(rate=1.0, spm=1.0, more={"form": lambda r: [2 if len(r["text"]) >= 3 else 0]})]


@declare("j/r36")
def dynamic_sampling(m, fn):
    good = lambda g: len(g) == 4 and len({r["reward"] for r in g}) > 1

    def by_prompt(rows):
        groups = {}
        for r in rows:
            groups.setdefault(r["prompt_id"], []).append(r)
        return list(groups.values())

    def mixed(groups):  # rows of a prompt are not neighbours; first rows arrive in the order of the groups
        return [g[k] for k in range(max(map(len, groups))) for g in groups if k < len(g)]

    number = lambda r: int(r["completion"].replace(".", ""))

    def per_group(groups):  # one row per group: whether it is kept, and its rows
        out = fn(mixed(groups), want=100)
        mine = [[r for r in out if r["prompt_id"] == g[0]["prompt_id"]] for g in groups]
        return {"kept": torch.tensor([[len(x)] for x in mine]), "completions": stack([[number(r) for r in x] for x in mine]),
                "prompt": torch.tensor([[g[0]["prompt_id"]] for g in groups])}

    def in_order(groups):  # kept groups only, in the order in which the stage gives them
        out = fn(mixed(groups), want=100)
        out = [out[k:k + 4] for k in range(0, len(out), 4)]
        return {"completions": torch.tensor([[number(r) for r in g] for g in out]), "reward": torch.tensor([[r["reward"] for r in g] for g in out]),
                "shaped": torch.tensor([[r["shaped"] for r in g] for g in out], dtype=torch.float64),
                "prompt": torch.tensor([[r["prompt_id"] for r in g] for g in out])}

    def raw(rows):
        return {"completions": torch.tensor([number(r) for r in fn(rows)])}

    groups, kept, some = by_prompt(m.make(0)["rows"]), [], []
    for s in range(6):
        for g in by_prompt(m.make(s)["rows"]):
            g = [{**r, "prompt_id": r["prompt_id"] + 10 * s + 10, "completion": f"{10 * s + 10 + r['prompt_id']}.{r['completion'][-1]}"} for r in g]
            if good(g):
                kept.append(g)
            some.append(g)
    found = [Collator(per_group, copy.deepcopy(some[:14]), pads={"completions": -1},
                      columns={"kept": lambda g: [4 if good(g) else 0], "completions": lambda g: [number(r) for r in g] if good(g) else []}),
             Collator(in_order, copy.deepcopy(kept[:6]), columns={"completions": lambda g: [number(r) for r in g]}),
             Collator(raw, m.make(0)["rows"], rows=False)]
    for s, want in ((0, 3), (1, 3), (2, 2), (3, 50)):
        rows = m.make(s)["rows"]
        expected = [r["completion"] for g in [g for g in by_prompt(rows) if good(g)][:want] for r in g]
        got = [r["completion"] for r in fn(rows, want=want)]
        found += [Census(expected, got, what="kept completions", once=True),
                  Census({c: k for k, c in enumerate(expected)}, {c: k for k, c in enumerate(got)}, what="places of kept completions")]
    return found


@declare("j/r37")
def std_over_ranks(m, fn):
    rows = torch.cat(m.make(0)["per_rank"])
    single = lambda shards: float(flat(shards).double().std())

    def ragged(shards):  # ranks with nothing and with one value
        x = [torch.as_tensor(s) for s in shards]
        return fn([x[0][:0], x[0][:1], x[0][:0], x[0][1:], *x[1:], x[0][:0]])

    return [Ranks(metric=lambda shards: fn([torch.as_tensor(s) for s in shards]), rows=rows, single=single),
            Ranks(metric=ragged, rows=rows, single=single)]


@declare("j/r38")
def padded_accuracy(m, fn):
    rows = torch.tensor([1.0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 0])

    def metric(more):
        def run(shards):
            correct, ranks = flat(shards), len(shards) + more
            total = len(correct)
            order = torch.arange(-(-total // ranks) * ranks) % total
            return fn([correct[order[r::ranks]] for r in range(ranks)], total)
        return run

    single = lambda shards: float(flat(shards).mean())
    return [Ranks(metric=metric(k), rows=rows, single=single) for k in (0, 3, 6)]


@declare("j/r39")
def parallel_seeds(m, fn):
    found = [Ranks(draw=lambda rank: torch.tensor([fn(rank, 3)[1]])),                      # sharded: every rank its own
             Ranks(draw=lambda rank: torch.tensor([fn(rank, 3, tp=4)[1]])),
             Ranks(draw=lambda replica: torch.tensor([fn(2 * replica, 3)[0]])),             # replicated: every replica its own
             Ranks(draw=lambda replica: torch.tensor([fn(2 * replica, 3)[1]])),
             Ranks(draw=lambda step: torch.tensor(fn(3, step))),                            # another one in every step
             Ranks(draw=lambda base: torch.tensor(fn(3, 2, base=1234 + base)))]
    for tp in (2, 4):
        places = [(d, t, s) for d in range(4) for t in range(tp) for s in (0, 1, 5)]
        name = lambda d, t, s: f"replica {d}, tensor rank {t}, step {s}"
        found += [Census({name(*p): fn(p[0] * tp, p[2], tp=tp)[0] for p in places}, {name(*p): fn(p[0] * tp + p[1], p[2], tp=tp)[0] for p in places},
                         what="replicated seeds, one per tensor group")]
        sharded = [str(fn(r, s, tp=tp)[1]) for r in range(16) for s in range(5)]
        replicated = [str(fn(d * tp, s, tp=tp)[0]) for d in range(16 // tp) for s in range(5)]
        found += [Census(list(dict.fromkeys(sharded)), sharded, what="sharded seeds", once=True),
                  Census(list(dict.fromkeys(replicated)), replicated, what="replicated seeds of replicas", once=True)]
    return found


@declare("j/r40")
def order_of_samples(m, fn):
    order = lambda epoch, n=23, ranks=4, **k: [fn(g % ranks, g // ranks, n=n, ranks=ranks, **k) for g in range(n * epoch, n * epoch + n)]
    found = [Ranks(draw=lambda rank: torch.tensor([fn(rank, s) for s in range(12)])),
             Ranks(draw=lambda epoch: torch.tensor(order(epoch))),
             Ranks(draw=lambda seed: torch.tensor(order(0, seed=7 + seed)))]
    for n, ranks in ((23, 4), (16, 3), (5, 4)):
        for epoch in (0, 1, 2):
            found.append(Census([str(i) for i in range(n)], [str(i) for i in order(epoch, n, ranks)], what=f"samples of epoch {epoch}", once=True))
    found.append(Census({f"global {g}": fn(g % 4, g // 4) for g in range(50)}, {f"global {g}": fn(g % 3, g // 3, ranks=3) for g in range(50)},
                        what="samples by global index, with 4 ranks and with 3"))
    return found


@declare("j/r41")
def debiased(m, fn):
    def fresh(seed=0):
        torch.manual_seed(seed)
        return nn.Linear(3, 2)

    def new(seed=0):
        return fn(fresh(seed), 0)[0]  # no step: the average as it begins

    def walk(ema, k):
        g = torch.Generator().manual_seed(100 + k)
        with torch.no_grad():
            for p in ema.model.parameters():
                p.add_(torch.randn(p.shape, generator=g))
        ema.update()

    values = lambda ema: torch.cat([v.flatten() for v in ema.weights().values()])

    def save(ema, folder):
        torch.save(ema.state_dict(), folder / "ema.pt")

    def load(ema, folder):
        ema.load_state_dict(torch.load(folder / "ema.pt"))

    class Run:
        def __init__(self):
            self.ema, self.k = new(), 0

    def run(x, n):
        ids = []
        for _ in range(n):
            ids.append(x.k)
            walk(x.ema, x.k)
            x.k += 1
        return ids

    def save_run(x, folder):
        save(x.ema, folder)
        torch.save({"model": x.ema.model.state_dict(), "k": x.k}, folder / "run.pt")

    def load_run(x, folder):
        s = torch.load(folder / "run.pt")
        x.ema.model.load_state_dict(s["model"])
        x.k = s["k"]
        load(x.ema, folder)

    def perturb(ema):
        for k in range(3):
            walk(ema, k)

    def metric(decay):  # the norm of the average after a run that is resumed in its middle
        def go(shards):
            torch.manual_seed(1)
            return fn(nn.Linear(3, 2), len(flat(shards)), decay=decay)
        value = lambda shards: round(float(go(shards)[0].weights()["weight"].double().norm()), 4)

        def single(shards):
            seen = [w.double() for w in go(shards)[1]]
            share = [decay ** (len(seen) - 1 - k) for k in range(len(seen))]
            return round(float((sum(a * w for a, w in zip(share, seen)) / sum(share)).norm()), 4)
        return Ranks(metric=value, single=single, rows=torch.arange(6.0), by_rank=True)

    model = fresh(3)
    own = {f"{n} {i}": float(v) for n, p in model.named_parameters() for i, v in enumerate(p.detach().flatten())}
    read = {f"{n} {i}": float(v) for n, p in fn(model, 0)[0].weights().items() for i, v in enumerate(p.flatten())}
    return [RoundTrip(make=new, perturb=perturb, save=save, load=load, outputs=values),
            Resume(make=Run, run=run, save=save_run, load=load_run, state=lambda x: torch.cat([values(x.ema), *(p.detach().flatten() for p in x.ema.model.parameters())])),
            Census(own, read, what="weights before the first update"), metric(0.9), metric(0.5)]


@declare("j/r42")
def return_scaler(m, fn):
    import json
    data = m.make(0)
    rewards, dones = data["rewards"], data["dones"]

    # through the code itself: it resumes at half of what it is given, so a run over twice as many steps has not resumed yet
    class Half:
        def __init__(self):
            self.k, self.resumed = 0, False

    def run(x, n):
        x.k += n
        return list(range(x.k - n, x.k))

    def save(x, folder):
        (folder / "k").write_text(str(x.k))

    def load(x, folder):
        x.k, x.resumed = int((folder / "k").read_text()), True

    def state(x):
        n = x.k if x.resumed else 2 * x.k
        return torch.tensor(fn(rewards[:n], dones[:n])[: x.k], dtype=torch.float64)

    # through the object
    Scaler = fn.__globals__.get("ReturnScaler", m.ReturnScaler)

    class Whole:
        def __init__(self):
            self.k, self.s, self.out = 0, Scaler(3), []

    def run_whole(x, n):
        ids = []
        for _ in range(n):
            x.out.append(x.s(rewards[x.k % 20], dones[x.k % 20]))
            ids.append(x.k)
            x.k += 1
        return ids

    def save_whole(x, folder):
        (folder / "s.json").write_text(json.dumps({"k": x.k, "out": x.out, "s": x.s.state()}))

    def load_whole(x, folder):
        s = json.loads((folder / "s.json").read_text())
        x.k, x.out = s["k"], s["out"]
        x.s.load(s["s"])

    # by the definition: population variance of all returns so far, beside 1e-4 of a return with mean 0 and variance 1
    def single(gamma):
        def go(shards):
            rows = flat(shards)
            e = rows.shape[1] // 2
            ret, seen, total = [0.0] * e, [], 0.0
            for row in rows.tolist():
                ret = [gamma * a + r for a, r in zip(ret, row[:e])]
                seen += ret
                n = 1e-4 + len(seen)
                mean = sum(seen) / n
                var = (1e-4 * (1 + mean ** 2) + sum((x - mean) ** 2 for x in seen)) / n
                sd = math.sqrt(var + 1e-8)
                total += sum(max(-10.0, min(10.0, r / sd)) for r in row[:e])
                ret = [0.0 if d else a for a, d in zip(ret, row[e:])]
            return round(total, 6)
        return go

    def metric(gamma):
        def go(shards):
            rows = flat(shards)
            e = rows.shape[1] // 2
            out = fn(rows[:, :e].tolist(), [[bool(d) for d in row] for row in rows[:, e:].tolist()], gamma=gamma)
            return round(sum(map(sum, out)), 6)
        return go

    r, d = torch.tensor(rewards, dtype=torch.float64), torch.tensor(dones, dtype=torch.float64)
    return [Resume(make=Half, run=run, save=save, load=load, state=state, steps=5),
            Resume(make=Whole, run=run_whole, save=save_whole, load=load_whole, state=lambda x: torch.tensor(x.out, dtype=torch.float64), steps=6),
            *(Ranks(metric=metric(g), single=single(g), rows=torch.cat([r[:, :e], d[:, :e]], 1), by_rank=True) for g, e in ((0.99, 3), (0.5, 3), (0.99, 1)))]


@declare("j/r43")
def boxed(m, fn):
    give = lambda answer, right, wrong, question: Grader(lambda text: fn({"answer": answer}, text), right=right, wrong=wrong, question=question)
    b = lambda s: "so \\boxed{" + s + "}."
    return [give("1/2", [b("\\frac{1}{2}"), b("1/2"), b("0.5"), b("50\\%"), b("\\dfrac{1}{2}"), b("\\frac12"), b("2/4"), b("$0.50$"),
                         "first \\boxed{4}, no: \\boxed{\\frac{1}{2}}", "\\boxed{1/2} and an unclosed \\boxed{3"],
                 [b("1/3"), b("2"), b("0.5000001"), b(""), b("50"), "the answer is 1/2", "\\boxed{1/2}, no: \\boxed{4}", "unclosed \\boxed{1/2", b("-1/2")],
                 "What is one half, that is 1/2?"),
            give("-3", ["first \\boxed{4}, no: \\boxed{-3}.", b("-3"), b("-3.0"), b("-6/2"), b(" -3 ")], [b("3"), b("-4"), "-3", "\\boxed{-3}, no: \\boxed{3}"], "What is 1 - 4?"),
            give("0.25", ["\\boxed{25\\%}", b("25%"), b("1/4"), b("\\frac{1}{4}"), b("\\tfrac14")], [b("25"), b("0.25%"), b("0.2500001"), "25%"], "What share is one of four?"),
            give("x+1", ["\\boxed{x + 1}", b("x+1"), b("$x+1$")], [b("x+2"), b("x"), "x+1", b("1")], "Expand x + 1."),
            give("1234", [b("1,234"), b("1234"), b("1234.0")], [b("1,235"), b("234"), b("1"), "1234"], "How many? 1234?"),
            give("\\sqrt{2}", [b("\\sqrt{2}"), "\\boxed {\\sqrt{2}}"], [b("\\sqrt{3}"), b("2"), "\\boxed{\\sqrt{2}", "\\sqrt{2}"], "The root of 2?")]


@declare("j/r44")
def overlong(m, fn):
    def completion(text):  # a character is a token; the value is the number at the end
        found = re.search(r"(\d+)\s*$", text)
        return {"tokens": list(text), "value": int(found.group(1)) if found else None}

    grade = lambda text: fn({"answer": 3}, completion(text))
    long = lambda n, last="3": "." * (n - 1) + last
    reward = lambda n, value, **s: fn({"answer": 3}, {"tokens": list(range(n)), "value": value}, **s)
    falls = lambda value, up: lambda total, ranks, **s: [reward(n, value, **s) + up for n in range(total)]
    q = "What is one and two?"
    return [Grader(grade, right=["3", long(40), long(80), long(90), long(100)], wrong=["4", "none", long(30, "4"), long(80, "4")], question=q),
            Grader(grade, right=["3", long(80)], wrong=[long(84), long(90), long(100)], question=q),
            Grader(grade, right=[long(81), long(90)], wrong=[long(97), long(100), long(130)], question=q),
            # the reward by length: it is held, falls from 80 to 100 tokens by 1, and is held again
            *(Schedule(falls(v, up), peak=1.0, final=0.0, total=121, warmup=0, ends=100, settings={"limit": 100, "cache": 20})
              for v, up in ((3, 0.0), (4, 2.0), (None, 2.0)))]


@declare("j/r45")
def last_turn(m, fn):
    def prompt(messages):
        return list(fn(list(messages))[0]) + [1] + [b + 10 for b in b"assistant\n"]

    short = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"},
             {"role": "user", "content": "three?"}, {"role": "assistant", "content": "four"}]
    one = [{"role": "user", "content": "one?"}, {"role": "assistant", "thinking": "hm", "content": "two"}]
    return [*(ChatTemplate(fn, prompt, m.make(s)["messages"], end=2, trained=[4, 6]) for s in (0, 1)),
            ChatTemplate(fn, prompt, short, end=2, trained=[4]), ChatTemplate(fn, prompt, one, end=2)]


@declare("j/r46")
def min_p(m, fn):
    def fresh(lift=0.0):
        model = m.make(0)["model"].double()
        with torch.no_grad():
            model.head.bias[0] += lift
        return model

    model, ends = fresh(), fresh(0.7)
    torch.manual_seed(5)
    prompts = torch.randint(1, 31, (12, 5))
    same = prompts[:1].repeat(4, 1)

    def raw(model, prompt, ids):
        with torch.no_grad():
            return model(torch.cat([prompt, ids], 1))[:, prompt.shape[1] - 1:-1].log_softmax(-1)

    def alive(ids):
        return ((ids == 0).cumsum(1) - (ids == 0).long()) == 0

    def greedy(prompt):
        ids, out, lps = torch.tensor([prompt]), [], []
        for _ in range(6):
            with torch.no_grad():
                lp = ends(ids)[0, -1].log_softmax(-1)
            tok = int(lp.argmax())
            done = 0 in out
            out.append(0 if done else tok)
            lps.append(0.0 if done else float(lp[tok]))
            ids = torch.cat([ids, torch.tensor([[out[-1]]])], 1)
        return out, lps

    def collate(examples):  # min_p = 1 leaves the most likely token: rows are then independent of their place
        ids, lps = fn(ends, torch.tensor(examples), min_p=1.0)
        return {"ids": ids, "logprobs": (lps * 1e4).round().long()}

    def metric(net):
        return lambda shards: round(float(fn(net, flat(shards))[1].sum()), 6)

    def single(net):
        def go(shards):
            ids = fn(net, flat(shards))[0]
            return round(float((raw(net, flat(shards), ids).gather(2, ids[..., None])[..., 0] * alive(ids)).sum()), 6)
        return go

    ids, lps = fn(model, prompts, new=16)
    lp = raw(model, prompts, ids)
    below = (lp.gather(2, ids[..., None])[..., 0] < lp.max(-1).values + math.log(0.3) - 1e-6) & alive(ids)
    other = torch.cat([prompts[:2], prompts.flip(0)[:5]])
    name = lambda t: {f"row {r}, token {k}": int(v) for r, row in enumerate(t[:2]) for k, v in enumerate(row)}
    return [Ranks(draw=lambda row: fn(model, same, new=16)[0][row]),
            Ranks(draw=lambda seed: fn(model, prompts[:2], new=16, seed=seed)[0]),
            Collator(collate, prompts.tolist(), columns={"ids": lambda p: greedy(p)[0], "logprobs": lambda p: [round(x * 1e4) for x in greedy(p)[1]]}),
            Ranks(metric=metric(model), single=single(model), rows=prompts, by_rank=True),
            Ranks(metric=metric(ends), single=single(ends), rows=prompts, by_rank=True),
            Census({"tokens below min_p": 0, "not pad after eos": 0, "with gradient": 0},
                   {"tokens below min_p": int(below.sum()), "not pad after eos": int(((ids != 0) & ~alive(ids)).sum() + ((lps != 0) & ~alive(ids)).sum()),
                    "with gradient": int(lps.requires_grad)}, what="sampled tokens"),
            Census(name(ids), name(fn(model, other, new=16)[0]), what="tokens of rows beside other rows")]


def shaken(adapter, seed=0):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in adapter.parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn(p.shape, generator=g))
    return adapter


def adapters(m, make, trained, formula, value_is_loss, variants):
    """what both adapters promise; make(linear, **settings) is the code"""
    def linear(seed=0, bias=True):
        torch.manual_seed(seed)
        return nn.Linear(8, 6, bias=bias)

    x = m.make(0)["x"]
    x = torch.cat([x, m.make(1)["x"]])
    torch.manual_seed(9)
    y = torch.randn(len(x), 6)
    loss = lambda out, batch: (out - batch["y"]).square().mean()
    found, count = [], iter(range(100))

    def fresh():
        return make(linear(next(count)))

    for bias in (True, False):
        found.append(AdapterStart(linear(0, bias), make, lambda model: model(x)))
    found.append(Census(trained, [n for n, p in make(linear()).named_parameters() if p.requires_grad], what="trained parameters"))
    for settings in ({}, *variants):
        found.append(Step(model=shaken(make(linear(), **settings)), loss=lambda model, batch: loss(model(batch["x"]), batch), batch={"x": x, "y": y},
                          paths={"the definition": lambda model, batch, s=settings: loss(formula(model, batch["x"], **s), batch)},
                          reduction="mean", value_is_loss=value_is_loss, name="regression through the adapter"))
    found.append(RoundTrip(make=fresh, perturb=shaken, save=lambda a, folder: torch.save(a.state_dict(), folder / "a.pt"),
                           load=lambda a, folder: a.load_state_dict(torch.load(folder / "a.pt")) and None, outputs=lambda a: a(x).detach()))
    return found, linear, x


@declare("j/r47")
def pissa(m, fn):
    formula = lambda a, x, rank=3: F.linear(x, a.base.weight + a.B @ a.A, a.base.bias)
    found, linear, x = adapters(m, fn, ["A", "B"], formula, True, ({"rank": 2},))
    for bias in (True, False):
        adapter = shaken(fn(linear(1, bias)))
        now = {"layer": adapter}
        found.append(MergedLayer(outputs=lambda now=now: now["layer"](x).detach(), merge=lambda now=now, a=adapter: now.update(layer=a.merge()),
                                 unmerge=lambda now=now, a=adapter: now.update(layer=a)))
    for rank in (2, 3):
        a = fn(linear(), rank)
        found.append(Census({"A": rank, "B": rank}, {"A": a.A.shape[0], "B": a.B.shape[1]}, what="ranks"))
    return found


@declare("j/r48")
def dora(m, fn):
    def formula(a, x, rank=2, alpha=4):
        w = a.weight + alpha / rank * (a.B @ a.A)
        out = x @ w.T * (a.magnitude / w.detach().norm(dim=1))
        return out if a.bias is None else out + a.bias

    found, linear, x = adapters(m, fn, ["A", "B", "magnitude"], formula, False, ({"rank": 4, "alpha": 2}, {"rank": 3, "alpha": 9}))
    # as training begins: B is 0, so A has no gradient in the first step
    torch.manual_seed(9)
    found.append(Step(model=fn(linear()), loss=lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean(), batch={"x": x, "y": torch.randn(len(x), 6)},
                      may_idle=("A",), reduction="mean", value_is_loss=False, name="first step"))
    return found


@declare("j/r49")
def global_std(m, fn):
    given = m.make(0)

    def single(shards):
        rows = flat(shards).double()
        r, g = rows[:, 0], rows[:, 1]
        c = torch.stack([x - r[g == k].mean() for x, k in zip(r, g)])
        return round(float((c / (c.square().mean() + 1e-8).sqrt()).abs().sum()), 4)

    def metric(shards):
        rows = flat(shards)
        return round(float(fn(rows[:, 0].contiguous(), rows[:, 1].long()).double().abs().sum()), 4)

    return [AdvantageEstimator(fn, scale="free", over="group", scaled_over="batch"),
            Ranks(metric=metric, single=single, rows=torch.stack([given["rewards"], given["groups"].float()], 1), by_rank=True)]


@declare("j/r50")
def pass_at_k(m, fn):
    def at(k):
        def run(rewards, groups):
            if rewards.isnan().any():
                raise ValueError("a reward is 0 or 1")  # the inputs of the case
            return fn(rewards, groups) if k == 3 else fn(rewards, groups, k=k)
        return run

    def single(k):  # over all sets: mean of a completion's sets, in units of the sets' spread
        def go(shards):
            rows, total = flat(shards).double(), 0.0
            for g in rows[:, 1].unique():
                r = rows[rows[:, 1] == g, 0].tolist()
                sets = list(combinations(range(len(r)), k))
                value = {s: max(r[i] for i in s) for s in sets}
                mean = sum(value.values()) / len(sets)
                sd = (sum((v - mean) ** 2 for v in value.values()) / len(sets)) ** 0.5
                if sd > 0:
                    for i in range(len(r)):
                        mine = [v for s, v in value.items() if i in s]
                        total += abs(sum(mine) / len(mine) - mean) / sd
            return round(total, 4)
        return go

    def metric(k):
        def go(shards):
            rows = flat(shards)
            return round(float(at(k)(rows[:, 0].contiguous(), rows[:, 1].long()).double().abs().sum()), 4)
        return go

    rows = torch.tensor([[0, 0, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1, 0], [0, 1, 2] * 6]).T.float()
    return [*(AdvantageEstimator(at(k), scale="free", over="group", size=6, values=(0.0, 1.0)) for k in (3, 2, 1)),
            *(Ranks(metric=metric(k), single=single(k), rows=rows, by_rank=True) for k in (3, 2))]
