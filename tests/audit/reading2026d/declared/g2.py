import contextlib
import copy
import itertools
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from earnest_audit import (
    GAE, Accumulation, AdapterStart, AdvantageEstimator, Census, Ema, Merge, MergedLayer, Ranks, Resume, RoundTrip, Schedule, Setting, Step,
    Unbiased, Update, WeightSync,
)
from tests.audit.reading2026d.reading import declare


def lp_of(model, ids):
    """Log-probs of the tokens, [rows, time]; the first has none."""
    lp = model.head(model.hidden(ids))[:, :-1].log_softmax(-1)
    return F.pad(lp.gather(-1, ids[:, 1:, None])[..., 0], (1, 0))


# ---------------------------------------------------------------- losses


@declare("g/r26")
def step_labels(m, fn):
    given = m.make(0)
    model, ids, label = given["model"], given["ids"], given["step_label"]
    torch.manual_seed(1)
    tagged = (label != -100).float()
    good = torch.where(label == -100, torch.randint(0, 2, label.shape), label)  # a class also where nothing is tagged

    def loss(model, batch, plus, minus):
        kept = torch.where(batch["tagged"] > 0, batch["good"], torch.full_like(batch["good"], -100))
        return fn(model, {"ids": batch["ids"], "step_label": kept}, plus=plus, minus=minus)

    return Step(
        model=model, loss=loss, batch={"ids": ids, "tagged": tagged, "good": good},
        roles={"ids": "ids", "mask": "tagged"},
        settings={"plus": Setting(20, "setting", modes=(5, 9)), "minus": Setting(21, "setting", modes=(6, 11))},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        reduction="mean", value_is_loss=True, wide=("ids", "tagged", "good"),
    )


@declare("g/r27")
def gflownet(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given,
        roles={"ids": "ids", "mask": "loss_mask", "reference": "ref_logps", "rewards": "rewards"},
        settings={"beta": Setting(0.5, "setting"), "group": Setting(3, "setting", modes=(2, 6))},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        family="policy gradient", rows_interact=True, reduction="mean", value_is_loss=True, wide=("ids", "loss_mask"),
    )


@declare("g/r28")
def fused_ce(m, fn):
    given = m.make(0)
    model = given.pop("model")

    def plain(model, batch, chunk=7):  # the words: cross-entropy, mean over trained tokens of all rows
        keep = batch["loss_mask"].clone()
        keep[:, 0] = 0
        return -(lp_of(model, batch["ids"]) * keep).sum() / keep.sum()

    return Step(
        model=model, loss=fn, batch=given, roles={"ids": "ids", "mask": "loss_mask"},
        settings={"chunk": Setting(7, "inert", modes=(1, 3, 4, 16, 1000))},
        logprobs=lambda model, batch: lp_of(model, batch["ids"]),
        paths={"unfused": plain},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        family="sft", reduction="mean", value_is_loss=True, wide=("ids", "loss_mask"),
    )


# ---------------------------------------------------------------- advantages


@declare("g/r29")
def leave_one_out(m, fn):
    call = lambda r, g: fn(r, g)
    return [AdvantageEstimator(call, scale="equal", over="group"),
            AdvantageEstimator(call, scale="equal", over="group", groups=4, size=3)]


@declare("g/r30")
def batch_std(m, fn):
    call = lambda r, g: fn(r, g)
    return [AdvantageEstimator(call, scale="free", over="group", scaled_over="batch", values=(0.0, 1.0)),
            # pairs: the mean of two equal rewards is exact, so that the eps of 1e-8 is enough
            AdvantageEstimator(call, scale="free", over="group", scaled_over="batch", groups=6, size=2)]


@declare("g/r31")
def per_kind(m, fn):
    same = lambda r, g: fn(torch.stack([r, r], 1), g)
    # kinds of other shapes: each is divided by its own spread, so that a factor changes nothing
    cubed = lambda r, g: fn(torch.stack([r, 100 * r**3], 1), g)
    # a factor on one group and kind changes nothing either: exp(r + c) = exp(c) * exp(r)
    return [AdvantageEstimator(same, scale="free", over="group", scaled_over="batch", values=(0.0, 1.0)),
            AdvantageEstimator(cubed, scale="free", over="none", scaled_over="batch")]


