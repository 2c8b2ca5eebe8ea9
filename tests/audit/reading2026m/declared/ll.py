"""Declarations of k01 … k25, from INPUTS, SETTINGS and NOTES."""
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from earnest_audit import (
    Accumulation, AdapterStart, Census, Ema, Merge, MergedLayer, Metric, Ranks, Resume, Schedule, Setting, Step, Update,
)
from tests.audit.reading2026m.reading import declare, parts, step_of


def cat(batches):
    """Micro-batches (or ranks) as one batch."""
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


def next_token(logits, ids, mask=None):
    """Cross-entropy of token t+1 from position t; the mask belongs to the token; pooled mean."""
    nll = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    if mask is None:
        return nll.mean()
    m = mask[:, 1:].to(nll.dtype)
    return (nll * m).sum() / m.sum()


# --- losses ---------------------------------------------------------------------------------------------------------


@declare("ll/r01")
def _(module, fn):
    def from_words(model, batch, skew=0.1):  # KL(q || m), m = (1 - skew) p + skew q, the gradient through m too
        q = model(batch["ids"])[:, :-1].softmax(-1)
        p = batch["teacher_logits"][:, :-1].softmax(-1)
        m = (1 - skew) * p + skew * q
        kl = (q * (q.log() - m.log())).sum(-1)
        mask = batch["loss_mask"][:, 1:].to(kl.dtype)
        return (kl * mask).sum() / mask.sum()

    return step_of(
        module, fn,
        roles={"ids": "ids", "mask": "loss_mask", "teacher": "teacher_logits"},
        settings={"skew": Setting(0.1, "mixture")},
        student=lambda model, batch: model(batch["ids"]),
        paths={"from the words": from_words},
        wide=("ids", "loss_mask", "teacher_logits"),
        family="divergence", reduction="mean", value_is_loss=True,
    )


@declare("ll/r15")
def _(module, fn):
    def in_the_loss(model, batch, aux_weight=0.05):  # lm + aux_weight * balance, the balance as an ordinary term
        ids, mask = batch["ids"], batch["attention_mask"]
        logits = model(ids, mask, 0.0)[0]
        probs = model.moe.router(model.rnn(model.emb(ids))[0]).softmax(-1)[mask.bool()]  # real tokens
        experts, k = probs.shape[-1], model.moe.top_k
        f = F.one_hot(probs.topk(k, -1).indices, experts).sum((0, 1)) / (len(probs) * k)
        return next_token(logits, ids, mask) + aux_weight * experts * (f * probs.mean(0)).sum()

    return step_of(
        module, fn,
        roles={"ids": "ids", "attention": "attention_mask"},
        settings={"aux_weight": Setting(0.05, "weight")},
        metrics={"balance": Metric(low=0.0, weight="aux_weight")},
        paths={"balance in the loss": in_the_loss},
        wide=("ids", "attention_mask"),
        family="sft", reduction="mean", value_is_loss=False, rows_interact=True, all_supervised=True,
    )


@declare("ll/r04")
def _(module, fn):
    def one_process(model, batch, cp=2):
        ids = batch["ids"]
        time = torch.arange(ids.shape[1])
        x = model.emb(ids) + model.pos(time)
        scores = model.q(x) @ model.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        scores = scores.masked_fill(time[None, :] > time[:, None], float("-inf"))
        return next_token(model.head(x + scores.softmax(-1) @ model.v(x)), ids, batch["loss_mask"])

    return step_of(
        module, fn,
        roles={"ids": "ids", "mask": "loss_mask"},
        settings={"cp": Setting(2, "inert", modes=(1, 3, 6))},  # 12 positions: a multiple of 2 * cp
        paths={"one process": one_process},
        wide=(),  # time % (2 * cp) == 0: not any width is legal
        family="sft", reduction="mean", value_is_loss=True,
    )


