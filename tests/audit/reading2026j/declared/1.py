import copy

import torch
import torch.nn.functional as F
from torch import nn

from earnest_audit import (Accumulation, AdapterStart, AdvantageEstimator, Census, ChatTemplate, Collator, FirstCall, Merge,
                           MergedLayer, Metric, Ranks, Resume, RoundTrip, Schedule, Setting, Step, Update)
from tests.audit.reading2026j.reading import declare, no_subject


# ---------------------------------------------------------------- helpers
class Catch(torch.optim.SGD):
    """Given to the code as its optimizer: keeps the gradients that it receives and changes nothing."""

    def __init__(self, params):
        super().__init__(list(params), lr=0.1)
        self.caught = None

    def step(self, closure=None):
        self.caught = [None if p.grad is None else p.grad.detach().clone() for p in self.param_groups[0]["params"]]


def caught(model, run):
    """run(optimizer): the gradients that its optimizer receives, left in .grad."""
    opt = Catch(p for p in model.parameters() if p.requires_grad)
    run(opt)
    got = opt.caught or [None] * len(opt.param_groups[0]["params"])
    for p, g in zip(opt.param_groups[0]["params"], got):
        p.grad = g


def through(model, run):
    """A value whose gradient is what run(optimizer) hands to its optimizer."""
    params = [p for p in model.parameters() if p.requires_grad]
    kept = [p.grad for p in params]
    opt = Catch(params)
    with torch.enable_grad():
        run(opt)
    for p, g in zip(params, kept):
        p.grad = g
    return sum((p * g).sum() for p, g in zip(params, opt.caught) if g is not None)


