import builtins
import contextlib
import json
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from earnest_audit import (Accumulation, AdapterStart, AdvantageEstimator, Census, ChatTemplate, Collator, Grader, Merge, MergedLayer,
                           Metric, Ranks, Resume, Schedule, Setting, Step, Unbiased, Update, WeightSync)
from tests.audit.reading2026f.reading import declare, no_subject


def take(m):
    given = m.make(0)
    return given.pop("model"), given


# ---------------------------------------------------------------- distillation
@declare("i/r26")
def decoupled(m, fn):
    model, batch = take(m)
    return Step(
        model=model, loss=fn, batch=batch, family="divergence",
        roles={"ids": "ids", "mask": "loss_mask", "teacher": "teacher_logits"},
        settings={"alpha": Setting(1.0, "weight"), "beta": Setting(8.0, "weight"), "T": Setting(2.0, "setting")},
        weighed={"target class": "alpha", "non-target classes": "beta"},
        student=lambda model, b: model(b["ids"])[:, :-1],
        reduction="mean", value_is_loss=True, wide=("ids", "loss_mask", "teacher_logits"),
    )


@declare("i/r27")
def skewed(m, fn):
    model, batch = take(m)
    return Step(
        model=model, loss=fn, batch=batch, family="divergence",
        roles={"ids": "ids", "mask": "loss_mask", "teacher": "teacher_probs"},
        settings={"alpha": Setting(0.1, "mixture")},
        student=lambda model, b: model(b["ids"])[:, :-1].log_softmax(-1).exp(),
        reduction="mean", value_is_loss=True, wide=("ids", "loss_mask", "teacher_probs"),
    )


@declare("i/r28")
def top_and_rest(m, fn):
    model, batch = take(m)
    return Step(
        model=model, loss=fn, batch=batch, family="divergence",
        roles={"ids": "ids", "mask": "loss_mask", "teacher": "top_logps"},
        student=lambda model, b: model(b["ids"])[:, :-1].log_softmax(-1).gather(-1, b["top_ids"]),
        reduction="mean", value_is_loss=True, wide=("ids", "loss_mask", "top_ids", "top_logps"),
    )


@declare("i/r29")
def sorted_distance(m, fn):
    model, batch = take(m)
    whole = Step(  # cross entropy and distance: no value of lam leaves the distance alone, so no student here
        model=model, loss=fn, batch=batch, family="sft", name="cross entropy + distance",
        roles={"ids": "ids", "mask": "loss_mask", "teacher": "teacher_probs"},
        settings={"lam": Setting(1.5, "weight")},
        logprobs=lambda model, b: m.logps(model, b["ids"]),
        reduction="mean", value_is_loss=True, wide=("ids", "loss_mask", "teacher_probs"),
    )

    def student(model, b):
        p = model(b["ids"])[:, :-1].log_softmax(-1).exp()
        return F.pad(p, (0, b["teacher_probs"].shape[-1] - p.shape[-1]))

    model, batch = take(m)
    distance = Step(  # what lam weighs, by itself
        model=model, loss=lambda model, b, lam: fn(model, b, lam=lam) - fn(model, b, lam=0.0), batch=batch,
        family="divergence", name="the distance",
        roles={"ids": "ids", "mask": "loss_mask", "teacher": "teacher_probs"},
        settings={"lam": Setting(1.5, "weight")}, student=student,
        reduction="mean", value_is_loss=True, wide=("ids", "loss_mask", "teacher_probs"),
    )
    return [whole, distance]


