import copy, re
import torch, torch.nn as nn, torch.nn.functional as F
from tests.audit.reading2026f.reading import declare, no_subject
from earnest_audit import (Step, Setting, Metric, AdvantageEstimator, Schedule, Collator, Ranks, Accumulation, Update, Ema,
                           RoundTrip, Resume, Census, ChatTemplate, Grader, Unbiased, WeightSync, AdapterStart, MergedLayer, Merge)


def split(m, seed=0):
    given = m.make(seed)
    return given.pop("model"), given


# ---------------------------------------------------------------- losses

@declare("k/r26")
def dkd(m, fn):
    model, batch = split(m)
    return Step(model=model, loss=fn, batch=batch, roles={"ids": "ids", "mask": "loss_mask", "teacher": "teacher_logits"},
                settings={"alpha": Setting(1.0, "weight"), "beta": Setting(4.0, "weight"), "temperature": Setting(2.0, "setting")},
                weighed={"target part": "alpha", "non-target part": "beta"},
                student=lambda model, b: model(b["ids"][:, :-1]), family="divergence", value_is_loss=True, reduction="mean")


@declare("k/r27")
def on_policy_distillation(m, fn):
    model, batch = split(m)
    # the advantage is teacher - sampler: given as advantages, the teacher's log-probs are sampler + advantages
    teacher = batch.pop("teacher_logps")
    batch["advantages"] = teacher - batch["sampler_logps"]

    def loss(model, b, kl_coef):
        b = dict(b)
        b["teacher_logps"] = b["sampler_logps"] + b.pop("advantages")
        return fn(model, b, kl_coef=kl_coef)

    def logprobs(model, b):
        logp = F.log_softmax(model(b["ids"][:, :-1]).float(), -1)
        return logp.gather(-1, b["ids"][:, 1:, None]).squeeze(-1)

    return Step(model=model, loss=loss, batch=batch,
                roles={"ids": "ids", "mask": "loss_mask", "behaviour": "sampler_logps", "advantages": "advantages"},
                settings={"kl_coef": Setting(1.0, "weight")}, logprobs=logprobs, family="policy gradient",
                value_is_loss=True, reduction="mean")


@declare("k/r28")
def uld(m, fn):
    model, batch = split(m)
    whole = Step(model=model, loss=fn, batch=batch, roles={"ids": "ids", "mask": "loss_mask"}, wide=("ids", "loss_mask"),
                 settings={"lam": Setting(1.5, "weight")}, family="sft", rows_interact=True, value_is_loss=True,
                 name="teacher's answers of other lengths")
    # the teacher's answer has as many positions as the student's: both means are then over the same tokens
    model, batch = split(m)
    g = torch.Generator().manual_seed(5)
    aligned = {"ids": batch["ids"], "loss_mask": batch["loss_mask"],
               "teacher_probs": torch.softmax(2 * torch.randn(5, 9, 31, generator=g), -1)}

    def loss(model, b, lam):
        return fn(model, {**b, "teacher_mask": b["loss_mask"][:, 1:]}, lam=lam)

    same = Step(model=model, loss=loss, batch=aligned, roles={"ids": "ids", "mask": "loss_mask", "teacher": "teacher_probs"},
                settings={"lam": Setting(1.5, "weight")}, family="sft", value_is_loss=True, reduction="mean",
                name="teacher's answers of the same lengths")
    return [same, whole]


@declare("k/r29")
def moe_balance(m, fn):
    model, batch = split(m)
    return Step(model=model, loss=fn, batch=batch,
                roles={"ids": "ids", "attention": "attention_mask", "mask": "attention_mask"},
                settings={"aux_coef": Setting(0.01, "weight")},
                metrics={"balance": Metric(low=0.0, high=4.0, weight="aux_coef")},
                may_idle=("experts.*", "*.experts.*"), rows_interact=True, all_supervised=True, family="sft",
                value_is_loss=True, reduction="mean")


@declare("k/r30")
def mtp(m, fn):
    model, batch = split(m)
    # three means with normalisers of their own: rows are coupled by them
    return Step(model=model, loss=fn, batch=batch,
                roles={"ids": "ids", "attention": "attention_mask", "mask": "attention_mask"},
                rows_interact=True, all_supervised=True, family="sft", value_is_loss=True, reduction="mean")


@declare("k/r31")
def unlikelihood(m, fn):
    model, batch = split(m)
    return Step(model=model, loss=fn, batch=batch,
                roles={"ids": "ids", "attention": "attention_mask", "mask": "attention_mask"},
                settings={"alpha": Setting(1.0, "weight")}, all_supervised=True, family="sft", value_is_loss=True,
                reduction="mean")