@declare("g/r32")
def pass_at_k(m, fn):
    return AdvantageEstimator(lambda r, g: fn(r, g), scale="free", over="group", groups=3, size=6, values=(0.0, 1.0))


@declare("g/r33")
def gae_turns(m, fn):
    def call(rewards, values, mask, gamma, lam):
        rows, time = rewards.shape
        groups = torch.arange(rows).repeat_interleave(time)
        out = fn(rewards.reshape(-1), groups, values.reshape(-1), mask.reshape(-1).bool(), gamma=gamma, lam=lam)
        return out.reshape(rows, time)

    return GAE(call, gamma=0.95, lam=0.9, holes=True)


@declare("g/r34")
def length_weighted(m, fn):
    even = lambda r, g: fn(r, g, torch.full(r.shape, 7))

    def ranked(r, g):  # lengths that follow the row: how many rewards of the group are smaller
        smaller = ((g[:, None] == g[None, :]) & (r[None, :] < r[:, None])).sum(1)
        return fn(r, g, 1 + 3 * smaller)

    return [AdvantageEstimator(even, scale="equal", over="group"),
            AdvantageEstimator(ranked, scale="equal", over="group", baseline="other")]


@declare("g/r35")
def median(m, fn):
    return AdvantageEstimator(lambda r, g: fn(r, g), scale="equal", over="group", size=5, baseline="other")


# ---------------------------------------------------------------- adapters


def trained(layer):
    return [n for n, p in layer.named_parameters() if p.requires_grad]


def start(m, fn):
    given = m.make(0)
    x = given["x"]
    return AdapterStart(model=given["base"], attach=lambda base: fn(base), outputs=lambda model: model(x))


def noisy(layer, *names, seed=3):
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for n in names:
            p = getattr(layer, n)
            p.add_(0.3 * torch.randn(p.shape, generator=gen))
    return layer


@torch.no_grad()
def effective(layer, bias):
    """The weight that the layer applies, [out, in], read from its outputs."""
    eye = torch.eye(12)
    return (layer(eye) - bias).t().clone()


def close(wanted, found, tolerance=1e-4):
    """Numbers that agree up to rounding become the same number."""
    return {k: (wanted[k] if abs(v - wanted[k]) <= tolerance * max(1.0, abs(wanted[k])) else v) for k, v in found.items()}


@declare("g/r36")
def rslora(m, fn):
    base = m.make(0)["base"]
    w0, bias = base.weight.detach().clone(), base.bias.detach().clone()
    layer = noisy(fn(base), "B")
    b0 = layer.B.detach().clone()

    def at(w):
        layer.B.data = w * b0
        return layer

    merged = lambda w: at(w).merged().detach() - w0
    applied = lambda w: effective(at(w), bias) - w0
    words = lambda w: (8 / math.sqrt(4)) * (w * b0) @ layer.A.detach()
    return [start(m, fn), Merge(delta=merged, applied=applied), Merge(delta=applied, applied=words),
            Census(wanted=["A", "B"], found=trained(layer), what="trained parameters")]


class Around(nn.Module):
    """A model around a layer whose weights the adapter changes by design: only the other weights are the base to be kept."""

    def __init__(self, layer):
        super().__init__()
        self.after = nn.Linear(10, 6).requires_grad_(False)
        self.plain = [layer]
        self.adapted = None

    def forward(self, x):
        return self.after((self.adapted or self.plain[0])(x))


@declare("g/r37")
def pissa(m, fn):
    given = m.make(0)
    x = given["x"]
    model = Around(given["base"])

    def attach(model):
        model.adapted = fn(copy.deepcopy(model.plain[0]))
        return model

    layer = noisy(fn(m.make(0)["base"]), "A", "B")
    b0, bias = layer.B.detach().clone(), layer.base.bias.detach().clone()

    def added(w):
        layer.B.data = w * b0
        return effective(layer, bias) - layer.base.weight.detach()

    return [AdapterStart(model=model, attach=attach, outputs=lambda model: model(x)),
            Merge(delta=added, applied=lambda w: w * b0 @ layer.A.detach()),
            Census(wanted=["A", "B"], found=trained(layer), what="trained parameters")]


