import itertools
import math
import random
from collections import Counter

import torch

from earnest_audit import Census, Collator, Ranks, Schedule
from tests.audit.reading2026g.reading import declare, no_subject


# ---------------------------------------------------------------- schedules
def both(rates, extra, **fields):
    """The run of `total` steps, and a run that goes on after the schedule's end, where the final rate is held."""
    total = fields.pop("total")
    ends = fields.pop("ends", None)
    plain = Schedule(rates=lambda n, ranks, **s: rates(n, n, **s), total=total, **fields, **({"ends": ends} if ends else {}))
    longer = Schedule(rates=lambda n, ranks, **s: rates(n - extra, n, **s), total=total + extra, ends=ends or total, **fields)
    return [plain, longer]


@declare("o/r01")
def one_minus_sqrt(m, fn):
    def rates(total, steps, **s):
        return [fn(k, total=total, **s) for k in range(steps)]

    return both(rates, 50, total=1000, peak=3e-4, final=0.0, warmup=100,
                settings={"peak": 3e-4, "warmup": 100, "cooldown": 200})


@declare("o/r02")
def layerwise(m, fn):
    def rates(total, steps, **s):
        given = m.make(0)
        opt = given["optimizer"]
        sched = fn(opt, total=total, **s)
        out = []
        for _ in range(steps):
            out.append([g["lr"] for g in opt.param_groups])
            opt.step()
            sched.step()
        return out

    depths = [g["depth"] for g in m.make(0)["optimizer"].param_groups]
    peaks = [0.1 * 0.5 ** (max(depths) - d) for d in depths]
    return both(rates, 10, total=100, peak=peaks, final=[0.0] * len(peaks), warmup=10, settings={"decay": 0.5, "warmup": 10})


@declare("o/r03")
def cyclic_kl(m, fn):
    def rates(total, steps, **s):
        return [fn(k, total=total, **s) for k in range(steps)]

    return both(rates, 10, total=1000, ends=875, peak=1.0, final=1.0, warmup=125, restarts=True,
                settings={"cycles": 4, "ramp": 0.5})


@declare("o/r04")
def onecycle_momentum(m, fn):
    # how far the momentum is below its upper end: 0 -> 0.1 at the turning point -> 0
    def rates(total, ranks, **s):
        return [0.95 - fn(k, total=total, **s) for k in range(total)]

    return Schedule(rates=rates, total=200, peak=0.1, final=0.0, warmup=59,
                    settings={"pct_start": 0.3, "high": 0.95, "low": 0.85})


@declare("o/r05")
def teacher_momentum(m, fn):
    # 1 - m, the weight of the student: 0.004 at step 0, falls to 0 at total and stays
    def rates(total, steps, **s):
        return [1.0 - fn(k, total=total, **s) for k in range(steps)]

    return both(rates, 100, total=500, peak=0.004, final=0.0, warmup=0, settings={"base": 0.996})


@declare("o/r06")
def adafactor_beta2(m, fn):
    # 1 - beta2 = t ** -power, the weight of the new square: 1 at the first step, falls, no total length
    def rates(total, ranks, **s):
        return [1.0 - fn(k, **s) for k in range(total)]

    return Schedule(rates=rates, total=40, peak=1.0, final=40.0 ** -0.8, warmup=0, settings={"power": 0.8})


@declare("o/r07")
def competence(m, fn):
    def rates(total, ranks, **s):
        return [fn(k, **s) for k in range(total)]

    return Schedule(rates=rates, total=600, peak=1.0, final=1.0, warmup=400, settings={"c0": 0.01, "length": 400})


@declare("o/r08")
def relora(m, fn):
    def rates(total, steps, **s):
        return [fn(k, total=total, **s) for k in range(steps)]

    return both(rates, 10, total=1000, peak=1e-3, final=1e-4, warmup=50, restarts=True,
                settings={"peak": 1e-3, "warmup": 50, "every": 200, "rewarm": 20, "floor": 0.1})


# ---------------------------------------------------------------- data stages
def L(values):
    return torch.tensor(list(values), dtype=torch.long)


def padded(lists, pad=0):
    w = max([len(x) for x in lists] + [1])
    return torch.tensor([list(x) + [pad] * (w - len(x)) for x in lists], dtype=torch.long)


def codes(text):
    return [ord(c) + 1 for c in text]