@declare("i/r30")
def on_policy_distillation(m, fn):
    model, batch = take(m)
    old = batch["sampler_logps"]

    def loss(model, b):  # the teacher's log-probs are those that give these advantages; double, so that they are exact
        old, a = b["sampler_logps"], b["advantages"]
        given = {"ids": b["ids"], "loss_mask": b["loss_mask"], "sampler_logps": old, "teacher_logps": a.double() + old.double()}
        return fn(model, given).to(next(model.parameters()).dtype)

    return Step(
        model=model, loss=loss, family="policy gradient",
        batch={"ids": batch["ids"], "loss_mask": batch["loss_mask"], "sampler_logps": old, "advantages": batch["teacher_logps"] - old},
        roles={"ids": "ids", "mask": "loss_mask", "behaviour": "sampler_logps", "advantages": "advantages"},
        logprobs=lambda model, b: m.logps(model, b["ids"]),
        reduction="sum", value_is_loss=True, wide=("ids", "loss_mask", "sampler_logps", "advantages"),
    )


# ---------------------------------------------------------------- auxiliary
@declare("i/r31")
def unlikelihood(m, fn):
    model, batch = take(m)
    return Step(
        model=model, loss=fn, batch=batch, family="sft",
        roles={"ids": "ids", "mask": "loss_mask"}, settings={"alpha": Setting(1.0, "weight")},
        logprobs=lambda model, b: m.logps(model, b["ids"]),
        reduction="mean", value_is_loss=True, wide=("ids", "loss_mask"),
    )


@declare("i/r32")
def router(m, fn):
    model, batch = take(m)

    def logprobs(model, b):
        return model(b["ids"])[0][:, :-1].log_softmax(-1).gather(-1, b["ids"][:, 1:, None]).squeeze(-1)

    return Step(
        model=model, loss=fn, batch=batch, family="sft",
        roles={"ids": "ids", "attention": "attention_mask"},
        settings={"top_k": Setting(2, "setting", modes=(1, 3)), "balance": Setting(0.01, "weight"), "z": Setting(0.001, "weight")},
        metrics={"balance": Metric(low=0.0, high=4.0, weight="balance")},
        logprobs=logprobs, rows_interact=True, all_supervised=True, reduction="mean", value_is_loss=True,
        wide=("ids", "attention_mask"),
    )


@declare("i/r33")
def codebook(m, fn):
    model, batch = take(m)
    return Step(
        model=model, loss=fn, batch=batch, settings={"commit": Setting(0.25, "weight")},
        metrics={"recon": Metric(low=0.0)}, value_is_loss=False, reduction="mean", wide=(),
    )


@declare("i/r34")
def reversal(m, fn):
    model, batch = take(m)
    return Step(  # rows without a label matter (domain loss), and the two terms have two normalisers
        model=model, loss=fn, batch=batch, settings={"lam": Setting(0.3, "weight")},
        metrics={"task": Metric(low=0.0), "domain": Metric(low=0.0, weight="lam", raises=True)},
        value_is_loss=False, rows_interact=True, reduction="mean", wide=(),
    )


# ---------------------------------------------------------------- advantages
@declare("i/r35")
def pass_at_k(m, fn):
    return [
        AdvantageEstimator(lambda r, g: fn(r, g), scale="free", values=(0.0, 1.0)),
        AdvantageEstimator(lambda r, g: fn(r, g, k=2), scale="free", values=(0.0, 1.0), size=5),
        AdvantageEstimator(lambda r, g: fn(r, g, k=3), scale="free", values=(0.0, 1.0), size=5),
    ]


@declare("i/r36")
def batch_std(m, fn):
    return AdvantageEstimator(lambda r, g: fn(r, g), scale="free", over="group", scaled_over="batch")


# ---------------------------------------------------------------- schedules
@declare("i/r37")
def cooldown(m, fn):
    settings = {"peak": 3e-4, "warmup": 10, "cooldown": 0.2}

    def rates(total, ranks, **settings):
        return [fn(k, total=total, **settings) for k in range(total)]

    def longer(total, ranks, **settings):
        return [fn(k, total=total - 20, **settings) for k in range(total)]

    return [
        Schedule(rates, peak=3e-4, final=0.0, total=200, warmup=10, settings=settings),
        Schedule(longer, peak=3e-4, final=0.0, total=220, warmup=10, ends=200, settings=settings),
    ]