@declare("g/r38")
def dora(m, fn):
    given = m.make(0)
    x, base = given["x"], given["base"]
    w0, bias = base.weight.detach().clone(), base.bias.detach().clone()
    layer = noisy(fn(base), "B", "magnitude")
    torch.manual_seed(5)
    y = torch.randn(5, 10)

    def words(model, x):  # magnitude times the direction, a norm per output row that is a constant; the bias is not scaled
        w = model.base.weight + (4 / 4) * model.B @ model.A
        return F.linear(x, model.magnitude[:, None] * w / w.norm(dim=1, keepdim=True).detach(), model.base.bias)

    step = Step(
        model=layer, loss=lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean(), batch={"x": x, "y": y},
        paths={"by the words": lambda model, batch: (words(model, batch["x"]) - batch["y"]).square().mean()},
        value_is_loss=False, reduction="mean",
    )
    other = copy.deepcopy(layer)
    b0 = other.B.detach().clone()

    def at(w):
        other.B.data = w * b0
        return other

    @torch.no_grad()
    def by_words(w):
        return (words(at(w), torch.eye(12)) - bias).t() - w0

    return [start(m, fn), step, Merge(delta=lambda w: effective(at(w), bias) - w0, applied=by_words, linear=False),
            Census(wanted=["A", "B", "magnitude"], found=trained(layer), what="trained parameters")]


@declare("g/r39")
def vera(m, fn):
    given = m.make(0)
    x, base = given["x"], given["base"]
    count = itertools.count(100)

    def make():
        with torch.random.fork_rng():
            torch.manual_seed(next(count))  # another process: only proj_seed is shared
            return fn(copy.deepcopy(base))

    layer = make()
    with torch.random.fork_rng():
        torch.manual_seed(9)
        before = torch.rand(()).item()
        torch.manual_seed(9)
        fn(copy.deepcopy(base))
        after = torch.rand(()).item()
    return [
        start(m, fn),
        RoundTrip(make=make, perturb=lambda l: noisy(l, "d", "b", seed=torch.randint(1 << 30, ()).item()) and None,
                  save=lambda l, folder: torch.save(l.state_dict(), folder / "a.pt"),
                  load=lambda l, folder: l.load_state_dict(torch.load(folder / "a.pt")) and None,
                  outputs=lambda l: l(x).detach()),
        Census(wanted=["d", "b", "base.weight", "base.bias"], found=list(layer.state_dict()), what="saved tensors"),
        Census(wanted=["d", "b"], found=trained(layer), what="trained parameters"),
        Census(wanted={"the next draw": before}, found={"the next draw": after}, what="draws of the global generator"),
    ]


@declare("g/r40")
def oft(m, fn):
    base = m.make(0)["base"]
    w0, bias = base.weight.detach().clone(), base.bias.detach().clone()
    layer = noisy(fn(base), "q")
    x = m.make(0)["x"]
    w = effective(layer, bias)
    # a rotation within each of 3 blocks of inputs keeps the norm of every row's part in that block
    norms = lambda w: {f"row {i}, block {b}": w[i, 4 * b:4 * b + 4].norm().item() for i in range(10) for b in range(3)}
    wanted = norms(w0)
    (layer(x) ** 3).sum().backward()
    sym = (layer.q.grad + layer.q.grad.transpose(1, 2)).abs().max().item() / layer.q.grad.abs().max().item()
    layer.q.grad = None
    wanted_all = {**wanted, "symmetric part of the gradient": 0.0}
    found_all = {**norms(w), "symmetric part of the gradient": sym}
    return [start(m, fn),
            Census(wanted=wanted_all, found=close(wanted_all, found_all), what="what a rotation keeps"),
            Census(wanted={"q": 3 * 4 * 4}, found={n: p.numel() for n, p in layer.named_parameters() if p.requires_grad},
                   what="trained parameters")]


@declare("g/r41")
def ia3(m, fn):
    base = m.make(0)["base"]
    w0, bias = base.weight.detach().clone(), base.bias.detach().clone()
    layer = fn(base)
    gen = torch.Generator().manual_seed(3)
    d = 0.3 * torch.randn(12, generator=gen)

    def added(w):
        layer.l.data = 1 + w * d
        return effective(layer, bias) - w0

    return [start(m, fn), Merge(delta=added, applied=lambda w: w0 * (w * d)[None, :]),
            Census(wanted={"l": 12}, found={n: p.numel() for n, p in layer.named_parameters() if p.requires_grad},
                   what="trained parameters")]


