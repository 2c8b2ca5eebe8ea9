import math
from collections import Counter
import torch
from tests.audit.reading2026g.reading import declare, no_subject
from earnest_audit import Schedule, Collator, Ranks, Census


def whole(v, default):  # an integer setting: another value stays another one
    if v == default:
        return default
    n = max(int(round(v)), 1)
    return n if n != default else (default + 1 if v > default else default - 1)


def run(value, total, **kw):
    return Schedule(rates=value, total=total, **kw)


# ---- schedules
@declare("p/r01")
def cooldown(m, fn):
    def rates(total, ranks=1, peak=3e-4, warmup=20, cooldown=0.2, steps=None):
        return [fn(k, peak=peak, warmup=whole(warmup, 20), total=total if steps is None else whole(steps, 500), cooldown=cooldown) for k in range(total)]
    s = {"peak": 3e-4, "warmup": 20, "cooldown": 0.2}
    return [Schedule(rates, peak=3e-4, final=0.0, total=500, warmup=20, settings=s),
            Schedule(rates, peak=3e-4, final=0.0, total=600, warmup=20, ends=500, settings={**s, "steps": 500})]


@declare("p/r02")
def relora(m, fn):
    def rates(total, ranks=1, peak=1e-3, warmup=50, restart=100, rewarm=10, floor=0.1, steps=None):
        return [fn(k, peak=peak, warmup=whole(warmup, 50), restart=whole(restart, 100), rewarm=whole(rewarm, 10),
                   total=total if steps is None else whole(steps, 1000), floor=floor) for k in range(total)]
    s = {"peak": 1e-3, "warmup": 50, "restart": 100, "rewarm": 10, "floor": 0.1}
    return [Schedule(rates, peak=1e-3, final=1e-4, total=1000, warmup=50, restarts=True, settings=s),
            Schedule(rates, peak=1e-3, final=1e-4, total=1100, warmup=50, ends=1000, restarts=True, settings={**s, "steps": 1000})]


@declare("p/r03")
def groups(m, fn):
    def rates(total, ranks=1, warmup=30, bias_start=0.1, final=0.01, steps=None):
        optimizer = m.make(0)["optimizer"]
        s = fn(optimizer, warmup=whole(warmup, 30), total=total if steps is None else whole(steps, 300), bias_start=bias_start, final=final)
        out = []
        for _ in range(total):
            out.append([float(g["lr"]) for g in optimizer.param_groups])
            optimizer.step()
            s.step()
        return out
    top = 0.01 * ((1 - 30 / 300) * (1 - 0.01) + 0.01)  # the decay runs since step 0
    s = {"warmup": 30, "bias_start": 0.1, "final": 0.01}
    kw = dict(peak=(top, 0.1), final=(1e-4, 1e-4), warmup=(30, 0))
    return [Schedule(rates, total=300, settings=s, **kw),
            Schedule(rates, total=360, ends=300, settings={**s, "steps": 300}, **kw)]


@declare("p/r04")
def teacher_momentum(m, fn):  # the student's weight 1 - m falls from 1 - base to 0
    def rates(total, ranks=1, base=0.996, steps=None):
        return [1 - fn(k, base=base, total=total if steps is None else whole(steps, 400)) for k in range(total)]
    return [Schedule(rates, peak=1 - 0.996, final=0.0, total=400, warmup=0, settings={"base": 0.996}),
            Schedule(rates, peak=1 - 0.996, final=0.0, total=480, warmup=0, ends=400, settings={"base": 0.996, "steps": 400})]


@declare("p/r05")
def adafactor_beta2(m, fn):  # the weight of the new square, 1 - beta2 = t^-power
    def rates(total, ranks=1, power=0.8):
        return [1 - fn(k, power=power) for k in range(total)]

    def resumed(total, ranks=1, power=0.8, offset=200):
        return [1 - fn(1000 + k, power=power, offset=whole(offset, 200)) for k in range(total)]
    return [Schedule(rates, peak=1.0, final=200 ** -0.8, total=200, warmup=0, settings={"power": 0.8}),
            Schedule(resumed, peak=801 ** -0.8, final=3800 ** -0.8, total=3000, warmup=0, settings={"power": 0.8, "offset": 200})]