@declare("o/r09")
def fim(m, fn):
    P, S, M = "<PRE>", "<SUF>", "<MID>"

    def undo(text):
        if not text.startswith(P):
            return text
        try:
            head, mid = text.split(M)
            p, s = head[len(P):].split(S)
            return p + mid + s
        except ValueError:
            return "#broken " + text

    def stage(**settings):
        def run(examples):
            out = fn(examples, **settings)
            return {
                "id": L(r["id"] for r in out)[:, None],
                "text": padded([codes(r["text"]) for r in out]),
                "original": padded([codes(undo(r["text"])) for r in out]),
                "form": L(r["text"].startswith(P) for r in out)[:, None],
                "spm": L(r["text"].startswith(P + S) for r in out)[:, None],
                "signs": torch.tensor([[r["text"].count(x) for x in (P, S, M)] for r in out]),
            }
        return run

    rows = m.make(0)["rows"][:48]
    pads = {"text": 0, "original": 0}
    base = {"id": lambda e: L([e["id"]]), "original": lambda e: L(codes(e["text"]))}
    one = lambda e: L([1])
    three = lambda e: L([1, 1, 1])

    def draw(rank):
        out = fn([{"id": 1000 + rank, "text": "abcdef \n" * 40}], rate=1.0, seed=7)
        return L((codes(out[0]["text"]) + [0] * 400)[:400])

    def draw_seed(seed):
        out = fn([{"id": i, "text": "abcdef \n" * 40} for i in range(4)], rate=1.0, seed=seed)
        return L(v for r in out for v in (codes(r["text"]) + [0] * 400)[:400])

    return [
        Collator(stage(), rows, pads=pads, columns=base),
        Collator(stage(rate=0.0), rows, pads=pads, columns={
            **base, "text": lambda e: L(codes(e["text"])), "signs": lambda e: L([0, 0, 0])}),
        Collator(stage(rate=1.0, spm=1.0), rows, pads=pads, columns={**base, "form": one, "spm": one, "signs": three}),
        Collator(stage(rate=1.0, spm=0.0), rows, pads=pads, columns={**base, "form": one, "signs": three}),
        Ranks(draw=draw),
        Ranks(draw=draw_seed),
    ]


@declare("o/r10")
def mlm(m, fn):
    pads = {"input_ids": 0, "labels": -100, "attention_mask": 0, "restored": 0}

    def stage(**settings):
        def run(examples):
            b = dict(fn(examples, **settings))
            inp, lab = b["input_ids"], b["labels"]
            trained = lab != -100
            restored = torch.where(trained, lab, inp)
            b["restored"] = restored
            b["special"] = (trained & (restored < 4)).sum(1, keepdim=True)
            b["outside"] = (trained & ~((inp == 3) | ((inp >= 4) & (inp < 50)))).sum(1, keepdim=True)
            return b
        return run

    def shares(examples):
        b = fn(examples)
        inp, lab = b["input_ids"], b["labels"]
        trained = lab != -100
        real = (b["attention_mask"] == 1).sum(1) - 2
        n = trained.sum(1)
        near = lambda x, y, d: ((x / y - d[0]).abs() < d[1]).long()[:, None]
        masked = (trained & (inp == 3)).sum(1)
        kept = (trained & (inp == lab)).sum(1)
        return {"trained": near(n, real, (0.15, 0.06)), "masked": near(masked, n.clamp(min=1), (0.8, 0.15)),
                "kept": near(kept, n.clamp(min=1), (0.102, 0.09))}

    base = {
        "restored": lambda e: L(e["ids"]),
        "attention_mask": lambda e: L([1] * len(e["ids"])),
        "special": lambda e: L([0]),
        "outside": lambda e: L([0]),
    }
    rows = m.make(0)["rows"] + m.make(1)["rows"]
    rng = random.Random(5)
    long = [{"id": 900 + i, "epoch": 0, "ids": [1] + [rng.randrange(4, 50) for _ in range(1200)] + [2]} for i in range(3)]
    yes = lambda e: L([1])
    same = [1] + [4 + i % 46 for i in range(100)] + [2]
    return [
        Collator(stage(), rows, pads=pads, columns=base),
        Collator(stage(share=1.0), rows, pads=pads, columns=base, targets=lambda e: [t for t in e["ids"] if t >= 4]),
        Collator(stage(share=0.0), rows, pads=pads, columns={**base, "input_ids": lambda e: L(e["ids"])}, targets=lambda e: []),
        Collator(shares, long, columns={"trained": yes, "masked": yes, "kept": yes}),
        Ranks(draw=lambda rank: fn([{"id": rank, "epoch": 0, "ids": same}])["labels"]),
        Ranks(draw=lambda epoch: fn([{"id": 3, "epoch": epoch, "ids": same}])["labels"]),
        Ranks(draw=lambda seed: fn([{"id": 3, "epoch": 0, "ids": same}], seed=seed)["labels"]),
    ]