@declare("i/r38")
def restarts(m, fn):
    def rates(total, ranks, **settings):
        if settings.get("mult", 2) <= 1:
            settings["mult"] = 3  # an integer above 1
        optimizer = m.make(0)["optimizer"]
        scheduler, out = fn(optimizer, **settings), []
        for _ in range(total):
            out.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return out

    def make():
        optimizer = m.make(0)["optimizer"]
        return SimpleNamespace(optimizer=optimizer, scheduler=fn(optimizer))

    def run(x, n):
        seen = []
        for _ in range(n):
            for p in x.optimizer.param_groups[0]["params"]:
                p.grad = torch.ones_like(p)
            x.optimizer.step()
            x.scheduler.step()
            seen.append(x.scheduler.last_epoch)
        return seen

    def save(x, folder):
        p = x.optimizer.param_groups[0]["params"][0]
        torch.save({"p": p.detach().clone(), "o": x.optimizer.state_dict(), "s": x.scheduler.state_dict()}, folder / "state.pt")

    def load(x, folder):
        state = torch.load(folder / "state.pt", weights_only=False)
        with torch.no_grad():
            x.optimizer.param_groups[0]["params"][0].copy_(state["p"])
        x.optimizer.load_state_dict(state["o"])
        x.scheduler.load_state_dict(state["s"])

    def state(x):
        group = x.optimizer.param_groups[0]
        return torch.cat([torch.tensor([group["lr"], float(x.scheduler.last_epoch)]), group["params"][0].detach().flatten()])

    return [
        Schedule(rates, peak=0.1, final=0.1 * 0.7**2 * 0.01, total=70, restarts=True,  # periods of 10, 20 and 40 steps
                 settings={"first": 10, "mult": 2, "fade": 0.7, "floor": 0.01}),
        Schedule(rates, peak=0.1, final=0.1 * 0.01, total=10, settings={"first": 10, "floor": 0.01}),  # the first period
        Resume(make, run, save, load, state, steps=7),
    ]


# ---------------------------------------------------------------- data
def padded(rows, value):
    width = max((len(r) for r in rows), default=0)
    return torch.tensor([[*r, *[value] * (width - len(r))] for r in rows], dtype=torch.long).view(len(rows), width)


@declare("i/r39")
def packed(m, fn):
    examples = m.make(0)["rows"]

    def unpack(batch):
        cu = batch["cu_seqlens"].tolist()
        return [{k: batch[k][0, a:b] for k in ("input_ids", "labels", "position_ids")} for a, b in zip(cu, cu[1:])]

    def rows(examples):
        docs = unpack(fn(examples))
        labels = [d["labels"].tolist() for d in docs]
        return {
            "input_ids": padded([d["input_ids"].tolist() for d in docs], 0),
            "labels": padded(labels, -100),
            "placed": padded([[-7 if t == -100 else t for t in row] for row in labels], -1),  # labels by their places
            "position_ids": padded([d["position_ids"].tolist() for d in docs], -1),
        }

    def supervised(e):  # one label per document is dropped: the first
        return [t for t in e["labels"][1:] if t != -100]

    batch = fn(m.make(0)["rows"])
    ends, at = [0], 0
    for e in examples:
        at += len(e["ids"])
        ends.append(at)
    wanted = {"batch size": 1, "tokens": at, "longest": max(len(e["ids"]) for e in examples), "boundaries": len(ends)}
    wanted |= {f"boundary {i}": n for i, n in enumerate(ends)}
    found = {"batch size": len(batch["input_ids"]), "tokens": batch["input_ids"].shape[1], "longest": int(batch["max_seqlen"]),
             "boundaries": len(batch["cu_seqlens"])}
    found |= {f"boundary {i}": n for i, n in enumerate(batch["cu_seqlens"].tolist())}
    return [
        Collator(fn, examples, rows=False, unpack=unpack),
        Collator(rows, examples, pads={"input_ids": 0, "labels": -100, "placed": -1, "position_ids": -1}, targets=supervised,
                 columns={"input_ids": lambda e: e["ids"], "position_ids": lambda e: list(range(len(e["ids"]))),
                          "placed": lambda e: [-7, *[-7 if t == -100 else t for t in e["labels"][1:]]]}),
        Census(wanted, found, what="sizes and boundaries of the packed batch"),
    ]