@declare("k/r32")
def histogram_value(m, fn):
    model, batch = split(m)

    def loss(model, b, **settings):  # returns are promised to be within [-1, 1]
        return fn(model, {**b, "returns": b["returns"].clamp(-1, 1)}, **settings)

    return Step(model=model, loss=lambda model, b, v_min, v_max, sigma_ratio: loss(model, b, v_min=v_min, v_max=v_max, sigma_ratio=sigma_ratio),
                batch=batch, roles={"ids": "ids", "attention": "state_mask", "mask": "state_mask", "returns": "returns"},
                settings={"v_min": Setting(-1.2, "setting"), "v_max": Setting(1.2, "setting"), "sigma_ratio": Setting(0.75, "setting")},
                metrics={"value_mean": Metric(low=-1.2, high=1.2)}, all_supervised=True, value_is_loss=True, reduction="mean")


# ---------------------------------------------------------------- advantages, schedules

@declare("k/r33")
def pass_at_k(m, fn):
    common = dict(scale="free", over="group", groups=3, size=8, values=(0.0, 1.0))
    return [AdvantageEstimator(lambda r, g: fn(r, g), **common), AdvantageEstimator(lambda r, g: fn(r, g, k=2), **common)]


@declare("k/r34")
def length_weighted(m, fn):
    def lengths(rewards, groups):  # by the row's place among its group's rewards: moves with the row
        out = torch.ones(len(rewards), dtype=torch.long)
        for grp in groups.unique().tolist():
            idx = (groups == grp).nonzero().flatten()
            order = rewards[idx].argsort(stable=True)
            for place, i in enumerate(idx[order].tolist()):
                out[i] = (7, 31, 2, 18, 40, 11)[place % 6]
        return out

    def weighted(r, g):
        n = lengths(r, g)
        return n * fn(r, g, n)

    common = dict(scale="equal", over="group", groups=3, size=4)
    return [AdvantageEstimator(lambda r, g: fn(r, g, torch.full((len(r),), 9)), **common),
            AdvantageEstimator(lambda r, g: fn(r, g, lengths(r, g)), baseline="other", **common),
            AdvantageEstimator(weighted, **common)]  # the length-weighted sum of a group is 0


@declare("k/r35")
def wsd(m, fn):
    def rates(total, ranks, **s):
        return [fn(k, total=total, **s) for k in range(total)]

    def longer(total, ranks, **s):  # a run that goes on for 20 steps beyond the plan
        return [fn(k, total=total - 20, **s) for k in range(total)]

    settings = {"peak": 3e-4, "warmup": 10, "cooldown": 20}
    return [Schedule(rates, peak=3e-4, final=0.0, total=100, warmup=10, settings=settings),
            Schedule(longer, peak=3e-4, final=0.0, total=120, warmup=10, ends=100, settings=settings)]


@declare("k/r36")
def ulmfit(m, fn):
    def run(total, **s):
        given = m.make(0)
        opt = given["optimizer"]
        scheduler = fn(opt, total=total, **s)
        out = []
        for _ in range(total):
            out.append([g["lr"] for g in opt.param_groups])
            opt.step()
            scheduler.step()
        return out

    def top(total, ranks, **s):
        return [r[0] for r in run(total, **s)]

    base = [0.1 / 2.6 ** i for i in range(3)]
    first = [6, 10, 20]  # the step of each group's highest rate: the top of the triangle, or when it thaws
    peak = [b * (1 + (1 - (k - 6) / 54) * 31) / 32 for b, k in zip(base, first)]
    return [Schedule(top, peak=0.1, final=0.1 / 32, total=60, warmup=6, settings={"cut": 0.1, "ratio": 32}),
            Schedule(lambda total, ranks, **s: run(total, **s), peak=peak, final=[b / 32 for b in base], total=60, restarts=True,
                     settings={"cut": 0.1, "ratio": 32, "unfreeze_every": 10})]


# ---------------------------------------------------------------- data

def numbers(make):
    try:
        return make()
    except Exception:  # what cannot be computed is not found
        return {}