@declare("ll/d01")
def _(module, fn):
    def from_words(model, batch, task_weight=0.5, kd_weight=0.4, hidden_weight=0.1, temperature=2.0, skew=0.1):
        logits, hidden = model(batch["ids"])
        real = batch["attention_mask"].to(logits.dtype)
        p = (batch["teacher_logits"] / temperature).softmax(-1)
        q = (logits / temperature).softmax(-1)
        kl = (p * (p.log() - (skew * p + (1 - skew) * q).log())).sum(-1) * temperature**2
        cos = 1 - F.cosine_similarity(hidden, batch["teacher_hidden"], dim=-1)
        task = next_token(logits, batch["ids"], batch["attention_mask"])
        return task_weight * task + ((kd_weight * kl + hidden_weight * cos) * real).sum() / real.sum()

    return step_of(
        module, fn,
        roles={"ids": "ids", "attention": "attention_mask", "teacher": "teacher_logits"},
        settings={
            "task_weight": Setting(0.5, "weight", pure=0.0),
            "kd_weight": Setting(0.4, "weight"),
            "hidden_weight": Setting(0.1, "weight", pure=0.0),
            "temperature": Setting(2.0, "setting"),
            "skew": Setting(0.1, "mixture"),
        },
        metrics={"task": Metric(low=0.0, weight="task_weight"), "kd": Metric(low=0.0, weight="kd_weight")},
        student=lambda model, batch: model(batch["ids"])[0],
        paths={"from the words": from_words},
        wide=("ids", "attention_mask", "teacher_logits", "teacher_hidden"),
        family="divergence", reduction="mean", value_is_loss=True, all_supervised=True,
    )


@declare("ll/r03")
def _(module, fn):
    def one_process(model, batch, tp=3, z_weight=0.001):
        logits = model.head(model.rnn(model.emb(batch["ids"]))[0])
        z = logits[:, :-1].logsumexp(-1) ** 2
        mask = batch["loss_mask"][:, 1:].to(z.dtype)
        return next_token(logits, batch["ids"], batch["loss_mask"]) + z_weight * (z * mask).sum() / mask.sum()

    return step_of(
        module, fn,
        roles={"ids": "ids", "mask": "loss_mask"},
        settings={"tp": Setting(3, "inert", modes=(1, 2, 4)), "z_weight": Setting(0.001, "weight")},
        paths={"one process": one_process},
        wide=("ids", "loss_mask"),
        family="sft", reduction="mean", value_is_loss=True,
    )


@declare("ll/d10")
def _(module, fn):
    def from_words(model, batch, aux_weight=0.05):
        ids = batch["ids"]
        probs = model.moe.router(model.rnn(model.emb(ids))[0]).softmax(-1).flatten(0, 1)
        tokens, experts = probs.shape
        chose = F.one_hot(probs.topk(2, -1).indices, experts).sum(1)  # [T, E], 1 where the token chose the expert
        balance = experts * (chose.sum(0) / (2 * tokens) * (probs * chose).sum(0) / tokens).sum()
        return next_token(model(ids)[0], ids) + aux_weight * balance

    return step_of(
        module, fn,
        roles={"ids": "ids"},
        settings={"aux_weight": Setting(0.05, "weight")},
        metrics={"lm": Metric(low=0.0, weight=1.0), "balance": Metric(low=0.0, high=4.0, weight="aux_weight")},
        paths={"from the words": from_words},
        wide=(),  # all rows are full
        family="sft", reduction="mean", rows_interact=True, all_supervised=True,
    )


@declare("ll/r02")
def _(module, fn):
    def full_logits(model, batch, chunk=5):
        logits = model.head(model.rnn(model.emb(batch["ids"]))[0])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)

    def accumulate(model, batches):  # "any factor on the loss is respected"
        counts = [(b["labels"][:, 1:] != -100).sum() for b in batches]
        for b, n in zip(batches, counts):
            (fn(model, b) * (n / sum(counts))).backward()

    step = step_of(
        module, fn,
        roles={"ids": "ids", "labels": "labels"},
        settings={"chunk": Setting(5, "inert", modes=(1, 7, 64))},
        paths={"full logits": full_logits},
        wide=("ids", "labels"),
        family="sft", reduction="mean", value_is_loss=True,
    )
    model, batch = parts(module)
    return [step, Accumulation(model, accumulate, batch)]


