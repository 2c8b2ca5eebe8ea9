import copy
import json
import math

import torch
import torch.nn.functional as F
from torch import nn

from earnest_audit import Census, Ema, FirstCall, OuterStep, Ranks, Resume, RoundTrip, Schedule, Setting, Step, Update
from tests.audit.reading2026l.reading import declare, step_of


def whole(x, usual):
    """A number of steps is whole: another value is rounded away from the usual one."""
    return int(math.ceil(x)) if x > usual else max(0, int(math.floor(x)))


def joined(batches):
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


def rates_of(scheduler, optimizer, total):
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


# ---------------------------------------------------------------- schedules
@declare("ii/r09")
def _(module, fn):
    def rates(total, ranks, warmup=4):
        optimizer = module.make(0)["optimizer"]
        return rates_of(fn(optimizer, warmup=whole(warmup, 4), total=total, world=ranks), optimizer, total)

    return Schedule(rates, peak=0.2, final=0.0, total=20, warmup=4, ends=20, settings={"warmup": 4})


@declare("ii/d05")
def _(module, fn):
    def plain(total, ranks):
        optimizer = module.make(0)["optimizer"]
        return rates_of(fn(optimizer, warmup=0, total=total), optimizer, total)

    def warm(total, ranks, warmup=5, start=0.01):
        optimizer = module.make(0)["optimizer"]
        return rates_of(fn(optimizer, warmup=whole(warmup, 5), total=total, start=start), optimizer, total)

    return [
        Schedule(plain, peak=0.1, final=0.0, total=20, warmup=0, ends=20),
        Schedule(warm, peak=0.1, final=0.0, total=20, warmup=5, ends=20, settings={"warmup": 5, "start": 0.01}),
    ]


@declare("ii/r08")
def _(module, fn):
    early, late = 512 * 4096, 2048 * 4096  # tokens of a step
    total = 100 + math.ceil((3_000_000_000 - 100 * early) / late)
    ends = 100 + math.ceil((2_700_000_000 - 100 * early) / late)  # 90% of the tokens

    def rates(total, ranks, warmup=20, seq_len=4096, total_tokens=3_000_000_000):
        return [fn(s, warmup=whole(warmup, 20), seq_len=whole(seq_len, 4096), total_tokens=total_tokens) for s in range(total)]

    return Schedule(rates, peak=4.2e-4, final=4.2e-5, total=total, warmup=20, ends=ends,
                    settings={"warmup": 20, "seq_len": 4096, "total_tokens": 3_000_000_000})


@declare("ii/r07")
def _(module, fn):
    def rates(total, ranks, warmup=10, decay=20):
        return [fn(s, total=total, warmup=whole(warmup, 10), decay=whole(decay, 20)) for s in range(total)]

    return Schedule(rates, peak=3e-4, final=0.0, total=100, warmup=10, ends=100, settings={"warmup": 10, "decay": 20})


# ---------------------------------------------------------------- metrics over ranks
@declare("ii/r06")
def _(module, fn):
    rows = torch.cat([torch.stack([b["ratio"], b["mask"]], 1) for b in module.make(0)["per_rank"]])  # [8, 2, 9]

    def metric(shards):
        return float(fn([{"ratio": s[:, 0], "mask": s[:, 1]} for s in shards]))

    def single(shards):
        x = torch.cat(shards)
        ratio, on = x[:, 0], x[:, 1] > 0
        outside = (ratio < 0.8) | (ratio > 1.25)
        return (outside & on).sum().item() / on.sum().item()

    return Ranks(metric=metric, rows=rows, single=single)


@declare("ii/r04")
def _(module, fn):
    rows = torch.cat(module.make(0)["per_rank"])

    def single(shards):
        x = torch.cat(shards)
        return (((x - x.mean()) ** 2).sum() / (len(x) - 1)).sqrt().item()

    def with_empty(shards):  # ranks without a reward before, between and after the others
        out = [rows[:0]]
        for s in shards:
            out += [s, rows[:0]]
        return float(fn(out))

    return [Ranks(metric=lambda shards: float(fn(list(shards))), rows=rows, single=single),
            Ranks(metric=with_empty, rows=rows, single=single)]