@declare("k/r37")
def packed(m, fn):
    rows = m.make(0)["rows"] + m.make(1)["rows"][:2]

    def unpack(batch):
        ends = batch["cu_seqlens"].tolist()
        return [{k: batch[k][0, a:b] for k in ("input_ids", "labels", "position_ids")} for a, b in zip(ends, ends[1:])]

    sizes = [len(r["input_ids"]) for r in rows]
    wanted = {"max_length": max(sizes), **{f"cu_seqlens[{i}]": sum(sizes[:i]) for i in range(len(rows) + 1)}}

    def found():
        out = fn(copy.deepcopy(rows))
        return {"max_length": int(out["max_length"]), **{f"cu_seqlens[{i}]": v for i, v in enumerate(out["cu_seqlens"].tolist())}}

    return [Collator(fn, rows, rows=False, unpack=unpack, targets=lambda r: [x for x in r["labels"][1:] if x != -100],
                     columns={"input_ids": lambda r: r["input_ids"], "labels": lambda r: [-100] + list(r["labels"][1:]),
                              "position_ids": lambda r: list(range(len(r["input_ids"])))}),
            Census(wanted, numbers(found), what="document borders")]


@declare("k/r38")
def rollouts(m, fn):
    rows = m.make(0)["rows"] + m.make(1)["rows"][:2]

    def collate(rows):
        out = dict(fn(rows))
        width = out["completion_mask"].shape[1]
        ids, att, pos = out["input_ids"], out["attention_mask"], out["position_ids"]
        out["lowest_position"] = pos.min(1, keepdim=True).values  # clamped at 0 on the left padding
        out["position_ids"] = pos.masked_fill(att == 0, -1)
        out["prompt"], out["completion"] = ids[:, :-width], ids[:, -width:]
        out["labels"] = ids[:, -width:].masked_fill(out["completion_mask"] == 0, -100)
        return out

    n = lambda r: len(r["prompt_ids"]) + len(r["completion_ids"])
    return Collator(collate, rows,
                    pads={"input_ids": 0, "attention_mask": 0, "position_ids": -1, "completion_mask": 0, "old_logps": 0.0,
                          "prompt": 0, "completion": 0, "labels": -100},
                    targets=lambda r: r["completion_ids"],
                    columns={"input_ids": lambda r: r["prompt_ids"] + r["completion_ids"], "attention_mask": lambda r: [1] * n(r),
                             "position_ids": lambda r: list(range(n(r))), "completion_mask": lambda r: [1] * len(r["completion_ids"]),
                             "old_logps": lambda r: torch.tensor(r["logps"]), "prompt": lambda r: r["prompt_ids"],
                             "completion": lambda r: r["completion_ids"], "lowest_position": lambda r: [0]})


@declare("k/r39")
def fim(m, fn):
    rows = m.make(0)["rows"]

    def tensor(texts, width=None):
        width = width or max([len(t) for t in texts] + [1])
        return torch.tensor([list(t.encode()) + [-1] * (width - len(t)) for t in texts])

    def whole(text):
        found = re.fullmatch(r"<PRE>(.*?)<SUF>(.*?)<MID>(.*)", text, re.S)
        return found[1] + found[3] + found[2] if found else text

    def stage(**s):
        def collate(rows):
            out = fn(rows, **s)
            return {"id": tensor([r["id"] for r in out]), "text": tensor([r["text"] for r in out]),
                    "whole": tensor([whole(r["text"]) for r in out])}
        return collate

    pads = {"id": -1, "text": -1, "whole": -1}
    plain = {"id": lambda r: list(r["id"].encode()), "whole": lambda r: list(r["text"].encode())}
    drawn = [0]

    def share(x, rate, spm):  # a share of all rows is chosen: x / share where it is, 0 elsewhere
        drawn[0] += 1
        rows = [{"id": f"draw{drawn[0]}-{i}", "text": "abcdefgh" * 250} for i in range(x.numel())]
        out = fn(rows, rate=1.0, spm_rate=rate) if spm else fn(rows, rate=rate)
        chosen = torch.tensor([r["text"].startswith("<PRE><SUF>" if spm else "<PRE>") for r in out]).view(x.shape)
        return x * chosen / rate

    return [Collator(stage(), rows, pads=pads, columns=plain),
            Collator(stage(rate=0.0), rows, pads=pads, columns={**plain, "text": lambda r: list(r["text"].encode())}),
            Collator(stage(rate=1.0, spm_rate=0.0), rows, pads=pads, columns=plain),
            Collator(stage(rate=1.0, spm_rate=1.0), rows, pads=pads, columns=plain),
            Unbiased(lambda x, rate: share(x, rate, False)), Unbiased(lambda x, rate: share(x, rate, True)),
            Ranks(draw=lambda rank: tensor([r["text"] for r in fn(copy.deepcopy(rows), seed=rank)], 80))]