# ---------------------------------------------------------------- samplers
# log-probs that a sampler reports = log-probs of the same text by the words (WeightSync); its tokens are drawn from them (Unbiased)


class Bigram(nn.Module):
    """A fast causal model: ids [rows, time] -> logits [rows, time, V]."""

    def __init__(self, v, size, seed):
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(size * torch.randn(v, v, generator=gen))

    def forward(self, ids):
        return self.table[ids]


@contextlib.contextmanager
def seeded(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def synced(model, draw, scores):
    """draw() -> (ids, log-probs) from a fixed seed; scores(ids) -> log-probs of the new tokens by the words."""
    kept = {}

    def perturb():
        kept.update({n: p.detach().clone() for n, p in model.named_parameters()})
        gen = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=gen))

    @torch.no_grad()
    def undo():
        for n, p in model.named_parameters():
            p.copy_(kept[n])

    @torch.no_grad()
    def trainer():
        ids = draw()[0]
        return scores(ids).gather(-1, ids[:, -scores.new(ids):, None])[..., 0] * scores.live(ids)

    return WeightSync(perturb=perturb, push=lambda: None, trainer=trainer, sampler=lambda: draw()[1].detach(), undo=undo, model=model)


class Scores:
    """Log-probs of all tokens at every new place, by the words."""

    def __init__(self, model, prompt, change=lambda logits: logits, eos=None):
        self.model, self.prompt, self.change, self.eos = model, prompt, change, eos

    def new(self, ids):
        return ids.shape[1] - self.prompt

    def live(self, ids):
        new = ids[:, self.prompt:]
        if self.eos is None:
            return torch.ones(new.shape)
        ended = (new == self.eos).long().cumsum(1)
        return (F.pad(ended, (1, 0))[:, :-1] == 0).float()

    @torch.no_grad()
    def __call__(self, ids):
        return self.change(self.model(ids)[:, self.prompt - 1:-1]).log_softmax(-1)


def noise(x, ids, scores, rows=slice(None)):
    """x + (what was drawn - its probability), summed over places: the mean is x where tokens follow the probabilities."""
    p = scores(ids).exp()
    d = (F.one_hot(ids[:, scores.prompt:], p.shape[-1]).float() - p) * scores.live(ids)[..., None]
    d = d[rows].sum(1).mean(0)
    n, v = x.numel(), len(d)
    folded = torch.zeros(n).index_add(0, torch.arange(v) % n, d) if n <= v else d[torch.arange(n) % v]
    return x + folded.reshape(x.shape).to(x.dtype)


def prompts(m, rows, seed=None):
    if seed is None:
        return torch.randint(2, m.V, (rows, 3))
    return torch.randint(2, m.V, (rows, 3), generator=torch.Generator().manual_seed(seed))


@declare("g/r42")
def temperature_sampler(m, fn):
    model = m.make(0)["model"]
    prompt, count = prompts(m, 24, 1), itertools.count(50)
    given = {"temperature": 0.7, "new": 8, "eos": 1, "seed": 0}
    draw = lambda: fn(model, prompt, dict(given))
    hot = lambda t: lambda logits: logits / t
    fast = Bigram(m.V, 1.0, 2)

    def thin(x, temperature):
        seed = torch.randint(1 << 30, ()).item()
        ids, _ = fn(fast, prompts(m, 16), {"temperature": temperature, "new": 4, "eos": 1, "seed": seed})
        return noise(x, ids, Scores(fast, 3, hot(temperature), eos=1))

    def of_rank(rank):
        with seeded(next(count)):  # only the given seed may matter
            return fn(model, prompt, {**given, "seed": 1000 + rank})[0]

    return [synced(model, draw, Scores(model, 3, hot(0.7), eos=1)), Unbiased(thin, settings=(0.5, 1.5)), Ranks(draw=of_rank)]