@declare("i/r40")
def fill_in_the_middle(m, fn):
    PRE, SUF, MID, END = 40, 41, 42, 43

    def document(ids):  # prefix + middle + suffix, in both forms
        if PRE not in ids:
            return [t for t in ids if t < 40]
        if SUF not in ids or MID not in ids:
            return [-5]
        a, b, c = ids.index(PRE), ids.index(SUF), ids.index(MID)
        return [*ids[a + 1:b], *[t for t in ids[c + 1:] if t < 40], *ids[b + 1:c]]

    def stage(**settings):
        def rows(examples):
            out = fn(examples, **settings)
            ids = [r["ids"] for r in out]
            return {
                "id": torch.tensor([r["id"] for r in out]),
                "ids": padded(ids, -1),
                "document": padded([document(i) for i in ids], -1),
                "tokens": padded([sorted(t for t in i if t < 40) for i in ids], -1),
                "last": torch.tensor([i[-1] for i in ids]),
                "legal": torch.tensor([int([t for t in i if t >= 40] in ([END], [PRE, SUF, MID, END])) for i in ids]),
            }
        return Collator(rows, m.make(0)["rows"], pads={"ids": -1, "document": -1, "tokens": -1},
                        columns={"id": lambda e: e["id"], "document": lambda e: e["ids"], "tokens": lambda e: sorted(e["ids"]),
                                 "last": lambda e: END, "legal": lambda e: 1})

    def census():
        many = [{"id": 7000 + i, "ids": [(i + 3 * j) % 40 for j in range(8)]} for i in range(1000)]
        moved = lambda rows: [r["ids"] for r in rows if PRE in r["ids"]]
        spm = lambda rows: [i for i in moved(rows) if i[:2] == [PRE, SUF]]
        half = moved(fn(many))
        found = {
            "rows": len(fn(many)), "transformed at rate 0": len(moved(fn(many, rate=0.0))),
            "transformed at rate 1": len(moved(fn(many, rate=1.0))), "SPM at rate 1, spm 1": len(spm(fn(many, rate=1.0, spm=1.0))),
            "about half are transformed at rate 0.5": int(400 < len(half) < 600),
            "fewer SPM at spm 0": int(len(spm(fn(many, rate=1.0, spm=0.0))) < 400),
        }
        wanted = {"rows": 1000, "transformed at rate 0": 0, "transformed at rate 1": 1000, "SPM at rate 1, spm 1": 1000,
                  "about half are transformed at rate 0.5": 1, "fewer SPM at spm 0": 1}
        return Census(wanted, found, what="transformed documents")

    return [stage(), stage(rate=1.0), stage(rate=1.0, spm=0.0), stage(rate=1.0, spm=1.0), census()]


# ---------------------------------------------------------------- ranks
def tensors(shards):
    return [s if isinstance(s, torch.Tensor) else torch.stack(list(s)) for s in shards]


@declare("i/r41")
def spread_over_ranks(m, fn):
    rows = torch.cat(m.make(0)["per_rank"])
    single = lambda shards: torch.cat(tensors(shards)).std().item()

    def with_empty(shards):
        shards = tensors(shards)
        return fn([shards[0][:0], *shards[:1], shards[0][:0], *shards[1:]])

    return [
        Ranks(metric=lambda shards: fn(tensors(shards)), rows=rows, single=single),
        Ranks(metric=with_empty, rows=rows, single=single),
    ]


