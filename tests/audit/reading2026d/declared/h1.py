import itertools, math, statistics, random
import torch
import torch.nn as nn
import torch.nn.functional as F
from tests.audit.reading2026d.reading import declare, no_subject
from earnest_audit import Accumulation, Census, Collator, Ema, Grader, OuterStep, Ranks, Schedule, Unbiased, Update


class Capture(torch.optim.SGD):
    """SGD that adds up the gradients that it steps with."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.seen = None

    def step(self, closure=None):
        now = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for g in self.param_groups for p in g["params"]]
        self.seen = now if self.seen is None else [a + b for a, b in zip(self.seen, now)]
        return super().step()


def captured(model, call, lr=0.1):
    """Run an update, put the weights back, and leave the gradient that the optimizer received in .grad."""
    params = list(model.parameters())
    keep = [p.detach().clone() for p in params]
    cap = Capture(params, lr)
    call(cap)
    with torch.no_grad():
        for p, k in zip(params, keep):
            p.copy_(k)
    for p, s in zip(params, cap.seen or [torch.zeros_like(p) for p in params]):
        p.grad = s
    return [p.grad for p in params]


def flat(ts):
    return torch.cat([t.detach().double().flatten() for t in ts])


def proj(ts):
    v = flat(ts)
    return float((v * torch.sin(torch.arange(1, len(v) + 1).double() * 1.7 + 0.3)).sum())


def T(s):
    return s if isinstance(s, torch.Tensor) else torch.stack([torch.as_tensor(r) for r in s])


def join(batches):
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


def xy(rows, dtype=torch.float64):
    """rows [n, 7]: six inputs and a target"""
    rows = rows.to(dtype)
    return {"x": rows[:, :6].contiguous(), "y": rows[:, 6].contiguous()}


def draw_rows(n, width=7, seed=3, dtype=torch.float64):
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def mse(model, b):
    return ((model(b["x"]).squeeze(-1) - b["y"]) ** 2).mean()


@declare("h/r01")
def ranks_and_micro(m, fn):
    def whole():
        parts = [b for rank in m.make(0)["batches"] for b in rank]
        t = max(b["y"].shape[1] for b in parts)
        return {
            "x": torch.cat([F.pad(b["x"], (0, 0, 0, t - b["x"].shape[1])) for b in parts]),
            "y": torch.cat([F.pad(b["y"], (0, t - b["y"].shape[1]), value=-100) for b in parts]),
        }

    def loss(model, b):
        return F.cross_entropy(model(b["x"]).flatten(0, 1), b["y"].flatten(), ignore_index=-100)

    def over_ranks(model, batches):
        captured(model, lambda o: fn(model, o, [[b] for b in batches], max_norm=1e9))

    def over_micro(model, batches):
        captured(model, lambda o: fn(model, o, [list(batches)], max_norm=1e9))

    given = m.make(0)
    model, optimizer = given["model"], given["optimizer"]

    def update(batches, max_grad_norm):
        batches = list(batches)
        fn(model, optimizer, [batches[:1], batches[1:]] if len(batches) > 1 else [batches], max_norm=max_grad_norm)

    return [
        Accumulation(m.make(0)["model"], over_ranks, whole(), what="ranks"),
        Accumulation(m.make(0)["model"], over_micro, whole()),
        Update(model, optimizer, update, loss, whole()),
    ]


@declare("h/r02")
def loss_scale(m, fn):
    def fresh():
        return {"scale": 2.0**10, "good": 0, "lr_step": 0}

    given = m.make(0)
    model, optimizer = given["model"], given["optimizer"]
    batch = join([b for i, b in enumerate(given["batches"]) if i in (0, 1, 3)])

    def update(batches, max_grad_norm):
        fn(model, optimizer, [join(list(batches))], state=fresh(), max_norm=max_grad_norm)  # one step per batch: joined

    def huge():
        b = m.make(1)["batches"][0]
        return {"x": b["x"], "y": b["y"] + 1e25}

    def rates(total, ranks, **settings):
        g, state, seen = m.make(0), fresh(), []
        handle = g["optimizer"].register_step_pre_hook(lambda o, *a: seen.append(o.param_groups[0]["lr"]))
        good = [b for i, b in enumerate(g["batches"]) if i != 2]
        try:
            for i in range(total):  # after every good batch one that overflows, and is no step
                fn(g["model"], g["optimizer"], [good[i % len(good)], huge()], state=state, **settings)
        finally:
            handle.remove()
        return seen

    def run(shards, overflow):
        g, state = m.make(0), fresh()
        before = flat(g["model"].parameters())
        for s in shards:
            fn(g["model"], g["optimizer"], [xy(T(s), torch.float32)] + ([huge()] if overflow else []), state=state)
        momentum = [g["optimizer"].state[p].get("momentum_buffer", torch.zeros_like(p)) for p in g["model"].parameters()]
        return proj([flat(g["model"].parameters()) - before]) + proj(momentum) + state["lr_step"]

    def scale(shards):  # one step per row, one call per shard
        g, state = m.make(0), fresh()
        for s in shards:
            fn(g["model"], g["optimizer"], [xy(r[None], torch.float32) for r in T(s)], state=state, growth_interval=3)
        return state["scale"] / 2.0**10

    rows = draw_rows(11, dtype=torch.float32)
    return [
        Update(model, optimizer, update, mse, batch),
        Schedule(rates, peak=0.05, final=0.05 / 20, total=20, settings={"base_lr": 0.05}),
        Ranks(metric=lambda s: run(s, True), single=lambda s: run(s, False), rows=rows, by_rank=True),
        Ranks(metric=scale, single=lambda s: 2.0 ** (sum(len(x) for x in s) // 3), rows=rows),
    ]


@declare("h/r03")
def sharded_adamw(m, fn):
    def shards_of(model, world):
        k = -(-sum(p.numel() for p in model.parameters()) // world)
        return [{"m": torch.zeros(k).double(), "v": torch.zeros(k).double(), "t": 0} for _ in range(world)]

    settings = {"lr": 0.01, "wd": 0.1, "max_norm": 0.5}

    def metric(shards):
        model = m.make(0)["model"]
        before, opt, ranks = flat(model.parameters()), shards_of(model, len(shards)), [xy(T(s)) for s in shards]
        for k in range(3):
            fn(model, opt, [{"x": b["x"] + 0.3 * k, "y": b["y"]} for b in ranks], **settings)
        return proj([flat(model.parameters()) - before]) * 100

    def single(shards):  # AdamW, unsharded, on the mean over ranks of the mean over a rank's rows
        model = m.make(0)["model"]
        before, ranks = flat(model.parameters()), [xy(T(s)) for s in shards]
        opt = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
        for k in range(3):
            opt.zero_grad()
            torch.stack([mse(model, {"x": b["x"] + 0.3 * k, "y": b["y"]}) for b in ranks]).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
        return proj([flat(model.parameters()) - before]) * 100

    model = m.make(0)["model"]
    plain = torch.optim.SGD(model.parameters(), lr=0.01)

    def update(batches, max_grad_norm):  # equal rows per rank; the gradient is what enters the first moments
        batches, params = list(batches), list(model.parameters())
        keep, opt = [p.detach().clone() for p in params], shards_of(model, len(batches))
        fn(model, opt, batches, lr=0.01, wd=0.1, max_norm=max_grad_norm)
        g, at = torch.cat([s["m"] for s in opt]) / 0.1, 0
        with torch.no_grad():
            for p, k in zip(params, keep):
                p.copy_(k)
                p.grad = g[at : at + p.numel()].view_as(p).clone()
                at += p.numel()
        plain.step()
        plain.zero_grad()

    return [
        Ranks(metric=metric, single=single, rows=draw_rows(12), by_rank=True),
        Update(model, plain, update, mse, xy(draw_rows(12, seed=4)), split=(4, 4, 4)),
    ]


@declare("h/r04")
def adaptive_clip(m, fn):
    def rows():
        b = join(m.make(0)["batches"] + m.make(1)["batches"])
        return torch.cat([b["x"], b["y"][:, None].double()], 1)

    def batch_of(s):
        b = xy(T(s))
        return {"x": b["x"], "y": b["y"].long()}

    def accumulate(model, batches):
        captured(model, lambda o: fn(model, o, list(batches), clip=0.02, eps=0.001), lr=1.0)

    def metric(shards):
        model = m.make(0)["model"]
        return proj(captured(model, lambda o: fn(model, o, [batch_of(s) for s in shards], clip=0.02, eps=0.001), lr=1.0))

    def single(shards):  # mean over all rows; a body's unit is a row of a matrix or an entry of a bias; the head unclipped
        model, out = m.make(0)["model"], []
        b = batch_of(torch.cat([T(s) for s in shards]))
        F.cross_entropy(model(b["x"]), b["y"]).backward()
        for name, p in model.named_parameters():
            g = p.grad.clone()
            if not name.startswith("head."):
                for i in range(len(g)):
                    limit = 0.02 * max(float(p[i].norm()), 0.001)
                    if float(g[i].norm()) > limit:
                        g[i] *= limit / g[i].norm()
            out.append(g)
        return proj(out)

    return [
        Accumulation(m.make(0)["model"], accumulate, join(m.make(0)["batches"])),
        Ranks(metric=metric, single=single, rows=rows()),
    ]


@declare("h/r05")
def sharpness(m, fn):
    def accumulate(model, batches):
        captured(model, lambda o: fn(model, o, list(batches), rho=0.05))

    def metric(shards):
        g = m.make(0)
        before = flat(g["model"].parameters())
        fn(g["model"], g["optimizer"], [xy(T(s)) for s in shards], rho=0.05)
        return proj([flat(g["model"].parameters()) - before]) * 10

    def single(shards):  # each rank's gradient is taken at rho along its own gradient; mean over ranks; one SGD step
        model = m.make(0)["model"]
        params, total = dict(model.named_parameters()), 0.0

        def grad(at, b):
            at = {k: v.detach().clone().requires_grad_() for k, v in at.items()}
            loss = ((torch.func.functional_call(model, at, (b["x"],)).squeeze(-1) - b["y"]) ** 2).mean()
            return dict(zip(at, torch.autograd.grad(loss, list(at.values()))))

        for s in shards:
            b = xy(T(s))
            g = grad(params, b)
            norm = flat(g.values()).norm()
            g2 = grad({k: v + 0.05 * g[k] / norm for k, v in params.items()}, b)
            total = total + flat(g2.values()) / len(shards)
        return proj([-0.1 * total]) * 10

    return [
        Accumulation(m.make(0)["model"], accumulate, join(m.make(0)["batches"]), what="ranks", rows_interact=True),
        Ranks(metric=metric, single=single, rows=draw_rows(12), by_rank=True),
    ]


class Land(nn.Module):
    """A worker that lands on the weights that its batch names: at an inner learning rate of 0 AdamW leaves them there."""

    def __init__(self, start):
        super().__init__()
        self.w = nn.Parameter(start.detach().clone())

    def forward(self, x):
        with torch.no_grad():
            self.w.copy_(x.view_as(self.w))
        return (self.w * 0).sum().reshape(1, 1)


class Round:
    def __init__(self, fn):
        self.fn, self.model, self.optimizer, self.inner = fn, None, None, {}

    def __call__(self, start, locals, lr=0.7, momentum=0.9):
        if self.model is None:
            self.model = Land(start)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with torch.no_grad():
            self.model.w.copy_(start)
        self.optimizer.param_groups[0].update(lr=float(lr), momentum=float(momentum))
        batches = [[{"x": w.detach().clone(), "y": torch.zeros(1, dtype=start.dtype)}] for w in locals]
        self.fn(self.model, self.optimizer, batches, inner=self.inner, inner_lr=0.0)
        return self.model.w.detach().clone()


@declare("h/r06")
def local_rounds(m, fn):
    def batches(shards, k):  # one inner step per two rows
        return [[xy(part + 0.1 * k) for part in T(s).split(2)] for s in shards]

    def metric(shards):
        g, inner = m.make(0), {}
        before = flat(g["model"].parameters())
        for k in range(3):
            fn(g["model"], g["optimizer"], batches(shards, k), inner=inner, inner_lr=0.01)
        return proj([flat(g["model"].parameters()) - before]) * 10

    def single(shards):  # workers keep their inner AdamW; their order is irrelevant: taken in reverse
        g = m.make(0)
        model, outer = g["model"], g["optimizer"]
        before = flat(model.parameters())
        workers = [m.make(0)["model"] for _ in shards]
        opts = [torch.optim.AdamW(w.parameters(), lr=0.01) for w in workers]
        for k in range(3):
            parts = batches(shards, k)
            for r in reversed(range(len(shards))):
                workers[r].load_state_dict(model.state_dict())
                for b in parts[r]:
                    opts[r].zero_grad()
                    mse(workers[r], b).backward()
                    opts[r].step()
            for p, *qs in zip(model.parameters(), *[w.parameters() for w in workers]):
                p.grad = p.detach() - torch.stack([q.detach() for q in qs]).mean(0)
            outer.step()
        return proj([flat(model.parameters()) - before]) * 10

    return [
        OuterStep(Round(fn), knobs={"lr": 0.7, "momentum": 0.9}),
        Ranks(metric=metric, single=single, rows=draw_rows(13), by_rank=True),
    ]


@declare("h/r07")
def fused_adam(m, fn):
    def loss(model, ids):
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def metric(shards):  # one step per shard, the list twice; then a plain backward pass, at which no hook may step
        g = m.make(0)
        before, steps = flat(g["model"].parameters()), [{"ids": T(s)} for s in shards]
        fn(g["model"], g["optimizer"], steps)
        fn(g["model"], g["optimizer"], steps)
        loss(g["model"], steps[0]["ids"]).backward()
        return proj([flat(g["model"].parameters()) - before]) * 10

    def single(shards):  # ordinary Adam
        model = m.make(0)["model"]
        before, opt = flat(model.parameters()), torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(2):
            for s in shards:
                opt.zero_grad()
                loss(model, T(s)).backward()
                opt.step()
        return proj([flat(model.parameters()) - before]) * 10

    rows = torch.cat([b["ids"] for b in m.make(0)["batches"]])
    return Ranks(metric=metric, single=single, rows=rows, by_rank=True)


@declare("h/r08")
def error_feedback(m, fn):
    lr = 0.05

    def steps(s):  # a row is a step: two ranks of eight rows
        return [[xy(r) for r in step] for step in T(s).view(-1, 2, 8, 7)]

    def left(opt):  # the mean over ranks of what was not sent
        return torch.stack([flat(r) for r in opt["residual"]]).mean(0)

    def metric(shards):  # one call per shard; weights moved plus what is still owed
        g = m.make(0)
        before = flat(g["model"].parameters())
        for s in shards:
            fn(g["model"], g["optimizer"], steps(s), lr=lr)
        return proj([before - flat(g["model"].parameters()) + left(g["optimizer"])]) * 10

    def single(shards):  # nothing is lost: the sum of lr times the mean gradients along the way
        g, total = m.make(0), 0.0
        params = list(g["model"].parameters())
        for step in [x for s in shards for x in steps(s)]:
            grads = [flat(torch.autograd.grad(mse(g["model"], b), params)) for b in step]
            total = total + lr * torch.stack(grads).mean(0)
            fn(g["model"], g["optimizer"], [step], lr=lr)
        return proj([total]) * 10

    return Ranks(metric=metric, single=single, rows=draw_rows(9, 2 * 8 * 7))


@declare("h/r09")
def chunks(m, fn):
    def accumulate(model, batches):  # without dropout, whose draws depend on the chunks
        was = model.training
        model.eval()
        captured(model, lambda o: fn(model, o, list(batches), tau=0.1), lr=0.5)
        model.train(was)

    def parts(shards):
        return [{"q": T(s)[:, :6].contiguous(), "d": T(s)[:, 6:].contiguous()} for s in shards]

    def metric(shards):  # with dropout
        model = m.make(0)["model"].train()
        torch.manual_seed(5)
        return proj(captured(model, lambda o: fn(model, o, parts(shards), tau=0.1), lr=0.5))

    def single(shards):  # the full-batch InfoNCE, with the same draws
        model = m.make(0)["model"].train()
        torch.manual_seed(5)
        e = [(model(b["q"]), model(b["d"])) for b in parts(shards)]
        q, d = torch.cat([x[0] for x in e]), torch.cat([x[1] for x in e])
        return proj(torch.autograd.grad(F.cross_entropy(q @ d.T / 0.1, torch.arange(len(q))), list(model.parameters())))

    return [
        Accumulation(m.make(0)["model"], accumulate, join(m.make(0)["batches"])),
        Ranks(metric=metric, single=single, rows=draw_rows(9, 12), by_rank=True),
    ]


class Slope(nn.Module):
    """(1 + p·x/2)² has the gradient x at p = 0"""

    def __init__(self, n):
        super().__init__()
        self.p = nn.Parameter(torch.zeros(n).double())

    def forward(self, x):
        return (1 + (x * self.p).sum(-1, keepdim=True) / 2)


@declare("h/r10")
def zeroth_order(m, fn):
    def estimate(x, eps):  # the update of one step, by the learning rate: its mean is the gradient
        model = Slope(x.numel())
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        batch = {"x": x.detach().double().flatten()[None], "y": torch.zeros(1).double()}
        fn(model, opt, [batch], eps=eps, seed=int(torch.randint(0, 2**31, (1,))))
        return (-model.p.detach() / 0.01).to(x.dtype).view_as(x)

    def metric(shards):  # a row is a step; one call per shard, whose base seed follows the steps before it
        g, at = m.make(0), 0
        before = flat(g["model"].parameters())
        for s in shards:
            fn(g["model"], g["optimizer"], [xy(r) for r in T(s).view(-1, 8, 7)], eps=1e-4, seed=123 + at)
            at += len(s)
        return proj([flat(g["model"].parameters()) - before]) * 10

    return [Unbiased(estimate, settings=(1e-4, 1e-2)), Ranks(metric=metric, rows=draw_rows(7, 56))]


class Compensated:
    """average += rate·(current - average), as SGD steps on the squared distance."""

    def __init__(self, fn):
        self.fn, self.last, self.comp = fn, None, None

    def __call__(self, average, current, rate):
        n = average.numel()
        model = nn.Linear(n, 1, bias=False).to(average.dtype)
        with torch.no_grad():
            model.weight.copy_(average.view(1, n))
        if self.last is None or self.last.shape != average.shape or not torch.equal(self.last, average):
            self.comp = {"weight": torch.zeros_like(model.weight)}
        opt = {"lr": rate * n / 2, "comp": self.comp}
        self.fn(model, opt, [{"x": torch.eye(n, dtype=average.dtype), "y": current.detach().clone().flatten()}])
        self.comp = opt["comp"]
        with torch.no_grad():
            average.copy_(model.weight.view_as(average))
        self.last = average.detach().clone()


@declare("h/r11")
def compensated(m, fn):
    def metric(shards):  # a row is a step; one call per shard, the compensation is kept
        g = m.make(0)
        before = flat(g["model"].parameters())
        for s in shards:
            fn(g["model"], g["optimizer"], [xy(r, torch.bfloat16) for r in T(s).view(-1, 8, 7)])
        return proj([flat(g["model"].parameters()) - before, *g["optimizer"]["comp"].values()])

    return [
        Ema(Compensated(fn), dtype=torch.bfloat16, rate=0.002),
        Ranks(metric=metric, rows=draw_rows(30, 56)),
    ]


@declare("h/r12")
def boxed(m, fn):
    def grader(answer, right, wrong, question):
        return Grader(lambda text: fn({"answer": answer}, text), right, wrong, question)

    return [
        grader(
            "3/4",
            ["\\boxed{\\frac{3}{4}}", "\\boxed{0.75}", "\\boxed{75/100}", "First \\boxed{7}, no: \\boxed{\\frac{3}{4}}.",
             "\\boxed{\\dfrac{3}{4}}", "\\boxed{\\tfrac{3}{4}}", "so \\boxed{ 3 / 4 } it is", "\\boxed{$0.75$}", "\\boxed{0.75\\%}"],
            ["\\boxed{7}", "\\boxed{0.7500001}", "\\boxed{4/3}", "\\boxed{3/4}, no: \\boxed{7}", "3/4", "The answer is 0.75.",
             "\\boxed{-3/4}", "\\boxed{75}", "\\boxed{75\\%}", "\\boxed{\\frac{4}{3}}", "\\boxed{3/4", "\\boxed{}", "\\boxed{3}/4", "\\boxed{1/0}"],
            "Write 75/100 in lowest terms, in a box.",
        ),
        grader(
            "1,250",
            ["\\boxed{1250}", "\\boxed{1,250}", "\\boxed{$1,250}", "\\boxed{1250.0}", "\\boxed{2500/2}", "\\boxed{1250%}"],
            ["\\boxed{1}", "\\boxed{1.25}", "\\boxed{250}", "\\boxed{1,251}", "\\boxed{12,50}", "1250", "\\boxed{12.5}", "\\boxed{1250000}"],
            "How much is 50 times 25? 1,250 or 1,350?",
        ),
        grader(
            "-1/2",
            ["\\boxed{-\\frac{1}{2}}", "\\boxed{\\frac{-1}{2}}", "\\boxed{-0.5}", "\\boxed{-2/4}"],
            ["\\boxed{\\frac{1}{2}}", "\\boxed{0.5}", "\\boxed{-2}", "\\boxed{-0.49}", "-1/2"],
            "What is 1/2 - 1?",
        ),
        grader(
            "x + 1",
            ["\\boxed{x+1}", "\\boxed{x + 1}", "\\boxed{x}, no: \\boxed{ x +1}"],
            ["\\boxed{x-1}", "\\boxed{x}", "\\boxed{1}", "x + 1"],
            "Simplify (x^2 - 1)/(x - 1).",
        ),
    ]


@declare("h/r13")
def warmup_stable_decay(m, fn):
    def rates(total, ranks, **settings):
        return [fn(k, **{"peak": 3e-4, "warmup": 10, "decay": 20, **{n: v if n == "peak" else int(v) for n, v in settings.items()}}, total=total) for k in range(total)]

    def longer(total, ranks):  # a run that goes on for 20 steps after the schedule's end
        return [fn(k, peak=3e-4, warmup=10, decay=20, total=total - 20) for k in range(total)]

    return [
        Schedule(rates, peak=3e-4, final=0.0, total=100, warmup=10, settings={"peak": 3e-4, "warmup": 10, "decay": 20}),
        Schedule(longer, peak=3e-4, final=0.0, total=120, warmup=10, ends=100),
    ]


@declare("h/r14")
def batch_ramp(m, fn):
    def rates(total, ranks, start=8, inc=8, jumps=3, ramp=240):  # 1/size falls where the size grows; inc divides full - start
        start, inc, jumps = int(start), int(inc), int(jumps)
        return [1 / fn(k, start=start, inc=inc, ramp=ramp, full=start + inc * jumps) for k in range(total)]

    found = {}
    for k in range(40):
        size = f"{fn(k, start=8, inc=8, ramp=240, full=32):g}"
        found[size] = found.get(size, 0) + 1
    return [
        Schedule(rates, peak=1 / 8, final=1 / 32, total=40, ends=19, settings={"start": 8, "inc": 8, "jumps": 3, "ramp": 240}),
        Census({"8": 10, "16": 5, "24": 4, "32": 21}, found, what="steps of each size (each holds for 80 samples)"),
    ]


@declare("h/r15")
def span_corruption(m, fn):
    def target(e):
        out = []
        for k, (s, n) in enumerate(e["spans"]):
            out += [49 - k] + e["ids"][s : s + n]
        return out + [49 - len(e["spans"]), 1]

    def inputs(e):
        out, at = [], 0
        for k, (s, n) in enumerate(e["spans"]):
            out += e["ids"][at:s] + [49 - k]
            at = s + n
        return out + e["ids"][at:] + [1]

    def collate(rows):  # the decoder's input is compared where there is a label, its first token (the pad) too
        out = dict(fn(rows, vocab=50, pad=0, eos=1))
        out["decoder_input_ids"] = out["decoder_input_ids"].masked_fill(out["labels"] == -100, -1)
        return out

    return Collator(
        collate,
        m.make(0)["rows"] + m.make(1)["rows"],
        pads={"input_ids": 0, "attention_mask": 0, "labels": -100, "decoder_input_ids": -1},
        targets=target,
        columns={
            "input_ids": inputs,
            "attention_mask": lambda e: [1] * len(inputs(e)),
            "labels": target,
            "decoder_input_ids": lambda e: [0] + target(e)[:-1],
        },
    )


@declare("h/r16")
def packed(m, fn):
    def unpack(b):
        cu = b["cu_seqlens"].tolist()
        return [{k: b[k][0, i:j] for k in ("input_ids", "labels", "position_ids")} for i, j in zip(cu, cu[1:])]

    def p(e):
        return max(1, e["prompt_len"])

    rows = m.make(0)["rows"]
    out = fn(rows)
    ends = [sum(len(r["ids"]) for r in rows[:i]) for i in range(len(rows) + 1)]
    return [
        Collator(
            fn, rows, rows=False, unpack=unpack,
            targets=lambda e: e["ids"][p(e):],
            columns={
                "input_ids": lambda e: e["ids"],
                "labels": lambda e: [-100] * p(e) + e["ids"][p(e):],
                "position_ids": lambda e: list(range(len(e["ids"]))),
            },
        ),
        Census(
            {"max_seqlen": 7, "batch": 1, **{f"cu {i}": e for i, e in enumerate(ends)}},
            {"max_seqlen": int(out["max_seqlen"]), "batch": len(out["input_ids"]), **{f"cu {i}": int(e) for i, e in enumerate(out["cu_seqlens"])}},
            what="lengths",
        ),
    ]


@declare("h/r17")
def two_sided(m, fn):
    def collate(rows):  # positions are compared on real tokens
        out = dict(fn(rows, pad=0))
        out["position_ids"] = out["position_ids"].masked_fill(out["attention_mask"] == 0, -1)
        out["completion_ids"] = out["input_ids"][:, out["input_ids"].shape[1] - out["completion_mask"].shape[1] :]
        return out

    rows = m.make(0)["rows"] + m.make(1)["rows"] + [{"prompt": [11], "completion": [12, 13, 14, 15]}, {"prompt": [21, 22, 23], "completion": [24, 25]}]
    return Collator(
        collate,
        rows,
        pads={"input_ids": 0, "attention_mask": 0, "position_ids": -1, "completion_mask": 0, "completion_ids": 0},
        columns={
            "input_ids": lambda e: e["prompt"] + e["completion"],
            "attention_mask": lambda e: [1] * len(e["prompt"] + e["completion"]),
            "position_ids": lambda e: list(range(len(e["prompt"] + e["completion"]))),
            "completion_mask": lambda e: [1] * len(e["completion"]),
            "completion_ids": lambda e: e["completion"],
        },
    )


def codes(texts):
    width = max([1, *map(len, texts)])
    return torch.tensor([[ord(c) for c in t] + [-1] * (width - len(t)) for t in texts])


@declare("h/r18")
def fill_in_the_middle(m, fn):
    def restore(t):
        if not t.startswith("<PRE>"):
            return t
        pre, rest = t[len("<PRE>") :].split("<SUF>", 1)
        suf, rest = rest.split("<MID>", 1)
        mid = rest[: -len("<EOT>")] if rest.endswith("<EOT>") else rest + "?"
        return pre + mid + suf

    def stage(rows):
        out = fn(rows, rate=0.5, seed=17)
        return {
            "id": torch.tensor([r["id"] for r in out]),
            "text": codes([r["text"] for r in out]),
            "restored": codes([restore(r["text"]) for r in out]),
        }

    def changed(rate):
        return sum(r["text"].startswith("<PRE>") for r in fn(m.make(0)["rows"], rate=rate, seed=17))

    rows = m.make(0)["rows"]
    return [
        Collator(stage, rows, pads={"text": -1, "restored": -1}, columns={"id": lambda e: e["id"], "restored": lambda e: [ord(c) for c in e["text"]]}),
        Census({"rate 0": 0, "rate 1": len(rows)}, {"rate 0": changed(0.0), "rate 1": changed(1.0)}, what="transformed rows"),
        Ranks(draw=lambda r: torch.tensor([len(x["text"]) for x in fn(m.make(0)["rows"], rate=0.5, seed=17 + r)])),
    ]


@declare("h/r19")
def bins(m, fn):
    def segments(out):
        docs = []
        for b in out:
            for k in sorted(set(b["seg"])):
                docs.append([t for t, s in zip(b["ids"], b["seg"]) if s == k])
        return docs

    def stage(rows):
        out = fn(rows, size=16)
        width = max(len(b["ids"]) for b in out)
        pad = lambda x: x + [-1] * (width - len(x))
        return {"ids": torch.tensor([pad(b["ids"]) for b in out]), "seg": torch.tensor([pad(b["seg"]) for b in out])}

    def unpack(b):  # order is not kept by design: documents are put in the order of their first (unique) token
        out = [{"ids": [t for t in i if t >= 0], "seg": [k for k in s if k >= 0]} for i, s in zip(b["ids"].tolist(), b["seg"].tolist())]
        return [{"ids": torch.tensor(d)} for d in sorted(segments(out))]

    r = random.Random(2)
    short = [{"ids": [100 + i] + [r.randrange(2, 50) for _ in range(r.randrange(0, 15))]} for i in range(12)]
    count = itertools.count(2)
    long = [{"ids": [next(count) for _ in range(n)]} for n in (39, 5, 16, 9, 33, 7, 1, 12, 17, 3)]
    out = fn(long, size=16)
    chunks = [str(e["ids"][i : i + 16]) for e in long for i in range(0, len(e["ids"]), 16)]
    return [
        Collator(stage, short, rows=False, unpack=unpack, columns={"ids": lambda e: e["ids"]}),
        Census(chunks, [str(d) for d in segments(out)], what="segments", once=True),
        Census({"tokens": sum(len(e["ids"]) for e in long), "bins above size": 0}, {"tokens": sum(len(b["ids"]) for b in out), "bins above size": sum(len(b["ids"]) > 16 for b in out)}, what="counts"),
    ]


@declare("h/r20")
def megabatches(m, fn):
    def order(seed):
        return fn(m.make(0)["rows"], batch=4, mega=3, seed=seed)

    def stage(rows):
        out = fn(rows, batch=4, mega=3, seed=5)
        return {"id": torch.tensor([r["id"] for r in out]), "len": torch.tensor([r["len"] for r in out])}

    rows, out = m.make(0)["rows"], order(5)
    lens = [r["len"] for r in out]
    rises = sum(lens[i] > lens[i - 1] for i in range(len(lens)) if i % 12 > 1)
    return [
        Collator(stage, rows, rows=False),
        Census([f"{r['id']}: {r['len']}" for r in rows], [f"{r['id']}: {r['len']}" for r in out], what="rows", once=True),
        Census({"rises behind a megabatch's first row": 0, "first length": max(r["len"] for r in rows)}, {"rises behind a megabatch's first row": rises, "first length": lens[0]}, what="order"),
        Ranks(draw=lambda r: torch.tensor([x["id"] for x in order(5 + r)])),
    ]


@declare("h/r21")
def wrapped_accuracy(m, fn):
    def metric(shards):  # as the sampler deals the same rows to as many ranks: interleaved, wrapped around
        v, world = [int(x) for s in shards for x in s], len(shards)
        w = (v + v)[: -(-len(v) // world) * world]
        return fn([w[i::world] for i in range(world)], len(v))

    def single(shards):
        v = [float(x) for s in shards for x in s]
        return sum(v) / len(v)

    return [Ranks(metric=metric, single=single, rows=torch.tensor(v)) for v in ([1, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0], [0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1])]


@declare("h/r22")
def spread(m, fn):
    def metric(shards):  # some ranks are empty
        return fn([[]] + [[float(x) for x in s] for s in shards] + [[]])

    def single(shards):
        return statistics.pstdev([float(x) for s in shards for x in s])

    r = random.Random(0)
    values = [r.gauss(i, 1) for i, n in enumerate((4, 0, 7, 1)) for _ in range(n)]
    return [Ranks(metric=metric, single=single, rows=torch.tensor([c + v for v in values], dtype=torch.float64)) for c in (0.0, 1e7)]


@declare("h/r23")
def pass_at_k(m, fn):
    rows = torch.tensor([list(x) for rank in m.make(0)["ranks"] for x in rank])

    def subject(k):
        def metric(shards):
            return fn([[(int(p), int(ok)) for p, ok in s] for s in shards], k=k)

        def single(shards):  # mean over prompts of the share of k samples with a right one
            by = {}
            for s in shards:
                for p, ok in s:
                    by.setdefault(int(p), []).append(int(ok))
            v = [statistics.fmean(any(c) for c in itertools.combinations(o, k)) for o in by.values() if len(o) >= k]
            return sum(v) / len(v)

        return Ranks(metric=metric, single=single, rows=rows)

    return [subject(2), subject(3)]


@declare("h/r24")
def seeds(m, fn):
    def noise(seed):
        return torch.rand(8, generator=torch.Generator().manual_seed(int(seed)))

    ranks = range(16)
    lead = {f"rank {r} tp {tp} step {s}": fn(r - r % tp, s, tp=tp, stream="default") for tp in (2, 4) for r in ranks for s in (0, 3)}
    each = {f"rank {r} tp {tp} step {s}": fn(r, s, tp=tp, stream="default") for tp in (2, 4) for r in ranks for s in (0, 3)}
    both = [str(fn(r, 0, tp=2, stream="parallel")) for r in range(2717)] + [str(fn(r, 0, tp=2, stream="default")) for r in range(0, 2717, 2)]
    return [
        Ranks(draw=lambda r: noise(fn(r, 7, tp=2, base=1234, stream="parallel"))),
        Ranks(draw=lambda r: noise(fn(2 * r, 7, tp=2, base=1234, stream="default"))),  # data-parallel ranks
        Ranks(draw=lambda r: noise(fn(3, r, tp=2, base=1234, stream="default"))),  # steps
        Ranks(draw=lambda r: noise(fn(3, r, tp=2, base=1234, stream="parallel"))),
        Ranks(draw=lambda r: noise(fn(3, 7, tp=2, base=1234 + r, stream="default"))),  # bases
        Census(lead, each, what="seeds of a tensor-parallel group"),
        Census(set(both), both, what="seeds of the two streams", once=True),
    ]


@declare("h/r25")
def global_order(m, fn):
    def at(p, world=4, n=37, key=9):
        return fn(p % world, p // world, world=world, n=n, key=key)

    def epoch(e, world=4, n=37, key=9):
        return [at(p, world, n, key) for p in range(e * n, (e + 1) * n)]

    def seen(world, n):
        return [f"epoch {e}: {i}" for e in range(3) for i in epoch(e, world, n)]

    def all_of(n):
        return [f"epoch {e}: {i}" for e in range(3) for i in range(n)]

    alone = {f"position {p}": at(p, 1) for p in range(111)}
    return [
        Ranks(draw=lambda r: torch.tensor([fn(r, s, world=4, n=37, key=9) for s in range(9)])),
        Ranks(draw=lambda e: torch.tensor(epoch(e))),  # epochs
        Ranks(draw=lambda k: torch.tensor(epoch(0, key=9 + k))),  # keys
        Census(all_of(37), seen(4, 37), what="samples of an epoch", once=True),
        Census(all_of(64), seen(3, 64), what="samples of an epoch", once=True),
        *[Census(alone, {f"position {p}": at(p, w) for p in range(111)}, what="the order for another world") for w in (4, 5)],
    ]