@declare("ii/r05")
def _(module, fn):
    def dataset(n):
        g = torch.Generator().manual_seed(3)
        label = torch.randint(0, 4, (n,), generator=g)
        pred = torch.where(torch.rand(n, generator=g) < 0.5, label, torch.randint(0, 4, (n,), generator=g))
        pred[:5] = label[:5]  # the samples that the last batch repeats are right
        return torch.stack([pred, label], 1).float()

    def metric(shards, batch=4):  # the samples, in order, in the layout of the INPUTS for this number of ranks
        x, ranks = torch.cat(shards).long(), len(shards)
        steps = -(-len(x) // (ranks * batch))
        x = x[torch.arange(steps * ranks * batch) % len(x)].view(steps, ranks, batch, 2)
        return float(fn([{"pred": x[:, r, :, 0], "label": x[:, r, :, 1]} for r in range(ranks)], sum(len(s) for s in shards)))

    def single(shards):
        x = torch.cat(shards)
        return (x[:, 0] == x[:, 1]).sum().item() / len(x)

    return [Ranks(metric=metric, rows=dataset(29), single=single), Ranks(metric=metric, rows=dataset(24), single=single)]


@declare("ii/d04")
def _(module, fn):
    g = torch.Generator().manual_seed(0)
    mask = (torch.arange(6) < torch.tensor([1, 6, 2, 5, 3, 1, 4, 6, 2])[:, None]).float()  # each row has a supervised position
    rows = torch.stack([torch.rand(9, 6, generator=g) * 3 + 4 / mask.sum(1, keepdim=True), mask], 1)  # [9, 2, 6]

    def metric(shards):
        return float(fn([{"ce": s[:, 0].flatten(), "mask": s[:, 1].flatten()} for s in shards]))

    def single(shards):
        x = torch.cat(shards)
        return ((x[:, 0] * x[:, 1]).sum() / x[:, 1].sum()).item()

    return Ranks(metric=metric, rows=rows, single=single)


@declare("ii/d03")
def _(module, fn):
    rows = torch.cat(module.make(0)["per_rank"])  # 24 trajectories: as many on each of 1, 2, 3 or 4 ranks
    by_name = {"turns_per_sample/mean": torch.mean, "turns_per_sample/max": torch.max, "turns_per_sample/min": torch.min, "total_turns": torch.sum}

    def subject(name):
        def metric(shards):  # every rank has the same number of trajectories
            return float(fn(list(torch.cat(shards).chunk(len(shards))), name))

        return Ranks(metric=metric, rows=rows, single=lambda shards: by_name[name](torch.cat(shards)).item())

    return [subject(name) for name in by_name]


# ---------------------------------------------------------------- seeds
@declare("ii/r03")
def _(module, fn):
    def draw(rank, step):  # a whole epoch of a rank: 7 of 26 samples in an order
        return torch.tensor([int(fn(rank, 7 * step + i)) for i in range(7)])

    def epoch(size, number=0):
        n = -(-size // 4)
        return [str(int(fn(r, number * n + i, size=size))) for i in range(n) for r in range(4)]

    return [
        Ranks(draw=draw),
        Census([str(i) for i in range(26)], epoch(26), what="samples of an epoch"),
        Census([str(i) for i in range(24)], epoch(24, 1), what="samples of an epoch without a repetition", once=True),
    ]


@declare("ii/d02")
def _(module, fn):
    def order(rank, step):  # the order of a whole entry: independent also where two workers hold one shard
        return torch.tensor([int(fn(rank, 64 * step + i)[1]) for i in range(64)])

    def order_of_worker(k, step):  # two ranks of two workers
        return torch.tensor([int(fn(k // 2, 64 * step + i, worker=k % 2, world=2, num_workers=2)[1]) for i in range(64)])

    def shards(rank, step):  # 30 entries of the schedule, with 50 shards
        return torch.tensor([int(fn(rank, 64 * (30 * step + e), n_shards=50)[0]) for e in range(30)])

    read = [str(int(fn(1, 64 + i)[1])) for i in range(64)]
    return [Ranks(draw=order), Ranks(draw=order_of_worker), Ranks(draw=shards),
            Census([str(i) for i in range(64)], read, what="samples of an entry", once=True)]


# ---------------------------------------------------------------- state
class _Run:
    """A run that can be interrupted: what came before the checkpoint, and what since."""

    def __init__(self):
        self.before, self.after = 0, 0

    def save(self, folder):
        (folder / "done.json").write_text(json.dumps(self.before + self.after))

    def load(self, folder):
        self.before, self.after = json.loads((folder / "done.json").read_text()), 0


@declare("ii/d06")
def _(module, fn):
    pattern = [0.05, 0.03, 0.012, 0.002]  # down, down, as it is, up: never at a bound within 30 updates

    def kls(start, stop):
        return [pattern[k % 4] for k in range(start, stop)]

    def run(x, n):
        first = x.before + x.after
        x.after += n
        return list(range(first, first + n))

    def state(x):  # the rate of the last update; without one since the checkpoint, that of the run until then
        b, a = (x.before, x.after) if x.after else (0, x.before)
        rates = fn(kls(0, b), kls(b, b + a))
        return torch.tensor([float(rates[-1]) if len(rates) else 1e-3], dtype=torch.float64)

    return Resume(make=_Run, run=run, save=_Run.save, load=_Run.load, state=state, steps=3)


@declare("ii/r15")
def _(module, fn):
    rows = module.make(0)["rows"]

    def run(x, n):
        batches = fn(rows, x.before, x.after + n)[x.after:]
        x.after += n
        return [int(i) for b in batches for i in b]

    return Resume(make=_Run, run=run, save=_Run.save, load=_Run.load, state=lambda x: torch.tensor([float(x.before + x.after)]), steps=3)


@declare("ii/d09")
def _(module, fn):
    batch = module.make(0)["batch"]

    class Trained:
        def __init__(self):
            with torch.random.fork_rng():
                made = module.make(1)
            self.model, self.optimizer = made["model"], made["optimizer"]
            for group in self.optimizer.inner.param_groups:
                group["lr"] = 0.0  # the one Adam update after the load is then 0: what is left is the checkpoint

    @torch.no_grad()
    def perturb(x):
        for p, master in zip(x.optimizer.model, x.optimizer.master):
            master.add_(torch.randn_like(master))
            p.copy_(master)

    def save(x, folder):
        torch.save(x.model.state_dict(), folder / "weights.pt")

    def load(x, folder):
        fn(x.model, x.optimizer, torch.load(folder / "weights.pt"), batch)

    def outputs(x):
        return torch.cat([p.detach().float().flatten() for p in x.model.parameters()])

    return RoundTrip(make=Trained, perturb=perturb, save=save, load=load, outputs=outputs)


@declare("ii/r14")
def _(module, fn):
    ids = torch.arange(20).view(4, 5)

    @torch.no_grad()
    def perturb(model):
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))

    def made_of(seed):  # make() seeds torch's generator: that of the audit stays as it is
        with torch.random.fork_rng():
            return module.make(seed)

    def save(model, folder):
        torch.save(fn(model, made_of(1)["fresh"])[0], folder / "model.pt")

    def load(model, folder):  # the saved model again, and from it a fresh one that is not yet tied
        saved = made_of(2)["model"]
        saved.load_state_dict(torch.load(folder / "model.pt"), strict=False)
        return fn(saved, made_of(3)["fresh"])[1]

    made = made_of(0)
    checkpoint, fresh = fn(made["model"], made["fresh"])
    return [
        RoundTrip(make=lambda: made_of(0)["model"], perturb=perturb, save=save, load=load, outputs=lambda model: model(ids).detach()),
        Census(["emb.weight", "mid.weight", "mid.bias"], list(checkpoint), what="tensors of the checkpoint"),
        Census(["emb.weight", "mid.weight", "mid.bias"], [n for n, _ in fresh.named_parameters()], what="parameters after the load"),
    ]


@declare("ii/d10")
def _(module, fn):
    def subject(*called):  # what the last of these sequences gets; each begins with a reset or is one
        def call(lengths):
            lengths.extend(called)
            return fn(list(lengths))[-1]

        return FirstCall(make=list, call=call, train=lambda lengths: lengths.extend([40, 61]))

    return [subject(9), subject(9, 50), subject(31, 50, 45)]


# ---------------------------------------------------------------- losses
def _token_mean(logits, batch):
    nll = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["ids"][:, 1:], reduction="none")
    mask = batch["loss_mask"][:, 1:]
    return (nll * mask).sum() / mask.sum()


@declare("ii/r01")
def _(module, fn):
    def unsharded(model, batch, ranks=2):
        positions = torch.arange(batch["ids"].shape[1]).expand_as(batch["ids"])
        return _token_mean(model(batch["ids"], positions), batch)

    return step_of(module, fn, roles={"ids": "ids", "mask": "loss_mask"}, family="sft",
                   settings={"ranks": Setting(2, "inert", modes=(1, 4))}, paths={"without sharding": unsharded},
                   value_is_loss=True, reduction="mean")


@declare("ii/r02")
def _(module, fn):
    def unsharded(model, batch, ranks=4):
        return _token_mean(model(batch["ids"]), batch)

    return step_of(module, fn, roles={"ids": "ids", "mask": "loss_mask"}, family="sft",
                   settings={"ranks": Setting(4, "inert", modes=(1, 2, 8))}, paths={"ordinary cross-entropy": unsharded},
                   value_is_loss=True, reduction="mean", wide=("ids", "loss_mask"))


# ---------------------------------------------------------------- updates
@declare("ii/r13")
def _(module, fn):
    # The gradient is consumed inside the backward pass. A fresh SGD moves by lr·gradient, so one update gives it back:
    # a template with a large lr (a power of two) keeps its digits.
    made, lr = module.make(0), 2.0 ** 20
    model, batch = made["model"], made["batches"][0]

    def loss(model, batch):
        return (model(batch["x"]) - batch["y"]).square().mean()

    def backward(settings):
        moved = copy.deepcopy(model)
        moved.zero_grad()
        fn(moved, torch.optim.SGD(moved.parameters(), lr=lr, momentum=0.9), [batch])
        for p, q in zip(model.parameters(), moved.parameters()):
            p.grad = (p.detach() - q.detach()) / lr

    return Step(model=model, loss=loss, batch=batch, backward=backward, value_is_loss=True, reduction="mean")


@declare("ii/d07")
def _(module, fn):
    def subject(**settings):
        made = module.make(0)
        model, optimizer = made["model"], made["optimizer"]

        def update(batches, max_grad_norm=None):  # one batch is one optimizer step
            fn(model, optimizer, [joined(batches)], max_norm=math.inf if max_grad_norm is None else float(max_grad_norm), **settings)

        def loss(model, batch):
            return (model(batch["x"]) - batch["y"]).square().mean()

        return Update(model, optimizer, update, loss, joined(made["batches"][:2]))

    return [subject(), subject(window=1)]  # window=1: the scale doubles for the batches after this one


@declare("ii/r11")
def _(module, fn):
    class Worker(nn.Module):
        """A network whose weights end where its batch says: with inner_lr=0 the local steps themselves do not move."""

        def __init__(self, size):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(size))

        def forward(self, x):
            with torch.no_grad():
                self.w.copy_(x[0])
            return self.w[:3].expand(len(x), 3)

    class Outer:
        def __init__(self):
            self.model = Worker(7)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

        def __call__(self, start, locals, lr=0.7, momentum=0.9):
            for group in self.optimizer.param_groups:
                group["lr"], group["momentum"] = lr, momentum
            with torch.no_grad():
                self.model.w.copy_(start)
            ends = [w.detach().clone()[None].expand(2, -1) for w in locals]
            fn(self.model, self.optimizer, [[[{"x": x, "y": torch.tensor([0, 2])}] for x in ends]], inner_lr=0.0)
            return self.model.w.detach().clone()

    return OuterStep(Outer(), knobs={"lr": 0.7, "momentum": 0.9}, size=7)


@declare("ii/d01")
def _(module, fn):
    rows = [b for seed in range(3) for b in module.make(seed)["batches"]]  # 6 data-parallel ranks
    batch = {k: torch.stack([b[k] for b in rows]) for k in ("ids", "labels", "weight")}

    def loss(model, batch):
        nll = F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return (nll * batch["weight"].flatten()).sum()

    def subject(cp):
        made = module.make(0)
        model, optimizer = made["model"], made["optimizer"]

        def update(batches):  # each row is a data-parallel rank
            ranks = [{k: b[k][i] for k in b} for b in batches for i in range(len(b["ids"]))]
            fn(model, optimizer, ranks, dp=len(ranks), cp=cp)

        return Update(model, optimizer, update, loss, batch, clips=False)

    return [subject(2), subject(4)]


@declare("ii/d08")
def _(module, fn):
    made = module.make(0)
    model, optimizer = made["model"], made["optimizer"]

    def update(batches):
        fn(model, optimizer, [joined(batches)])

    def loss(model, batch):
        student, teacher = model.student.train(), model.teacher.eval()
        with torch.no_grad():
            pseudo = teacher(batch["u"]).argmax(-1)
        return F.cross_entropy(student(batch["x"]), batch["y"]) + F.cross_entropy(student(batch["u"]), pseudo)

    def state(network):  # parameters and floating-point buffers
        return [t for t in [*network.parameters(), *network.buffers()] if t.is_floating_point()]

    pair = module.make(1)
    for network in (pair["model"].student, pair["model"].teacher):
        for part in network.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.momentum = 0.0  # the student's running statistics stay what they were given
    still = torch.optim.SGD(pair["model"].student.parameters(), lr=0.0)  # and so do its parameters

    @torch.no_grad()
    def write(network, vector):
        for t, v in zip(state(network), vector.split([t.numel() for t in state(network)])):
            t.copy_(v.view_as(t))

    def flat(network):
        return torch.cat([t.detach().flatten() for t in state(network)])

    def average(average, current, rate):
        write(pair["model"].teacher, average)
        write(pair["model"].student, current)
        fn(pair["model"], still, pair["batches"][:1], tau=1 - rate)
        with torch.no_grad():
            current.copy_(flat(pair["model"].student))  # the averaging must leave the student as it is
        return flat(pair["model"].teacher)

    size = sum(t.numel() for t in state(pair["model"].student))
    return [Update(model, optimizer, update, loss, made["batches"][0], clips=False), Ema(average, size=size, rate=0.1)]


@declare("ii/r10")
def _(module, fn):
    made = module.make(0)
    model, optimizer = made["model"], made["optimizer"]

    def update(batches):
        fn(model, optimizer, [joined(batches)])

    def loss(model, batch):
        return (model.net(batch["x"]) - batch["y"]).square().mean()

    class Net(nn.Module):
        """Its weights are what the batch says; Adam has a rate of 0."""

        def __init__(self, size):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(size))

        def forward(self, x):
            with torch.no_grad():
                self.w.copy_(x[0])
            return self.w.sum().expand(len(x), 1)

    def subject(which, size=7, steps=3):
        holder = nn.Module()
        holder.net = Net(size)
        holder.ema = nn.ModuleList([Net(size).requires_grad_(False) for _ in range(2)])
        still = torch.optim.Adam(holder.net.parameters(), lr=0.0)

        def average(average, current, rate):
            # two steps at `average`, after which the average is that (beta = 0 at t = 1), and the third at `current`:
            # there beta = (1 - 1/3)**(gamma + 1), which is 1 - rate for this gamma
            gamma = math.inf if rate >= 1 else math.log(1 - rate) / math.log(1 - 1 / steps) - 1
            gammas = [16.97, 6.94]
            gammas[which] = gamma
            with torch.no_grad():
                for e in holder.ema:
                    e.w.copy_(average if rate <= 0 else torch.zeros_like(average))
            y = torch.zeros(2, 1)
            batches = [{"x": w.detach().clone()[None].expand(2, -1), "y": y} for w in [average] * (steps - 1) + [current]]
            fn(holder, still, batches, gammas=tuple(gammas))
            with torch.no_grad():
                current.copy_(holder.net.w)  # the averages never feed back
            return holder.ema[which].w.detach().clone()

        return Ema(average, size=size)

    return [Update(model, optimizer, update, loss, joined(made["batches"][:2]), clips=False), subject(0), subject(1)]


@declare("ii/r12")
def _(module, fn):
    made = module.make(0)
    model, optimizer = made["model"], made["optimizer"]

    def update(batches):
        fn(model, optimizer, list(batches))

    def loss(model, batch):
        nll = F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="none")
        mask = batch["mask"].flatten()
        return (nll * mask).sum() / mask.sum()

    # rows 4 and 5 have no trained token: they are a micro-batch of their own
    return Update(model, optimizer, update, loss, joined(made["batches"]), split=(3, 1, 2, 2), clips=False)