@declare("i/r42")
def accuracy_over_ranks(m, fn):
    g = torch.Generator().manual_seed(3)
    rows = (torch.rand(13, generator=g) < 0.6).float()
    rows[:4] = torch.tensor([1.0, 1.0, 0.0, 1.0])

    def over(more):
        def metric(shards):
            results = torch.cat(tensors(shards))
            return fn(m.shard(results, len(shards) + more), len(results))
        return metric

    single = lambda shards: torch.cat(tensors(shards)).mean().item()
    return [Ranks(metric=over(more), rows=rows, single=single) for more in (0, 3)]


@contextlib.contextmanager
def new_process():
    """Python's hash of texts has another salt in every process."""
    own, new_process.salt = builtins.hash, getattr(new_process, "salt", 0) + 1
    texts = lambda x: isinstance(x, (str, bytes)) or (isinstance(x, tuple) and any(map(texts, x)))
    builtins.hash = lambda x: own((new_process.salt, x)) if texts(x) else own(x)
    try:
        yield
    finally:
        builtins.hash = own


@declare("i/r43")
def seeds(m, fn):
    def call(rank, step, **settings):
        with new_process():
            return fn(rank, step, **settings)

    dropout = [str(call(r, s)[1]) for r in range(8) for s in range(4)]
    data = [str(call(r, s)[0]) for r in range(0, 8, 2) for s in range(4)]
    pairs = [(r, s, tp) for tp in (2, 4) for r in range(8) for s in range(3)]
    runs = [str(call(0, 0, base=b)[i]) for b in (1234, 99) for i in (0, 1)]
    return [
        Ranks(draw=lambda rank: torch.tensor([call(rank, 3)[1]])),  # dropout: every rank
        Ranks(draw=lambda rank: torch.tensor([call(2 * rank, 3)[0]])),  # data: every data rank
        Ranks(draw=lambda rank: torch.tensor([call(4 * rank, 3, tp=4)[0]])),
        Ranks(draw=lambda rank: torch.tensor([call(rank, 3, tp=4)[1]])),
        Ranks(draw=lambda step: torch.tensor([call(5, step)[0]])),  # and every step
        Ranks(draw=lambda step: torch.tensor([call(5, step)[1]])),
        Ranks(draw=lambda base: torch.tensor(call(5, 3, base=10 * base))),
        Census({f"rank {r} step {s} tp {tp}": call(r - r % tp, s, tp=tp)[0] for r, s, tp in pairs},
               {f"rank {r} step {s} tp {tp}": call(r, s, tp=tp)[0] for r, s, tp in pairs}, what="data seeds of a tensor group"),
        Census(set(dropout), dropout, what="dropout seeds", once=True),
        Census(set(data), data, what="data seeds", once=True),
        Census(set(runs), runs, what="seeds of two runs", once=True),
    ]


# ---------------------------------------------------------------- updates
class Catch(torch.optim.SGD):
    """Keeps the gradients that it is given, and moves nothing."""

    def step(self, closure=None):
        self.caught = [None if p.grad is None else p.grad.detach().clone() for g in self.param_groups for p in g["params"]]


def caught(model, run):
    optimizer = Catch(model.parameters(), lr=0.1)
    run(optimizer)
    for p, grad in zip(model.parameters(), optimizer.caught):
        p.grad = grad


CUTS = {
    "ranks": lambda batches: [[b] for b in batches],
    "micro-batches": lambda batches: [list(batches)],
    "ranks with micro-batches": lambda batches: [list(batches[::2]), list(batches[1::2])] if len(batches) > 1 else [list(batches)],
}


@declare("i/r44")
def ranks_and_micro_batches(m, fn):
    def batch():
        return dict(zip(("ids", "loss_mask"), m.fake_rows(torch.Generator().manual_seed(5), 9)))

    def loss(model, b):
        return -(m.logps(model, b["ids"]) * b["loss_mask"]).sum() / b["loss_mask"].sum()

    def accumulation(what, cut):
        def accumulate(model, batches):
            caught(model, lambda optimizer: fn(model, optimizer, cut(batches), max_norm=1e9))
        return Accumulation(m.make(0)["model"], accumulate, batch(), what=what)

    def update(cut):
        given = m.make(0)
        model, optimizer = given["model"], given["optimizer"]
        return Update(model, optimizer, lambda batches, most: fn(model, optimizer, cut(batches), max_norm=most), loss, batch())

    return [accumulation(what, cut) for what, cut in CUTS.items()] + [update(cut) for cut in CUTS.values()]