@declare("ll/d03")
def _(module, fn):
    def one_process(model, batch, temperature=0.1):
        emb = F.normalize(model(batch["ids"].flatten(0, 1)), dim=-1)  # all ranks in order
        anchors, candidates, target, at = [], [], [], 0
        for entry in batch["labels"].flatten().tolist():
            if entry:  # opens a sample: its anchor stands before the positive
                anchors.append(emb[at])
                target.append(len(candidates))
                at += 1
            candidates.append(emb[at])
            at += 1
        return F.cross_entropy(torch.stack(anchors) @ torch.stack(candidates).T / temperature, torch.tensor(target))

    # no roles: ids are [ranks, sentences, time] and labels are the layout of the samples, not target ids
    return step_of(
        module, fn,
        settings={"temperature": Setting(0.1, "setting")},
        paths={"one process": one_process},
        wide=(), rows_interact=True, value_is_loss=True,
    )


# --- metrics over ranks ---------------------------------------------------------------------------------------------


@declare("ll/r06")
def _(module, fn):
    def metric(shards):  # the samples, dealt out as INPUTS says: r, r + ranks, …; the last round filled from the start
        scores, ranks = torch.cat(shards), len(shards)
        n = len(scores)
        rounds = -(-n // ranks)
        index = torch.arange(rounds * ranks) % n
        return fn([scores[index[r::ranks]] for r in range(ranks)], n)

    rows = torch.rand(13, generator=torch.Generator().manual_seed(0))
    rows[:3] = 1.0
    return Ranks(metric=metric, rows=rows, single=lambda shards: torch.cat(shards).mean().item())


@declare("ll/r05")
def _(module, fn):
    made = module.make(0)
    token_bytes = made["token_bytes"]
    data = cat([b for batches in made["per_rank"] for b in batches])
    rows = torch.stack([data["nll"], data["targets"].to(data["nll"].dtype)], 1)  # [N, 2, time]

    def metric(shards):
        return fn([[{"nll": b[:, 0], "targets": b[:, 1].long()} for b in s.split(3)] for s in shards], token_bytes)

    def single(shards):
        joined = torch.cat(shards)
        nll, targets = joined[:, 0].double(), joined[:, 1].long()
        size = token_bytes[targets.clamp(min=0)] * (targets >= 0)
        return (nll[size > 0].sum() / (math.log(2) * size.sum())).item()

    return Ranks(metric=metric, rows=rows, single=single)


@declare("ll/d04")
def _(module, fn):
    data = cat([mb for mbs in module.make(0)["per_rank"] for mb in mbs])
    rows = torch.stack([data["pg_loss"], data["mask"]], 1)[:17].clone()  # [N, 2, time]
    rows[-1, 1] = 0.0  # a micro-batch may have no response token

    def metric(shards):
        return fn([[{"pg_loss": b[:, 0], "mask": b[:, 1]} for b in s.split(4)] for s in shards])

    def single(shards):
        loss, mask = torch.cat(shards).unbind(1)
        return ((loss * mask).sum() / mask.sum()).item()

    return Ranks(metric=metric, rows=rows, single=single)


# --- schedules ------------------------------------------------------------------------------------------------------


@declare("ll/d05")
def _(module, fn):
    def schedule(eta_min):
        def rates(total, ranks, warmup_steps=4, eta_min=eta_min):
            optimizer = module.make(0)["optimizer"]
            scheduler = fn(optimizer, warmup_steps=warmup_steps, total_steps=total - 6, eta_min=eta_min)
            out = []
            for _ in range(total):  # six updates more than the schedule has: the end is held
                out.append([g["lr"] for g in optimizer.param_groups])
                optimizer.step()
                scheduler.step()
            return out

        return Schedule(
            rates, peak=(0.1, 0.02), final=eta_min, total=20, warmup=4, ends=14,
            settings={"warmup_steps": 4, "eta_min": eta_min} if eta_min else {"warmup_steps": 4},
        )

    return [schedule(0.0), schedule(0.004)]


@declare("ll/r07")
def _(module, fn):
    def rates(total, ranks, peak=0.003, warmup=20, cooldown_start=140, cooldown=60):
        return [fn(k, peak=peak, warmup=warmup, cooldown_start=cooldown_start, cooldown=cooldown) for k in range(total)]

    def stable(total, ranks, peak=0.003, warmup=20):
        return [fn(k, peak=peak, warmup=warmup, cooldown_start=None) for k in range(total)]

    return [
        Schedule(
            rates, peak=0.003, final=0.0, total=220, warmup=20, ends=200,
            settings={"peak": 0.003, "warmup": 20, "cooldown_start": 140, "cooldown": 60},
        ),
        Schedule(stable, peak=0.003, final=0.003, total=60, warmup=20, settings={"peak": 0.003, "warmup": 20}),
    ]


@declare("ll/r08")
def _(module, fn):
    def rates(skips):
        def run(total, ranks, warmup_updates=5):
            optimizer = module.make(0)["optimizer"]
            scheduler = fn(optimizer, warmup_updates=warmup_updates, total_updates=total - 5, num_processes=ranks)
            out, tries = [], 0
            while len(out) < total:  # five updates more than the schedule has: the rate stays at 0
                tries += 1
                optimizer.step_was_skipped = skips and tries % 3 == 0
                if not optimizer.step_was_skipped:
                    out.append(optimizer.param_groups[0]["lr"])
                    optimizer.step()
                scheduler.step()
            return out

        return run

    return [
        Schedule(rates(s), peak=0.2, final=0.0, total=30, warmup=5, ends=25, settings={"warmup_updates": 5})
        for s in (False, True)
    ]


# --- updates --------------------------------------------------------------------------------------------------------


@declare("ll/r09")
def _(module, fn):
    made = module.make(0)
    model, optimizers = made["model"], made["optimizer"]

    def update(batches):  # no accumulation: one update per batch
        fn(model, optimizers, [cat(batches)])

    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"])

    # each parameter has an optimizer of its own
    return [Update(model, o, update, loss, cat(made["batches"][:2]), clips=False) for o in optimizers.values()]


@declare("ll/d06")
def _(module, fn):
    made = module.make(0)
    model, optimizer = made["model"], made["optimizer"]

    def plain(model, batch):  # plain autograd through the same two layers
        return F.cross_entropy(torch.tanh(batch["x"] @ model.a.t()) @ model.b.t(), batch["y"])

    return Update(
        model, optimizer, lambda batches: fn(model, optimizer, batches), plain, cat(made["batches"]),
        split=(5, 5, 5, 5), clips=False,  # equal sizes
    )


@declare("ll/d02")
def _(module, fn):
    made = module.make(0)
    model, optimizer = made["model"], made["optimizer"]

    def loss(model, batch):
        nll = F.cross_entropy(model(batch["hidden"]).transpose(1, 2), batch["targets"], reduction="none")
        return (nll * batch["mask"]).sum() / batch["mask"].sum()

    def update(batches, max_grad_norm):
        fn(model, optimizer, batches, max_norm=max_grad_norm)

    return Update(model, optimizer, update, loss, cat(made["batches"]), split=(3, 1, 2, 2))


class Vector(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.detach())  # shares its memory

    def forward(self, x):
        return x @ self.weight.reshape(-1, 1)


@declare("ll/d07")
def _(module, fn):
    def once(net, shadow, decay, feedback):  # one step of an optimizer that leaves net as it is
        both = nn.Module()
        both.net, both.shadow = Vector(net), Vector(shadow).requires_grad_(False)
        g = torch.Generator().manual_seed(0)
        batch = {"x": torch.randn(4, net.numel(), generator=g), "y": torch.randn(4, 1, generator=g)}
        fn(both, torch.optim.Adam(both.net.parameters(), lr=0.0), [batch], decay=decay, feedback=feedback)
        return both

    def average(average, current, rate):
        return once(current, average, 1 - rate, 0.0).shadow.weight.detach()

    def feedback(average, current, rate):  # net moves to the shadow by the gap before the shadow's update
        return once(average, current.clone(), 0.9, rate).net.weight.detach()

    made = module.make(0)
    model, optimizer = made["model"], made["optimizer"]
    return [
        Ema(average, rate=0.1),
        Ema(feedback),
        Update(
            model, optimizer, lambda batches: fn(model, optimizer, [cat(batches)]),
            lambda model, batch: F.mse_loss(model.net(batch["x"]), batch["y"]), cat(made["batches"][:2]), clips=False,
        ),
    ]


@declare("ll/r14")
def _(module, fn):
    made = module.make(0)
    model, optimizer = made["model"], made["optimizer"]

    def loss(model, batch):
        training = model.training
        model.eval()  # evaluation forwards do not count in the load
        value = next_token(model(batch["ids"]), batch["ids"])
        model.train(training)
        return value

    return Update(
        model, optimizer, lambda batches: fn(model, optimizer, batches), loss, cat(made["batches"]),
        split=(3, 3, 3), clips=False,
    )


@declare("ll/r10")
def _(module, fn):
    made = module.make(0)
    model, pair = made["model"], made["optimizer"]

    def loss(model, batch):
        return next_token(model(batch["ids"]), batch["ids"])

    return [
        Update(model, o, lambda batches: fn(model, pair, batches), loss, cat(made["batches"]), split=(4, 4, 4), clips=False)
        for o in pair
    ]


# --- state ----------------------------------------------------------------------------------------------------------


@declare("ll/d09")
def _(module, fn):
    seed, n_rows = 42, 12

    class Run:
        def __init__(self):
            torch.manual_seed(seed)  # a fresh run seeds the training stream once, before step 0
            self.order = torch.randperm(n_rows, generator=torch.Generator().manual_seed(seed + 1)).tolist()
            self.step, self.weight = 0, torch.zeros(4)

        def train(self, steps):
            seen = []
            for _ in range(steps):
                seen.append(self.order[self.step % n_rows])
                self.weight = 0.9 * self.weight + torch.rand(4)  # dropout, sampling: the training stream
                self.step += 1
            return seen

        def state(self):
            return [self.weight, torch.tensor(self.order), torch.tensor(self.step)]

        def save(self, folder):
            torch.save({"step": self.step, "rng": torch.get_rng_state(), "weight": self.weight}, folder / "run.pt")

        def load(self, folder):
            saved = torch.load(folder / "run.pt")
            self.weight = saved["weight"]
            order, self.step = fn({"step": saved["step"], "rng": saved["rng"]}, n_rows, seed=seed)
            self.order = list(order)

    return Resume(Run, Run.train, Run.save, Run.load, Run.state)


@declare("ll/r11")
def _(module, fn):
    class Run:
        def __init__(self, ranks=4):
            self.progress, self.ranks = {"consumed_samples": 0}, ranks

        def train(self, steps):
            batches = fn(self.progress, 43, self.ranks, steps, global_batch=8, seed=1234)
            return [row for batch in batches for rank in batch for row in rank]  # ranks joined in order

        def save(self, folder):
            torch.save(self.progress, folder / "data.pt")

        def load(self, folder):
            self.progress, self.ranks = torch.load(folder / "data.pt"), 2  # on another number of ranks

        def state(self):
            return {"consumed_samples": torch.tensor(self.progress["consumed_samples"])}

    def draw(rank, step):  # what one of four ranks gets of one global batch
        return torch.tensor(fn({"consumed_samples": 8 * step}, 43, 4, 1)[0][rank])

    epoch = fn({"consumed_samples": 0}, 40, 4, 5)  # 40 rows: no row is left over
    return [
        Resume(Run, Run.train, Run.save, Run.load, Run.state),
        Ranks(draw=draw),
        Census(
            wanted=[f"row {k}" for k in range(40)],
            found=[f"row {k}" for batch in epoch for rank in batch for k in rank],
            what="rows of an epoch", once=True,
        ),
    ]


@declare("ll/r12")
def _(module, fn):
    """The uninterrupted run is computed from the words, what comes after a load by ``fn``. In float64, and compared in
    float32: eval() and train() turn the weights over and back, which is exact up to rounding only."""
    start = module.make(0)["model"].double()
    g = torch.Generator().manual_seed(1)
    batches = [
        {"x": torch.randn(6, 5, generator=g).double(), "y": torch.randn(6, 2, generator=g).double()} for _ in range(96)
    ]

    def flat(tensors):
        return torch.cat([t.detach().flatten() for t in tensors]).float()

    def words(updates, lr=0.1, beta=0.9, warmup=3):
        """The evaluation weights after each update."""
        x = [p.detach().clone() for p in start.parameters()]
        z, total, out = [p.clone() for p in x], 0.0, []
        for k in range(updates):
            rate = lr * min(1.0, (k + 1) / warmup)
            total += rate**2
            c = rate**2 / total
            y = [((1 - beta) * b + beta * a).requires_grad_() for a, b in zip(x, z)]
            loss = F.mse_loss(F.linear(batches[k]["x"], *y), batches[k]["y"])
            z = [b - rate * d for b, d in zip(z, torch.autograd.grad(loss, y))]
            x = [(1 - c) * a + c * b for a, b in zip(x, z)]
            out.append(flat(x))
        return out

    class Run:
        def __init__(self):
            self.place, self.loaded = 0, None

        def train(self, steps):
            first, self.place = self.place, self.place + steps
            return list(range(first, self.place))

        def state(self):
            weights = words(self.place)
            if self.loaded and self.place > self.loaded:
                saved, end = fn(copy.deepcopy(start), copy.deepcopy(batches[: self.place]), self.loaded)
                weights[self.loaded - 1], weights[-1] = saved.float(), end.float()
            return weights

        def save(self, folder):
            torch.save(self.place, folder / "run.pt")

        def load(self, folder):
            self.place = self.loaded = torch.load(folder / "run.pt")

    return Resume(Run, Run.train, Run.save, Run.load, Run.state)


# --- adapters -------------------------------------------------------------------------------------------------------


@declare("ll/d08")
def _(module, fn):
    made = module.make(0)
    weight, bias = made["base"].weight.detach().clone(), made["base"].bias.detach().clone()
    adapters = made["adapters"]
    x, y = torch.randn(5, 8), torch.randn(5, 6)
    layer = fn(made["base"], adapters)

    def from_words(model, batch):
        r = batch["x"] @ weight.t()
        for name, a in adapters.items():
            delta = a["scaling"] * model.B[name] @ model.A[name]
            factor = model.magnitude[name] / (weight + delta).norm(dim=1).detach()  # constant in the gradient
            r = factor * (r + batch["x"] @ delta.t())
        return F.mse_loss(r + bias, batch["y"])

    fresh = {n: {**a, "B": torch.zeros_like(a["B"]), "magnitude": weight.norm(dim=1)} for n, a in adapters.items()}
    return [
        MergedLayer(lambda: layer(x), layer.merge, layer.unmerge),
        AdapterStart(module.make(0)["base"], lambda base: fn(base, fresh), lambda model: model(x)),  # D = 0, all f = 1
        Step(
            model=fn(module.make(0)["base"], adapters),
            loss=lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]),
            batch={"x": x, "y": y},
            paths={"from the words": from_words},
            reduction="mean", value_is_loss=False, wide=(),
        ),
    ]