@declare("g/r43")
def min_p_sampler(m, fn):
    model = m.make(0)["model"]
    prompt = prompts(m, 24, 1)

    def cut(min_p):
        def change(logits):
            lp = logits.log_softmax(-1)
            return lp.masked_fill(lp < lp.max(-1, keepdim=True).values + math.log(min_p), float("-inf"))
        return change

    def draw():
        with seeded(4):
            return fn(model, prompt, {"min_p": 0.7, "new": 3})

    fast = Bigram(m.V, 0.5, 2)

    def thin(x, min_p):
        ids, _ = fn(fast, prompts(m, 32), {"min_p": min_p, "new": 3})
        return noise(x, ids, Scores(fast, 3, cut(min_p)))

    return [synced(model, draw, Scores(model, 3, cut(0.7))), Unbiased(thin, settings=(0.3, 0.7))]


@declare("g/r44")
def speculative_sampler(m, fn):
    given = m.make(0)
    model, prompt, settings = given["model"], given["prompt"], given["settings"]

    def draw():
        with seeded(4):
            return fn(model, prompt, dict(settings))

    target, draft = Bigram(m.V, 1.5, 2), Bigram(m.V, 1.5, 3)

    def thin(x, gamma):
        ids, _ = fn(target, prompts(m, 1), {"draft": draft, "gamma": int(gamma)})
        return noise(x, ids, Scores(target, 3))

    return [synced(model, draw, Scores(model, 3)), Unbiased(thin, settings=(1, 3), draws=4000)]


@declare("g/r45")
def beam_sampler(m, fn):
    given = m.make(0)
    model, prompt, settings = given["model"], given["prompt"], given["settings"]

    def draw():
        with seeded(4):
            return fn(model, prompt, dict(settings))

    fast = Bigram(m.V, 1.0, 2)

    def thin(x, k):  # the first beam is a sample of the model
        ids, _ = fn(fast, prompts(m, 1), {"k": int(k), "new": 2})
        return noise(x, ids, Scores(fast, 3), rows=slice(0, 1))

    sharp = Bigram(m.V, 3.0, 5)  # beams that would often be the same, were they drawn by themselves
    wanted, found = {}, {}
    for seed in range(5):
        with seeded(seed):
            ids = fn(sharp, prompt, dict(settings))[0]
        wanted[f"draw {seed}"], found[f"draw {seed}"] = settings["k"], len({tuple(r) for r in ids.tolist()})
    return [synced(model, draw, Scores(model, 3)), Unbiased(thin, settings=(2, 5), draws=4000),
            Census(wanted=wanted, found=found, what="different sequences")]


@declare("g/r46")
def arithmetic_sampler(m, fn):
    given = m.make(0)
    model, prompt, settings = given["model"], given["prompt"], given["settings"]

    def draw():
        with seeded(4):
            return fn(model, prompt, dict(settings))

    fast = Bigram(m.V, 1.0, 2)

    def thin(x, n):
        ids, _ = fn(fast, prompts(m, 1), {"n": int(n), "new": 3})
        return noise(x, ids, Scores(fast, 3))

    return [synced(model, draw, Scores(model, 3)), Unbiased(thin, settings=(3, 8)), Ranks(draw=lambda rank: draw()[0][rank])]


# ---------------------------------------------------------------- updates