@declare("i/r45")
def cached_gradients(m, fn):
    def whole():
        chunks = m.make(0)["batches"]
        return {k: torch.cat([c[k] for c in chunks]) for k in ("q", "d")}

    def loss(model, b, tau=0.1):  # all documents are negatives, mean over queries
        q, d = F.normalize(model(b["q"]), dim=-1), F.normalize(model(b["d"]), dim=-1)
        return F.cross_entropy(q @ d.T / tau, torch.arange(len(q)))

    def accumulate(model, batches):
        caught(model, lambda optimizer: fn(model, optimizer, list(batches)))

    given = m.make(0)
    model, optimizer = given["model"], given["optimizer"]

    def update(batches, most):
        def step():  # the code has no clip of its own
            torch.nn.utils.clip_grad_norm_(model.parameters(), most)
            optimizer.step()
        fn(model, SimpleNamespace(zero_grad=optimizer.zero_grad, step=step), list(batches))

    other, batch = m.make(0)["model"], whole()

    def backward(settings):
        cut = [{k: v[a:b] for k, v in batch.items()} for a, b in ((0, 3), (3, 7), (7, 9))]
        caught(other, lambda optimizer: fn(other, optimizer, cut, **settings))

    return [
        Accumulation(m.make(0)["model"], accumulate, whole(), what="chunks"),
        Update(model, optimizer, update, loss, whole()),
        Step(model=other, loss=loss, batch=batch, settings={"tau": Setting(0.1, "setting")}, backward=backward, rows_interact=True,
             reduction="mean", value_is_loss=True, wide=()),
    ]


# ---------------------------------------------------------------- state, grader, template, sampler, adapter
@declare("i/r46")
def stream(m, fn):
    SIZE, SEED = 11, 5

    def make():
        return SimpleNamespace(stream=fn(SIZE, SEED, 0)[0])

    def run(x, n):
        seen = []
        while len(seen) < 4 * n:
            seen += x.stream.next()
        return seen

    def save(x, folder):
        (folder / "state.json").write_text(json.dumps({"state": x.stream.state_dict(), "consumed": x.stream.consumed}))

    def load(batch):
        def load(x, folder):  # into a stream of another seed
            x.stream = fn(SIZE, 77, 0, batch=batch)[0]
            x.stream.load_state_dict(json.loads((folder / "state.json").read_text())["state"])
        return load

    def load_by_fn(x, folder):
        x.stream = fn(SIZE, SEED, json.loads((folder / "state.json").read_text())["consumed"])[1]

    def state(x):
        return torch.tensor([float(x.stream.consumed)])

    def epochs(which, at):
        s, seen = fn(SIZE, SEED, at)[which], []
        while len(seen) < 4 * SIZE:
            seen += s.next()
        return [str(i) for i in seen]

    every = [str(i) for i in range(SIZE)]
    fresh, loaded = epochs(0, 0), epochs(1, 8)
    return [
        *[Resume(make, run, save, how, state, steps=n) for n in (2, 4) for how in (load(4), load_by_fn)],
        Resume(make, run, save, load(2), state, steps=4),  # the number of samples per call changes
        Census(every, fresh[:SIZE], what="samples of the first epoch", once=True),
        Census(every, fresh[SIZE:2 * SIZE], what="samples of the second epoch", once=True),
        Census(every, loaded[3:3 + SIZE], what="samples of the second epoch after a load", once=True),
        Ranks(draw=lambda seed: torch.tensor(run(SimpleNamespace(stream=fn(SIZE, seed, 0)[0]), 5))),
    ]