@declare("o/r11")
def t5_spans(m, fn):
    pads = {"input_ids": 0, "attention_mask": 0, "labels": -100, "decoder_input_ids": 0, "restored": 0, "sentinels": 0}

    def restore(enc, dec, top=49):
        try:
            assert enc[-1] == 1 and dec[-1] == 1
            enc, dec = enc[:-1], dec[:-1]
            spans, i = [], 0
            for t in dec:
                if t >= 40:
                    assert t == top - i
                    i += 1
                    spans.append([])
                else:
                    spans[-1].append(t)
            assert all(spans) and enc[0] < 40 and enc[-1] >= 40
            out, i = [], 0
            for t in enc:
                if t >= 40:
                    assert t == top - i
                    out += spans[i]
                    i += 1
                else:
                    out.append(t)
            assert i == len(spans)
            return out
        except (AssertionError, IndexError):
            return [77]

    def stage(**settings):
        def run(examples):
            b = dict(fn(examples, **settings))
            inp, att, lab, din = (b[k] for k in ("input_ids", "attention_mask", "labels", "decoder_input_ids"))
            enc = [x[a == 1].tolist() for x, a in zip(inp, att)]
            dec = [y[y != -100].tolist() for y in lab]
            b["restored"] = padded([restore(e, d) for e, d in zip(enc, dec)])
            b["removed"] = L(sum(2 <= t < 40 for t in d) for d in dec)[:, None]
            before = torch.cat([torch.zeros_like(lab[:, :1]), lab[:, :-1]], 1)
            b["unshifted"] = ((lab != -100) & (din != before)).sum(1, keepdim=True)
            return b
        return run

    def counts(e, density, mean):
        n = len(e["ids"])
        noise = min(max(round(n * density), 1), n - 1)
        return n, noise, min(max(round(noise / mean), 1), noise, n - noise)

    def columns(density=0.3, mean=3):
        def attention(e):
            n, noise, spans = counts(e, density, mean)
            return L([1] * (n - noise + spans + 1))
        return {
            "restored": lambda e: L(e["ids"]),
            "removed": lambda e: L([counts(e, density, mean)[1]]),
            "attention_mask": attention,
            "unshifted": lambda e: L([0]),
        }

    rows = m.make(0)["rows"]
    same = [2 + i % 38 for i in range(60)]

    def draw(id, seed):
        return fn([{"id": id, "ids": same}], seed=seed)["input_ids"]

    return [
        Collator(stage(), rows, pads=pads, columns=columns()),
        Collator(stage(density=0.15, mean_span=2), rows, pads=pads, columns=columns(0.15, 2)),
        Ranks(draw=lambda rank: draw(rank, 5)),
        Ranks(draw=lambda seed: draw(1, seed)),
    ]


@declare("o/r12")
def packed_varlen(m, fn):
    keys = ("input_ids", "labels", "position_ids")

    def by_starts(b):
        cu = b["cu_seqlens"].tolist()
        return [{k: b[k][0, s:e] for k in keys} for s, e in zip(cu, cu[1:])]

    def by_positions(b):
        n = b["input_ids"].shape[1]
        starts = [i for i in range(n) if int(b["position_ids"][0, i]) == 0] + [n]
        return [{k: b[k][0, s:e] for k in keys} for s, e in zip(starts, starts[1:])]

    rows = m.make(0)["rows"] + m.make(1)["rows"]
    own = lambda e: list(e.get("labels", e["input_ids"]))
    fields = dict(
        rows=False,
        targets=lambda e: [t for t in own(e)[1:] if t != -100],
        columns={
            "input_ids": lambda e: L(e["input_ids"]),
            "position_ids": lambda e: L(range(len(e["input_ids"]))),
            "labels": lambda e: L([-100] + own(e)[1:]),
        },
    )
    return [Collator(fn, rows, unpack=by_starts, **fields), Collator(fn, rows, unpack=by_positions, **fields)]