class Catch(torch.optim.Optimizer):
    """Keeps the gradients that it is given, and changes nothing."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.0})
        self.got = None

    def step(self, closure=None):
        self.got = [(p, None if p.grad is None else p.grad.clone()) for g in self.param_groups for p in g["params"]]


@declare("g/r47")
def token_mean_update(m, fn):
    given = m.make(0)
    model, optimizer = given["model"], given["optimizer"]
    flat = [b for rank in given["batches"] for b in rank]
    batch = {k: torch.cat([F.pad(b[k], (0, 9 - b[k].shape[1])) for b in flat]) for k in ("ids", "loss_mask")}  # row 2 trains nothing

    def accumulate(cut):
        def run(model, batches):
            catch = Catch(model.parameters())
            fn(model, catch, cut(list(batches)), max_norm=1e9)
            for p, g in catch.got:
                p.grad = g
        return run

    def loss(model, batch):
        mask = batch["loss_mask"].clone()
        mask[:, 0] = 0
        return -(lp_of(model, batch["ids"]) * mask).sum() / mask.sum()

    both = lambda bs: [bs[:1], bs[1:]] if len(bs) > 1 else [bs]
    return [
        Accumulation(model, accumulate(lambda bs: [[b] for b in bs]), batch, split=(2, 1, 5), what="ranks"),
        Accumulation(model, accumulate(lambda bs: [bs]), batch, split=(2, 1, 5), what="micro-batches"),
        Update(model=model, optimizer=optimizer, update=lambda bs, norm: fn(model, optimizer, both(list(bs)), max_norm=norm),
               loss=loss, batch=batch, split=(2, 1, 5)),
    ]


@declare("g/r48")
def popart(m, fn):
    given = m.make(0)
    h, stream = given["h"], given["returns"]

    def make(seed=7):
        with seeded(seed):
            return fn()

    layer, count = make(), itertools.count()
    rewritten = MergedLayer(outputs=lambda: layer(h).detach(), merge=lambda: layer.update(stream[next(count) % len(stream)]), tolerance=1e-4)

    def perturb(l):
        l.update(stream[0] + 20 * torch.rand(()))
        with torch.no_grad():
            for p in l.parameters():
                p.add_(0.1 * torch.randn(p.shape))

    saved = RoundTrip(
        make=make, perturb=perturb, save=lambda l, folder: torch.save(l.state_dict(), folder / "a.pt"),
        load=lambda l, folder: l.load_state_dict(torch.load(folder / "a.pt")) and None,
        outputs=lambda l: torch.cat([l(h)[:, 0], l.mu, l.nu, l.loss(h, stream[1])[None]]).detach(),
    )

    def average(mean, current, rate):  # the moving mean, one head per number
        out = []
        for a, c in zip(mean.tolist(), current.tolist()):
            l = fn(beta=rate, width=1).to(mean.dtype)
            l.mu.fill_(a)
            l.nu.fill_(a * a + 1)
            l.update(torch.full((4,), c, dtype=mean.dtype))
            out.append(l.mu.clone())
        return torch.cat(out)

    moments = make()
    for _ in range(300):
        moments.update(stream[0])
    wanted = {"mean": stream[0].mean().item(), "standard deviation": stream[0].std(unbiased=False).item()}
    found = close(wanted, {"mean": moments.mu.item(), "standard deviation": moments.sigma().item()}, 1e-2)

    head = make()
    for r in stream[:3]:
        head.update(r)
    step = Step(model=head, loss=lambda model, batch: model.loss(batch["h"], batch["returns"]), batch={"h": h, "returns": stream[3]},
                roles={"returns": "returns"}, reduction="mean", value_is_loss=True)
    return [rewritten, saved, Ema(update=average, rate=0.1), Census(wanted=wanted, found=found, what="moments of a constant stream"), step]


@declare("g/r49")
def cycles(m, fn):
    rates = lambda total, ranks=1, **settings: [fn(k, **settings) for k in range(total)]
    settings = {"peak": 1e-3, "floor": 1e-4, "warmup": 5, "share": 0.1}
    return [Schedule(rates, peak=1e-3, final=1e-4, total=170, warmup=5, ends=160, restarts=True, settings=settings),
            Schedule(rates, peak=1e-3, final=1e-4, total=40, warmup=5, settings=settings)]  # the first phase: no restart in it


@declare("g/r50")
def power_ema(m, fn):
    values = m.make(0)["values"]
    new = lambda: fn(values[0])

    def update(average, current, rate):  # at the count t at which the current value has this weight
        ema = fn(average)
        short = 1 - (1 - rate) ** (1 / (6.94 + 1))
        ema.t = (1 / short - 1) if short > 0 else math.inf
        ema.update(current)
        return ema.avg

    def run(x, n):
        seen = []
        for _ in range(n):
            seen.append(x.t)
            x.update(values[1 + x.t % 29])
        return seen

    def perturb(x):
        for _ in range(3):
            x.update(torch.randn(4, dtype=torch.double))

    def outputs(x):
        after = copy.deepcopy(x)
        after.update(values[5])
        return torch.cat([x.avg, after.avg])

    save = lambda x, folder: torch.save(x.state_dict(), folder / "a.pt")

    def load(x, folder):
        x.load_state_dict(torch.load(folder / "a.pt"))

    return [Ema(update=update, dtype=torch.float64), RoundTrip(make=new, perturb=perturb, save=save, load=load, outputs=outputs),
            Resume(make=new, run=run, save=save, load=load, state=lambda x: x.avg.clone())]