# ---------------------------------------------------------------- ranks

def tensors(shards):
    return [s if isinstance(s, torch.Tensor) else torch.stack(list(s)) for s in shards]


@declare("k/r40")
def variance(m, fn):
    rows = torch.cat(m.make(0)["ranks"] + m.make(1)["ranks"])
    single = lambda shards: torch.cat(tensors(shards)).double().var(unbiased=True).item()
    none = rows[:0]

    def few():
        return {"no sample": fn([none, none]), "one sample": fn([none, rows[:1]]), "no rank but one sample": fn([rows[:1]])}

    return [Ranks(metric=lambda shards: fn(tensors(shards)), rows=rows, single=single),
            Ranks(metric=lambda shards: fn([none, *tensors(shards)[::-1], none]), rows=rows, single=single),
            Census({"no sample": 0.0, "one sample": 0.0, "no rank but one sample": 0.0}, numbers(few), what="variances of few samples")]


@declare("k/r41")
def accuracy(m, fn):
    rows = torch.tensor([1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 1])

    def ranks(shards, more):
        correct = [int(x) for s in tensors(shards) for x in s.flatten()]
        total, world = len(correct), len(shards) + more
        order = list(range(total))
        order += order[:-total % world]
        return [{"correct": [correct[i] for i in order[k::world]], "total": total} for k in range(world)]

    def single(shards):
        x = torch.cat(tensors(shards)).double()
        return (x.sum() / x.numel()).item()

    return [Ranks(metric=lambda shards, more=more: fn(ranks(shards, more)), rows=rows, single=single) for more in (0, 2)]