@declare("o/r13")
def best_fit(m, fn):
    rows = m.make(0)["rows"]

    def pieces(bins):
        for b in bins:
            for k, (i, o) in enumerate(b["sources"], 1):
                yield i, o, [t for t, s in zip(b["ids"], b["segments"]) if s == k], len(b["ids"])

    def one(window):
        def stage(examples):
            bins = fn(examples, window=window)
            flat = lambda key: L(v for b in bins for v in b[key])
            return {
                "ids": flat("ids"), "segments": flat("segments"),
                "bin": L(n for n, b in enumerate(bins) for _ in b["ids"]),
                "sources": torch.tensor([(n, i, o) for n, b in enumerate(bins) for i, o in b["sources"]]).reshape(-1, 3),
                "order": L(e["id"] for e in examples),
            }

        def unpack(b):
            docs = {}
            for n, i, o in b["sources"].tolist():
                docs.setdefault(i, []).append((o, n))
            out = []
            place = {}
            seen = Counter()
            for n, i, o in b["sources"].tolist():
                seen[n] += 1
                place[i, o, n] = seen[n]
            for i in b["order"].tolist():
                parts = sorted(docs.pop(i, []))
                ids = [b["ids"][(b["bin"] == n) & (b["segments"] == place[i, o, n])] for o, n in parts]
                fits = all(int((b["bin"] == n).sum()) <= window for _, n in parts)
                out.append({"ids": torch.cat(ids) if ids else L([]), "id": L([i]), "offsets": L(o for o, _ in parts),
                            "fits": L([fits])})
            out += [{"ids": L([]), "id": L([i]), "offsets": L([]), "fits": L([0])} for i in docs]
            return out

        return Collator(stage, rows, rows=False, unpack=unpack, columns={
            "ids": lambda e: L(e["ids"]), "id": lambda e: L([e["id"]]),
            "offsets": lambda e: L(range(0, len(e["ids"]), window)), "fits": lambda e: L([1])})

    names = lambda i, o, ids: [f"{i}:{o + j}:{t}" for j, t in enumerate(ids)]
    wanted = [x for r in rows for x in names(r["id"], 0, r["ids"])]
    found = [x for i, o, ids, _ in pieces(fn(rows)) for x in names(i, o, ids)]
    mixed = list(rows)
    random.Random(1).shuffle(mixed)
    as_names = lambda bins: [str((b["ids"], b["segments"], b["sources"])) for b in bins]
    return [one(16), one(7), Census(wanted=wanted, found=found, what="tokens of the bins", once=True),
            Census(wanted=as_names(fn(rows)), found=as_names(fn(mixed)), what="bins of reordered rows")]


@declare("o/r14")
def kto_rotation(m, fn):
    fixed = lambda text: (codes(text) + [0] * 10)[:10]
    keys = ("prompt", "completion", "kl_completion")

    def table(out):
        d = {k: L(v for r in out for v in fixed(r[k])) for k in keys}
        d["label"] = L(int(r["label"]) for r in out)
        return d

    def stage(batch):  # an example is a whole batch of rows: batches are independent and stay in order
        def run(examples):
            out = fn([r for e in examples for r in e], batch=batch)
            parts = [table(out[s:s + batch]) for s in range(0, len(out), batch)]
            return {k: torch.stack([p[k] for p in parts]) for k in parts[0]}
        return run

    def whole(examples):  # an example is a whole data set, whose last batch is short
        parts = [table(fn(e, batch=4)) for e in examples]
        return {k: torch.stack([p[k] for p in parts]) for k in parts[0]}

    def columns(batch):
        def kl(e):
            return L(v for s in range(0, len(e), batch) for i in range(len(e[s:s + batch]))
                     for v in fixed(e[s:s + batch][i - 1]["completion"]))
        return {
            "prompt": lambda e: L(v for r in e for v in fixed(r["prompt"])),
            "completion": lambda e: L(v for r in e for v in fixed(r["completion"])),
            "label": lambda e: L(int(r["label"]) for r in e),
            "kl_completion": kl,
        }

    rows = []
    for seed in range(2):
        rows += [{**r, "completion": f"{r['completion']}s{seed}"} for r in m.make(seed)["rows"]]
    cut = lambda rows, n: [rows[s:s + n] for s in range(0, len(rows) - n + 1, n)]
    return [
        Collator(stage(4), cut(rows, 4), columns=columns(4)),
        Collator(stage(3), cut(rows, 3), columns=columns(3)),
        Collator(whole, [m.make(s)["rows"] for s in range(3)], columns=columns(4)),
    ]