@declare("p/r06")
def cyclical(m, fn):  # the missing weight, 1 - w: falls in each cycle and starts again
    def rates(total, ranks=1, cycles=4, ramp=0.5, top=1.0, steps=None):
        return [1.0 - fn(k, total=total if steps is None else whole(steps, 800), cycles=whole(cycles, 4), ramp=ramp, top=top) for k in range(total)]
    s = {"cycles": 4, "ramp": 0.5, "top": 1.0}
    return [Schedule(rates, peak=1.0, final=0.0, total=800, warmup=0, ends=700, restarts=True, settings=s),
            Schedule(rates, peak=1.0, final=0.0, total=1000, warmup=0, ends=700, restarts=True, settings={**s, "steps": 800})]


@declare("p/r07")
def lengths(m, fn):  # what is missing to the last length: falls from high - low to 0
    def rates(total, ranks=1, low=64, high=1024, ramp=1000, multiple=8, degree=2):
        return [1024.0 - fn(k, low=whole(low, 64), high=whole(high, 1024), ramp=whole(ramp, 1000), multiple=whole(multiple, 8), degree=degree) for k in range(total)]
    return Schedule(rates, peak=1024.0 - 64, final=0.0, total=1200, warmup=0, ends=1000,
                    settings={"low": 64, "high": 1024, "ramp": 1000, "multiple": 8, "degree": 2})