@declare("k/r42")
def seeds(m, fn):
    def sample(seed):
        return torch.randint(0, 10 ** 6, (8,), generator=torch.Generator().manual_seed(int(seed)))

    pairs = [(0, 0), (1, 0), (0, 1), (1, 1)]
    every = lambda tp: [str(fn(rank, step, tp=tp)) for step in range(6) for rank in range(0, 8, tp)]
    groups = lambda tp: {f"tp {tp}, step {s}, group {g}": len({fn(g * tp + i, s, tp=tp) for i in range(tp)}) for s in range(3) for g in range(8 // tp)}
    found = numbers(lambda: {k: v for tp in (1, 2, 4, 8) for k, v in groups(tp).items()})
    wanted = {f"tp {tp}, step {s}, group {g}": 1 for tp in (1, 2, 4, 8) for s in range(3) for g in range(8 // tp)}
    return [Ranks(draw=lambda r: sample(fn(2 * r, 3))),  # the four data-parallel ranks
            Ranks(draw=lambda r: sample(fn(2 * r + 1, 3))),
            Ranks(draw=lambda r: sample(fn(2, r))),  # four steps
            Ranks(draw=lambda r: sample(fn(2 * pairs[r][0], pairs[r][1]))),
            Ranks(draw=lambda r: sample(fn(0, 0, base=1234 + 100 * r))),
            *[Census(set(every(tp)), every(tp), what=f"seeds of (data-parallel rank, step), tp {tp}", once=True) for tp in (1, 2, 4)],
            Census(wanted, found, what="different seeds within a tensor-parallel group")]


# ---------------------------------------------------------------- updates

class Clipping:
    """an optimizer that clips before it steps"""

    def __init__(self, optimizer, norm):
        self.optimizer, self.norm = optimizer, norm

    def __getattr__(self, name):
        return getattr(self.optimizer, name)

    def step(self):
        if self.norm is not None:
            nn.utils.clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], self.norm)
        self.optimizer.step()


@declare("k/r43")
def grad_cache(m, fn):
    given = m.make(0)
    batch = {k: torch.cat([b[k] for b in given["batches"]]) for k in ("query", "key")}

    def accumulate(model, batches):
        fn(model, torch.optim.SGD(model.parameters(), lr=0.0), list(batches))

    def of(temperature):
        given = m.make(0)
        model, optimizer = given["model"], given["optimizer"]

        def loss(model, b):
            q, k = model(b["query"]), model(b["key"])
            return F.cross_entropy(q @ k.T / temperature, torch.arange(len(q)))

        return Update(model, optimizer, lambda batches, norm: fn(model, Clipping(optimizer, norm), list(batches), temperature=temperature),
                      loss, batch, split=(3, 4, 2))

    return [Accumulation(given["model"], accumulate, batch, split=(3, 4, 2)), of(0.1), of(0.5)]


@declare("k/r44")
def token_mean(m, fn):
    batch = {k: torch.cat([b[k] for rank in m.make(0)["batches"] for b in rank]) for k in ("ids", "labels")}
    blank = {"ids": batch["ids"][:1], "labels": torch.full_like(batch["labels"][:1], -100)}
    plans = {"ranks": lambda bs: [[b] for b in bs], "micro-batches": lambda bs: [list(bs)],
             "ranks with unequal numbers of micro-batches": lambda bs: [[bs[0]], list(bs[1:])] if len(bs) > 1 else [list(bs)],
             "ranks with micro-batches without a trained token": lambda bs: [[bs[0], blank], *[[b] for b in bs[1:]], [blank]]}

    def loss(model, b):
        return F.cross_entropy(model(b["ids"]).flatten(0, 1), b["labels"].flatten(), ignore_index=-100)

    def accumulation(what, plan):
        return Accumulation(m.make(0)["model"],
                            lambda model, bs: fn(model, torch.optim.SGD(model.parameters(), lr=0.0), plan(list(bs)), max_norm=1e9),
                            batch, split=(2, 5, 3), what=what)

    def update(plan):
        given = m.make(0)
        model, optimizer = given["model"], given["optimizer"]
        return Update(model, optimizer, lambda bs, norm: fn(model, optimizer, plan(list(bs)), max_norm=1e9 if norm is None else norm),
                      loss, batch, split=(2, 5, 3))

    return [accumulation(k, v) for k, v in plans.items()] + [update(v) for v in plans.values()]


# ---------------------------------------------------------------- state

class Weight(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(value.detach(), requires_grad=False)


class Average:
    """update(average, current, rate) by the averager of the case, which counts its updates"""

    def __init__(self, fn):
        self.fn, self.averager = fn, None

    def __call__(self, average, current, rate):
        if self.averager is None:
            self.averager = self.fn(Weight(average.clone()), decay=1 - rate)
        a = self.averager
        a.decay = 1 - rate
        a.shadow["weight"] = average.detach().to(a.shadow["weight"].dtype).clone()
        a.update(Weight(current))
        return a.shadow["weight"].clone()


class Run:
    def __init__(self, m, fn):
        self.m, self.step, self.model = m, 0, m.make(0)["model"]
        self.averager = fn(self.model)

    def train(self, n):
        seen = []
        for _ in range(n):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.step)).to(torch.bfloat16)
            self.model.zero_grad()
            (self.model(x) - 1).square().mean().backward()
            with torch.no_grad():
                for p in self.model.parameters():
                    p -= 0.5 * p.grad
            self.averager.update(self.model)
            seen.append(self.step)
            self.step += 1
        return seen

    def averages(self):
        target = self.m.make(3)["model"].float()
        self.averager.copy_to(target)
        return torch.cat([x.detach().double().flatten() for x in [*target.parameters(), *target.buffers()]])

    def next_averages(self):  # what the next update makes of it: the count matters here
        other = copy.copy(self)
        other.averager = copy.deepcopy(self.averager)
        other.averager.update(self.m.make(5)["model"])
        return torch.cat([self.averages(), other.averages()])


@declare("k/r45")
def ema(m, fn):
    kept = {}

    def save(x, folder):
        kept[str(folder)] = x.averager.state_dict()

    def load(x, folder):
        x.averager.load_state_dict(kept[str(folder)])

    def save_run(x, folder):
        kept[str(folder)] = (x.averager.state_dict(), copy.deepcopy(x.model.state_dict()), x.step)

    def load_run(x, folder):
        average, model, x.step = kept[str(folder)]
        x.averager.load_state_dict(average)
        x.model.load_state_dict(model)

    def perturb(x):
        with torch.no_grad():
            for p in x.model.parameters():
                p += 0.3 * torch.randn(p.shape).to(p.dtype)
        x.train(3)

    def buffers(average):
        x = Run(m, fn)
        x.train(4)
        target = x.model
        if average:
            target = m.make(3)["model"]
            x.averager.copy_to(target)
        return {f"{k}[{i}]": float(v) for k, b in target.named_buffers() for i, v in enumerate(b.flatten())}

    return [Ema(Average(fn), rate=0.01), Ema(Average(fn), dtype=torch.bfloat16, rate=0.01),
            RoundTrip(lambda: Run(m, fn), perturb, save, load, lambda x: x.next_averages()),
            Resume(lambda: Run(m, fn), lambda x, n: x.train(n), save_run, load_run,
                   lambda x: torch.cat([x.next_averages(), *[p.detach().double().flatten() for p in x.model.parameters()]])),
            Census(numbers(lambda: buffers(False)), numbers(lambda: buffers(True)), what="buffers, which follow the model")]


@declare("k/r46")
def sampler_state(m, fn):
    kept = {}

    def one(rank):
        def make():
            return fn(**{**m.make(0), "rank": rank})

        def save(x, folder):
            kept[str(folder)] = x.state_dict()

        def load(x, folder):
            x.load_state_dict(kept[str(folder)])

        return Resume(make, lambda x, n: [i for _ in range(n) for i in x.next_batch()], save, load,
                      lambda x: torch.tensor([float(v) for v in x.state_dict().values()]), steps=5)

    def ranks(world, batch, **s):
        return [fn(10, rank, world, batch, **s) for rank in range(world)]

    def run(xs, n):
        return [i for _ in range(n) for x in xs for i in x.next_batch()]

    def save(xs, folder):
        kept[str(folder)] = xs[0].state_dict()

    def load(xs, folder):  # another number of ranks, the same samples per step
        xs = ranks(3, 2)
        for x in xs:
            x.load_state_dict(kept[str(folder)])
        return xs

    def epochs(r):
        x = fn(10, 0, 1, 10)
        for _ in range(r):
            x.next_batch()
        return torch.tensor(x.next_batch())

    order = [str(i) for i in numbers(lambda: run(ranks(2, 3), 5))]
    return [one(0), one(1),
            Resume(lambda: ranks(2, 3), run, save, load,
                   lambda xs: torch.tensor([float(v) for v in xs[0].state_dict().values()]), steps=5),
            Ranks(draw=lambda rank: torch.tensor(fn(40, rank, 4, 5).next_batch())),
            Ranks(draw=lambda seed: torch.tensor(fn(40, 0, 1, 20, seed=10 * seed).next_batch())),
            Ranks(draw=epochs),
            Census({str(i): 3 for i in range(10)}, {i: order.count(i) for i in order}, what="samples of three epochs"),
            *[Census([str(i) for i in range(10)], order[10 * e:10 * e + 10], what=f"samples of epoch {e}", once=True) for e in range(3)]]


# ---------------------------------------------------------------- texts

@declare("k/r47")
def grader(m, fn):
    def of(answer, tokens=75):
        return lambda text: fn({"answer": answer, "completion_tokens": tokens}, text)

    def by_length(text):
        return fn({"answer": "1/2", "completion_tokens": len(text.split())}, text)

    def words(n, answer="0.5"):
        return "w " * (n - 2) + f"Answer: {answer}"

    def rewards():
        r = lambda n, answer="0.5", **s: fn({"answer": "1/2", "completion_tokens": n}, f"Answer: {answer}", **s)
        return {"right, 80 tokens": r(80), "right, 90": r(90), "right, 100": r(100), "right, 150": r(150), "right, 3": r(3),
                "wrong, 80": r(80, "3"), "wrong, 90": r(90, "3"), "wrong, 150": r(150, "3"),
                "right, 45 of 50": r(45, max_tokens=50, buffer=10), "right, 40 of 50": r(40, max_tokens=50, buffer=10),
                "right, 90, buffer 40": r(90, buffer=40), "no answer, 3": fn({"answer": "1/2", "completion_tokens": 3}, "0.5")}

    wanted = {"right, 80 tokens": 1.0, "right, 90": 0.5, "right, 100": 0.0, "right, 150": 0.0, "right, 3": 1.0, "wrong, 80": -1.0,
              "wrong, 90": -1.5, "wrong, 150": -2.0, "right, 45 of 50": 0.5, "right, 40 of 50": 1.0, "right, 90, buffer 40": 0.25,
              "no answer, 3": -1.0}
    return [Grader(of("1/2"), right=["Answer: 1/2", "Answer: 0.5", "Answer: 0.50", "I think. Answer: 3 ... no.\nAnswer: 0.50", "Answer : 1 / 2",
                                     "So it is a half.\nAnswer: $0.5$", "Answer: 0.5."],
                   wrong=["Answer: 2", "Answer: 0.50\nAnswer: 3", "1/2", "0.5", "Answer: 1/3", "Answer: 5", "Answer: a half", "I do not know.", "Answer: 1/0",
                          "Answer: 12"],
                   question="What is 1/2 of 1?"),
            Grader(of("1,000"), right=["Answer: 1000", "Answer: 1,000", "Answer: 1000.0", "Answer: 2000/2"],
                   wrong=["Answer: 1", "Answer: 100", "Answer: 10000", "1,000", "Answer: 1000 apples"], question="What is 10 times 100, or 1,000?"),
            Grader(of("x + 1"), right=["Answer: x+1", "Answer: x + 1", "Answer: x +1"], wrong=["Answer: x+2", "Answer: x", "Answer: 1", "x + 1"],
                   question="Simplify x + 1."),
            Grader(by_length, right=[words(10), words(79), words(80)], wrong=[words(84), words(90), words(100), words(150)]),
            Grader(by_length, right=[words(85), words(90)], wrong=[words(95), words(100), words(150), words(10, "3")]),
            Census(wanted, numbers(rewards), what="rewards")]


@declare("k/r48")
def chat(m, fn):
    def prompt(messages):
        return [*fn(messages)[0], 256, *b"assistant\n"]

    def tokens(messages):
        return fn(messages)

    def template(messages, trained):
        return ChatTemplate(tokens, prompt, messages, end=257, trained=trained)

    messages = m.make(0)["messages"]
    short = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    two = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}, {"role": "user", "content": "And you?"},
           {"role": "assistant", "content": "Fine", "thinking": "polite"}]

    def texts(supervised):
        ids, mask = fn(copy.deepcopy(messages))
        text = "".join(chr(i) if i < 256 else "\0" for i, t in zip(ids, mask) if t or not supervised)
        return [t for t in ("Be brief.", "2+2?", "easy", "weather?", "two tools", "<call>a</call><call>b</call>", "sun", "rain", "Mixed.", "assistant\n")
                if t in text]

    return [template(messages, (4, 7)), template(short, (1,)), template(two, (3,)),
            Census(["two tools", "<call>a</call><call>b</call>", "Mixed."], numbers(lambda: texts(True)), what="supervised texts"),
            Census(["Be brief.", "2+2?", "weather?", "two tools", "<call>a</call><call>b</call>", "sun", "rain", "Mixed.", "assistant\n"],
                   numbers(lambda: texts(False)), what="texts")]