@declare("o/r15")
def goldfish(m, fn):
    def dropped(context, k):
        x = 1469598103934665603
        for t in context:
            x = (x ^ t) * 1099511628211 % (1 << 64)
        x ^= x >> 33
        x = x * 18397679294719823053 % (1 << 64)
        return (x >> 32) % k == 0

    rows = m.make(0)["rows"] + m.make(1)["rows"]

    def one(**s):
        k, h = s.get("k", 4), s.get("h", 5)
        kept = lambda e: [not (j >= h and dropped(e["ids"][j - h:j], k)) for j in range(len(e["ids"]))]

        def run(examples):
            b = dict(fn(examples, **s))
            b["places"] = torch.where(b["attention_mask"] == 1, 1 + (b["labels"] != -100).long(), 0)
            return b

        return Collator(
            run, rows, pads={"input_ids": 0, "labels": -100, "attention_mask": 0, "places": 0},
            targets=lambda e: [t for t, x in zip(e["ids"], kept(e)) if x],
            columns={
                "input_ids": lambda e: L(e["ids"]),
                "attention_mask": lambda e: L([1] * len(e["ids"])),
                "places": lambda e: L(1 + int(x) for x in kept(e)),
            },
        )

    return [one(), one(k=2, h=3)]


@declare("o/r16")
def strided(m, fn):
    rows = m.make(0)["rows"] + m.make(1)["rows"]

    def one(window, stride):
        def run(examples):
            out = fn(examples, window=window, stride=stride)
            return {
                "ids": L(t for r in out for t in r["ids"]), "labels": L(t for r in out for t in r["labels"]),
                "id_row": L(n for n, r in enumerate(out) for _ in r["ids"]),
                "label_row": L(n for n, r in enumerate(out) for _ in r["labels"]),
                "doc": L(r["doc"] for r in out), "start": L(r["start"] for r in out),
            }

        def unpack(b):
            docs = []
            for d in range(int(b["doc"].max()) + 1):
                mine = b["doc"] == d
                docs.append({"ids": b["ids"][mine[b["id_row"]]], "labels": b["labels"][mine[b["label_row"]]],
                             "start": b["start"][mine]})
            return docs

        def starts(e):
            out = [0]
            while out[-1] + window < len(e["ids"]):
                out.append(out[-1] + stride)
            return out

        def labels(e):
            x, out, done = e["ids"], [], 0
            for s in starts(e):
                end = min(s + window, len(x))
                out += [-100] * (done - s) + x[done:end]
                done = end
            return L(out)

        return Collator(run, rows, rows=False, unpack=unpack, targets=lambda e: list(e["ids"]), columns={
            "ids": lambda e: L(t for s in starts(e) for t in e["ids"][s:s + window]),
            "labels": labels, "start": lambda e: L(starts(e))})

    return [one(12, 5), one(8, 7), one(9, 2)]