@declare("i/r47")
def boxed_numbers(m, fn):
    grader = lambda answer: lambda text: fn({"answer": answer}, text)
    half = [r"\boxed{0.5}", r"\boxed{1/2}", r"so \boxed{\frac{1}{2}}.", r"\boxed{\dfrac12}", r"\boxed{50\%}", r"\boxed{2/4}",
            r"<think>x \boxed{3}</think> so \boxed{\frac{1}{2}}", r"\boxed{3} no, \boxed{1/2}", r"\boxed{$\tfrac{1}{2}$}"]
    wrong = [r"\boxed{2}", r"\boxed{1/3}", r"\boxed{-1/2}", r"\boxed{5}", r"\boxed{50}", r"<think>\boxed{1/2} hmm", "one half",
             r"<think>\boxed{1/2}</think> so \boxed{3}", r"\boxed{1/2} no, \boxed{3}", r"<think>\boxed{1/2}</think> I do not know",
             r"\boxed{1/0}", r"\boxed{0.25*2}", r"\boxed{}", r"\boxed{1/2"]
    return [
        Grader(grader("1/2"), half, wrong, question=r"What is 3/6? Put the reduced fraction into \boxed{}."),
        Grader(grader("0.5"), half, wrong, question="What is three divided by six?"),
        Grader(grader("12000"), [r"\boxed{12,000}", r"\boxed{12000}", r"\boxed{3} no, \boxed{12,000}", r"\boxed{$12\,000$}"],
               [r"\boxed{12}", r"\boxed{1200}", r"\boxed{12,000} no, \boxed{3}", r"\boxed{120,00}0", "twelve"], question="What is 12 times 1000?"),
        Grader(grader("-3/4"), [r"\boxed{-\dfrac34}", r"\boxed{-0.75}", r"\boxed{\frac{-3}{4}}", r"\boxed{-75\%}", r"\boxed{-6/8}"],
               [r"\boxed{3/4}", r"\boxed{-3}", r"\boxed{-4/3}", r"\boxed{-34}"], question="What is 1/4 - 1?"),
        Grader(grader("7"), [r"\boxed{7}", r"<think>a</think>\boxed{7}", r"\boxed{14/2}", r"\boxed{700\%}"],
               ["seven", r"\boxed{8}", r"\boxed{77}", r"<think>\boxed{7}"], question="What is 3 + 4?"),
    ]


@declare("i/r48")
def reasoning_template(m, fn):
    S, E = 256, 257
    tokens = lambda messages: fn(messages)
    prompt = lambda messages: [*fn(messages)[0], S, *b"assistant\n"]
    messages = m.make(0)["messages"]
    return [
        ChatTemplate(tokens, prompt, messages, end=E, prefix=False, trained=(4, 7)),
        ChatTemplate(tokens, prompt, m.make(0)["messages"][3:], end=E),  # one user: nothing is rewritten
        ChatTemplate(tokens, prompt, m.make(1)["messages"], end=E),
    ]