# ---------------------------------------------------------------- sampler, adapter

@declare("k/r49")
def min_p(m, fn):
    given = m.make(0)
    model, prompts, base = given["model"], given["prompt_ids"], given["settings"]

    @torch.no_grad()
    def distribution(logits, s):  # temperature, then min-p, then renormalised
        logp = F.log_softmax(logits.float() / s["temperature"], -1)
        low = logp.max(-1, keepdim=True).values + torch.log(torch.tensor(s["min_p"]))
        return F.log_softmax(logp.masked_fill(logp < low, float("-inf")), -1)

    drawn = [0]

    def frequency(x, **changed):  # the most likely token comes as often as its probability says
        drawn[0] += 1
        s = {**base, **changed, "max_new": 1, "seed": drawn[0]}
        logp = distribution(model(prompts[:1])[:, -1], s)[0]
        token = int(logp.argmax())
        ids, _ = fn(model, prompts[:1].expand(x.numel(), -1).contiguous(), s)
        return x * (ids[:, 0] == token).view(x.shape) / logp[token].exp().item()

    synced = copy.deepcopy(model)
    before = copy.deepcopy(synced.state_dict())

    def perturb():
        g = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in synced.parameters():
                p += 0.05 * torch.randn(p.shape, generator=g)

    @torch.no_grad()
    def by_definition():
        ids, _ = fn(synced, prompts, dict(base))
        logits = synced(torch.cat([prompts, ids], 1))[:, prompts.shape[1] - 1:-1]
        logp = distribution(logits, base).gather(-1, ids[..., None]).squeeze(-1)
        ended = ((ids == base["eos"]).long().cumsum(1) - (ids == base["eos"]).long()) > 0
        return logp.masked_fill(ended, 0.0)

    def endings():
        s = {**base, "min_p": 1e-4, "temperature": 1.5, "max_new": 12}
        many = torch.randint(2, 12, (64, 4), generator=torch.Generator().manual_seed(2))
        state = torch.get_rng_state()
        ids, logps = fn(model, many, s)
        eos = (ids == s["eos"]).long()
        after = (eos.cumsum(1) - eos) > 0
        return {"width": ids.shape[1], "width of the log-probs": logps.shape[1], "other than pad after the end": int((ids[after] != s["pad"]).sum()),
                "log-probs after the end": int((logps[after] != 0).sum()), "tokens without a log-prob": int((logps[~after] >= 0).sum()),
                "log-probs with a gradient": int(logps.requires_grad), "the global generator moved": int(not torch.equal(state, torch.get_rng_state())),
                "some row ended": int(bool(after.any()))}

    wanted = {"width": 12, "width of the log-probs": 12, "other than pad after the end": 0, "log-probs after the end": 0,
              "tokens without a log-prob": 0, "log-probs with a gradient": 0, "the global generator moved": 0, "some row ended": 1}
    return [Ranks(draw=lambda rank: fn(model, prompts, {**base, "temperature": 2.0, "min_p": 0.01, "seed": rank})[0]),
            Unbiased(lambda x, t: frequency(x, temperature=t), settings=(0.8, 1.6)),
            Unbiased(lambda x, p: frequency(x, min_p=p), settings=(0.02, 0.4)),
            WeightSync(perturb, lambda: None, by_definition, lambda: fn(synced, prompts, dict(base))[1],
                       undo=lambda: synced.load_state_dict(before)),
            Census(wanted, numbers(endings), what="properties of sampled rows")]