@declare("ll/r13")
def _(module, fn):
    base = module.make(0)["base"]
    weight = base.weight.detach().clone()
    x, y = torch.randn(5, 10), torch.randn(5, 7)

    def trained():  # as after some training
        layer = fn(module.make(0)["base"], rank=3, alpha=6.0)
        g = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in (layer.A, layer.B):
                p += 0.1 * torch.randn(p.shape, generator=g)
        return layer

    layer = trained()

    def unmerged(w=1.0):  # the weight with which the layer computes
        with torch.no_grad():
            return (layer(torch.eye(10)) - layer(torch.zeros(1, 10))).t()

    def exported(w=1.0):  # the exported LoRA on the original weight
        a, b, alpha = layer.export_lora()
        return weight + alpha / a.shape[0] * b @ a

    start = fn(module.make(0)["base"], rank=3, alpha=6.0)
    return [
        AdapterStart(base, lambda model: fn(model, rank=3, alpha=6.0), lambda model: model(x)),
        Merge(lambda w: layer.merged_weight(), unmerged, once=True),
        Merge(exported, unmerged, once=True),
        Census(wanted=["A", "B"], found=[n for n, p in start.named_parameters() if p.requires_grad], what="trained parameters"),
        Step(
            model=start,
            loss=lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]),
            batch={"x": x, "y": y},
            reduction="mean", value_is_loss=True, wide=(),
        ),
    ]