def token_logps(model, ids):
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def next_token_mean(model, batch):
    logits = model(batch["ids"])[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def one_batch(micros):
    """Micro-batches of several widths as one right padded batch."""
    width = max(b["ids"].shape[1] for b in micros)
    pad = lambda x, value: F.pad(x, (0, width - x.shape[1]), value=value)
    return {"ids": torch.cat([pad(b["ids"], 0) for b in micros]), "labels": torch.cat([pad(b["labels"], -100) for b in micros])}


def blank(b):
    return {"ids": b["ids"], "labels": torch.full_like(b["labels"], -100)}


def two_ranks(batches):
    """Micro-batches dealt to two ranks; rank 1 also has one without any trained token."""
    return [list(batches[::2]), [blank(batches[0])] + list(batches[1::2])]


# ---------------------------------------------------------------- cases
@declare("y/r22")
def critic_clip(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given,
        roles={"ids": "ids", "mask": "response_mask", "values": "old_values", "returns": "returns"},
        settings={"value_clip": Setting(0.2, "setting"), "value_coef": Setting(0.5, "weight")},
        metrics={"clipfrac": Metric(low=0.0, high=1.0)},
        reduction="mean", drops_tokens=True, value_is_loss=True,
    )


@declare("aa/r01")
def chat(m, fn):
    messages = m.make(0)["messages"]
    last = max(i for i, x in enumerate(messages) if x["role"] == "user")
    return ChatTemplate(
        tokens=fn,
        prompt=lambda messages: m._render(messages, generation_prompt=True)[0],
        messages=messages, end=m.END,
        trained=[i for i, x in enumerate(messages) if x["role"] == "assistant" and i > last],
    )


@declare("aa/r11")
def span_corruption(m, fn):
    top, eos, pad = 99, 1, 0

    def subject(raw, density, mean_span, spans, noise, epoch, seed):
        sentinels = [top - k for k in range(spans)]

        def collate(rows):
            out = dict(fn(rows, density=density, mean_span=mean_span, raw=raw, epoch=epoch))
            texts, ins, outs, ends = [], [], [], []
            for a, b in zip(out["input_ids"].tolist(), out["labels"].tolist()):
                parts, key = {}, None  # what stands after each sentinel of the labels
                for t in b[:-1]:
                    if t > 49:
                        key = t
                        parts.setdefault(key, [])
                    else:
                        parts.setdefault(key, []).append(t)
                text = []
                for t in a[:-1]:
                    text += parts.get(t, [t]) if t > 49 else [t]
                texts.append((text + [-1] * raw)[:raw])
                ins.append(([t for t in a if t > 49] + [-1] * spans)[:spans + 1])
                outs.append(([t for t in b if t > 49] + [-1] * spans)[:spans + 1])
                ends.append([a[-1], b[-1], len(a), len(b)])
            shifted = torch.cat([torch.full((len(rows), 1), pad), out["labels"][:, :-1]], 1)
            return out | {
                "text": torch.tensor(texts), "sentinels_in": torch.tensor(ins), "sentinels_out": torch.tensor(outs),
                "ends": torch.tensor(ends), "decoder_minus_shifted_labels": out["decoder_input_ids"] - shifted,
            }

        rows = m.make(seed)["rows"]
        rows = [{"ids": r["ids"][:raw], "index": r["index"]} for r in rows]
        ni, nl = raw - noise + spans + 1, noise + spans + 1
        return Collator(
            fn=collate, examples=rows,
            columns={
                "text": lambda e: list(e["ids"]),
                "sentinels_in": lambda e: sentinels + [-1],
                "sentinels_out": lambda e: sentinels + [-1],
                "ends": lambda e: [eos, eos, ni, nl],
                "decoder_minus_shifted_labels": lambda e: [0] * nl,
            },
        )

    return [subject(40, 0.15, 3.0, 2, 6, 0, 0), subject(40, 0.3, 3.0, 4, 12, 1, 1)]


@declare("z/r19")
def context_parallel(m, fn):
    full = m.make(0)["full"]
    d, head = full["q"].shape[1], full["head"]
    rows = torch.cat([full["q"], full["k"], full["v"], full["labels"][:, None].double(), full["position"][:, None].double()], 1)

    def fields(x):
        q, k, v = x[:, :3 * d].split(d, 1)
        return {"q": q, "k": k, "v": v, "labels": x[:, -2].long(), "position": x[:, -1].long(), "head": head}

    def whole(shards):
        x = torch.cat([s if isinstance(s, torch.Tensor) else torch.stack(list(s)) for s in shards])
        return x[x[:, -1].argsort()]

    def metric(shards):  # the sequence is dealt to as many ranks as there are shards: chunk r and chunk 2n - 1 - r
        x, n = whole(shards), len(shards)
        c = torch.arange(len(x)).tensor_split(2 * n)
        return float(fn([fields(x[torch.cat([c[r], c[2 * n - 1 - r]])]) for r in range(n)]))

    def single(shards):
        f = fields(whole(shards))
        s = f["q"] @ f["k"].T / d ** 0.5
        s = s.masked_fill(f["position"][None, :] > f["position"][:, None], float("-inf"))
        return float(F.cross_entropy(s.softmax(-1) @ f["v"] @ head, f["labels"], ignore_index=-100))

    return Ranks(metric=metric, rows=rows, single=single)


@declare("y/r17")
def wpo(m, fn):
    given = m.make(0)
    model = given.pop("model")

    def logprobs(model, batch):
        return tuple((token_logps(model, batch[s + "_ids"]) * batch[s + "_mask"][:, 1:]).sum(1) for s in ("chosen", "rejected"))

    return Step(
        model=model, loss=fn, batch=given,
        roles={"chosen": "chosen_ids", "rejected": "rejected_ids", "chosen_mask": "chosen_mask", "rejected_mask": "rejected_mask",
               "reference_chosen": "ref_chosen", "reference_rejected": "ref_rejected"},
        settings={"beta": Setting(0.1, "setting")},
        metrics={"weight": Metric(low=0.0, high=1.0)},
        logprobs=logprobs, family="preference", reduction="mean",
        value_is_loss=False,  # the weight is detached
        empty_rows=False,  # the weight divides by the answer's length
    )


@declare("aa/r20")
def power_ema(m, fn):
    def make():
        given = m.make(0)
        return {"model": given["model"], "track": given["track"], "ema": fn(given["model"]), "i": 0}

    def run(x, n):
        seen = []
        for _ in range(n):
            with torch.no_grad():
                for p, t in zip(x["model"].parameters(), x["track"][x["i"] % len(x["track"])]):
                    p.copy_(t)
                for b in x["model"].buffers():
                    b.add_(1)
            x["ema"].update()
            seen.append(x["i"])
            x["i"] += 1
        return seen

    def average(x):
        other = x["ema"].copy_to(copy.deepcopy(x["model"]))
        return torch.cat([v.detach().double().flatten() for v in other.state_dict().values()])

    def save(x, folder):
        torch.save({"model": x["model"].state_dict(), "ema": x["ema"].state_dict(), "i": x["i"]}, folder / "state.pt")

    def load(x, folder):
        s = torch.load(folder / "state.pt")
        x["model"].load_state_dict(s["model"])
        x["ema"].load_state_dict(s["ema"])
        x["i"] = s["i"]

    store = {}  # checkpoints that are kept in memory

    def keep(x, folder):
        store[str(folder)] = x["ema"].state_dict()
        (folder / "kept").touch()

    def take(x, folder):
        x["ema"].load_state_dict(store[str(folder)])

    def outputs(x):  # the average, and what the next update makes of it (the counter)
        y = copy.deepcopy(x)
        with torch.no_grad():
            for b in y["model"].buffers():
                b.zero_()
        now = average(y)
        with torch.no_grad():
            for p in y["model"].parameters():
                p.fill_(0.5)
        y["ema"].update()
        return torch.cat([now, average(y)])

    # copy_to gives every parameter and every buffer: after one update the snapshot has all the weight
    x = make()
    run(x, 1)
    fresh = m.make(1)["model"]
    x["ema"].copy_to(fresh)
    live, got = x["model"].state_dict(), fresh.state_dict()
    # the average of a half-precision model is in float32
    half = m.make(0)["model"].half()
    mean = fn(half).state_dict()["mean"]
    return [
        Resume(make=make, run=run, save=save, load=load, state=average, steps=4),
        RoundTrip(make=make, perturb=lambda x: run(x, 3), save=keep, load=take, outputs=outputs),
        Census(wanted=list(live), found=[n for n in live if torch.allclose(live[n], got[n])], what="tensors that copy_to writes"),
        Census(wanted=[n for n, _ in half.named_parameters()], found=[n for n, v in mean.items() if v.dtype == torch.float32],
               what="averages in float32"),
    ]


@declare("bb/r23")
def elastic_sampler(m, fn):
    given = m.make(0)
    length, seed = given["length"], given["seed"]

    def make(world=3, batch=2):
        return {"s": fn(length, seed, world, batch), "world": world}

    def ahead(x, n):
        seen = []
        for _ in range(n):
            for r in range(x["world"]):
                seen += list(x["s"].next(r))
            x["s"].advance()
        return seen

    def upcoming(x):
        return torch.tensor(ahead(copy.deepcopy(x), 6), dtype=torch.double)

    def save(x, folder):
        torch.save(x["s"].state_dict(), folder / "sampler.pt")

    def load(x, folder):
        x["s"].load_state_dict(torch.load(folder / "sampler.pt"))

    def load_elsewhere(x, folder):  # other ranks, as many samples a step
        x = make(2, 3)
        load(x, folder)
        return x

    def draw(rank):
        s, out = fn(length, seed, 4, 2), []
        for _ in range(3):
            out += list(s.next(rank))
            s.advance()
        return torch.tensor(out)

    def skip(x):
        for _ in range(5):
            x["s"].advance()

    epochs = ahead(make(), 3 * length)  # 6 samples a step
    census = [Census(wanted=[str(i) for i in range(length)], found=[str(i) for i in epochs[e * length:(e + 1) * length]],
                     what=f"samples of epoch {e}", once=True) for e in range(2)]
    return [
        Resume(make=make, run=ahead, save=save, load=load, state=upcoming, steps=5),
        Resume(make=make, run=ahead, save=save, load=load_elsewhere, state=upcoming, steps=5),
        RoundTrip(make=make, perturb=lambda x: ahead(x, 3), save=save, load=load, outputs=upcoming),
        FirstCall(make=make, call=lambda x: torch.tensor([i for r in range(3) for i in x["s"].next(r)], dtype=torch.double),
                  train=skip, constant=False),
        Ranks(draw=draw),
        *census,
    ]


@declare("aa/r18")
def token_mean_over_ranks(m, fn):
    given = m.make(0)
    model = given["model"]
    batch = one_batch([mb for step in given["batches"][:2] for rank in step for mb in rank])

    def by(deal):
        def accumulate(model, batches):
            step = deal(list(batches))
            caught(model, lambda opt: fn(model, opt, [step], world=len(step)))
        return accumulate

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    def update(batches, max_grad_norm):  # the code has no clip: that of the declaration comes between it and the optimizer
        by(two_ranks)(model, batches)
        nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()

    return [
        Accumulation(model, by(lambda b: [[x] for x in b]), batch, what="ranks"),
        Accumulation(model, by(lambda b: [b]), batch, what="micro-batches"),
        Accumulation(model, by(two_ranks), batch, what="micro-batches of two ranks"),
        Update(model=model, optimizer=optimizer, update=update, loss=next_token_mean, batch=batch),
    ]


@declare("bb/r20")
def dealt_accuracy(m, fn):
    rows = torch.cat([m.make(s)["ranks"][0]["correct"].flatten() for s in range(3)]).float()[:25]

    def flat(shards):
        return torch.cat([torch.as_tensor(s).flatten() for s in shards]) if len(shards) else torch.zeros(0)

    def subject(batch):
        return Ranks(
            metric=lambda shards: float(fn(m.deal(flat(shards).long(), len(shards), batch))),
            rows=rows,
            single=lambda shards: float(flat(shards).double().mean()),
        )

    return [subject(m.ACCURACY_BATCH), subject(4)]


@declare("z/r05")
def masked_diffusion(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given, roles={"ids": "ids"},
        settings={"mask_id": Setting(24, "setting", modes=(23,)), "eps": Setting(0.001, "setting")},
        reduction="mean", value_is_loss=True,
        wide=(),  # trailing EOS are answer: no tensor is padded without effect
        drops_tokens=True,  # only masked tokens of the answer have a loss
        all_supervised=None,
    )


@declare("bb/r12")
def target_momentum(m, fn):
    # 1 - tau, the weight of the online network, falls from 1 - base to 0
    def rates(total, ranks, base=0.996):
        return [1.0 - fn(k, base=base, total=total) for k in range(total)]

    def held(total, ranks, base=0.996, horizon=30):
        return [1.0 - fn(k, base=base, total=horizon) for k in range(total)]

    return [
        Schedule(rates=rates, peak=0.004, final=0.0, total=40, settings={"base": 0.996}),
        Schedule(rates=held, peak=0.004, final=0.0, total=40, ends=30, settings={"base": 0.996, "horizon": 30}),
    ]


@declare("bb/r15")
def beta2(m, fn):
    # 1 - beta2, the weight of the newest square, falls from 1 for ever: t ** -power
    def rates(total, ranks, power=0.8):
        return [1.0 - fn(k, power=power) for k in range(total)]

    return Schedule(rates=rates, peak=1.0, final=40 ** -0.8, total=40, settings={"power": 0.8})


@declare("aa/r25")
def gradcache(m, fn):
    def whole(model, batch, chunk=3, temperature=0.2):
        q, k = model(batch["q"]), model(batch["k"])
        logits = q @ k.T * (model.scale.exp() / temperature)
        goal = torch.arange(len(q))
        return (F.cross_entropy(logits, goal) + F.cross_entropy(logits.T, goal)) / 2

    def join(batches):
        return {s: torch.cat([b[s] for b in batches]) for s in ("q", "k")}

    def accumulate(model, batches):  # the rows of the first piece are the chunk
        caught(model, lambda opt: fn(model, opt, [join(batches)], chunk=len(batches[0]["q"])))

    def updates(model, optimizer, noisy):
        def update(batches, max_grad_norm):
            modes = {x: x.training for x in model.modules()}
            b = join(batches)
            if noisy:  # dropout, one chunk: the masks of the plain pass
                model.train()
                torch.manual_seed(5)
                caught(model, lambda opt: fn(model, opt, [b], chunk=len(b["q"])))
            else:
                accumulate(model, batches)
            for x, mode in modes.items():
                x.training = mode
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
        return update

    def noisy_whole(model, batch):
        modes = {x: x.training for x in model.modules()}
        model.train()
        torch.manual_seed(5)
        value = whole(model, batch)
        for x, mode in modes.items():
            x.training = mode
        return value

    still, noisy = m.make(0, p=0.0), m.make(0, p=0.3)
    model, batch = still["model"], still["batches"][0]
    with torch.no_grad():
        model.scale.fill_(0.1)
    other = noisy["model"]
    sgd = [torch.optim.SGD(x.parameters(), lr=0.3, momentum=0.9) for x in (model, other)]
    return [
        Step(
            model=model, batch=batch,
            loss=lambda model, batch, chunk=3, temperature=0.2: through(
                model, lambda opt: fn(model, opt, [batch], chunk=int(chunk), temperature=temperature)),
            paths={"one pass": whole},
            settings={"chunk": Setting(3, "inert", modes=(1, 2, 8)), "temperature": Setting(0.2, "setting")},
            rows_interact=True, value_is_loss=False, wide=(),
        ),
        Accumulation(model, accumulate, batch, what="chunks"),
        Update(model=model, optimizer=sgd[0], update=updates(model, sgd[0], False), loss=whole, batch=batch),
        Update(model=other, optimizer=sgd[1], update=updates(other, sgd[1], True), loss=noisy_whole, batch=noisy["batches"][0]),
    ]


@declare("z/r01")
def clipped_token_mean(m, fn):
    given = m.make(0)
    model, optimizer = given["model"], given["optimizer"]
    batch = one_batch([b for rank in given["batches"] for b in rank])
    deals = {"ranks": lambda b: [[x] for x in b], "micro-batches": lambda b: [b], "micro-batches of two ranks": two_ranks}

    def by(deal):
        def accumulate(model, batches):
            caught(model, lambda opt: fn(model, opt, deal(list(batches)), max_norm=1e9))
        return accumulate

    def updates(deal):
        return lambda batches, max_grad_norm: fn(model, optimizer, deal(list(batches)), max_norm=max_grad_norm)

    return [
        *(Accumulation(model, by(deal), batch, what=what) for what, deal in deals.items()),
        *(Update(model=model, optimizer=optimizer, update=updates(deal), loss=next_token_mean, batch=batch)
          for deal in deals.values()),
    ]


@declare("z/r16")
def packed(m, fn):
    given = m.make(0)
    given.pop("model")
    torch.manual_seed(0)
    model = m.LM(T=64)  # room for more positions
    starts = given["position_ids"] == 0
    documents = starts.long().cumsum(-1) - 1

    def positions(documents):
        a = torch.arange(documents.shape[1]).expand_as(documents)
        new = torch.ones_like(documents, dtype=torch.bool)
        new[:, 1:] = documents[:, 1:] != documents[:, :-1]
        return a - torch.where(new, a, torch.zeros_like(a)).cummax(-1).values

    def by_documents(model, batch):
        return fn(model, {"input_ids": batch["input_ids"], "labels": batch["labels"], "position_ids": positions(batch["documents"])})

    def by_rows(model, batch):  # one document a row: laid end to end
        keep = batch["attention"].bool()
        labels = batch["labels"].clone()
        first = keep & (keep.long().cumsum(-1) == 1)
        labels[first] = -100
        place = keep.long().cumsum(-1) - 1
        return fn(model, {"input_ids": batch["ids"][keep][None], "position_ids": place[keep][None], "labels": labels[keep][None]})

    lens = torch.bincount(documents[0]).tolist()
    ids, labels, attention = torch.zeros(4, 9, dtype=torch.long), torch.full((4, 9), -100), torch.zeros(4, 9, dtype=torch.long)
    at = 0
    for i, n in enumerate(lens):
        ids[i, :n], labels[i, :n], attention[i, :n] = given["input_ids"][0, at:at + n], given["labels"][0, at:at + n], 1
        at += n
    return [
        Step(model=model, loss=fn, batch=given, family="sft",
             roles={"ids": "input_ids", "positions": "position_ids", "labels": "labels"},
             rows_interact=True, value_is_loss=True, name="one packed row"),
        Step(model=model, loss=by_documents, family="sft",
             batch={"input_ids": given["input_ids"], "labels": given["labels"], "documents": documents},
             roles={"ids": "input_ids", "labels": "labels", "documents": "documents"},
             rows_interact=True, value_is_loss=True, name="packed documents"),
        Step(model=model, loss=by_rows, batch={"ids": ids, "labels": labels, "attention": attention}, family="sft",
             roles={"ids": "ids", "labels": "labels", "attention": "attention"},
             reduction="mean", value_is_loss=True, name="a document a row"),
    ]


@declare("y/r08")
def soft_gate(m, fn):
    given = m.make(0)
    model = given.pop("model")
    given["advantages"] = given["advantages"].abs() * torch.tensor([1.0, -1.0]).repeat(3)  # make(0) has only negative ones
    return Step(
        model=model, loss=fn, batch=given, family="policy gradient",
        roles={"ids": "ids", "mask": "completion_mask", "behaviour": "old_logps", "advantages": "advantages"},
        settings={"tau_pos": Setting(1.0, "setting"), "tau_neg": Setting(1.05, "setting")},
        logprobs=lambda model, batch: token_logps(model, batch["ids"]),
        reduction="mean", value_is_loss=True,
        empty_rows=False,  # a row is divided by its own length
    )


@declare("aa/r21")
def sam_over_ranks(m, fn):
    given = m.make(0)
    model = given["model"]
    batch = {s: torch.cat([r[s] for r in given["batches"][0]]) for s in ("x", "y")}

    def cut(batch, ranks):
        parts = [batch[s].tensor_split(ranks) for s in ("x", "y")]
        return [{"x": x, "y": y} for x, y in zip(*parts)]

    def step(ranks):
        return lambda model, batch, rho=0.05: through(model, lambda opt: fn(model, opt, [cut(batch, ranks)], rho=rho))

    def definition(ranks):
        def loss(model, batch, rho=0.05):
            names = {n: p for n, p in model.named_parameters() if p.requires_grad}
            total = 0.0
            for r in cut(batch, ranks):
                with torch.enable_grad():
                    g = torch.autograd.grad(F.cross_entropy(model(r["x"]), r["y"]), list(names.values()))
                norm = torch.cat([x.flatten() for x in g]).norm()
                there = {n: p + rho * x / (norm + 1e-12) for (n, p), x in zip(names.items(), g)}
                total = total + F.cross_entropy(torch.func.functional_call(model, there, (r["x"],)), r["y"]) / ranks
            return total
        return loss

    def accumulate(model, batches):
        caught(model, lambda opt: fn(model, opt, [list(batches)]))

    return [
        *(Step(model=model, loss=step(ranks), batch=batch, paths={"by definition": definition(ranks)},
               settings={"rho": Setting(0.05, "setting")}, rows_interact=True, value_is_loss=False,
               name=f"{ranks} rank(s)") for ranks in (1, 2)),
        Accumulation(model, accumulate, batch, what="ranks", rows_interact=True),
    ]


@declare("aa/r14")
def mbart(m, fn):
    eos = 2
    target = lambda e: list(e["tgt"]) + [eos, e["tgt_lang"]]
    return Collator(
        fn=fn, examples=m.make(0)["rows"],
        pads={"input_ids": 1, "attention_mask": 0, "decoder_input_ids": 1, "labels": -100},
        targets=target,
        columns={
            "input_ids": lambda e: list(e["src"]) + [eos, e["src_lang"]],
            "attention_mask": lambda e: [1] * (len(e["src"]) + 2),
            "decoder_input_ids": lambda e: [e["tgt_lang"]] + list(e["tgt"]) + [eos],
            "labels": target,
        },
    )


@declare("y/r14")
def ld_dpo(m, fn):
    given = m.make(0)
    model, alpha = given["model"], 0.4
    sides = ("chosen", "rejected")
    pairs = {s: given["ids"][:, i] for i, s in enumerate(sides)}
    pairs |= {s + "_mask": given["completion_mask"][:, i] for i, s in enumerate(sides)}
    roles = {k: k for k in pairs}

    def stacked(batch):
        return {"ids": torch.stack([batch[s] for s in sides], 1),
                "completion_mask": torch.stack([batch[s + "_mask"] for s in sides], 1)}

    def weights(batch, ld_alpha):  # 1 on the common length, ld_alpha beyond it
        masks = [batch[s + "_mask"][:, 1:] for s in sides]
        common = torch.minimum(masks[0].sum(1), masks[1].sum(1))[:, None]
        return [x * torch.where(x.cumsum(1) <= common, 1.0, ld_alpha) for x in masks]

    def logprobs(model, batch):
        return tuple((token_logps(model, batch[s]) * w).sum(1) for s, w in zip(sides, weights(batch, alpha)))

    def per_token(model, batch, beta=0.1, ld_alpha=alpha):
        ref = torch.stack([batch["ref_" + s] for s in sides], 1)
        return fn(model, stacked(batch) | {"ref_token_logps": ref}, beta=beta, ld_alpha=ld_alpha)

    def per_answer(model, batch, beta=0.1, ld_alpha=alpha):  # the reference's (weighted) sum, spread evenly over the answer's tokens
        ref = [batch["reference_" + s][:, None] / w.sum(1, keepdim=True).clamp(min=1e-6) * (w > 0)
               for s, w in zip(sides, weights(batch, alpha))]
        return fn(model, stacked(batch) | {"ref_token_logps": torch.stack(ref, 1)}, beta=beta, ld_alpha=ld_alpha)

    common = dict(model=model, family="preference", reduction="mean", value_is_loss=True, logprobs=logprobs,
                  settings={"beta": Setting(0.1, "setting"), "ld_alpha": Setting(alpha, "setting")})
    tokens = {"ref_" + s: given["ref_token_logps"][:, i] for i, s in enumerate(sides)}
    sums = {"reference_" + s: (tokens["ref_" + s] * w).sum(1) for s, w in zip(sides, weights(pairs, alpha))}
    return [
        Step(loss=per_token, batch=pairs | tokens, roles=roles, name="reference of each token", **common),
        Step(loss=per_answer, batch=pairs | sums, roles=roles | {k: k for k in sums}, name="reference of each answer", **common),
    ]


@declare("z/r23")
def merged_lora(m, fn):
    x = m.make(0)["x"]

    def trained(double=False, **kw):
        base = m.make(0)["base"]
        base = base.double() if double else base
        torch.manual_seed(1)
        mod = fn(base, **kw)
        mod = mod.double() if double else mod
        g = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in (mod.lora_A, mod.lora_B):
                p.copy_(torch.randn(p.shape, generator=g) * 0.3)
        return base, mod

    def delta(w):
        base, mod = trained(alpha=4 * w)
        before = base.weight.detach().clone()
        mod.merge()
        return base.weight.detach() - before

    def applied(w):
        base, mod = trained(alpha=4 * w)
        eye = torch.eye(base.weight.shape[0])[None]
        with torch.no_grad():
            return (mod(eye) - base(eye))[0]

    def layer(merge, unmerge):
        _, mod = trained()

        def outputs():
            with torch.no_grad():
                return mod(x)
        return MergedLayer(outputs=outputs, merge=lambda: merge(mod), unmerge=lambda: unmerge(mod))

    def make():
        return trained(double=True)[1]

    def call(mod):  # in evaluation; rounded, because merging and unmerging leave a rounding behind
        mod.eval()
        with torch.no_grad():
            out = mod(x.double()).float()
        mod.train()
        return out

    def train(mod):
        mod.train()
        with torch.no_grad():
            for p in (mod.lora_A, mod.lora_B):
                p.mul_(1.5).add_(0.1)

    thirds = ("q", "k", "v")
    moved = lambda d: [n for n, part in zip(thirds, d.chunk(3, 1)) if bool((part != 0).any())]
    return [
        AdapterStart(model=m.make(0)["base"], attach=lambda base: fn(base), outputs=lambda model: model(x)),
        layer(lambda mod: mod.merge(), lambda mod: mod.unmerge()),
        layer(lambda mod: mod.eval(), lambda mod: mod.train()),
        Merge(delta=delta, applied=applied),
        FirstCall(make=make, call=call, train=train, constant=False),
        Census(wanted=["lora_A", "lora_B"], found=[n for n, p in trained()[1].named_parameters() if p.requires_grad],
               what="trainable parameters"),
        Census(wanted=["q", "v"], found=moved(applied(1.0)), what="thirds that the adapter changes"),
        Census(wanted=["q", "v"], found=moved(delta(1.0)), what="thirds that merging changes"),
    ]


@declare("y/r07")
def topr(m, fn):
    given = m.make(0)
    model = given.pop("model")

    def logprobs(model, batch):  # of the whole completion, like behaviour_logp
        labels = batch["labels"][:, 1:]
        lp = model(batch["ids"])[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return (lp * (labels != -100)).sum(1)

    return Step(
        model=model, loss=fn, batch=given, family="policy gradient",
        roles={"ids": "ids", "labels": "labels", "behaviour": "behaviour_logp", "advantages": "reward"},
        settings={"taper_max": Setting(1.0, "bound")},
        logprobs=logprobs, reduction="mean",
        value_is_loss=False,  # the weight is detached
    )


@declare("aa/r06")
def step_groups(m, fn):
    def single(state):  # trajectories of one step
        def estimate(rewards, groups):
            n = len(rewards)
            return fn(rewards, groups, torch.arange(n), torch.full((n,), 100) if state == "shared" else torch.arange(n))
        return estimate

    def double(second, take, omega=0.5):
        """Two steps a trajectory, interleaved: 0 and then the reward."""
        def estimate(rewards, groups):
            n = len(rewards)
            states = torch.cat([torch.full((n,), 100), torch.full((n,), 100) if second == "shared" else torch.arange(n)])
            out = fn(torch.cat([torch.zeros_like(rewards), rewards]), groups.repeat(2), torch.arange(n).repeat(2), states, omega=omega)
            return take(out[:n], out[n:])
        return estimate

    def long(rewards, groups):
        """Trajectories of one to three steps; the episode part alone, at each first step."""
        n = len(rewards)
        lens = torch.arange(n) % 3 + 1
        traj = torch.arange(n).repeat_interleave(lens)
        last = lens.cumsum(0) - 1
        steps = torch.zeros(len(traj), dtype=rewards.dtype).index_put((last,), rewards)
        out = fn(steps, groups[traj], traj, torch.arange(len(traj)) + 1000, omega=0.0)
        return out[last - lens + 1]

    fns = [
        single("shared"), single("own"),
        double("own", lambda a, b: a), double("own", lambda a, b: b), double("shared", lambda a, b: a + b), long,
    ]
    return [AdvantageEstimator(fn=f, scale="equal", over="group") for f in fns]


@declare("z/r15")
def router_z(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given, roles={"ids": "ids"}, family="sft",
        settings={"z_coef": Setting(0.01, "weight")},
        reduction="mean", all_supervised=True,
        value_is_loss=False,  # the z-loss is in the gradient only
    )


@declare("y/r25")
def squashed_td(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given, roles={"ids": "ids", "mask": "step_mask"},
        settings={"gamma": Setting(0.99, "setting"), "eps": Setting(1e-3, "setting")},
        metrics={"target_mean": Metric()},
        wide=("ids", "rewards", "terminated", "step_mask"),
        reduction="mean", all_supervised=True,
        value_is_loss=False,  # the target is detached
    )


@declare("y/r04")
def dr_grpo(m, fn):
    given = m.make(0)
    model = given.pop("model")

    class Table(nn.Module):  # logits of its own for every row: their gradient shows the row's advantage
        def __init__(self, rows):
            super().__init__()
            self.logits = nn.Parameter(torch.zeros(rows, 2, 32, dtype=torch.float64))

        def forward(self, ids):
            return self.logits

    def advantages(rewards, groups):
        n, table = len(rewards), Table(len(rewards))
        ids = torch.ones(n, 2, dtype=torch.long)
        batch = {"ids": ids, "completion_mask": torch.tensor([[0.0, 1.0]]).repeat(n, 1),
                 "old_logps": token_logps(table, ids).detach(), "rewards": rewards, "group": groups}
        loss = fn(table, batch, max_completion_length=1)
        g, = torch.autograd.grad(loss, table.logits)
        return (-g[:, 0, 1] * n / (1 - 1 / 32)).to(rewards.dtype)

    return [
        Step(
            model=model, loss=fn, batch=given, family="policy gradient",
            roles={"ids": "ids", "mask": "completion_mask", "behaviour": "old_logps", "rewards": "rewards", "group": "group"},
            settings={"clip": Setting(0.2, "clip"), "max_completion_length": Setting(12, "setting")},
            logprobs=lambda model, batch: token_logps(model, batch["ids"]),
            reduction="mean", value_is_loss=True,
            rows_interact=True,  # advantages are relative to the rows of the same prompt
        ),
        AdvantageEstimator(fn=advantages, scale="equal", over="group"),
    ]