@declare("p/r08")
def batch_ramp(m, fn):  # what is missing to the last batch size
    def rates(total, ranks=1, start=16, increment=16, final=128, ramp_samples=7000):
        start = 16 if start == 16 else 32  # values that keep `increment` a divisor
        increment = 16 if increment == 16 else 8
        final = 128 if final == 128 else 256
        return [128.0 - fn(k, start=start, increment=increment, final=final, ramp_samples=whole(ramp_samples, 7000)) for k in range(total)]
    seen = ends = 0  # a stair per 1000 samples
    while 16 + 16 * (seen // 1000) < 128:
        seen += 16 + 16 * (seen // 1000)
        ends += 1
    return Schedule(rates, peak=128.0 - 16, final=0.0, total=ends + 100, warmup=0, ends=ends,
                    settings={"start": 16, "increment": 16, "final": 128, "ramp_samples": 7000})


@declare("p/r09")
def consistency_weight(m, fn):  # what is missing to top * labelled / samples
    def rates(total, ranks=1, steps_per_epoch=10, ramp_epochs=80, top=30.0, labelled=4000, samples=50000):
        return [2.4 - fn(k, steps_per_epoch=whole(steps_per_epoch, 10), ramp_epochs=whole(ramp_epochs, 80), top=top,
                         labelled=whole(labelled, 4000), samples=whole(samples, 50000)) for k in range(total)]
    return Schedule(rates, peak=2.4, final=0.0, total=1000, warmup=0, ends=800,
                    settings={"steps_per_epoch": 10, "ramp_epochs": 80, "top": 30.0, "labelled": 4000, "samples": 50000})


# ---- data
def table(lists, fill=-1):
    lists = [list(x) for x in lists]
    out = torch.full((len(lists), max([len(x) for x in lists] + [1])), fill, dtype=torch.long)
    for i, x in enumerate(lists):
        out[i, :len(x)] = torch.tensor(x, dtype=torch.long)
    return out


def more(m, n=2):
    rows = []
    for s in range(n):
        rows += [{**r, "index": len(rows) + k} for k, r in enumerate(m.make(s)["rows"])]
    return rows


@declare("p/r10")
def t5(m, fn):
    def one(density, mean_span, vocab, eos, seed):
        def is_sentinel(t):
            return t >= 900

        def restored(row):
            parts, key = {}, None
            for t in row["labels"][:-1]:
                if is_sentinel(t):
                    key = t
                    parts.setdefault(t, [])
                else:
                    parts.setdefault(key, []).append(t)
            out = []
            for t in row["ids"][:-1]:
                out += parts.pop(t, [t]) if is_sentinel(t) else [t]
            return out + [t for v in parts.values() for t in v]

        def stage(examples):
            rows = fn(examples, density=density, mean_span=mean_span, vocab=vocab, eos=eos, seed=seed)
            return {
                "ids": table([r["ids"] for r in rows]), "labels": table([r["labels"] for r in rows]), "index": table([[r["index"]] for r in rows]),
                "restored": table([restored(r) for r in rows]),
                "noise": table([[sum(not is_sentinel(t) for t in r["labels"][:-1])] for r in rows]),
                "source_sentinels": table([[t for t in r["ids"] if is_sentinel(t)] for r in rows]),
                "target_sentinels": table([[t for t in r["labels"] if is_sentinel(t)] for r in rows]),
                "ends": table([[r["ids"][-1], r["labels"][-1]] for r in rows]),
                "clean_first_noise_last": table([[int(not is_sentinel(r["ids"][0])), int(is_sentinel(r["ids"][-2])), int(is_sentinel(r["labels"][0]))] for r in rows]),
            }

        def noise(e):
            n = len(e["ids"])
            return min(max(round(n * density), 1), n - 1)

        def sentinels(e):
            k = min(max(round(noise(e) / mean_span), 1), len(e["ids"]) - noise(e))
            return [vocab - 1 - i for i in range(k)]
        names = ["ids", "labels", "index", "restored", "noise", "source_sentinels", "target_sentinels", "ends", "clean_first_noise_last"]
        return Collator(stage, more(m), pads={n: -1 for n in names}, columns={
            "index": lambda e: [e["index"]], "restored": lambda e: list(e["ids"]), "noise": lambda e: [noise(e)],
            "source_sentinels": sentinels, "target_sentinels": sentinels, "ends": lambda e: [eos, eos], "clean_first_noise_last": lambda e: [1, 1, 1]})
    return [one(0.15, 3.0, 1000, 1, 0), one(0.4, 2.0, 980, 0, 3),
            Ranks(draw=lambda seed: torch.tensor([t for r in fn(more(m), seed=seed) for t in (r["ids"] + [0] * 70)[:70]]).float())]


@declare("p/r11")
def whole_words(m, fn):
    def one(rate, mask_id, pad_id, vocab, epoch):
        def collate(rows):
            out = fn(rows, rate=rate, mask_id=mask_id, pad_id=pad_id, vocab=vocab, epoch=epoch)
            ids, labels = out["input_ids"], out["labels"]
            words, partial, odd = [], [], []
            for i, row in enumerate(rows):
                by = {}
                for t, w in enumerate(row["word"]):
                    by.setdefault(w, []).append(bool(labels[i, t] != -100))
                words.append([sum(any(v) for v in by.values())])
                partial.append([sum(any(v) and not all(v) for v in by.values()) + any(by[-1])])
                new = [int(x) for x, y, t in zip(ids[i], labels[i], row["ids"]) if y != -100 and x != t]
                odd.append([sum(x != mask_id and not 4 <= x < vocab for x in new)])
            return {**out, "restored": torch.where(labels != -100, labels, ids), "words": table(words), "partial": table(partial), "odd": table(odd)}
        return Collator(collate, more(m), pads={"input_ids": pad_id, "labels": -100, "attention_mask": 0, "restored": pad_id}, columns={
            "restored": lambda e: list(e["ids"]), "attention_mask": lambda e: [1] * len(e["ids"]),
            "words": lambda e: [max(1, round(rate * len(set(e["word"]) - {-1})))], "partial": lambda e: [0], "odd": lambda e: [0]})
    return [one(0.15, 3, 0, 50, 0), one(0.5, 60, 99, 50, 2), Ranks(draw=lambda epoch: fn(more(m), epoch=epoch)["input_ids"].float())]


@declare("p/r12")
def fill_in_the_middle(m, fn):
    def one(rate, spm, pre=1, mid=2, suf=3, eod=0, seed=0):
        special = {pre, mid, suf, eod}

        def restored(ids):
            ids = ids[:-1]
            if not (special & set(ids)):
                return ids
            if ids[0] != pre or suf not in ids or mid not in ids or ids.index(mid) < ids.index(suf):
                return [-2] + ids
            a, b = ids.index(suf), ids.index(mid)
            return ids[1:a] + ids[b + 1:] + ids[a + 1:b]

        def stage(examples):
            rows = fn(examples, rate=rate, spm=spm, pre=pre, mid=mid, suf=suf, eod=eod, seed=seed)
            found = [[t for t in r["ids"] if t in special] for r in rows]
            out = {"ids": table([r["ids"] for r in rows]), "index": table([[r["index"]] for r in rows]),
                   "restored": table([restored(list(r["ids"])) for r in rows]), "end": table([[r["ids"][-1]] for r in rows]),
                   "legal": table([[int(f in ([eod], [pre, suf, mid, eod]))] for f in found])}
            if rate in (0.0, 1.0):
                out["specials"] = table(found)
            if rate == 1.0 and spm == 1.0:
                out["start"] = table([r["ids"][:2] for r in rows])
            return out
        columns = {"index": lambda e: [e["index"]], "restored": lambda e: list(e["ids"]), "end": lambda e: [eod], "legal": lambda e: [1]}
        if rate == 0.0:
            columns |= {"ids": lambda e: list(e["ids"]) + [eod], "specials": lambda e: [eod]}
        if rate == 1.0:
            columns |= {"specials": lambda e: [pre, suf, mid, eod]}
        if rate == 1.0 and spm == 1.0:
            columns |= {"start": lambda e: [pre, suf]}
        return Collator(stage, more(m), pads={k: -1 for k in ("ids", "index", "restored", "end", "legal", "specials", "start")}, columns=columns)
    return [one(0.5, 0.5), one(0.5, 0.5, 4, 5, 6, 7, 1), one(0.0, 0.5), one(1.0, 0.0), one(1.0, 1.0),
            Ranks(draw=lambda seed: table([(list(r["ids"]) + [-1] * 60)[:60] for r in fn(more(m), seed=seed)]).float())]


@declare("p/r13")
def padding_free(m, fn):
    examples = m.make(0)["rows"] + m.make(1)["rows"]

    def unpack(batch):
        cu = [int(x) for x in batch["cu_seqlens"]]
        n = batch["input_ids"].shape[1]
        if cu[-1] < n:
            cu = cu + [n]
        ok = int(batch["cu_seqlens"].dtype == torch.int32 and batch["input_ids"].shape[0] == 1)
        return [{**{k: batch[k][0, a:b] for k in ("input_ids", "labels", "position_ids")}, "form": torch.tensor([ok])} for a, b in zip(cu, cu[1:])]
    return Collator(lambda rows: fn(rows), examples, rows=False, unpack=unpack, targets=lambda e: [t for t in e["labels"][1:] if t != -100],
                    columns={"input_ids": lambda e: list(e["ids"]), "labels": lambda e: [-100] + list(e["labels"][1:]),
                             "position_ids": lambda e: list(range(len(e["ids"]))), "form": lambda e: [1]})


@declare("p/r14")
def best_fit(m, fn):
    # ids that tell the document, so that its pieces can be put together again
    examples = [{"ids": [(d + 1) * 1000 + k for k in range(len(r["ids"]))]} for d, r in enumerate(m.make(0)["rows"])]

    def one(capacity):
        def stage(rows):
            packed = fn(rows, capacity=capacity)
            return {"ids": table([r["ids"] for r in packed]), "lengths": table([r["lengths"] for r in packed]),
                    "order": torch.tensor([r["ids"][0] // 1000 for r in rows])}

        def unpack(batch):
            found = {}
            for ids, lengths in zip(batch["ids"].tolist(), batch["lengths"].tolist()):
                ids, lengths, at = [t for t in ids if t != -1], [n for n in lengths if n != -1], 0
                fits = int(len(ids) <= capacity and sum(lengths) == len(ids))
                for n in lengths + ([len(ids) - sum(lengths)] if sum(lengths) < len(ids) else []):
                    piece, at = ids[at:at + n], at + n
                    if piece:
                        found.setdefault(piece[0] // 1000, []).append((piece, fits))
            order = batch["order"].tolist()
            out = []
            for d in [d for d in order if d in found] + [d for d in found if d not in order]:
                pieces = sorted(found[d], key=lambda p: p[0][0])
                out.append({"ids": torch.tensor([t for p, _ in pieces for t in p]), "pieces": torch.tensor([len(p) for p, _ in pieces]),
                            "fits": torch.tensor([min(f for _, f in pieces)])})
            return out

        def pieces(e):
            n = len(e["ids"])
            return [min(capacity, n - i) for i in range(0, n, capacity)]
        return Collator(stage, examples, pads={"lengths": -1}, rows=False, unpack=unpack,
                        columns={"ids": lambda e: list(e["ids"]), "pieces": pieces, "fits": lambda e: [1]})
    def tokens(capacity):
        rows = fn([{"ids": list(e["ids"])} for e in examples], capacity=capacity)
        return Census([str(t) for e in examples for t in e["ids"]], [str(t) for r in rows for t in r["ids"]], what="tokens", once=True)
    return [one(32), one(20), tokens(32), tokens(20)]


@declare("p/r15")
def megabatches(m, fn):
    rows = m.make(0)["rows"]

    def one(batch, mega, seed):
        def stage(examples):
            out = fn(examples, batch=batch, mega=mega, seed=seed)
            return {"index": table([[r["index"]] for r in out]), "ids": table([r["ids"] for r in out]), "order": torch.tensor([e["index"] for e in examples])}

        def unpack(b):
            at = {d: i for i, d in enumerate(b["order"].tolist())}
            docs = [(i, [t for t in ids if t != -1]) for [i], ids in zip(b["index"].tolist(), b["ids"].tolist())]
            docs.sort(key=lambda d: at.get(d[0], len(at)))
            return [{"index": torch.tensor([i]), "ids": torch.tensor(ids)} for i, ids in docs]
        out = fn(m.make(0)["rows"], batch=batch, mega=mega, seed=seed)
        size, n = batch * mega, [len(r["ids"]) for r in out]
        blocks = [n[i + 1:i + size] for i in range(0, len(n), size)]  # a block's first row may have been exchanged
        return [Collator(stage, rows, rows=False, unpack=unpack, columns={"index": lambda e: [e["index"]], "ids": lambda e: list(e["ids"])}),
                Census([str(r["index"]) for r in rows], [str(r["index"]) for r in out], what="rows", once=True),
                Census({"first row": max(len(r["ids"]) for r in rows)}, {"first row": n[0]}, what="lengths"),
                Census({f"megabatch {k}": 0 for k in range(len(blocks))},
                       {f"megabatch {k}": sum(a < b for a, b in zip(x, x[1:])) for k, x in enumerate(blocks)}, what="rows out of order of length")]
    return [*one(4, 5, 0), *one(3, 4, 2), Ranks(draw=lambda seed: torch.tensor([float(r["index"]) for r in fn(m.make(0)["rows"], seed=seed)]))]


@declare("p/r16")
def cutmix(m, fn):
    rows = m.make(0)["rows"]

    def facts(examples):  # what holds of every row, whatever its neighbours
        out = fn(examples)
        x, y = out["pixel_values"], out["labels"]
        total, own, other, foreign = [], [], [], []
        for i, e in enumerate(examples):
            prev = examples[i - 1]
            mine = (x[i] == e["image"]).all(0)
            theirs = (x[i] == prev["image"]).all(0)
            share = mine.double().mean().item()
            want = torch.zeros(y.shape[1], dtype=torch.float64)
            want[e["label"]] += share
            want[prev["label"]] += 1 - share
            gap = (y[i].double() - want).abs()
            total.append([round(y[i].sum().item(), 4)])
            own.append([round(gap[e["label"]].item(), 4)])
            other.append([round(gap.max().item(), 4)])
            foreign.append([float((~mine & ~theirs).sum())])
        return {"total": torch.tensor(total), "own": torch.tensor(own), "other": torch.tensor(other), "foreign": torch.tensor(foreign)}

    def alone(examples):  # a batch of one row comes out unchanged
        made = [fn([e]) for e in examples]
        return {"pixels": torch.stack([b["pixel_values"].reshape(-1) for b in made]), "labels": torch.stack([(b["labels"][0] * 1e4).round() / 1e4 for b in made])}
    return [Collator(lambda examples: fn(examples), rows, rows=False),
            Collator(facts, rows, columns={"total": lambda e: [1.0], "own": lambda e: [0.0], "other": lambda e: [0.0], "foreign": lambda e: [0.0]}),
            Collator(alone, rows, columns={"pixels": lambda e: e["image"].reshape(-1), "labels": lambda e: [float(c == e["label"]) for c in range(10)]}),
            Ranks(draw=lambda epoch: fn(m.make(0)["rows"], epoch=epoch)["pixel_values"])]


@declare("p/r17")
def temperature(m, fn):
    rows = m.make(0)["rows"]
    count = Counter(r["lang"] for r in rows)
    first = list(dict.fromkeys(r["lang"] for r in rows))
    total = len(rows)

    def stage(examples):
        out = fn(examples)
        return {"index": table([[r["index"]] for r in out]), "ids": table([r["ids"] for r in out])}

    def copies(passes):
        c = Counter(r["index"] for out in passes for r in out)
        return {l: float(max(c[r["index"]] for r in rows if r["lang"] == l) - min(c[r["index"]] for r in rows if r["lang"] == l) <= 1) for l in first}
    found = [Collator(stage, rows, rows=False)]
    for alpha in (0.3, 0.0, 0.7):
        out = fn(m.make(0)["rows"], alpha=alpha)
        got = Counter(r["lang"] for r in out)
        z = sum(n ** alpha for n in count.values())
        share = {l: total * n ** alpha / z for l, n in count.items()}
        found += [
            Census({"rows": total, "changed": 0}, {"rows": len(out), "changed": sum(r not in rows for r in out)}, what="rows"),
            Census({l: 1.0 for l in first}, {l: float(abs(got[l] - share[l]) < 1) for l in first}, what="languages near their share"),
            Census({l: 1.0 for l in first}, copies([out]), what="languages with even copies"),
            Census({f"{i} {l}": 1 for i, l in enumerate(first)},
                   {f"{i} {l}": 1 for i, l in enumerate(l for k, l in enumerate(r["lang"] for r in out) if k == 0 or out[k - 1]["lang"] != l)}, what="groups in order"),
        ]
    every = fn(m.make(0)["rows"], alpha=1.0)
    found.append(Census([str(r["index"]) for r in rows], [str(r["index"]) for r in every], what="rows at alpha 1", once=True))
    found.append(Census({l: 1.0 for l in first}, copies([fn(m.make(0)["rows"], epoch=e) for e in range(5)]), what="languages with even copies over passes"))
    found.append(Ranks(draw=lambda epoch: torch.tensor([float(r["index"]) for r in fn(m.make(0)["rows"], epoch=epoch)])))
    return found


# ---- metrics over ranks
def tensor(shard):
    return shard if isinstance(shard, torch.Tensor) else torch.stack(list(shard))


def both(rows, of, fn, single, **kw):
    """The metric of these shards, and of the same shards with ranks that hold nothing."""
    rows_of = lambda shards: torch.cat([tensor(s) for s in shards])
    plain = Ranks(metric=lambda shards: float(fn([of(tensor(s)) for s in shards], **kw)), rows=rows, single=lambda shards: float(single(rows_of(shards), **kw)))

    def gaps(shards):
        parts = [tensor(s) for s in shards]
        parts = [x for p in parts for x in (p[:0], p)] + [parts[0][:0]]
        return float(fn([of(p) for p in parts], **kw))
    return [plain, Ranks(metric=gaps, rows=rows, single=lambda shards: float(single(rows_of(shards), **kw)))]


def attempt(f):
    try:
        v = float(f())
        return 12345.0 if math.isnan(v) else round(v, 6)
    except ValueError:
        return -12345.0
    except Exception:
        return -54321.0


@declare("p/r18")
def bleu(m, fn):
    L = 16
    pairs = [p for s in range(2) for r in m.make(s)["ranks"] for p in r]
    rows = torch.stack([torch.tensor([len(h), len(r), *h, *[0] * (L - len(h)), *r, *[0] * (L - len(r))]) for h, r in pairs])

    def of(x):
        return [(v[2:2 + v[0]], v[2 + L:2 + L + v[1]]) for v in x.tolist()]

    def single(x, order=4):
        pairs, logs = of(x), 0.0
        for n in range(1, order + 1):
            hit = made = 0
            for h, r in pairs:
                a = Counter(tuple(h[i:i + n]) for i in range(len(h) - n + 1))
                b = Counter(tuple(r[i:i + n]) for i in range(len(r) - n + 1))
                hit += sum(min(c, b[g]) for g, c in a.items())
                made += sum(a.values())
            if hit == 0:
                return 0.0
            logs += math.log(hit / made) / order
        h, r = sum(len(p[0]) for p in pairs), sum(len(p[1]) for p in pairs)
        return math.exp(logs) * (1.0 if h >= r else math.exp(1 - r / h))
    return [*both(rows, of, fn, single), *both(rows, of, fn, single, order=2),
            Census({"no match": 0.0}, {"no match": attempt(lambda: fn([[([1, 2, 3, 4], [5, 6, 7, 8])], [([1, 2], [1, 2])]]))}, what="scores")]


@declare("p/r19")
def spread(m, fn):
    rows = torch.cat(m.make(0)["ranks"])
    return [*both(rows, lambda x: x, fn, lambda x: m.single(x)),
            Census({"one": 0.0, "none": 0.0}, {"one": attempt(lambda: fn([torch.tensor([]), torch.tensor([3.0])])),
                                              "none": attempt(lambda: fn([torch.tensor([]), torch.tensor([])]))}, what="spreads of too few rewards")]


@declare("p/r20")
def auc(m, fn):
    rows = torch.cat([torch.stack([r["score"], r["label"].float()], 1) for s in range(2) for r in m.make(s)["ranks"]])
    of = lambda x: {"score": x[:, 0].contiguous(), "label": x[:, 1].long()}
    one = lambda y: [{"score": torch.tensor([0.1, 0.2]), "label": torch.tensor([y, y])}]
    return [*both(rows, of, fn, lambda x: m.single(x[:, 0], x[:, 1].long())),
            Census({"no positives": 12345.0, "no negatives": 12345.0},
                   {"no positives": attempt(lambda: fn(one(0))), "no negatives": attempt(lambda: fn(one(1)))}, what="areas that are nan (12345)")]


@declare("p/r21")
def accuracy(m, fn):
    def sampled(correct, world):  # torch's DistributedSampler, not shuffled, drop_last=False
        n = len(correct)
        per = -(-n // world)
        order = torch.arange(per * world) % n
        return [{"correct": correct[order[r::world]], "size": n} for r in range(world)]
    g = torch.Generator().manual_seed(0)

    def one(n, worlds):
        correct = (torch.rand(n, generator=g) < 0.4).long()
        correct[:3] = torch.tensor([1, 1, 0])
        return Ranks(metric=lambda shards: float(fn(sampled(torch.cat([tensor(s) for s in shards]), worlds(len(shards))))),
                     rows=correct, single=lambda shards: float(m.single(torch.cat([tensor(s) for s in shards]))))
    return [one(23, lambda n: n), one(25, lambda n: 3 + n), one(7, lambda n: 7 + 4 * n)]


@declare("p/r22")
def throughput(m, fn):
    rows = torch.tensor([[r["tensor_rank"], *e] for s in range(2) for r in m.make(s)["ranks"] for e in r["events"]], dtype=torch.float64)
    events = lambda x: [(a, b, int(n)) for _, a, b, n in x.tolist()]

    def one(gaps):
        def metric(shards):
            ranks = []
            for s in shards:
                s = tensor(s)
                for t in (0, 1):
                    part = s[s[:, 0] == t]
                    if len(part) or gaps:
                        ranks.append({"tensor_rank": t, "events": events(part)})
                if gaps:
                    ranks.insert(0, {"tensor_rank": 1, "events": []})
            return float(fn(ranks))

        def single(shards):
            x = torch.cat([tensor(s) for s in shards])
            return float(m.single(events(x[x[:, 0] == 0]), events(x)))
        return Ranks(metric=metric, rows=rows, single=single)
    return [one(False), one(True)]


@declare("p/r23")
def pass_at_k(m, fn):
    rows = torch.tensor([[int(p[1:]), c] for r in m.make(0)["ranks"] for p, c in r])
    of = lambda x: [(f"p{p}", c) for p, c in x.tolist()]
    single = lambda x, k=3: m.single(of(x), k=k)
    return [*both(rows, of, fn, single), *both(rows, of, fn, single, k=2),
            Census({"two of three": -12345.0, "one failure": 1.0},
                   {"two of three": attempt(lambda: fn([[("a", 1)], [("a", 0)]])),
                    "one failure": attempt(lambda: fn([[("a", 1), ("a", 0)], [("a", 1)]]))}, what="prompts (-12345: ValueError)")]


@declare("p/r24")
def ece(m, fn):
    rows = torch.cat([torch.stack([r["confidence"], r["correct"].double()], 1) for r in m.make(0)["ranks"]])
    rows = torch.cat([rows, torch.tensor([[0.5, 1.0], [1.0, 1.0], [0.45, 0.0]], dtype=torch.float64)])
    of = lambda x: {"confidence": x[:, 0].contiguous(), "correct": x[:, 1].long()}
    single = lambda x, bins=10: m.single(x[:, 0], x[:, 1].long(), bins=bins)
    none = torch.zeros(0, dtype=torch.float64)
    edge = torch.tensor([0.5, 0.45], dtype=torch.float64)
    return [*both(rows, of, fn, single), *both(rows, of, fn, single, bins=4),
            Census({"nothing": 12345.0, "on an edge": 0.025},
                   {"nothing": attempt(lambda: fn([{"confidence": none, "correct": none.long()}])),
                    "on an edge": attempt(lambda: fn([{"confidence": edge, "correct": torch.tensor([1, 0])}]))}, what="errors (12345: nan)")]


@declare("p/r25")
def effective_size(m, fn):
    x = torch.cat(m.make(0)["ranks"]).double()
    zero = x == float("-inf")
    rows = torch.stack([torch.where(zero, torch.zeros_like(x), x), zero.double()], 1)  # log ratio, and whether its weight is 0
    of = lambda r: torch.where(r[:, 1] > 0, torch.full_like(r[:, 0], float("-inf")), r[:, 0])
    single = lambda r: m.single(of(r))
    low = torch.tensor([float("-inf")] * 2)
    return [*both(rows, of, fn, single), *both(rows, lambda r: of(r) + 512.0, fn, single),
            Census({"no weight": 0.0, "nothing": 0.0}, {"no weight": attempt(lambda: fn([low, low])), "nothing": attempt(lambda: fn([low[:0], low[:0]]))}, what="effective sizes")]
