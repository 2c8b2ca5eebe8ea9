import copy, itertools, math
import torch
import torch.nn as nn
import torch.nn.functional as F
from tests.audit.reading2026f.reading import declare, no_subject
from earnest_audit import (Accumulation, AdapterStart, AdvantageEstimator, Census, ChatTemplate, Collator, Ema, FirstCall, Grader,
                           MergedLayer, OuterStep, Ranks, RoundTrip, Schedule, Setting, Step, Unbiased, Update, WeightSync)


class Capture(torch.optim.SGD):
    """An optimizer that keeps the gradients it is given at each step and moves nothing."""

    def __init__(self, params):
        super().__init__(params, lr=0.0)
        self.seen = []

    def step(self, closure=None):
        self.seen.append([None if p.grad is None else p.grad.detach().clone() for g in self.param_groups for p in g["params"]])


def leave(model, run):
    """What the optimizer received last is left in .grad."""
    opt = Capture(model.parameters())
    run(opt)
    for p, g in zip(model.parameters(), opt.seen[-1] if opt.seen else itertools.repeat(None)):
        p.grad = g


def by_update(run):
    """A loss whose gradient is what the optimizer receives in run(model, optimizer, batch, **settings)."""
    def loss(model, batch, **settings):
        twin = copy.deepcopy(model)
        opt = Capture(twin.parameters())
        with torch.enable_grad():
            run(twin, opt, batch, **settings)
            return sum((p * g).sum() for p, g in zip(model.parameters(), opt.seen[-1]) if g is not None)
    return loss


def join(batches):
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


def norm_of(n):
    return 1e9 if n is None or math.isinf(n) else float(n)


def tried(f, *a, **k):
    try:
        return f(*a, **k)
    except Exception as e:
        return {"raised " + type(e).__name__: 1.0}


def tried_names(f):
    try:
        return list(f())
    except Exception as e:
        return ["raised " + type(e).__name__]


# ------------------------------------------------------------------ updates
@declare("l/r26")
def windows(m, fn):
    given = m.make(0); model, optimizer = given["model"], given["optimizer"]
    torch.manual_seed(1)
    ids, mask = m.random_rows(7)
    batch = {"ids": ids, "loss_mask": mask}
    first = given["batches"][:3]

    def loss(model, b):
        w = b["loss_mask"][:, 1:]
        lp = model(b["ids"][:, :-1]).log_softmax(-1).gather(-1, b["ids"][:, 1:, None]).squeeze(-1)
        return -(lp * w).sum() / w.sum()

    def steps():
        a = m.make(0); o = Capture(a["model"].parameters())
        fn(a["model"], o, a["batches"])
        left = sum(p.grad is not None for p in a["model"].parameters())
        empty = {"ids": a["batches"][0]["ids"], "loss_mask": torch.zeros_like(a["batches"][0]["loss_mask"])}
        e = Capture(a["model"].parameters())
        fn(a["model"], e, [empty, empty, empty] + a["batches"][:3] + [empty])
        n = Capture(a["model"].parameters())
        fn(a["model"], n, a["batches"], window=2)
        return {"steps of 5 batches": len(o.seen), "gradients left": left, "steps beside empty windows": len(e.seen), "steps, window 2": len(n.seen)}

    return [
        Update(model, optimizer, lambda bs, n: fn(model, optimizer, list(bs), window=3, max_norm=norm_of(n)), loss, batch, split=(2, 5)),
        Accumulation(model, lambda mo, bs: leave(mo, lambda o: fn(mo, o, list(bs), window=3, max_norm=1e9)), batch, split=(2, 5)),
        Accumulation(model, lambda mo, bs: leave(mo, lambda o: fn(mo, o, first + list(bs), window=3, max_norm=1e9)), batch, split=(1, 6),
                     what="micro-batches of a final, shorter window"),
        Accumulation(model, lambda mo, bs: leave(mo, lambda o: fn(mo, o, first + list(bs), window=3, max_norm=0.05)), batch, split=(1, 6),
                     what="micro-batches of a final, shorter window, clipped"),
        Census({"steps of 5 batches": 2, "gradients left": 0, "steps beside empty windows": 1, "steps, window 2": 3}, tried(steps), what="optimizer steps"),
    ]


@declare("l/r27")
def sam(m, fn):
    given = m.make(0); model = given["model"]; batches = given["batches"]
    batch = join(batches[:2])

    def definition(model, b, rho):
        names = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        with torch.enable_grad():
            g = torch.autograd.grad(F.cross_entropy(model(b["x"]), b["label"]), [p for _, p in names])
        size = torch.sqrt(sum(x.pow(2).sum() for x in g))
        moved = {n: p + rho * x / (size + 1e-12) for (n, p), x in zip(names, g)}
        return F.cross_entropy(torch.func.functional_call(model, moved, (b["x"],)), b["label"])

    def steps():
        a = m.make(0); o = Capture(a["model"].parameters())
        before = [p.detach().clone() for p in a["model"].parameters()]
        fn(a["model"], o, a["batches"])
        return {"steps of 4 batches": len(o.seen), "parameters that an optimizer of rate 0 moved": sum(not torch.equal(p, q) for p, q in zip(a["model"].parameters(), before)),
                "gradients left": sum(p.grad is not None and bool(p.grad.any()) for p in a["model"].parameters())}

    return [
        Step(model=model, loss=by_update(lambda mo, o, b, rho: fn(mo, o, [b], rho=rho)), batch=batch, settings={"rho": Setting(0.05, "setting")},
             paths={"gradient at the ascended point": definition}, value_is_loss=False, rows_interact=True, reduction="mean", name="one batch"),
        Step(model=model, loss=by_update(lambda mo, o, b, rho: fn(mo, o, [batches[2], batches[3], b], rho=rho)), batch=batch, settings={"rho": Setting(0.05, "setting")},
             paths={"gradient at the ascended point": definition}, value_is_loss=False, rows_interact=True, reduction="mean", name="after other batches"),
        Accumulation(model, lambda mo, bs: leave(mo, lambda o: fn(mo, o, list(bs))), batch, rows_interact=True, what="batches"),
        Census({"steps of 4 batches": 4, "parameters that an optimizer of rate 0 moved": 0, "gradients left": 0}, tried(steps), what="optimizer steps"),
    ]


class Movable(nn.Module):
    """Inner SGD on a row c of x with label 0 moves w by rate * c / 2."""

    def __init__(self, n):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(n))

    def forward(self, x):
        s = ((self.w - self.w.detach()) * x).sum(-1)
        return torch.stack([s, torch.zeros_like(s)], -1)


class Round:
    def __init__(self, fn, n):
        self.fn, self.model = fn, Movable(n)
        self.outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def __call__(self, start, locals, lr=0.7, momentum=0.9, inner=0.05):
        with torch.no_grad():
            self.model.w.copy_(start)
        for g in self.outer.param_groups:
            g["lr"], g["momentum"] = lr, momentum
        ranks = []
        for k, local in enumerate(locals):
            c = 2 * (local - start) / 0.05
            rows = c.repeat(k + 1, 1)  # ranks have batches of different sizes
            ranks.append([{"x": rows / 2, "label": torch.zeros(k + 1, dtype=torch.long)} for _ in range(2)])
        self.fn(self.model, self.outer, ranks, inner_lr=inner)
        return self.model.w.detach().clone()