@declare("i/r49")
def speculative(m, fn):
    class Constant(nn.Module):
        def __init__(self, logits):
            super().__init__()
            self.logits = nn.Parameter(logits)

        def forward(self, ids):
            return self.logits.expand(*ids.shape, -1)

    count = [0]

    def estimate(x, temperature):  # a token is drawn by the size of the numbers: the mean of Σ|x|·sign·one-hot is x
        flat, new = x.detach().double().flatten(), 5
        p = flat.abs() / flat.abs().sum()
        count[0] += 1
        ids, _ = fn(Constant(temperature * p.clamp(min=1e-30).log()), torch.tensor([0]), new=new, temperature=temperature, seed=count[0])
        share = torch.bincount(ids, minlength=len(flat)).double() / new
        return (flat.abs().sum() * flat.sign() * share).view(x.shape).to(x.dtype)

    given = m.make(0)
    model, prompt = given["model"], given["prompt"]

    def draw(seed, **settings):
        torch.manual_seed(1000 + count[0])  # the global generator does not matter
        count[0] += 1
        return fn(model, prompt, new=24, seed=seed, **settings)[0]

    def sync(temperature):
        given = m.make(0)
        model, prompt = given["model"], given["prompt"]
        text = lambda: fn(model, prompt, new=8, temperature=temperature, seed=0)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}

        def trainer():
            ids = torch.cat([prompt, text()[0]])
            with torch.no_grad():
                lp = (model(ids[None])[0, :-1] / temperature).log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
            return lp[len(prompt) - 1:]

        def perturb():
            g = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.02 * torch.randn(p.shape, generator=g))

        def undo():
            with torch.no_grad():
                for n, p in model.named_parameters():
                    p.copy_(before[n])

        return WeightSync(perturb, lambda: None, trainer, lambda: text()[1], undo=undo, model=model)

    wanted, found = {}, {}
    for new in (1, 2, 5, 6):
        for draft in (1, 3, 8):
            ids, lps = fn(model, prompt, new=new, draft_len=draft)
            wanted |= {f"ids of {new}, drafts of {draft}": new, f"log-probs of {new}, drafts of {draft}": new}
            found |= {f"ids of {new}, drafts of {draft}": len(ids), f"log-probs of {new}, drafts of {draft}": len(lps)}
    state = torch.get_rng_state()
    fn(model, prompt)
    wanted["draws from the global generator"], found["draws from the global generator"] = 0, int(not torch.equal(state, torch.get_rng_state()))
    return [
        Unbiased(estimate, settings=(1.0, 0.7)),
        Ranks(draw=draw),
        sync(1.0), sync(0.6),
        Census(wanted, found, what="tokens that are produced"),
    ]


@declare("i/r50")
def dora(m, fn):
    x = m.make(0)["x"]

    def trained(linear, **settings):
        torch.manual_seed(3)
        layer = fn(linear, **settings)
        g = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for p in layer.parameters():
                if p.requires_grad:
                    p.add_(0.3 * torch.randn(p.shape, generator=g))
        return layer

    def merged(linear):
        layer = trained(linear)
        now = [layer]
        return MergedLayer(lambda: now[0](x).detach(), lambda: now.__setitem__(0, layer.merge()), lambda: now.__setitem__(0, layer))

    def linear(bias=True):
        torch.manual_seed(0)
        return nn.Linear(6, 5, bias=bias)

    def delta(w):
        layer = trained(linear(), alpha=4 * w)
        return (layer.merge().weight - linear().weight).detach()

    def applied(w):  # unmerged, on unit vectors and without a bias
        layer = trained(linear(), alpha=4 * w)
        plain = layer(torch.eye(6)) - layer.base.bias
        return (plain.T - linear().weight).detach()

    def defined(w):  # magnitude · V / ‖V‖ per output row, V = W + (alpha / r) · B A
        layer = trained(linear(), alpha=4 * w)
        v = linear().weight + 4 * w / 2 * layer.B @ layer.A
        return (layer.magnitude[:, None] * v / v.norm(dim=1, keepdim=True) - linear().weight).detach()

    fresh = fn(linear())
    layer = trained(linear())
    g = torch.Generator().manual_seed(6)
    return [
        AdapterStart(linear(), lambda base: fn(base), lambda model: model(x).detach()),
        AdapterStart(linear(bias=False), lambda base: fn(base, r=3, alpha=1), lambda model: model(x).detach()),
        merged(linear()), merged(linear(bias=False)),
        Merge(delta, applied, linear=False), Merge(delta, defined, linear=False),
        Census({"A", "B", "magnitude"}, [n for n, p in fresh.named_parameters() if p.requires_grad], what="trained parameters"),
        Step(model=layer, loss=lambda model, b: F.mse_loss(model(b["x"]), b["y"]),
             batch={"x": torch.randn(8, 6, generator=g), "y": torch.randn(8, 5, generator=g)},
             optimizer=torch.optim.AdamW([p for p in layer.parameters() if p.requires_grad], lr=1e-2),
             value_is_loss=False, reduction="mean", wide=()),  # the norm is detached
    ]