@declare("o/r17")
def length_grouped(m, fn):
    rows = m.make(0)["rows"]

    def run(examples):
        out = fn(examples)
        return {"ids": L(t for r in out for t in r["ids"]), "row": L(r["id"] for r in out for _ in r["ids"]),
                "id": L(r["id"] for r in out), "order": L(e["id"] for e in examples)}

    def unpack(b):
        known = b["order"].tolist()
        at = sorted(b["id"].tolist(), key=lambda i: known.index(i) if i in known else len(known))
        return [{"id": L([i]), "ids": b["ids"][b["row"] == i]} for i in at]

    def facts(batch, mega):
        out, size = fn(rows, batch=batch, mega=mega), batch * mega
        sizes = [len(r["ids"]) for r in out]
        found = [f"megabatch {s // size} falls" for s in range(0, len(out), size)
                 if all(a >= b for a, b in zip(sizes[s + 1:s + size], sizes[s + 2:s + size]))]
        found += ["the longest row is first"] * (sizes[0] == max(sizes))
        wanted = [f"megabatch {n} falls" for n in range(-(-len(rows) // size))] + ["the longest row is first"]
        return Census(wanted=wanted, found=found, what=f"orders of megabatches of {size}")

    name = lambda r: f"{r['id']}:{r['ids']}"
    return [
        Collator(run, rows, rows=False, unpack=unpack, columns={"id": lambda e: L([e["id"]]), "ids": lambda e: L(e["ids"])}),
        Census(wanted=[name(r) for r in rows], found=[name(r) for r in fn(rows)], what="rows of an epoch", once=True),
        facts(4, 5), facts(3, 4),
        Ranks(draw=lambda epoch: L(r["id"] for r in fn(rows, seed=epoch))),
    ]


# ---------------------------------------------------------------- metrics over ranks
@declare("o/r18")
def perplexity(m, fn):
    g = torch.Generator().manual_seed(3)
    n, t = 11, 9
    scale = torch.linspace(0.3, 6.0, n)[:, None]
    mask = (torch.arange(t)[None] < torch.tensor([9, 2, 7, 1, 5, 9, 3, 0, 8, 2, 6])[:, None]) & (torch.rand(n, t, generator=g) < 0.9)
    rows = torch.stack([torch.rand(n, t, generator=g) * scale, mask.float()], 1)

    def rank(s, wrong=float("nan")):
        mk = s[:, 1].long()
        width = max(1, int((mk.sum(0) > 0).nonzero().max()) + 1 if mk.sum() else 1)
        x, mk = s[:, 0, :width], mk[:, :width]
        return {"nll": torch.where(mk.bool(), x, torch.full_like(x, wrong)), "mask": mk}

    def single(shards):
        x = torch.cat(list(shards))
        return float(x[:, 0][x[:, 1].bool()].double().mean().exp())

    idle = {"nll": torch.full((2, 3), float("inf")), "mask": torch.zeros(2, 3, dtype=torch.long)}
    return [Ranks(metric=lambda shards: fn([rank(s) for s in shards]), rows=rows, single=single),
            Ranks(metric=lambda shards: fn([rank(s, 50.0) for s in shards] + [idle]), rows=rows, single=single)]


@declare("o/r19")
def accuracy_wrapped(m, fn):
    rows = torch.tensor([1, 1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1])[:, None]

    def metric(more):
        def run(shards):
            whole, world = torch.cat(list(shards))[:, 0].long(), len(shards) + more
            n = -(-len(whole) // world)
            idx = torch.arange(n * world) % len(whole)
            return fn([{"correct": whole[idx[r::world]], "size": len(whole)} for r in range(world)])
        return run

    single = lambda shards: float(torch.cat(list(shards)).double().mean())
    return [Ranks(metric=metric(k), rows=rows, single=single) for k in (0, 3)]


@declare("o/r20")
def std_merge(m, fn):
    rows = torch.cat([r["x"] for r in m.make(0)["ranks"]])[:, None]
    single = lambda shards: float(torch.cat(list(shards)).double().reshape(-1).std(unbiased=True))
    of = lambda s: {"x": s.reshape(-1)}

    def ragged(shards):  # with a rank without values and ranks with one value
        out = [{"x": torch.zeros(0)}]
        for s in shards:
            out += [of(s[:1]), of(s[1:]), {"x": torch.zeros(0)}]
        return fn(out)

    return [Ranks(metric=lambda shards: fn([of(s) for s in shards]), rows=rows, single=single),
            Ranks(metric=ragged, rows=rows, single=single)]


@declare("o/r21")
def bleu(m, fn):
    pairs = [p for r in m.make(0)["ranks"] for p in r]
    fill = lambda x: list(x) + [-1] * (24 - len(x))
    rows = torch.tensor([[fill(h), fill(r)] for h, r in pairs])
    cut = lambda x: [int(t) for t in x.tolist() if t >= 0]
    of = lambda s: [(cut(p[0]), cut(p[1])) for p in s]

    def single(shards):
        every = [p for s in shards for p in of(s)]
        logs = 0.0
        for n in range(1, 5):
            grams = lambda x: Counter(tuple(x[i:i + n]) for i in range(len(x) - n + 1))
            hit = sum(min(c, grams(r)[g]) for h, r in every for g, c in grams(h).items())
            tried = sum(max(0, len(h) - n + 1) for h, _ in every)
            if hit == 0:
                return 0.0
            logs += math.log(hit / tried) / 4
        h, r = sum(len(h) for h, _ in every), sum(len(r) for _, r in every)
        return 100 * math.exp(logs + min(0.0, 1 - r / h))

    return [Ranks(metric=lambda shards: fn([of(s) for s in shards]), rows=rows, single=single),
            Ranks(metric=lambda shards: fn([[]] + [of(s) for s in shards] + [[]]), rows=rows, single=single),
            Ranks(metric=lambda shards: fn([[p] for s in shards for p in of(s)]), rows=rows, single=single)]


@declare("o/r22")
def auc(m, fn):
    rows = torch.cat([torch.stack([r["score"], r["label"].float()], 1) for r in m.make(0)["ranks"]])
    of = lambda s: {"score": s[:, 0], "label": s[:, 1].long()}

    def single(shards):
        x = torch.cat(list(shards)).double()
        a, b = x[x[:, 1] == 1, 0][:, None], x[x[:, 1] == 0, 0][None]
        return float(((a > b).double() + 0.5 * (a == b).double()).mean())

    none = {"score": torch.zeros(0), "label": torch.zeros(0, dtype=torch.long)}
    return [Ranks(metric=lambda shards: fn([of(s) for s in shards]), rows=rows, single=single),
            Ranks(metric=lambda shards: fn([none] + [of(s) for s in shards] + [none]), rows=rows, single=single),
            Ranks(metric=lambda shards: fn([of(s) for s in shards]), rows=rows - torch.tensor([7.0, 0.0]), single=single)]


@declare("o/r23")
def grad_norm(m, fn):
    g = torch.Generator().manual_seed(2)
    rows = torch.randn(11, 6, generator=g) * torch.linspace(0.2, 3, 11)[:, None]
    same = [2 * torch.randn(7, generator=g), torch.randn(3, 2, generator=g)]
    of = lambda s: {"sharded": [s[:, :2], s[:, 2:].reshape(-1)], "replicated": [x.clone() for x in same]}
    bare = lambda: {"sharded": [], "replicated": [x.clone() for x in same]}

    def single(shards):
        return float(torch.cat([x.double().reshape(-1) for x in [*shards, *same]]).norm())

    return [Ranks(metric=lambda shards: fn([of(s) for s in shards]), rows=rows, single=single),
            Ranks(metric=lambda shards: fn([bare()] + [of(s) for s in shards] + [bare()]), rows=rows, single=single)]


@declare("o/r24")
def pass_at_k(m, fn):
    rows = torch.tensor([[p, int(ok)] for r in m.make(0)["ranks"] for p, ok in r])
    of = lambda s: [(int(p), bool(ok)) for p, ok in s.tolist()]

    def one(k, empty):
        def single(shards):
            every = [p for s in shards for p in of(s)]
            scores = []
            for prompt in sorted({p for p, _ in every}):
                sets = list(itertools.combinations([ok for p, ok in every if p == prompt], k))
                scores.append(sum(any(s) for s in sets) / len(sets))
            return sum(scores) / len(scores)

        return Ranks(metric=lambda shards: fn([[]] * empty + [of(s) for s in shards], k=k), rows=rows, single=single)

    return [one(3, 0), one(3, 1), one(2, 0), one(1, 0)]


@declare("o/r25")
def vocab_parallel(m, fn):
    x, y, mask = m.make(0, vocab=29)["whole"]
    rows = torch.cat([x, y[:, None].float(), mask[:, None].float()], 1)

    def metric(more):
        def run(shards):  # all tokens on every rank; the vocabulary is what is cut, into as many parts as there are ranks
            whole, world = torch.cat(list(shards)), len(shards) + more
            logits, target, scored = whole[:, :-2], whole[:, -2].long(), whole[:, -1].long()
            cols = -(-logits.shape[1] // world)
            full = torch.nn.functional.pad(logits, (0, cols * world - logits.shape[1]), value=float("-inf"))
            return fn([{"logits": p, "target": target, "mask": scored} for p in full.split(cols, 1)])
        return run

    def single(shards):
        whole = torch.cat(list(shards))
        whole = whole[whole[:, -1] == 1]
        return float(torch.nn.functional.cross_entropy(whole[:, :-2].double(), whole[:, -2].long()))

    return [Ranks(metric=metric(k), rows=rows, single=single) for k in (0, 3)]