@declare("l/r28")
def diloco(m, fn):
    given = m.make(0); model = given["model"]
    batch = join(given["batches"][0])

    def accumulate(mo, bs):
        ranks = [[{k: v[: len(v) // 2] for k, v in b.items()}, {k: v[len(v) // 2:] for k, v in b.items()}] for b in bs]
        leave(mo, lambda o: fn(mo, o, ranks))

    def steps():
        a = m.make(0); o = Capture(a["model"].parameters())
        before = [p.detach().clone() for p in a["model"].parameters()]
        fn(a["model"], o, a["batches"])
        return {"outer steps": len(o.seen), "parameters that an outer rate of 0 moved": sum(not torch.equal(p, q) for p, q in zip(a["model"].parameters(), before))}

    return [
        OuterStep(Round(fn, 7), knobs={"lr": 0.7, "momentum": 0.9, "inner": 0.05}, plain={"inner": 0.05}),
        Accumulation(model, accumulate, batch, rows_interact=True, what="ranks"),
        Census({"outer steps": 1, "parameters that an outer rate of 0 moved": 0}, tried(steps), what="outer steps"),
    ]


@declare("l/r29")
def loss_scale(m, fn):
    given = m.make(0); model, optimizer, batches = given["model"], given["optimizer"], given["batches"]
    batch = join(batches[:2])
    loss = lambda mo, b: F.mse_loss(mo(b["x"]).squeeze(-1), b["y"])

    def update(bs, n):
        fn(model, optimizer, [join(list(bs))], scale=2.0 ** 10, max_norm=norm_of(n))

    def run(mo, o, b, scale, growth_every):
        fn(mo, o, [b] * 14, scale=scale, growth_every=growth_every, max_norm=1e9)

    def skipped():
        a = m.make(0); bad = {"x": a["batches"][0]["x"], "y": torch.full((8,), float("inf"))}
        log = []
        fn(a["model"], a["optimizer"], a["batches"][:3] + [bad] + a["batches"][3:5], scale=2.0 ** 6, log=log)
        assert all(bool(p.isfinite().all()) for p in a["model"].parameters())
        return [f"batch {k}" for k in log]

    def grown():
        a = m.make(0); b = a["batches"][0]
        g = torch.autograd.grad(loss(a["model"], b), list(a["model"].parameters()))
        s = 2.0 ** math.floor(math.log2(65504 / max(float(x.abs().max()) for x in g)))
        log = []
        fn(a["model"], Capture(a["model"].parameters()), [b] * 12, scale=s, growth_every=4, log=log)
        return [f"batch {k}" for k in log]

    def counted():
        a = m.make(0); log = []; o = Capture(a["model"].parameters())
        fn(a["model"], o, a["batches"], log=log)
        return {"steps that are not in the log": len(o.seen) - len(log)}

    return [
        Update(model, optimizer, update, loss, batch, precision=torch.float16),
        Step(model=model, loss=by_update(run), batch=batch, value_is_loss=False, reduction="mean", precision=torch.float16,
             settings={"scale": Setting(2.0 ** 18, "inert", modes=(2.0 ** 16, 2.0 ** 12)), "growth_every": Setting(4, "inert", modes=(3, 6))},
             paths={"without a scale": lambda mo, b, scale, growth_every: loss(mo, b)}),
        Census([f"batch {k}" for k in (0, 1, 2, 4, 5)], tried_names(skipped), what="batches that stepped, beside one that is not finite", once=True),
        Census([f"batch {k}" for k in (0, 1, 2, 3, 5, 6, 7, 8, 10, 11)], tried_names(grown), what="batches that stepped while the scale grows", once=True),
        Census({"steps that are not in the log": 0}, tried(counted), what="steps"),
    ]


# ---------------------------------------------------------------- schedules
@declare("l/r30")
def sqrt_cooldown(m, fn):
    def rates(total, ranks, peak=3e-4, warmup=10, cooldown=0.2):
        return [fn(k, peak=peak, warmup=int(round(warmup)), total=total, cooldown=cooldown) for k in range(total)]

    def longer(total, ranks, peak=3e-4, warmup=10, cooldown=0.2):
        return [fn(k, peak=peak, warmup=int(round(warmup)), total=total - 20, cooldown=cooldown) for k in range(total)]

    def numbers():
        return {f"step {k}": round(fn(k) / 3e-4, 6) for k in (0, 4, 9, 10, 50, 79, 80, 100, 101, 120)}

    return [
        Schedule(rates, peak=3e-4, final=0.0, total=100, warmup=10, settings={"peak": 3e-4, "warmup": 10, "cooldown": 0.2}),
        Schedule(longer, peak=3e-4, final=0.0, total=120, warmup=10, ends=100, settings={"cooldown": 0.2}),
        Census({"step 0": 0.1, "step 4": 0.5, "step 9": 1.0, "step 10": 1.0, "step 50": 1.0, "step 79": 1.0, "step 80": 1.0, "step 100": 0.0, "step 101": 0.0, "step 120": 0.0},
               tried(numbers), what="shares of the peak"),
    ]


@declare("l/r31")
def thawing(m, fn):
    def rates(total, ranks, every=5, ramp=4):
        optimizer = m.make(0)["optimizer"]
        scheduler = fn(optimizer, every=int(round(every)), ramp=int(round(ramp)))
        out = []
        for _ in range(total):
            out.append([g["lr"] for g in optimizer.param_groups])
            optimizer.step(); scheduler.step()
        return out

    def of(g):
        return lambda total, ranks, **s: [row[g] for row in rates(total, ranks, **s)]

    def numbers():
        table = rates(20, 1)
        return {f"group {g} step {k}": round(table[k][g], 8) for g in range(3) for k in range(20)}

    base = [0.01, 0.005, 0.0025]
    return [
        Schedule(rates, peak=base, final=base, total=40, warmup=14, settings={"every": 5, "ramp": 4}),
        Schedule(of(0), peak=base[0], final=base[0], total=40, warmup=4, settings={"ramp": 4}),
        Schedule(of(1), peak=base[1], final=base[1], total=40, warmup=9, settings={"every": 5, "ramp": 4}),
        Schedule(of(2), peak=base[2], final=base[2], total=40, warmup=14, settings={"every": 5, "ramp": 4}),
        Census({f"group {g} step {k}": round(base[g] * (0 if k < 5 * g else min(1.0, (k - 5 * g + 1) / 4)), 8) for g in range(3) for k in range(20)}, tried(numbers), what="rates"),
    ]


# --------------------------------------------------------------------- data
@declare("l/r32")
def packed(m, fn):
    examples = [r for s in range(3) for r in m.make(s)["rows"]][:7]
    examples.append({"input_ids": [9], "labels": [9]})
    examples.append({"input_ids": [7, 8, 9], "labels": [7, 8, 9]})

    def unpack(batch):
        cut = [int(x) for x in batch["cu_seqlens"]]
        return [{k: batch[k][0, a:b] for k in ("input_ids", "position_ids", "labels")} for a, b in zip(cut, cut[1:])]

    def shape():
        b = fn(copy.deepcopy(examples))
        out = {f"cu_seqlens {i}": int(x) for i, x in enumerate(b["cu_seqlens"])}
        return {**out, "max_length": int(b["max_length"]), "int32": int(b["cu_seqlens"].dtype == torch.int32),
                **{k: b[k].shape[1] for k in ("input_ids", "position_ids", "labels")}}

    ends = list(itertools.accumulate([len(e["input_ids"]) for e in examples], initial=0))
    return [
        Collator(fn, examples, rows=False, unpack=unpack, targets=lambda e: [x for x in e["labels"][1:] if x != -100],
                 columns={"input_ids": lambda e: e["input_ids"], "position_ids": lambda e: list(range(len(e["input_ids"]))),
                          "labels": lambda e: [-100] + e["labels"][1:]}),
        Census({**{f"cu_seqlens {i}": x for i, x in enumerate(ends)}, "max_length": max(len(e["input_ids"]) for e in examples), "int32": 1,
                "input_ids": ends[-1], "position_ids": ends[-1], "labels": ends[-1]}, tried(shape), what="boundaries"),
    ]


@declare("l/r33")
def left_padded(m, fn):
    sizes = [5, 1, 26, 20, 9, 3, 17]
    rows = lambda pad: [{"prompt_ids": [(i * 7 + j * 3) % 38 + 1 if j not in (n - 2, n // 2) or n < 5 else pad for j in range(n)], "answer": str(10 + i)}
                        for i, n in enumerate(sizes)]

    def collate(**s):
        def run(examples):
            out = dict(fn(examples, **s))
            out["answer"] = torch.tensor([[int(a)] for a in out["answer"]])
            return out
        return run

    def kept(n):
        return lambda e: e["prompt_ids"][-n:]

    def columns(n):
        return {"input_ids": kept(n), "attention_mask": lambda e: [1] * len(kept(n)(e)), "position_ids": lambda e: list(range(len(kept(n)(e)))),
                "answer": lambda e: [int(e["answer"])]}

    def widths():
        one = lambda n, **s: fn([{"prompt_ids": [3] * n, "answer": "a"}, {"prompt_ids": [4], "answer": "b"}], **s)["input_ids"].shape[1]
        padded = fn([{"prompt_ids": [3] * 6, "answer": "a"}, {"prompt_ids": [4], "answer": "b"}])
        return {"1": one(1), "8": one(8), "9": one(9), "26": one(26), "9 by 4": one(9, multiple=4), "9 cut at 5": one(9, max_length=5, multiple=1),
                "padding on the left": int(padded["attention_mask"][1].tolist() == [0] * 7 + [1])}

    return [
        Collator(collate(), rows(0), pads={"input_ids": 0, "attention_mask": 0, "position_ids": 1}, columns=columns(20)),
        Collator(collate(pad_id=99, max_length=7, multiple=4), rows(99), pads={"input_ids": 99, "attention_mask": 0, "position_ids": 1}, columns=columns(7)),
        Census({"1": 8, "8": 8, "9": 16, "26": 24, "9 by 4": 12, "9 cut at 5": 5, "padding on the left": 1}, tried(widths), what="widths"),
    ]


@declare("l/r34")
def infill(m, fn):
    PRE, SUF, MID = m.PRE, m.SUF, m.MID
    examples = m.make(0)["rows"] + [{"id": "short", "text": "ab"}, {"id": "empty", "text": ""}, {"id": "three", "text": "abc"}]
    numbers = {e["id"]: i for i, e in enumerate(examples)}

    def original(text):
        if not text.startswith(PRE):
            return text
        prefix, rest = text[len(PRE):].split(SUF, 1)
        suffix, middle = rest.split(MID, 1)
        return prefix + middle + suffix

    def padded(texts):
        width = max([len(t) for t in texts] + [1])
        return torch.tensor([[ord(c) for c in t] + [-1] * (width - len(t)) for t in texts])

    def stage(**s):
        def run(rows):
            out = fn(rows, **s)
            return {"text": padded([r["text"] for r in out]), "original": padded([original(r["text"]) for r in out]),
                    "id": torch.tensor([[numbers[r["id"]]] for r in out]), "rewritten": torch.tensor([[int(r["text"].startswith(PRE))] for r in out]),
                    "spm": torch.tensor([[int(r["text"].startswith(PRE + SUF))] for r in out])}
        return run

    codes = lambda t: [ord(c) for c in t]
    always = {"original": lambda e: codes(e["text"]), "id": lambda e: [numbers[e["id"]]]}
    long = lambda e: [int(len(e["text"]) >= 3)]
    pads = {"text": -1, "original": -1}

    def shares():
        many = [{"id": f"d{i}", "text": "abcdef abcdef abcdef" * 3} for i in range(1000)]
        a, b = fn(copy.deepcopy(many)), fn(copy.deepcopy(many), rate=1.0, spm=0.0)
        hit = [r for r in a if r["text"].startswith(PRE)]
        spm = sum(r["text"].startswith(PRE + SUF) for r in hit)
        return {"rewritten about half": int(400 < len(hit) < 600), "about half of them SPM": int(0.4 < spm / max(1, len(hit)) < 0.6),
                "all PSM": int(sum(r["text"].startswith(PRE + SUF) for r in b) < 100), "other fields are kept": int(fn([{"id": "a", "text": "abcd", "z": 3}])[0].get("z") == 3),
                "texts of different splits": int(len({r["text"] for r in b}) > 500)}

    return [
        Collator(stage(), examples, pads=pads, columns=always),
        Collator(stage(rate=1.0, spm=1.0), examples, pads=pads, columns={**always, "rewritten": long, "spm": long}),
        Collator(stage(rate=1.0, spm=0.0), examples, pads=pads, columns={**always, "rewritten": long}),
        Collator(stage(rate=0.0), examples, pads=pads, columns={**always, "text": lambda e: codes(e["text"]), "rewritten": lambda e: [0]}),
        Census({"rewritten about half": 1, "about half of them SPM": 1, "all PSM": 1, "other fields are kept": 1, "texts of different splits": 1}, tried(shares), what="shares"),
    ]


@declare("l/r35")
def useful_prompts(m, fn):
    def group(p, accs):
        return [{"prompt": p, "completion": "c%d" % (100 * p + j), "accuracy": a, "reward": a - 0.01 * (j + 1) - 0.001 * p} for j, a in enumerate(accs)]

    examples = [group(4, [1, 0, 0, 1]), group(2, [0, 0, 0, 1]), group(9, [1, 1, 0, 1]), group(1, [0, 1, 0, 1])]

    def stage(groups):
        rows = [row for rank in zip(*groups) for row in rank]  # rows of a prompt are not adjacent
        kept = {}
        for row in fn(rows, prompts=len(groups)):
            kept.setdefault(row["prompt"], []).append(row)
        return {"prompt": torch.tensor([[p] for p in kept]), "completion": torch.tensor([[int(r["completion"][1:]) for r in rs] for rs in kept.values()]),
                "accuracy": torch.tensor([[r["accuracy"] for r in rs] for rs in kept.values()]),
                "reward": torch.tensor([[r["reward"] for r in rs] for rs in kept.values()], dtype=torch.float64)}

    column = lambda k: lambda g: [r[k] for r in g]
    out = [Collator(stage, examples, columns={"prompt": lambda g: [g[0]["prompt"]], "completion": lambda g: [int(r["completion"][1:]) for r in g],
                                              "accuracy": column("accuracy"), "reward": lambda g: torch.tensor([r["reward"] for r in g], dtype=torch.float64)}),
           Collator(lambda rows: {"completion": torch.tensor([[int(r["completion"][1:])] for r in fn(rows)])}, m.make(1)["rows"], rows=False)]

    name = lambda k, r: f"{k}: prompt {r['prompt']} {r['completion']} {r['accuracy']} {r['reward']}"

    def wanted(rows, prompts):
        order = list(dict.fromkeys(r["prompt"] for r in rows))
        mixed = [p for p in order if len({r["accuracy"] for r in rows if r["prompt"] == p}) > 1][:prompts]
        return [name(k, r) for k, r in enumerate([r for r in rows if r["prompt"] in mixed])]

    for seed, prompts in ((0, 3), (1, 1), (2, 2), (3, 8), (4, 3)):
        rows = m.make(seed)["rows"]
        got = tried_names(lambda: [name(k, r) for k, r in enumerate(fn(copy.deepcopy(rows), prompts=prompts))])
        out.append(Census(wanted(rows, prompts), got, what=f"rows that are kept of {prompts} prompts", once=True))
    plain = [{"prompt": 0, "completion": "c1", "accuracy": 1, "reward": 0.9}, {"prompt": 0, "completion": "c2", "accuracy": 1, "reward": 0.8}]
    out.append(Census({"rows": 0}, tried(lambda: {"rows": len(fn(plain))}), what="rows of prompts that are all right"))
    return out


@declare("l/r36")
def best_fit(m, fn):
    sizes = [1, 3, 5, 7, 9, 12, 16, 21, 40, 3, 5]
    examples = [{"ids": [1000 * (i + 1) + j for j in range(n)]} for i, n in enumerate(sizes)]

    def stage(capacity):
        def run(rows):
            bins = fn(rows, capacity=capacity)
            return {"ids": torch.tensor([t for b in bins for t in b["ids"]]), "lengths": torch.tensor([n for b in bins for n in b["lengths"]]),
                    "order": torch.tensor([r["ids"][0] // 1000 for r in rows])}
        return run

    def unpack(batch):  # the pieces of a long document are joined, and the documents are put into the order of the examples
        ids, at, pieces = batch["ids"].tolist(), 0, []
        for n in batch["lengths"].tolist():
            pieces.append(ids[at:at + n]); at += n
        if at < len(ids):
            pieces.append(ids[at:])
        own = {k: sorted(p for p in pieces if p and p[0] // 1000 == k) for k in batch["order"].tolist()}
        return [{"ids": torch.tensor([t for p in own[k] for t in p])} for k in batch["order"].tolist()]

    def numbers(rows, capacity):
        bins = fn(copy.deepcopy(rows), capacity=capacity)
        full = [len(b["ids"]) for b in bins]
        return {"tokens": sum(full), "rows above capacity": sum(n > capacity for n in full), "rows whose lengths do not add up": sum(sum(b["lengths"]) != len(b["ids"]) for b in bins),
                "empty pieces or rows": sum(n == 0 for b in bins for n in b["lengths"] + [len(b["ids"])]),
                "pairs of rows that fit into one": sum(a + b <= capacity for a, b in itertools.combinations(full, 2)),
                "pieces": sum(len(b["lengths"]) for b in bins)}

    out = [Collator(stage(c), examples, rows=False, unpack=unpack, columns={"ids": lambda e: e["ids"]}) for c in (16, 6)]
    for seed, c in ((0, 16), (1, 16), (2, 5)):
        rows = m.make(seed)["rows"]; n = [len(r["ids"]) for r in rows]
        out.append(Census({"tokens": sum(n), "rows above capacity": 0, "rows whose lengths do not add up": 0, "empty pieces or rows": 0, "pairs of rows that fit into one": 0,
                           "pieces": sum(-(-k // c) for k in n)}, tried(numbers, rows, c), what="tokens of packed rows"))
    tokens = [{"ids": [100 * i + j for j in range(n)]} for i, n in enumerate([0, 21, 3, 40, 16, 0, 5])]
    out.append(Census([str(t) for r in tokens for t in r["ids"]], tried_names(lambda: [str(t) for b in fn(copy.deepcopy(tokens)) for t in b["ids"]]), what="tokens", once=True))
    out.append(Census({"rows": 0}, tried(lambda: {"rows": len(fn([{"ids": []}]))}), what="rows of an empty document"))
    return out


# ------------------------------------------------------------ ranks, seeds
@declare("l/r37")
def padded_accuracy(m, fn):
    def metric(shards):
        full = [int(x) for s in shards for x in s.flatten().tolist()]
        ranks, size = len(shards), len(full)
        wrapped = [full[i % size] for i in range(-(-size // ranks) * ranks)]
        return fn([{"correct": wrapped[r::ranks], "size": size} for r in range(ranks)])

    single = lambda shards: float(torch.cat([s.flatten() for s in shards]).double().mean())
    four = lambda shards: metric(list(shards) + [shards[0][:0]] * (4 - len(shards)))  # four ranks, whatever the cut
    return [Ranks(metric=metric, rows=torch.tensor([1.0, 1, 0, 1, 0, 0, 0]), single=single),
            Ranks(metric=metric, rows=torch.tensor([0.0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1]), single=single),
            Ranks(metric=four, rows=torch.tensor([1.0, 0, 0, 1, 0]), single=single)]


@declare("l/r38")
def deviation(m, fn):
    def single(shards):
        v = torch.cat([s.flatten() for s in shards]).double()
        return float((v - v.mean()).pow(2).sum().div(len(v) - 1).sqrt())

    lists = lambda shards: [s.flatten().tolist() for s in shards]
    torch.manual_seed(0)
    rows = torch.randn(11, dtype=torch.float64) + torch.arange(11, dtype=torch.float64) / 2
    return [Ranks(metric=lambda s: fn(lists(s)), rows=rows, single=single),
            Ranks(metric=lambda s: fn(lists(s)), rows=rows + 1e6, single=single),
            Ranks(metric=lambda s: fn([[]] + lists(s) + [[]]), rows=rows, single=single),
            Ranks(metric=lambda s: fn([[x] for x in lists(s)[0]] + lists(s)[1:]), rows=rows, single=single),
            Census({"none": 0.0, "one": 0.0, "one and an empty rank": 0.0, "no ranks": 0.0, "two": round(math.sqrt(2), 6), "two ranks": round(math.sqrt(2), 6)},
                   tried(lambda: {"none": fn([[], []]), "one": fn([[3.0]]), "one and an empty rank": fn([[], [3.0]]), "no ranks": fn([[]]),
                                  "two": round(fn([[1.0, 3.0]]), 6), "two ranks": round(fn([[1.0], [], [3.0]]), 6)}), what="deviations of few")]


@declare("l/r39")
def replicated_seed(m, fn):
    one = lambda v: torch.tensor([v])
    many = [(r, s, tp) for tp in (1, 2, 4) for r in range(8) for s in range(3)]
    replicas = sorted({(r // 2, s) for r in range(8) for s in range(8)})
    return [
        Ranks(draw=lambda k: one(fn(2 * k, 3))),  # data-parallel replicas
        Ranks(draw=lambda k: one(fn(2 * k + 1, 3))),
        Ranks(draw=lambda k: one(fn(4 * k, 3, tp=4))),
        Ranks(draw=lambda k: one(fn(k, 3, tp=1))),
        Ranks(draw=lambda k: one(fn(1, k))),  # steps
        Ranks(draw=lambda k: one(fn(2 * k, 10 - k))),  # replicas and steps
        Ranks(draw=lambda k: one(fn(1, 3, base=1234 + k))),
        Census([f"tp {tp} rank {r} step {s}: {tried(fn, r // tp * tp, s, tp=tp)}" for r, s, tp in many],
               [f"tp {tp} rank {r} step {s}: {tried(fn, r, s, tp=tp)}" for r, s, tp in many], what="seeds of a tensor-parallel group"),
        Census({"different seeds": len(replicas)}, tried(lambda: {"different seeds": len({fn(2 * p, s) for p, s in replicas})}), what="seeds of replicas and steps"),
    ]


@declare("l/r40")
def streaming_shuffle(m, fn):
    def order(size, ranks, epoch, seed):
        return [fn(p % ranks, p // ranks, size=size, ranks=ranks, seed=seed) for p in range(epoch * size, (epoch + 1) * size)]

    out = [
        Ranks(draw=lambda r: torch.tensor([fn(r, s) for s in range(9)])),
        Ranks(draw=lambda e: torch.tensor(order(37, 4, e, 7))),  # epochs
        Ranks(draw=lambda k: torch.tensor(order(37, 4, 0, 7 + k))),  # seeds
    ]
    for size, ranks in ((37, 4), (10, 3), (16, 2), (5, 2), (64, 8), (100, 1)):
        wanted = [f"epoch {e} item {i}" for e in range(3) for i in range(size)]
        found = tried_names(lambda: [f"epoch {e} item {i}" for e in range(3) for i in order(size, ranks, e, 7)])
        out.append(Census(wanted, found, what=f"items of an epoch of {size} over {ranks} ranks", once=True))
    return out


# -------------------------------------------------------------------- state
@declare("l/r41")
def popart(m, fn):
    given = m.make(0); hidden, returns = given["hidden"], given["returns"]

    def made(updates=0, **s):
        torch.manual_seed(3)
        x = fn(8, **s)
        for k in range(updates):
            x.update(returns + k)
        return x

    def perturb(x):
        with torch.no_grad():
            for p in x.parameters():
                p.add_(0.3 * torch.randn_like(p))
        x.update(30 + 10 * torch.randn(9))

    def load(x, folder):
        x.load_state_dict(torch.load(folder / "x.pt"))

    def invariant(updates, **s):
        x = made(updates, **s)
        return MergedLayer(outputs=lambda: x(hidden).detach(), merge=lambda: x.update(returns * 1.3 - 20), tolerance=1e-4)

    def mean(average, current, rate):
        out = []
        for a, c in zip(average.double(), current.double()):
            x = fn(8, beta=rate); x.mu.copy_(a); x.nu.copy_(a * a + 1.0)
            x.update(c.reshape(1)); out.append(x.mu.clone())
        return torch.stack(out).to(average.dtype)

    def square(average, current, rate):
        out = []
        for a, c in zip(average.double(), current.double()):
            x = fn(8, beta=rate); x.nu.copy_(a + 100.0)
            x.update((c + 100.0).sqrt().reshape(1)); out.append(x.nu - 100.0)
        return torch.stack(out).to(average.dtype)

    def start():
        x = fn(8); flat = fn(8, beta=1.0, floor=0.5)
        flat.update(torch.full((4,), 2.0))
        y = made(3); t = y.targets(returns).double() * y.sigma() + y.mu
        before = made(); old = before.normalised(hidden); before.update(returns)
        return {"mu": float(x.mu), "nu": float(x.nu), "deviation at the floor": float(flat.sigma()), "targets are the returns, normalised": int(torch.allclose(t, returns.double(), rtol=1e-4)),
                "normalised output follows": int(not torch.allclose(old, before.normalised(hidden), rtol=1e-2)),
                "sigma": round(float(made(0).sigma()), 6), "saved": len(x.state_dict())}

    model = made(2)
    return [
        invariant(0), invariant(60), invariant(5, beta=0.5),
        RoundTrip(make=lambda: fn(8), perturb=perturb, save=lambda x, folder: torch.save(x.state_dict(), folder / "x.pt"), load=load,
                  outputs=lambda x: torch.cat([x(hidden), x.normalised(hidden), x.targets(returns)]).detach()),
        Ema(mean, size=2, rate=0.05), Ema(square, size=2, rate=0.05),
        Step(model=model, loss=lambda mo, b: (mo.normalised(b["hidden"]) - mo.targets(b["returns"])).pow(2).mean(), batch={"hidden": hidden, "returns": returns},
             roles={"returns": "returns"}, reduction="mean", value_is_loss=True, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
             paths={"in units of the returns": lambda mo, b: ((mo(b["hidden"]) - b["returns"]) / mo.sigma().to(b["returns"].dtype)).pow(2).mean()}),
        Census({"mu": 0.0, "nu": 1.0, "deviation at the floor": 0.5, "targets are the returns, normalised": 1, "normalised output follows": 1, "sigma": 1.0, "saved": 4},
               tried(start), what="the head's statistics"),
    ]


@declare("l/r42")
def rotary(m, fn):
    given = m.make(0); q, positions = given["q"], given["positions"]
    torch.manual_seed(5); k = torch.randn_like(q)

    def scores():
        x, at = fn(8), [0]

        def outputs():
            p = positions + at[0]
            return x(q, p) @ x(k, p).transpose(-1, -2)

        def shift():
            at[0] += 37
        return MergedLayer(outputs=outputs, merge=shift, tolerance=1e-4)

    def rotate(examples):
        return {"out": fn(8)(torch.stack([e[0] for e in examples]), torch.stack([e[1] for e in examples]))}

    examples = [(torch.randn(3, 5, 8), torch.randint(0, 30 * (i + 1), (5,))) for i in range(5)]

    def facts(base):
        x = fn(8, base=base)
        out = {}
        for i in range(8):
            e = torch.zeros(1, 1, 1, 8); e[..., i] = 1.0
            y = x(e, torch.tensor([[3]])).flatten()
            out.update({f"{i} -> {j}": round(float(y[j]), 4) + 0.0 for j in range(8)})
        return out

    def wanted(base):
        out = {}
        for i in range(8):
            y = [0.0] * 8; a = 3 * base ** (-2 * (i % 4) / 8)
            y[i] = math.cos(a); y[(i + 4) % 8] = math.sin(a) * (1 if i < 4 else -1)
            out.update({f"{i} -> {j}": round(y[j], 4) + 0.0 for j in range(8)})
        return out

    def forms():
        x = fn(8)
        y = x(q.bfloat16(), positions)
        return {"keys of the state dict": len(x.state_dict()), "parameters": len(list(x.parameters())), "bf16 stays": int(y.dtype == torch.bfloat16), "fp32 stays": int(x(q, positions).dtype == torch.float32),
                "position 0 changes": float((x(q, positions * 0) - q).abs().max())}

    cast = lambda x: x.to(torch.bfloat16)
    cast_far = lambda x: (x.to(torch.bfloat16), x(q.bfloat16(), positions + 300))
    return [
        FirstCall(make=lambda: fn(8), call=lambda x: x(q, positions), train=lambda x: x(q, positions + 500)),
        FirstCall(make=lambda: fn(8), call=lambda x: x(q, positions + 100), train=lambda x: x(q, positions * 0)),
        FirstCall(make=lambda: fn(8), call=lambda x: x(q, positions), train=cast),
        FirstCall(make=lambda: fn(8, base=500.0), call=lambda x: x(q, positions), train=cast_far),
        scores(),
        Collator(rotate, examples),
        Census(wanted(10000.0), tried(facts, 10000.0), what="rotations"), Census(wanted(500.0), tried(facts, 500.0), what="rotations"),
        Census({"keys of the state dict": 0, "parameters": 0, "bf16 stays": 1, "fp32 stays": 1, "position 0 changes": 0.0}, tried(forms), what="forms"),
    ]


# ------------------------------------------------------------------ graders
@declare("l/r43")
def boxed(m, fn):
    box = lambda s: "So the answer is \\boxed{%s}." % s
    grade = lambda gold: lambda text: fn({"answer": gold}, text)
    broken = ["\\boxed{", "\\boxed", "boxed{3/4}", box(""), box("{"), box("/"), box("-"), box("%"), box("."), box("\\frac{3}{0}"), box("3/0"), box("--")]
    out = [
        Grader(grade("3/4"), right=[box(s) for s in ("3/4", "\\frac{3}{4}", "\\dfrac{3}{4}", "0.75", ".75", "75\\%", "75%", " 3 / 4 ", "$3/4$", "6/8", "0.750", "\\frac{6}{8}")]
               + ["First \\boxed{0}, but then \\boxed{3/4}.", "\\boxed{\\frac{3}{4}} is it"],
               wrong=["3/4", "The answer is 3/4.", "First \\boxed{3/4}, but then \\boxed{0}.", "\\boxed{3/4", "\\boxed{1} \\boxed{3/4"]
               + [box(s) for s in ("4/3", "-3/4", "75", "0.7500000000000000000001", "3/40", "13/4", "0.75x", "3", "\\frac{4}{3}", "x")] + broken, question="What is 3/4 of one?"),
        Grader(grade("1/3"), right=[box("1/3"), box("\\frac{1}{3}"), box("\\frac{2}{6}")], wrong=[box("0.3333333333333333"), box("0.333333333333333333333333"), box("33.3%"), box("0.33")]),
        Grader(grade("1,234"), right=[box("1234"), box("1,234"), box("$1,234$"), box("1234.0")], wrong=[box("1.234"), box("1"), box("234"), box("12345"), "1234"]),
        Grader(grade("0.5"), right=[box("50\\%"), box("1/2"), box("\\frac{1}{2}"), box(".5")], wrong=[box("50"), box("5"), box("0.05"), box("-0.5")]),
        Grader(grade("-\\frac{1}{2}"), right=[box("-1/2"), box("-0.5"), box("-\\frac{1}{2}"), box("\\frac{-1}{2}")], wrong=[box("1/2"), box("\\frac{1}{2}"), box("-2")]),
        Grader(grade("x^2"), right=[box("x^2"), box(" x ^2"), box("$x^2$"), "\\boxed{x} no \\boxed{x^2}"], wrong=[box("X^2"), box("x"), box("x^3"), box("x^2+1"), "x^2", box("")] + broken[:2], question="Differentiate x^3/3."),
        Grader(grade("\\sqrt{x_{1}}"), right=[box("\\sqrt{x_{1}}")], wrong=[box("\\sqrt{x_{2}}"), box("\\sqrt{x_{1"), box("\\sqrt")]),
    ]
    exact = lambda: {"right": fn({"answer": "3/4"}, box("0.75")), "wrong": fn({"answer": "3/4"}, box("0.7")), "no box": fn({"answer": "3/4"}, "3/4"), "text": fn({"answer": "A"}, box("A")),
                     "case": fn({"answer": "A"}, box("a")), "zero": fn({"answer": "1/0"}, box("1/0"))}
    out.append(Census({"right": 1.0, "wrong": 0.0, "no box": 0.0, "text": 1.0, "case": 0.0, "zero": 1.0}, tried(exact), what="rewards"))
    return out


@declare("l/r44")
def soft_length(m, fn):
    row = {"answer": "7"}
    fixed = lambda n: lambda text: fn(row, {"text": text, "ids": [3] * n})
    by_words = lambda text: fn(row, {"text": text, "ids": [3] * len(text.split())})
    said = lambda n, last="7": " ".join(["w"] * (n - 1) + [last])
    right, wrong = ["so it is 7", "so it is 7.", "7", "7!", "not 8 but 7"], ["so it is 8", "7 or 8", "17", "77", "so it is", "7 is not it"]
    out = [Grader(fixed(n), right=right, wrong=wrong, question="What is 3 + 4?") for n in (5, 17, 40)]
    for k in (12, 15, 19):
        out.append(Grader(by_words, right=[said(n) for n in (k - 1, k)], wrong=[said(n) for n in (k + 1, k + 4, 30)] + [said(5, "8")], question="What is 3 + 4?"))
    small = lambda text: fn(row, {"text": text, "ids": [3] * len(text.split())}, limit=10, buffer=4)
    out.append(Grader(small, right=[said(3), said(6)], wrong=[said(7), said(9), said(10), said(12), said(3, "8")], question="What is 3 + 4?"))
    values = lambda: {**{f"right {n}": fn(row, {"text": "it is 7", "ids": [1] * n}) for n in (1, 11, 12, 13, 16, 19, 20, 21, 50)},
                      **{f"wrong {n}": fn(row, {"text": "it is 8", "ids": [1] * n}) for n in (1, 12, 16, 20, 50)}, "empty": fn(row, {"text": "", "ids": []}),
                      "limit 10 buffer 4": fn(row, {"text": "7", "ids": [1] * 8}, limit=10, buffer=4)}
    length = lambda n: -min(1.0, max(0.0, (n - 12) / 8))
    out.append(Census({**{f"right {n}": 1.0 + length(n) for n in (1, 11, 12, 13, 16, 19, 20, 21, 50)}, **{f"wrong {n}": -1.0 + length(n) for n in (1, 12, 16, 20, 50)},
                       "empty": -1.0, "limit 10 buffer 4": 0.5}, tried(values), what="rewards"))
    return out


# ------------------------------------------------------------ chat template
@declare("l/r45")
def reasoning_template(m, fn):
    header = [m.START] + list(b"assistant\n")
    prompt = lambda messages: list(fn(messages)[0]) + header
    say = lambda role, content: {"role": role, "content": content}
    one = [say("system", "be brief"), say("user", "q0"), say("assistant", "<think>t0</think>call0"), say("tool", "r0"), say("assistant", "<think>u0</think>a0")]
    short = [say("user", "why"), say("assistant", "because")]
    more = [say("system", "be brief"), say("user", "q0"), say("assistant", "<think>t0</think>call0"), say("tool", "r0"), say("assistant", "<think>u0</think>a0"),
            say("user", "q1"), say("assistant", "<think>t1</think>call1"), say("tool", "r1"), say("assistant", "<think>u1</think>a1")]
    plain = [say("user", "q0"), say("assistant", "a0"), say("user", "q1"), say("assistant", "a1")]

    def text(ids):
        return "".join({256: "[S]", 257: "[E]"}.get(t) or chr(t) for t in ids)

    def facts():
        ids, mask = fn(copy.deepcopy(more))
        none, zero = fn([say("system", "s"), say("assistant", "<think>t</think>a")])
        return ["rendered " + text(ids), "supervised " + text(t for t, w in zip(ids, mask) if w), f"lengths {len(ids) - len(mask)}", "without user " + text(none), f"supervised without user {sum(zero)}"]

    turn = lambda role, body: f"[S]{role}\n{body}[E]\n"
    wanted = ["rendered " + turn("system", "be brief") + turn("user", "q0") + turn("assistant", "call0") + turn("tool", "r0") + turn("assistant", "a0") + turn("user", "q1")
              + turn("assistant", "<think>t1</think>call1") + turn("tool", "r1") + turn("assistant", "<think>u1</think>a1"),
              "supervised <think>t1</think>call1[E]<think>u1</think>a1[E]", "lengths 0", "without user " + turn("system", "s") + turn("assistant", "<think>t</think>a"), "supervised without user 0"]
    return [
        ChatTemplate(fn, prompt, one, end=m.END),
        ChatTemplate(fn, prompt, short, end=m.END),
        ChatTemplate(fn, prompt, more, end=m.END, prefix=False, trained=(6, 8)),
        ChatTemplate(fn, prompt, plain, end=m.END, trained=(3,)),
        Census(wanted, tried_names(facts), what="renderings"),
    ]


# ------------------------------------------------------------------ sampler
@declare("l/r46")
def self_speculative(m, fn):
    given = m.make(0); model, prompt = given["model"], given["prompt"]

    class Tables(m.TwoExit):
        """Two exits that are tables over the last token: quick, for many draws."""

        def __init__(self):
            super().__init__()
            g = torch.Generator().manual_seed(4)
            self.deep, self.early = torch.randn(6, 6, generator=g), torch.randn(6, 6, generator=g)

        def forward(self, ids, early=False):
            return (self.early if early else self.deep)[ids]

    quick = Tables()

    @torch.no_grad()
    def events(temperature):
        """(place, tokens, probability) under the full model, none of them rare."""
        p0 = (quick(prompt[None])[0, -1] / temperature).softmax(-1)
        p1 = sum(p0[a] * (quick(torch.cat([prompt, torch.tensor([a])])[None])[0, -1] / temperature).softmax(-1) for a in range(len(p0)))
        out = []
        for place, p in ((0, p0), (1, p1)):
            common = [t for t in range(len(p)) if float(p[t]) >= 0.08]
            rest = [t for t in range(len(p)) if t not in common]
            out += [(place, {t}, float(p[t])) for t in common]
            if rest and float(p[rest].sum()) >= 0.08:
                out.append((place, set(rest), float(p[rest].sum())))
        return out

    def thinned(temperature, draft, found):
        def f(x):
            seed = int(torch.randint(0, 2 ** 31, ()))
            ids, _ = fn(quick, prompt, seed=seed, new=2, draft=draft, temperature=temperature)
            flat = x.flatten()
            hit = torch.tensor([float(int(ids[w[0]]) in w[1]) / w[2] for w in (found[i % len(found)] for i in range(len(flat)))], dtype=x.dtype)
            return (flat * hit).reshape(x.shape)
        return f

    at = {t: events(t) for t in (1.0, 0.6, 1.7)}

    def lengths():
        out = {}
        for new, draft in ((1, 3), (4, 1), (6, 3), (7, 5)):
            ids, lp = fn(model, prompt, seed=1, new=new, draft=draft)
            out[f"{new} by {draft}"] = len(ids) + len(lp)
        return out

    saved = [p.detach().clone() for p in model.parameters()]

    def undo():
        with torch.no_grad():
            for p, q in zip(model.parameters(), saved):
                p.copy_(q)

    def perturb():
        g = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.02 * torch.randn(p.shape, generator=g))

    def logps(temperature, seed):
        run = lambda: fn(model, prompt, seed=seed, new=12, temperature=temperature)

        @torch.no_grad()
        def trainer():
            ids = torch.cat([prompt, run()[0]])
            lp = (model(ids[None, :-1])[0] / temperature).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            return lp[len(prompt) - 1:]
        return WeightSync(perturb=perturb, push=lambda: None, trainer=trainer, sampler=lambda: run()[1], undo=undo)

    return [
        Unbiased(lambda x, s: thinned(1.0, int(s), at[1.0])(x), settings=(1, 3), draws=2000),
        Unbiased(lambda x, s: thinned(s, 3, at[s])(x), settings=(0.6, 1.7), draws=2000),
        Ranks(draw=lambda r: fn(model, prompt, seed=r, new=24)[0]),
        logps(1.0, 3), logps(0.6, 4),
        Census({"1 by 3": 2, "4 by 1": 8, "6 by 3": 12, "7 by 5": 14}, tried(lengths), what="numbers of tokens and log-probs"),
    ]


# ----------------------------------------------------------------- adapters
def stir(x):
    g = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for p in x.parameters():
            if p.requires_grad:
                p.add_(0.2 * torch.randn(p.shape, generator=g))
    return x


def shake(x):
    with torch.no_grad():
        for p in x.parameters():
            if p.requires_grad:
                p.add_(0.2 * torch.randn_like(p))


def put(x, folder):
    torch.save(x.state_dict(), folder / "x.pt")


def get(x, folder):
    x.load_state_dict(torch.load(folder / "x.pt"))


@declare("l/r47")
def dora(m, fn):
    x = m.make(0)["x"]
    torch.manual_seed(2); y = torch.randn(7, 5)
    base = lambda: m.make(0)["base"]

    def attach(**s):
        def run(model):
            model[0] = fn(model[0], **s)
        return run

    def merged(b, **s):
        layer = stir(fn(b, **s)); now = [layer]

        def merge():
            now[0] = layer.merge()
        return MergedLayer(outputs=lambda: now[0](x).detach(), merge=merge)

    loss = lambda mo, b: F.mse_loss(mo(b["x"]), b["y"])

    def definition(scale):
        def path(mo, b):
            v = mo.base.weight + scale * mo.B @ mo.A
            w = mo.magnitude[:, None] * v / v.norm(dim=1, keepdim=True).detach()
            return F.mse_loss(F.linear(b["x"], w, mo.base.bias), b["y"])
        return path

    def step(layer, scale, **more):
        return Step(model=layer, loss=loss, batch={"x": x, "y": y}, reduction="mean", value_is_loss=False, paths={"definition": definition(scale)},
                    optimizer=torch.optim.Adam([p for p in layer.parameters() if p.requires_grad], lr=1e-2), **more)

    def start():
        layer = fn(base())
        loss(layer, {"x": x, "y": y}).backward()
        return {"A": int(bool(layer.A.grad is not None and layer.A.grad.any())), "B": int(bool(layer.B.grad.any())), "magnitude": int(bool(layer.magnitude.grad.any())),
                "frozen": sum(p.grad is not None for p in layer.base.parameters()), "merge is an nn.Linear": int(type(layer.merge()) is nn.Linear)}

    return [
        AdapterStart(model=nn.Sequential(base()), attach=attach(), outputs=lambda mo: mo(x)),
        AdapterStart(model=nn.Sequential(base()), attach=attach(rank=3, alpha=1.0), outputs=lambda mo: mo(x)),
        merged(base()), merged(nn.Linear(6, 5, bias=False), rank=3, alpha=1.0),
        step(stir(fn(base())), 2.0), step(stir(fn(base(), rank=4, alpha=2.0)), 0.5), step(fn(base()), 2.0, may_idle=("A",), name="the fresh adapter"),
        RoundTrip(make=lambda: fn(nn.Linear(6, 5)), perturb=shake, save=put, load=get, outputs=lambda l: l(x).detach()),
        Census(["A", "B", "magnitude"], tried_names(lambda: [n for n, p in fn(base()).named_parameters() if p.requires_grad]), what="trained parameters"),
        Census({"A": 0, "B": 1, "magnitude": 1, "frozen": 0, "merge is an nn.Linear": 1}, tried(start), what="gradients at the start"),
    ]


@declare("l/r48")
def pissa(m, fn):
    x = m.make(0)["x"]
    torch.manual_seed(2); y = torch.randn(7, 5)
    base = lambda: m.make(0)["base"]

    def attached(**s):
        now = [base()]

        def attach():
            now[0] = fn(base(), **s)
        return MergedLayer(outputs=lambda: now[0](x).detach(), merge=attach, tolerance=1e-5)

    def exported(**s):
        layer, plain = stir(fn(base(), **s)), base()
        now = [lambda: layer(x)]

        def export():
            a, b = layer.export_lora()
            now[0] = lambda: plain(x) + x @ a.T @ b.T
        return MergedLayer(outputs=lambda: now[0]().detach(), merge=export, tolerance=1e-5)

    loss = lambda mo, b: F.mse_loss(mo(b["x"]), b["y"])
    path = lambda mo, b: F.mse_loss(F.linear(b["x"], mo.base.weight + mo.B @ mo.A, mo.base.bias), b["y"])

    def step(layer, name):
        return Step(model=layer, loss=loss, batch={"x": x, "y": y}, reduction="mean", value_is_loss=True, paths={"residual and adapter in one": path}, name=name,
                    optimizer=torch.optim.Adam([p for p in layer.parameters() if p.requires_grad], lr=1e-2))

    def outputs(l):
        a, b = l.export_lora()
        return torch.cat([l(x).flatten(), (b @ a).flatten()]).detach()

    def facts():
        out = {}
        for rank in (1, 2, 4):
            b = base(); s = torch.linalg.svdvals(b.weight.detach().double())
            layer = fn(b, rank=rank)
            rest = torch.linalg.svdvals(layer.base.weight.detach().double())
            out.update({f"rank {rank}, largest of the residual": int(abs(float(rest[0] - s[rank])) < 1e-4), f"rank {rank}, rows of A": len(layer.A), f"rank {rank}, columns of B": layer.B.shape[1],
                        f"rank {rank}, same wrapped layer": int(layer.base is b)})
        return out

    wanted = {}
    for rank in (1, 2, 4):
        wanted.update({f"rank {rank}, largest of the residual": 1, f"rank {rank}, rows of A": rank, f"rank {rank}, columns of B": rank, f"rank {rank}, same wrapped layer": 1})
    return [
        attached(), attached(rank=4), exported(), exported(rank=3),
        step(fn(base()), "the fresh adapter"), step(stir(fn(base())), "the trained adapter"),
        RoundTrip(make=lambda: fn(nn.Linear(6, 5)), perturb=shake, save=put, load=get, outputs=outputs),
        Census(["A", "B"], tried_names(lambda: [n for n, p in fn(base()).named_parameters() if p.requires_grad]), what="trained parameters"),
        Census(["A", "B", "A0", "B0", "base.weight", "base.bias"], tried_names(lambda: list(fn(base()).state_dict())), what="saved tensors"),
        Census(wanted, tried(facts), what="facts of the residual"),
    ]


# --------------------------------------------------------------- advantages
@declare("l/r49")
def leave_one_out(m, fn):
    def facts():
        r, g = m.make(0)["rewards"], m.make(0)["groups"]
        a = fn(r.clone(), g)
        lone = g == 1
        moved = r.clone(); moved[g == 3] += 5.0
        far = r.clone(); far[lone] += 9.0
        return {"alone": float(a[lone].abs().max()), "groups that do not sum to 0": sum(abs(float(a[g == k].sum())) > 1e-5 for k in (0, 3, 7)),
                "mean square of the others is 1": int(abs(float(a[~lone].pow(2).mean()) - 1) < 1e-3), "a constant on a group": int(torch.allclose(fn(moved, g), a, atol=1e-4)),
                "the lone row's reward": int(torch.allclose(fn(far, g), a, atol=1e-6)), "without the lone row": int(torch.allclose(fn(r[~lone], g[~lone]), a[~lone], atol=1e-5)),
                "all alone": float(fn(torch.tensor([1.0, 2.0]), torch.tensor([0, 1])).abs().max()), "equal": float(fn(torch.ones(5), torch.tensor([0, 1, 0, 1, 0])).abs().max()),
                "eps matters": int(not torch.equal(fn(r, g, eps=0.1), a))}

    return [
        AdvantageEstimator(fn, scale="free", over="group", scaled_over="batch"),
        AdvantageEstimator(fn, scale="free", over="group", scaled_over="batch", groups=4, size=3, seed=1),
        Census({"alone": 0.0, "groups that do not sum to 0": 0, "mean square of the others is 1": 1, "a constant on a group": 1, "the lone row's reward": 1, "without the lone row": 1,
                "all alone": 0.0, "equal": 0.0, "eps matters": 1}, tried(facts), what="properties for groups of different size"),
    ]


@declare("l/r50")
def pass_at_k(m, fn):
    def by_subsets(rewards, k):
        n = len(rewards)
        subsets = [(s, max(rewards[i] for i in s)) for s in itertools.combinations(range(n), k)]
        mean = sum(v for _, v in subsets) / len(subsets)
        std = math.sqrt(sum((v - mean) ** 2 for _, v in subsets) / len(subsets))
        if std == 0:
            return [0.0] * n
        own = [[v for s, v in subsets if i in s] for i in range(n)]
        return [(sum(v) / len(v) - mean) / std for v in own]

    groups = [[1, 0, 0, 0], [0, 1, 0, 1, 0, 0], [0, 0, 0], [1, 1, 0], [0, 0, 1, 0, 0]]
    flat = [(g, i, float(r)) for g, rs in enumerate(groups) for i, r in enumerate(rs)]
    flat = flat[::2] + flat[1::2]  # rows of a group are not adjacent

    def facts(k):
        a = fn(torch.tensor([r for *_, r in flat]), torch.tensor([10 * g + 3 for g, *_ in flat]), k=k)
        return {f"group {g} row {i}": round(float(v), 3) + 0.0 for (g, i, _), v in zip(flat, a)}

    def wanted(k):
        return {f"group {g} row {i}": round(by_subsets(groups[g], k)[i], 3) + 0.0 for g, i, _ in flat}

    return [
        AdvantageEstimator(fn, scale="free", over="group", values=(0.0, 1.0)),
        AdvantageEstimator(lambda r, g: fn(r, g, k=3), scale="free", over="group", values=(0.0, 1.0), size=6, seed=1),
        Census(wanted(2), tried(facts, 2), what="advantages by the k-subsets, k = 2"),
        Census(wanted(3), tried(facts, 3), what="advantages by the k-subsets, k = 3"),
    ]
