"""Declarations of the cases of ee, from INPUTS, SETTINGS and NOTES."""
import copy
import math
import statistics

import torch
import torch.nn.functional as F
from torch.func import functional_call

from earnest_audit import Accumulation, AdapterStart, Collator, Merge, MergedLayer, Ranks, Setting, Step, Update
from tests.audit.reading2026k.reading import declare, step_of


def together(batches):
    """The micro-batches (or ranks) as one batch."""
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


class Keep(torch.optim.Optimizer):
    """Takes no step, keeps the gradients that it would step with."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.0})
        self.kept = None

    def step(self, closure=None):
        self.kept = [[None if p.grad is None else p.grad.clone() for p in g["params"]] for g in self.param_groups]


def gradients_of(fn, settings=lambda batches: {}):
    """(model, batches) -> the gradients with which fn steps, in .grad."""
    def accumulate(model, batches):
        keep = Keep(model.parameters())
        fn(model, keep, list(batches), **settings(batches))
        for group, kept in zip(keep.param_groups, keep.kept):
            for p, g in zip(group["params"], kept):
                p.grad = g
    return accumulate


def next_token(model, batch):
    """Mean next-token cross-entropy over all positions but the first."""
    ids = batch["ids"]
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# sharding and reductions over ranks

@declare("ee/d01")
def _(module, fn):
    case = module.make(0)
    model, optimizer = case["model"], case["optimizer"]

    def update(batches, max_grad_norm):
        replicas = 2 if len(batches) % 2 == 0 else 1           # ranks are a multiple of the replicas
        fn(model, optimizer, list(batches), max_norm=max_grad_norm, replicas=replicas)

    return Update(model, optimizer, update, next_token, together(case["batches"]), split=(2, 2, 2, 2))


@declare("ee/d02")
def _(module, fn):
    case = module.make(0)
    model, longest = case["model"], max(b["ids"].shape[1] for b in case["batches"])
    padded = [F.pad(b["ids"], (0, longest - b["ids"].shape[1])) for b in case["batches"]]
    real = [F.pad(torch.ones_like(b["ids"][:, 1:]), (1, longest - b["ids"].shape[1])) for b in case["batches"]]   # targets
    batch = {"ids": torch.cat(padded), "mask": torch.cat(real).float()}

    def cut(micro):
        """Rows of one length make a micro-batch without padding."""
        out, lengths = [], [int(n) + 1 for n in micro["mask"].sum(1)]
        for i, n in enumerate(lengths):
            if i and n == lengths[i - 1]:
                out[-1].append(i)
            else:
                out.append([i])
        return [{"ids": micro["ids"][rows, :lengths[rows[0]]]} for rows in out]

    def loss(model, batch):
        lp = model(batch["ids"][:, :-1]).log_softmax(-1).gather(-1, batch["ids"][:, 1:, None])[..., 0]
        mask = batch["mask"][:, 1:]
        return -(lp * mask).sum() / mask.sum()

    inner = gradients_of(fn)
    accumulate = lambda model, batches: inner(model, [c for micro in batches for c in cut(micro)])
    return [Accumulation(model, accumulate, batch, split=(4, 2, 2)),
            Step(model=model, loss=loss, batch=batch, roles={"ids": "ids", "mask": "mask"}, family="sft", all_supervised=True, reduction="mean",
                 value_is_loss=True, optimizer=case["optimizer"], backward=lambda settings: inner(model, case["batches"]))]


@declare("ee/d03")
def _(module, fn):
    def one_process(model, batch, lam):
        def rows(views):
            out = []
            for x in views:
                z = model(x)
                out.append((z - z.mean(0)) / torch.sqrt(z.var(0, unbiased=False) + 1e-5))
            return torch.cat(out)
        za, zb = rows(batch["view_a"]), rows(batch["view_b"])
        c = za.T @ zb / len(za)
        eye = torch.eye(len(c), dtype=torch.bool)
        return (c[eye] - 1).pow(2).sum() + lam * c[~eye].pow(2).sum()

    return step_of(module, fn, settings={"lam": Setting(0.02, "weight")}, paths={"one process": one_process},
                   rows_interact=True, value_is_loss=True, reduction="mean")


@declare("ee/d04")
def _(module, fn):
    case = module.make(0)
    batch = together(case["batches"])
    # a run on an odd number of ranks has groups of one
    accumulate = gradients_of(fn, lambda batches: {"ep_size": 2 if len(batches) % 2 == 0 else 1})
    ranks = lambda: [{"ids": x} for x in batch["ids"].chunk(4)]
    return [Accumulation(case["model"], accumulate, batch, split=(2, 2, 2, 2), what="ranks"),
            Step(model=case["model"], loss=next_token, batch=batch, roles={"ids": "ids"}, family="sft", all_supervised=True,
                 reduction="mean", value_is_loss=True, may_idle=("experts.*",), optimizer=case["optimizer"],
                 backward=lambda settings: accumulate(case["model"], ranks()))]


# metrics

@declare("ee/d05")
def _(module, fn):
    rows = torch.tensor([pair for p in module.make(0)["parts"] for pair in zip(p["loss"], p["mask"])], dtype=torch.float64)

    def metric(shards):
        return fn([{"loss": s[:, 0].tolist(), "mask": [int(m) for m in s[:, 1].tolist()]} for s in shards])

    def single(shards):
        every = torch.cat(list(shards))
        return (every[:, 0] * every[:, 1]).sum().item() / max(every[:, 1].sum().item(), 1)

    return Ranks(metric=metric, rows=rows, single=single)


@declare("ee/d06")
def _(module, fn):
    rows = torch.tensor(module.make(0)["parts"] + module.make(1)["parts"], dtype=torch.float64)

    def ranks(key, of_rank, over):
        return Ranks(metric=(lambda shards: fn([of_rank(s.tolist()) for s in shards], **key)), rows=rows,
                     single=lambda shards: over([of_rank(s.tolist()) for s in shards]), by_rank=True)

    return [ranks({}, statistics.fmean, statistics.fmean),
            ranks({"key": "critic/score/max"}, max, max), ranks({"key": "critic/score_min"}, min, min)]


@declare("ee/d07")
def _(module, fn):
    rows = torch.tensor([s + l for queries in module.make(0)["parts"] for s, l in queries], dtype=torch.float64)

    def metric(shards):
        return fn([[(r[:6], [int(x) for x in r[6:]]) for r in s.tolist()] for s in shards])

    def single(shards):
        found = []
        for r in torch.cat(list(shards)).tolist():
            relevant = [s for s, l in zip(r[:6], r[6:]) if l]
            if relevant:
                found.append(1 / (1 + sum(s > max(relevant) for s in r[:6])))
        return statistics.fmean(found) if found else 0.0

    return Ranks(metric=metric, rows=rows, single=single)


# adapters, merging and low precision

@declare("ee/d08")
def _(module, fn):
    case = module.make(0)
    adapter = case["adapters"][0]
    torch.manual_seed(1)
    x = torch.randn(6, case["base"].in_features)

    def delta(weight):
        base = torch.nn.Linear(case["base"].in_features, case["base"].out_features, bias=False)
        torch.nn.init.zeros_(base.weight)
        merged = fn(base, copy.deepcopy(case["adapters"]), [weight])
        return merged(torch.eye(base.in_features)).detach().T

    return [Merge(delta=delta, applied=lambda weight: weight * adapter["scaling"] * adapter["B"] @ adapter["A"]),
            AdapterStart(case["base"], lambda base: fn(base, copy.deepcopy(case["adapters"]), case["weights"]), lambda m: m(x), identity=False)]


@declare("ee/d09")
def _(module, fn):
    def by_hand(model, batch, bits):
        low, high = -2 ** (bits - 1), 2 ** (bits - 1) - 1
        w = model.head.weight
        scale = w.detach().abs().amax(1, keepdim=True) / ((high - low) / 2)
        whole = torch.round(w.detach() / scale)
        through = torch.where((whole >= low) & (whole <= high), w, w.detach())
        quantized = whole.clamp(low, high) * scale + (through - w.detach())
        lp = (model.hidden(batch["ids"]) @ quantized.T).log_softmax(-1)[:, :-1]
        lp = lp.gather(-1, batch["ids"][:, 1:, None])[..., 0]
        mask = batch["loss_mask"][:, 1:]
        return -(lp * mask).sum() / mask.sum()

    return step_of(module, fn, roles={"ids": "ids", "mask": "loss_mask"}, family="sft", settings={"bits": Setting(4, "setting", modes=(3, 8))},
                   paths={"by hand": by_hand}, value_is_loss=False, reduction="mean")


@declare("ee/d10")
def _(module, fn):
    case = module.make(0)
    model, optimizer = case["model"], case["optimizer"]
    fn(model, optimizer, case["batches"])                       # the model and the optimizer as the run has them

    def loss(model, batch):
        cast = {n: p.to(torch.bfloat16) for n, p in model.named_parameters()}
        logits = functional_call(model, cast, (batch["ids"],)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())

    return Step(model=model, loss=loss, batch=together(case["batches"][:3]), roles={"ids": "ids"}, family="sft", all_supervised=True,
                optimizer=optimizer, precision=torch.bfloat16, reduction="mean", value_is_loss=True)


# right code

@declare("ee/r01")
def _(module, fn):
    return step_of(module, fn, roles={"ids": "ids", "labels": "labels"}, settings={"dp_size": Setting(4, "setting")}, reduction="sum", value_is_loss=True)


@declare("ee/r02")
def _(module, fn):
    case = module.make(0)
    batch = together(case["batches"])
    accumulate = gradients_of(fn)

    def loss(model, batch, temperature):
        q, p = F.normalize(model(batch["query"]), dim=-1), F.normalize(model(batch["passage"]), dim=-1)
        return -(q @ p.T / temperature).log_softmax(-1).diagonal().mean()

    def backward(settings):
        ranks = [{k: v[i:i + 4] for k, v in batch.items()} for i in (0, 4, 8)]
        gradients_of(fn, lambda _: {"temperature": 0.2} | dict(settings))(case["model"], ranks)

    return [Accumulation(case["model"], accumulate, batch, split=(4, 4, 4), what="ranks"),
            Step(model=case["model"], loss=loss, batch=batch, settings={"temperature": Setting(0.2, "setting")}, rows_interact=True, value_is_loss=True,
                 optimizer=case["optimizer"], backward=backward)]


@declare("ee/r03")
def _(module, fn):
    case = module.make(0)
    batch = together(case["batches"])
    accumulate = gradients_of(fn)
    return [Accumulation(case["model"], accumulate, batch, split=(2, 2, 2), what="ranks"),
            Step(model=case["model"], loss=next_token, batch=batch, roles={"ids": "ids"}, family="sft", all_supervised=True, reduction="mean",
                 value_is_loss=True, optimizer=case["optimizer"],
                 backward=lambda settings: accumulate(case["model"], [{"ids": x} for x in batch["ids"].chunk(3)]))]


@declare("ee/r04")
def _(module, fn):
    def whole(rows):
        """The shards of all ranks put together, by their positions."""
        out = {k: torch.cat(list(v), dim=1) for k, v in fn(rows).items()}
        order = out["position_ids"].argsort(1)
        return {k: out[k].gather(1, order) for k in ("input_ids", "labels")}

    def labels(row):
        ids, mask = row["ids"], row["loss_mask"]
        return [t if m else -100 for t, m in zip(ids[1:], mask[1:])] + [-100]

    return Collator(whole, module.make(0)["rows"], pads={"input_ids": 0, "labels": -100}, targets=lambda row: [t for t in labels(row) if t != -100],
                    columns={"input_ids": lambda row: row["ids"], "labels": labels})


@declare("ee/r05")
def _(module, fn):
    rows = torch.tensor([v for p in module.make(0)["parts"] for v in p], dtype=torch.float64)

    def single(shards):
        every = torch.cat(list(shards))
        return every.std(unbiased=True).item() if len(every) > 1 else 0.0

    return Ranks(metric=lambda shards: fn([s.tolist() for s in shards]), rows=rows, single=single)


@declare("ee/r06")
def _(module, fn):
    sizes = (0, 1, 2, 3, 4, 5, 1, 7)
    rows = torch.tensor([pair for p in module.make(0)["parts"] for pair in zip(p["nats"], p["target"])], dtype=torch.float64)

    def metric(shards):
        return fn([{"nats": s[:, 0].tolist(), "target": [int(t) for t in s[:, 1].tolist()]} for s in shards])

    def single(shards):
        counted = [(l, sizes[int(t)]) for l, t in torch.cat(list(shards)).tolist() if t >= 0 and sizes[int(t)]]
        size = sum(b for _, b in counted)
        return math.fsum(l for l, _ in counted) / math.log(2) / size if size else math.inf

    return Ranks(metric=metric, rows=rows, single=single)


@declare("ee/r07")
def _(module, fn):
    seen = dict(pair for rank in module.make(0)["parts"] for batch in rank for pair in batch)
    rows = torch.tensor(sorted(seen.items()))

    def metric(shards):
        """As many ranks as shards; batches of two, filled up with rows from the beginning."""
        pairs, ranks = [tuple(p) for p in torch.cat(list(shards)).tolist()], len(shards)
        steps = -(-len(pairs) // (2 * ranks))
        wrapped = [pairs[i % len(pairs)] for i in range(steps * 2 * ranks)]
        at = lambda step, rank: wrapped[(step * ranks + rank) * 2:(step * ranks + rank) * 2 + 2]
        return fn([[at(s, r) for s in range(steps)] for r in range(ranks)], examples=len(pairs))

    return Ranks(metric=metric, rows=rows, single=lambda shards: torch.cat(list(shards))[:, 1].double().mean().item())


@declare("ee/r08")
def _(module, fn):
    torch.manual_seed(1)
    x = torch.randn(6, 10)
    now = {"adapted": fn(**module.make(0))}
    now["layer"] = now["adapted"]

    def merge():
        now["layer"] = now["adapted"].merge()

    def unmerge():
        now["layer"] = now["adapted"]

    return [AdapterStart(module.make(0)["base"], lambda base: fn(base), lambda m: m(x)),
            MergedLayer(lambda: now["layer"](x).detach(), merge, unmerge)]


@declare("ee/r09")
def _(module, fn):
    torch.manual_seed(1)
    x = torch.randn(6, 10)
    return AdapterStart(module.make(0)["base"], lambda base: fn(base), lambda m: m(x))


@declare("ee/r10")
def _(module, fn):
    case = module.make(0)
    model, optimizer = case["model"], case["optimizer"]
    fn(model, optimizer, case["batches"])                       # the model and the optimizer as the run has them

    def loss(model, batch):
        return F.cross_entropy(model(batch["ids"])[:, :-1].float().flatten(0, 1), batch["ids"][:, 1:].flatten())

    return Step(model=model, loss=loss, batch=together(case["batches"][:3]), roles={"ids": "ids"}, family="sft", all_supervised=True,
                optimizer=optimizer, reduction="mean", value_is_loss=True)