@declare("k/r50")
def pissa(m, fn):
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(4))

    def start(**s):
        return AdapterStart(m.make(0)["linear"], lambda linear: nn.Sequential(fn(linear, **s)), lambda model: model(x))

    def trained(seed=0, **s):
        linear = m.make(seed)["linear"]
        a, g = fn(linear, **s), torch.Generator().manual_seed(seed + 7)
        with torch.no_grad():
            for p in (a.A, a.B):
                p += 0.3 * torch.randn(p.shape, generator=g)
        return linear, a

    def layer(weight, **s):
        linear, a = trained(**s)
        now = {"merged": False}

        @torch.no_grad()
        def outputs():
            return F.linear(x, weight(linear, a), linear.bias) if now["merged"] else a(x)

        return MergedLayer(outputs, lambda: now.update(merged=True), lambda: now.update(merged=False))

    def lora(scale):
        def weight(linear, a):
            A, B = a.to_lora()
            return linear.weight.detach() + scale * (B @ A)
        return weight

    def scale(alpha, rank):
        _, a = trained(rank=rank, alpha=alpha)
        start, D = a.B.detach().clone(), torch.randn(7, rank, generator=torch.Generator().manual_seed(3))

        @torch.no_grad()
        def delta(w):
            a.B.copy_(start)
            before = a.merged().detach().clone()
            a.B.copy_(start + w * D)
            after = a.merged().detach().clone()
            a.B.copy_(start)
            return after - before

        return Merge(delta, applied=lambda w: w * alpha / rank * (D @ a.A.detach()))

    made = [0]

    def fresh():
        made[0] += 1
        return fn(m.make(made[0])["linear"])

    def perturb(a):
        with torch.no_grad():
            for p in (a.A, a.B):
                p += 0.3 * torch.randn(p.shape)

    def outputs(a):
        with torch.no_grad():
            A, B = a.to_lora()
            return torch.cat([t.flatten() for t in (a(x), a.merged(), A, B)])

    def facts():
        linear = m.make(0)["linear"]
        before = copy.deepcopy(linear.state_dict())
        a = fn(linear, rank=4)
        A, B = a.to_lora()
        return {"rank of A": a.A.shape[0], "rank of B": a.B.shape[1], "rank of to_lora's A": A.shape[0], "rank of to_lora's B": B.shape[1],
                "changed tensors of the linear": sum(not torch.equal(v, before[k]) for k, v in linear.state_dict().items())}

    y = torch.randn(6, 7, generator=torch.Generator().manual_seed(6))
    return [start(), start(rank=2, alpha=3.0),
            Census(["A", "B"], numbers(lambda: [k for k, p in fn(m.make(0)["linear"]).named_parameters() if p.requires_grad]), what="trained parameters"),
            Census({"rank of A": 4, "rank of B": 4, "rank of to_lora's A": 8, "rank of to_lora's B": 8, "changed tensors of the linear": 0},
                   numbers(facts), what="ranks"),
            layer(lambda linear, a: a.merged().detach()), layer(lora(2.0)), layer(lora(1.5), rank=2, alpha=3.0),
            scale(8.0, 4), scale(3.0, 2),
            RoundTrip(fresh, perturb, lambda a, folder: torch.save(a.state_dict(), folder / "a.pt"),
                      lambda a, folder: a.load_state_dict(torch.load(folder / "a.pt")) and None, outputs),
            Step(model=trained()[1], loss=lambda model, b: (model(b["x"]) - b["y"]).square().mean(), batch={"x": x, "y": y},
                 value_is_loss=True, reduction="mean", name="training of A and B")]
