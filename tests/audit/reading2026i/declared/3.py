import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from earnest_audit import (
    GAE, Accumulation, AdapterStart, AdvantageEstimator, Census, ChatTemplate, Collator, Merge, MergedLayer, Metric,
    Ranks, Resume, RoundTrip, Schedule, Setting, Step, Unbiased, Update,
)
from tests.audit.reading2026i.reading import declare, no_subject


# ---------------------------------------------------------------- helpers
def padded(lists, value, dtype=None):
    width = max([len(x) for x in lists] + [1])
    return torch.tensor([list(x) + [value] * (width - len(x)) for x in lists], dtype=dtype)


def cat_batches(batches):
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


class Recorder:
    """An optimizer that only records the gradients it is given when it is stepped."""

    def __init__(self, model, lr):
        self.inner = torch.optim.SGD(model.parameters(), lr=lr)
        self.params, self.grads = list(model.parameters()), None

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, *args, **kwargs):
        self.grads = [None if p.grad is None else p.grad.detach().clone() for p in self.params]

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none=set_to_none)


class Clipping:
    """The run's optimizer, with one clip of the gradient's norm right before its step."""

    def __init__(self, inner, model, max_norm):
        self.inner, self.model, self.max_norm = inner, model, max_norm

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, *args, **kwargs):
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        return self.inner.step(*args, **kwargs)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none=set_to_none)


def accumulator(fn, arrange, lr):
    """accumulate(model, batches): what the optimizer is given ends in .grad; the next call finds what the code left."""
    memory = {}

    def accumulate(model, batches):
        params = list(model.parameters())
        for p in params:  # the code's own remains of the call before, and not what is shown to the audit
            if id(p) in memory and p.grad is memory[id(p)][0]:
                p.grad = memory[id(p)][1]
        optimizer = Recorder(model, lr)
        fn(model, optimizer, arrange(list(batches)))
        for p, g in zip(params, optimizer.grads or [None] * len(params)):
            memory[id(p)] = (g, p.grad)
            p.grad = g

    return accumulate


def token_logprobs(model, ids):
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def first_zero(lp):
    return torch.cat([torch.zeros_like(lp[:, :1]), lp], dim=1)


def supervised_spans(fn, conversations, targets):
    """A chat template as a data stage: of each conversation exactly these tokens are supervised."""

    def stage(examples):
        out = [fn(e) for e in examples]
        return {
            "input_ids": padded([ids for ids, _ in out], -1),
            "mask": padded([mask for _, mask in out], -1),
            "labels": padded([[t if k else -100 for t, k in zip(ids, mask)] for ids, mask in out], -100),
            "aligned": torch.tensor([[int(len(ids) == len(mask))] for ids, mask in out]),
        }

    return Collator(
        fn=stage, examples=conversations, pads={"input_ids": -1, "mask": -1, "labels": -100}, targets=targets,
        columns={"aligned": lambda e: [1]},
    )


# ---------------------------------------------------------------- l071
@declare("u/r05")
def packed_by_positions(m, fn):
    given = m.make(0)
    model, pos = given.pop("model"), given["position_ids"]
    documents = (pos == 0).long().cumsum(1)

    def loss(model, batch):
        doc = batch["documents"]
        index = torch.arange(doc.shape[1]).expand_as(doc)
        new = torch.ones_like(doc, dtype=torch.bool)
        new[:, 1:] = doc[:, 1:] != doc[:, :-1]
        start = torch.where(new, index, torch.zeros_like(index)).cummax(1).values
        return fn(model, {"ids": batch["ids"], "position_ids": index - start})

    return Step(
        model=model, loss=loss, batch={"ids": given["ids"], "documents": documents},
        roles={"ids": "ids", "documents": "documents"}, family="sft", reduction="mean", value_is_loss=True,
        all_supervised=True, wide=("ids", "documents"),
    )


# ---------------------------------------------------------------- l072
@declare("v/r18")
def pair_collator(m, fn):
    rows = m.make(0)["rows"] + m.make(1)["rows"]

    def one(max_prompt, pad_id):
        def collate(examples):
            out, n = fn(examples, max_prompt=max_prompt, pad_id=pad_id), len(examples)
            batch = {}
            for side, part in (("chosen", slice(0, n)), ("rejected", slice(n, None))):
                ids, att = out["input_ids"][part], out["attention_mask"][part]
                comp, pos = out["completion_mask"][part], out["position_ids"][part]
                behind = att.flip(1).cummax(1).values.flip(1) == 0  # right padding, whose positions are not promised
                batch |= {
                    f"{side}_input_ids": ids, f"{side}_attention_mask": att, f"{side}_completion_mask": comp,
                    f"{side}_position_ids": pos.masked_fill(behind, 0),
                    f"{side}_attended": ids.masked_fill(att == 0, -100),
                    f"{side}_completed": ids.masked_fill(comp == 0, -100),
                }
            return batch

        pads, columns = {}, {}
        for side in ("chosen", "rejected"):
            whole = lambda e, side=side: list(e["prompt"][-max_prompt:]) + list(e[side])
            pads |= {
                f"{side}_input_ids": pad_id, f"{side}_attention_mask": 0, f"{side}_completion_mask": 0,
                f"{side}_position_ids": 0, f"{side}_attended": -100, f"{side}_completed": -100,
            }
            columns |= {
                f"{side}_input_ids": whole,
                f"{side}_attention_mask": lambda e, w=whole: [1] * len(w(e)),
                f"{side}_completion_mask": lambda e, side=side: [1] * len(e[side]),
                f"{side}_position_ids": lambda e, w=whole: list(range(1, len(w(e)))),  # the first, 0, reads as padding
                f"{side}_attended": whole,
                f"{side}_completed": lambda e, side=side: list(e[side]),
            }
        return Collator(fn=collate, examples=rows, pads=pads, columns=columns)

    return [one(6, 0), one(4, 77)]


# ---------------------------------------------------------------- l073
@declare("v/r20")
def bits_per_byte(m, fn):
    given = m.make(0)
    token_bytes = given["token_bytes"]
    batches = [b for rank in given["per_rank"] for b in rank]
    rows = torch.cat([torch.cat([b["targets"][..., None].float(), b["logits"]], -1) for b in batches])

    def open_(rows):
        return {"logits": rows[..., 1:].contiguous(), "targets": rows[..., 0].round().long()}

    def ranks(size):
        def metric(shards):
            per_rank = []
            for shard in shards:
                shard = shard if torch.is_tensor(shard) else torch.stack(list(shard))
                per_rank.append([open_(part) for part in shard.split(size)] if len(shard) else [])
            return float(fn(per_rank, token_bytes))

        return metric

    def single(shards):
        b = open_(torch.cat([s if torch.is_tensor(s) else torch.stack(list(s)) for s in shards]))
        y, nats, total = b["targets"].flatten(), 0.0, 0
        lp = b["logits"].flatten(0, 1).log_softmax(-1)
        for i, t in enumerate(y.tolist()):
            if t >= 0 and int(token_bytes[t]) > 0:
                nats, total = nats - float(lp[i, t]), total + int(token_bytes[t])
        return nats / (math.log(2) * total) if total else float("inf")

    return [Ranks(metric=ranks(2), rows=rows, single=single), Ranks(metric=ranks(100), rows=rows, single=single)]


# ---------------------------------------------------------------- l074
@declare("t/d08")
def tree_returns(m, fn):
    def as_gae(fork):
        def run(rewards, values, mask, gamma, lam):
            # δ of every token is the reward of an interaction; tokens of a row are a chain, cached in the order of time
            b, t = rewards.shape
            delta = torch.zeros_like(rewards)
            for i in range(b):
                nxt = 0.0
                for j in reversed(range(t)):
                    if mask[i, j] > 0:
                        delta[i, j] = rewards[i, j] + gamma * nxt - values[i, j]
                        nxt = values[i, j]
            own, groups, parents, place = [], [], [], {}
            # with forks: unequal children whose mean is the chain's reward, and one of them forks again, so that
            # subtrees are unequally large; (branch, the branch it extends, what is added to its reward)
            later = [("a1", "a1", 0.0), ("a2", "a2", 0.0), ("p", "p", 0.0), ("b", "b", 0.0)]
            tree = [
                [("p", None, 0.0)],
                [("a", "p", 0.5), ("p", "p", 0.0), ("b", "p", -0.5)],
                [("a1", "a", 0.5), ("a2", "a", -0.5), ("p", "p", 0.0), ("b", "b", 0.0)],
            ]
            last, depth = [{} for _ in range(b)], [0] * b
            for j in range(t):
                for i in range(b):
                    if mask[i, j] > 0:
                        level = (tree[depth[i]] if depth[i] < len(tree) else later) if fork else [("p", "p", 0.0)]
                        before, depth[i] = dict(last[i]), depth[i] + 1
                        for branch, parent, more in level:
                            parents.append(before.get(parent, -1))
                            last[i][branch] = len(own)
                            if branch == "p":
                                place[i, j] = len(own)
                            own.append(delta[i, j] + more)
                            groups.append(i)
            out = fn(torch.stack(own), torch.tensor(groups), torch.tensor(parents), turn_discount=gamma * lam)
            adv = torch.zeros_like(rewards)
            for (i, j), k in place.items():
                adv[i, j] = out[k]
            return adv

        return run

    def roots(rewards, groups):
        return fn(rewards, groups, torch.full((len(rewards),), -1))

    return [
        GAE(fn=as_gae(False)),
        GAE(fn=as_gae(True)),
        AdvantageEstimator(fn=roots, scale="equal", over="none"),
    ]


# ---------------------------------------------------------------- l075
@declare("v/d08")
def gae_two_ends(m, fn):
    def stream(truncated):
        def run(rewards, values, mask, gamma, lam):
            r, v, nv, dead, cut, places = [], [], [], [], [], []
            for i in range(len(rewards)):
                cols = mask[i].nonzero().flatten().tolist()
                for k, j in enumerate(cols):
                    end = k + 1 == len(cols)
                    by_limit = end and truncated(i)
                    nv.append(values.new_tensor(0.5) if end else values[i, cols[k + 1]])
                    # an answer's end has no next value: γ·0.5, which counts after a truncation, is taken off its reward
                    r.append(rewards[i, j] - gamma * 0.5 if by_limit else rewards[i, j])
                    v.append(values[i, j])
                    dead.append(end and not by_limit)
                    cut.append(by_limit)
                    places.append((i, j))
            out = fn(torch.stack(r), torch.stack(v), torch.stack(nv), torch.tensor(dead), torch.tensor(cut), gamma, lam)
            adv = torch.zeros_like(rewards)
            for k, (i, j) in enumerate(places):
                adv[i, j] = out[k]
            return adv

        return run

    return [
        GAE(fn=stream(lambda i: False)),
        GAE(fn=stream(lambda i: True)),
        GAE(fn=stream(lambda i: i % 2 == 1)),
    ]


# ---------------------------------------------------------------- l076
@declare("v/r11")
def context_parallel(m, fn):
    given = m.make(0)
    batch = {k: v.clone() for k, v in given["batch"].items()}
    batch["loss_mask"][:, 0] = 0  # the first token is never predicted
    return Step(
        model=given["model"], loss=fn, batch=batch, roles={"ids": "ids", "mask": "loss_mask"},
        settings={"cp": Setting(2, "inert", modes=(1, 4))}, family="sft", reduction="mean", value_is_loss=True,
        wide=("ids", "loss_mask"),
    )


# ---------------------------------------------------------------- l077
@declare("u/d05")
def sharded_muon(m, fn):
    given = m.make(0)
    batch = cat_batches(given["batches"] + m.make(1)["batches"])  # 64 rows
    first = lambda n: {k: v[:n] for k, v in batch.items()}
    make = lambda n, split: Accumulation(
        model=given["model"], accumulate=accumulator(fn, lambda b: b, 0.1), batch=first(n), split=split, what="ranks"
    )
    return [make(32, [8, 8, 8, 8]), make(24, [8, 8, 8]), make(16, [8, 8])]  # ranks are equally large by the notes


# ---------------------------------------------------------------- l078
@declare("s/r06")
def zigzag(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given, roles={"ids": "ids", "mask": "loss_mask"},
        settings={"ranks": Setting(2, "inert", modes=(1, 4))}, family="sft", reduction="mean", value_is_loss=True,
        wide=("ids", "loss_mask"),
    )


# ---------------------------------------------------------------- l079
@declare("u/r10")
def vocab_parallel(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given, roles={"ids": "ids", "mask": "loss_mask"},
        settings={"ranks": Setting(4, "inert", modes=(1, 2, 8))}, family="sft", reduction="mean", value_is_loss=True,
        wide=("ids", "loss_mask"),
    )


# ---------------------------------------------------------------- l080
@declare("u/d07")
def lora(m, fn):
    given = m.make(0)
    base, x, rank, alpha = given["base"], given["x"], given["rank"], given["alpha"]

    def built(w=1.0, rank=rank):
        torch.manual_seed(7)
        layer = fn(copy.deepcopy(base), rank, alpha * w)
        g = torch.Generator().manual_seed(8)
        with torch.no_grad():
            for p in layer.parameters():
                if p.requires_grad and p.shape != base.weight.shape and p.dim() == 2:
                    p.copy_(torch.randn(p.shape, generator=g) * 0.3)
        return layer

    @torch.no_grad()
    def delta(w, rank=rank):
        return built(w, rank).merged().weight.detach() - base.weight.detach()

    @torch.no_grad()
    def applied(w, rank=rank):
        eye = torch.eye(base.in_features)
        return (built(w, rank)(eye) - base(eye)).T

    @torch.no_grad()
    def defined(w, rank=rank):  # the notes: (alpha / rank) * x A B
        layer = built(w, rank)
        return alpha * w / rank * (layer.A @ layer.B).T

    layer = built()
    now = {"layer": layer}
    return [
        AdapterStart(model=base, attach=lambda b: fn(b, rank, alpha), outputs=lambda f: f(x)),
        Merge(delta=delta, applied=applied),
        Merge(delta=lambda w: delta(w, 4), applied=lambda w: defined(w, 4)),
        Merge(delta=lambda w: delta(w, 4), applied=lambda w: applied(w, 4)),
        MergedLayer(
            outputs=lambda: now["layer"](x).detach(),
            merge=lambda: now.update(layer=layer.merged()),
            unmerge=lambda: now.update(layer=layer),
        ),
        Census(
            wanted=["A", "B"], found=[n for n, p in layer.named_parameters() if p.requires_grad],
            what="trained parameters",
        ),
        Step(
            model=built(), loss=lambda model, batch: model(batch["x"]).square().mean(), batch={"x": x},
            reduction="mean", value_is_loss=True,
        ),
    ]


# ---------------------------------------------------------------- l081
@declare("v/r01")
def trajectories(m, fn):
    given = m.make(0)
    b = given["batch"]

    def loss(model, batch):
        traj = torch.unique(batch["trajectory"], return_inverse=True)[1]  # numbers 0, 1, … without gaps
        mask = first_zero(batch["mask"])
        return fn(model, {"ids": batch["ids"], "loss_mask": mask, "trajectory": traj, "advantages": batch["advantages"]})

    return Step(
        model=given["model"], loss=loss,
        batch={"ids": b["ids"], "mask": b["loss_mask"][:, 1:].clone(), "trajectory": b["trajectory"],
               "advantages": b["advantages"]},
        roles={"ids": "ids", "mask": "mask", "group": "trajectory", "advantages": "advantages"},
        logprobs=lambda model, batch: token_logprobs(model, batch["ids"]),
        rows_interact=True, value_is_loss=True, reduction="mean", family="policy gradient", wide=("ids", "mask"),
        empty_rows=False,  # a trajectory without a trained token is divided by 0
    )


# ---------------------------------------------------------------- l082, l089
def position_facts(positions, target, chunks):
    step = positions[:, 1:] - positions[:, :-1]
    return torch.stack([
        positions[:, 0] == 0, (step > 0).all(1), positions.amax(1) < target, (step != 1).sum(1) <= chunks - 1,
    ], 1).long()


@declare("v/r06")
def skipped_positions(m, fn):
    rows = m.make(0)["rows"]

    def one(target, chunks, seed):
        def collate(examples):  # skips are drawn per place in the batch: only what is promised of positions is kept
            out = fn(examples, target_len=target, chunks=chunks, seed=seed)
            return {"input_ids": out["input_ids"], "labels": out["labels"],
                    "positions": position_facts(out["position_ids"], target, chunks)}

        return Collator(
            fn=collate, examples=rows, targets=lambda e: e["ids"],
            columns={"input_ids": lambda e: e["ids"], "labels": lambda e: e["ids"], "positions": lambda e: [1, 1, 1, 1]},
        )

    whole = Collator(fn=lambda examples: fn(examples, target_len=64, chunks=2, seed=0), examples=rows, rows=False)

    def positions(row=0, **settings):
        return fn(rows, **{"target_len": 64, "chunks": 2, "seed": 0, **settings})["position_ids"][row]

    return [
        one(64, 2, 0), one(24, 4, 5), whole,
        Ranks(draw=lambda row: positions(row % len(rows))),  # skips are drawn per row
        Ranks(draw=lambda seed: positions(seed=seed)),
        Ranks(draw=lambda i: positions(target_len=64 * 2**i)),
        Ranks(draw=lambda i: positions(chunks=2 + i)),
    ]


@declare("t/r08")
def skipped_by_seed(m, fn):
    rows = m.make(0)["rows"] + m.make(1)["rows"]

    def one(target, chunks):
        def collate(examples):
            out = fn(examples, target=target, chunks=chunks)
            return {**out, "positions": position_facts(out["position_ids"], target, chunks)}

        return Collator(
            fn=collate, examples=rows, targets=lambda e: e["input_ids"],
            columns={"input_ids": lambda e: e["input_ids"], "labels": lambda e: e["input_ids"],
                     "positions": lambda e: [1, 1, 1, 1]},
        )

    def positions(seed=0, **settings):
        return fn([{**rows[0], "seed": seed}], **{"target": 64, "chunks": 3, **settings})["position_ids"][0]

    return [
        one(64, 3), one(24, 4),
        Ranks(draw=lambda seed: positions(seed)),  # the row's seed fixes its skips
        Ranks(draw=lambda i: positions(target=64 * 2**i)),
        Ranks(draw=lambda i: positions(chunks=3 + i)),
    ]


# ---------------------------------------------------------------- l083
@declare("v/r03")
def tool_template(m, fn):
    messages = m.make(0)["messages"]
    def targets(e):
        return [t for x in e if x["role"] == "assistant" and x.get("train", True) for t in m.text(x["content"]) + [m.END]]

    return [
        ChatTemplate(
            tokens=fn, prompt=lambda msgs: list(fn(msgs)[0]) + [m.START] + m.text("assistant\n"), messages=messages,
            end=m.END, trained=[2, 7],
        ),
        supervised_spans(fn, [messages, messages[1:3], messages[:5], m.make(3)["messages"][1:]], targets),
    ]


# ---------------------------------------------------------------- l084
@declare("s/d04")
def scheduler_state(m, fn):
    names = ("max_lr", "warmup", "decay_steps", "start_wd", "end_wd", "wd_steps")

    def optimizer():
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        return model, torch.optim.AdamW(groups, lr=0.0)

    def run_of(key, **fixed):
        def rates(total, ranks=1, **settings):
            model, opt = optimizer()
            given = {k: v for k, v in fixed.items()} | settings
            if given.get("decay_steps", 0) is None:
                given["decay_steps"] = total
            sched, out = fn(opt, **given), []
            for _ in range(total):
                out.append([g[key] for g in opt.param_groups])
                opt.step()
                sched.step()
            return out

        return rates

    def fresh():
        model, opt = optimizer()
        return {"model": model, "opt": opt, "sched": fn(opt), "k": 0}

    def perturb(x):
        s = x["sched"]
        s.max_lr, s.warmup, s.decay_steps = s.max_lr * 1.25, s.warmup + 1, s.decay_steps + 7
        s.start_wd, s.end_wd, s.wd_steps = s.start_wd + 0.01, s.end_wd + 0.05, s.wd_steps + 3
        s.step(3)

    def outputs(x):
        s = copy.deepcopy(x["sched"])
        out = [float(getattr(s, n)) for n in names] + [float(s.num_steps)]
        for _ in range(60):
            out += [v for g in s.optimizer.param_groups for v in (g["lr"], g["weight_decay"])]
            s.step()
        return torch.tensor(out, dtype=torch.float64)

    def train(x, n):
        seen = []
        for _ in range(n):
            g = torch.Generator().manual_seed(x["k"])
            x["model"](torch.randn(5, 4, generator=g)).square().mean().backward()
            x["opt"].step()
            x["sched"].step()
            x["opt"].zero_grad()
            seen.append(x["k"])
            x["k"] += 1
        return seen

    def save(x, folder):
        torch.save({"model": x["model"].state_dict(), "opt": x["opt"].state_dict(), "sched": x["sched"].state_dict(),
                    "k": x["k"]}, folder / "all.pt")

    def load(x, folder):
        state = torch.load(folder / "all.pt")
        x["model"].load_state_dict(state["model"])
        x["opt"].load_state_dict(state["opt"])
        x["sched"].load_state_dict(state["sched"])
        x["k"] = state["k"]

    return [
        Schedule(rates=run_of("lr", decay_steps=None), peak=[0.01, 0.01], final=[0.0, 0.0], total=40, warmup=5,
                 settings={"max_lr": 0.01, "warmup": 5}),
        Schedule(rates=run_of("lr"), peak=[0.01, 0.01], final=[0.0, 0.0], total=50, warmup=5, ends=40,
                 settings={"decay_steps": 40}),
        Schedule(rates=run_of("weight_decay"), peak=[0.1, 0.1], final=[0.01, 0.01], total=30, ends=20,
                 settings={"start_wd": 0.1, "end_wd": 0.01, "wd_steps": 20}),
        RoundTrip(make=fresh, perturb=perturb, outputs=outputs,
                  save=lambda x, folder: torch.save(x["sched"].state_dict(), folder / "s.pt"),
                  load=lambda x, folder: x["sched"].load_state_dict(torch.load(folder / "s.pt"))),
        Resume(make=fresh, run=train, save=save, load=load, steps=6,
               state=lambda x: torch.cat([x["model"].weight.detach().flatten(), x["model"].bias.detach()])),
    ]


# ---------------------------------------------------------------- l085
@declare("s/r08")
def shared_prompt(m, fn):
    given = m.make(0)
    model, seg = given["model"], given["segment"]
    prompt = given["ids"][seg == 0]
    answers = [given["ids"][seg == k] for k in range(1, int(seg.max()) + 1)]
    width = len(prompt) + max(map(len, answers))
    ids, mask = torch.zeros(len(answers), width, dtype=torch.long), torch.zeros(len(answers), width - 1)
    for i, a in enumerate(answers):
        ids[i, : len(prompt)], ids[i, len(prompt) : len(prompt) + len(a)] = prompt, a
        mask[i, len(prompt) - 1 : len(prompt) - 1 + len(a)] = 1

    def loss(model, batch):
        """One row per response (prompt, response, padding); responses to one prompt go to the code as one packed row."""
        packs = {}
        for i, row in enumerate(batch["ids"]):
            cols = batch["mask"][i].nonzero().flatten() + 1
            if len(cols):
                packs.setdefault(tuple(row[: cols[0]].tolist()), []).append((row[cols], batch["advantages"][i]))
        total, count = 0.0 * sum(p.sum() for p in model.parameters()), 0
        for start, pairs in packs.items():
            start = torch.tensor(start, dtype=torch.long)
            parts = [start] + [a for a, _ in pairs]
            segment = torch.cat([torch.full((len(p),), k) for k, p in enumerate(parts)])
            n = sum(len(a) for a, _ in pairs)
            value = fn(model, {"ids": torch.cat(parts), "segment": segment, "advantage": torch.stack([x for _, x in pairs])})
            total, count = total + value * n, count + n
        return total / max(count, 1)

    def logprobs(model, batch):
        t = batch["ids"].shape[1] - 1
        pos = torch.arange(t).clamp(max=model.pos.num_embeddings - 1)  # more padding than places, which no token sees
        allowed = torch.ones(t, t, dtype=torch.bool).tril()
        lp = torch.stack([model(row[:-1], pos, allowed).log_softmax(-1) for row in batch["ids"]])
        return lp.gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)

    return Step(
        model=model, loss=loss, batch={"ids": ids, "mask": mask, "advantages": given["advantage"]},
        roles={"ids": "ids", "mask": "mask", "advantages": "advantages"}, logprobs=logprobs,
        family="policy gradient", reduction="mean", value_is_loss=True, wide=("ids", "mask"),
    )


# ---------------------------------------------------------------- l086, l103
def in_order(ids, pre, suf, mid):
    """The document of a rearranged row: prefix, middle, suffix, end; others as they are."""
    body, end = list(ids[:-1]), list(ids[-1:])
    if not body or body[0] != pre or suf not in body or mid not in body:
        return list(ids)
    a, b = body.index(suf), body.index(mid)
    return body[1:a] + body[b + 1 :] + body[a + 1 : b] + end


def thinned(changed):
    """E[x · changed / rate] = x: the share of documents that are changed is the rate. changed(numbers, rate) -> 0 or 1."""

    def fn(x, rate):
        numbers = torch.randint(0, 2**40, (x.numel(),)).tolist()
        return x * torch.tensor(changed(numbers, rate), dtype=x.dtype).view(x.shape) / rate

    return fn


def seeded(fn, rows, width):
    def draw(seed):
        out = fn(rows, seed=seed)
        return torch.tensor([(list(r["input_ids"]) + [-1] * width)[:width] for r in out])

    return draw


@declare("t/r18")
def fill_in_the_middle(m, fn):
    rows = m.make(0)["rows"]

    def one(columns, **settings):
        def stage(examples):
            out = fn(examples, **settings)
            return {
                "input_ids": padded([r["input_ids"] for r in out], -1),
                "labels": padded([r["labels"] for r in out], -100),
                "same": torch.tensor([[int(list(r["labels"]) == list(r["input_ids"]))] for r in out]),
                "document": padded([in_order(r["input_ids"], m.PRE, m.SUF, m.MID) for r in out], -1),
                "changed": torch.tensor([[int(r["input_ids"][0] == m.PRE)] for r in out]),
                "length": torch.tensor([[len(r["input_ids"]) - 3 * int(r["input_ids"][0] == m.PRE)] for r in out]),
            }

        return Collator(
            fn=stage, examples=rows, pads={"input_ids": -1, "labels": -100, "document": -1},
            columns={"same": lambda e: [1], "document": lambda e: e["input_ids"],
                     "length": lambda e: [len(e["input_ids"])], **columns},
        )

    same = lambda e: e["input_ids"]
    return [
        one({}), one({}, seed=5),
        one({"changed": lambda e: [1]}, fim_rate=1.0),
        one({"changed": lambda e: [0], "input_ids": same, "labels": same}, fim_rate=0.0),
        Unbiased(fn=thinned(lambda numbers, rate: [
            int(r["input_ids"][0] == m.PRE)
            for r in fn([{"input_ids": [5, 6, 7, 8, m.EOD], "index": n} for n in numbers], fim_rate=rate)
        ])),
        Ranks(draw=seeded(fn, rows, 20)),
    ]


@declare("s/r17")
def fill_in_the_middle_by_id(m, fn):
    rows = m.make(0)["rows"]
    short = lambda e: len(e["input_ids"]) - 1 < 3

    def one(columns, **settings):
        def stage(examples):
            out = fn(examples, **settings)
            ids = [r["input_ids"] for r in out]
            return {
                "id": torch.tensor([[r["id"]] for r in out]),
                "input_ids": padded(ids, -1),
                "document": padded([in_order(i, 1, 2, 3) for i in ids], -1),
                "changed": torch.tensor([[int(i[0] == 1)] for i in ids]),
                "suffix_first": torch.tensor([[int(list(i[:2]) == [1, 2])] for i in ids]),
                "length": torch.tensor([[len(i) - 3 * int(i[0] == 1)] for i in ids]),
            }

        return Collator(
            fn=stage, examples=rows, pads={"input_ids": -1, "document": -1},
            columns={"id": lambda e: [e["id"]], "document": lambda e: e["input_ids"],
                     "length": lambda e: [len(e["input_ids"])], **columns},
        )

    all_ = lambda e: [0 if short(e) else 1]
    return [
        one({}), one({}, seed=3),
        one({"changed": all_}, rate=1.0),
        one({"changed": all_, "suffix_first": all_}, rate=1.0, spm_rate=1.0),
        one({"changed": all_}, rate=1.0, spm_rate=0.0),
        one({"changed": lambda e: [0], "input_ids": lambda e: e["input_ids"]}, rate=0.0),
        Unbiased(fn=thinned(lambda numbers, rate: [
            int(r["input_ids"][0] == 1) for r in fn([{"id": n, "input_ids": [15, 16, 17, 18, 4]} for n in numbers], rate=rate)
        ])),
        Unbiased(fn=thinned(lambda numbers, rate: [  # long documents: an empty prefix, which looks like SPM, is rare
            int(list(r["input_ids"][:2]) == [1, 2])
            for r in fn([{"id": n, "input_ids": [15] * 200 + [4]} for n in numbers], rate=1.0, spm_rate=rate)
        ])),
        Ranks(draw=seeded(fn, rows, 20)),
    ]


# ---------------------------------------------------------------- l087
@declare("t/r04")
def sampled_ids(m, fn):
    # an assistant's sampled ids become text, one character an id, and back, so that it has a text like the others
    messages = [
        {"role": x["role"], "content": "".join(chr(i + 22) for i in x["ids"][:-1]) if "ids" in x else x["content"]}
        for x in m.make(0)["messages"]
    ]

    def tokens(msgs):
        msgs = list(msgs)
        if not any(x["role"] == "assistant" for x in msgs):
            ids = m.template(msgs)
            return ids, [0] * len(ids)
        return fn([
            {"role": "assistant", "ids": [ord(c) - 22 for c in x["content"]] + [m.END]} if x["role"] == "assistant" else x
            for x in msgs
        ])

    given = m.make(1)["messages"]
    return [
        ChatTemplate(
            tokens=tokens, prompt=lambda msgs: m.template(list(msgs), generation_prompt=True), messages=messages,
            end=m.END,
        ),
        supervised_spans(
            fn, [given, given[1:], given[:3], m.make(2)["messages"][1:6]],
            lambda e: [t for x in e if x["role"] == "assistant" for t in x["ids"]],
        ),
    ]


# ---------------------------------------------------------------- l088
@declare("s/d08")
def two_ahead(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given, roles={"ids": "ids", "mask": "loss_mask"},
        settings={"mtp_weight": Setting(0.3, "weight")}, family="sft", reduction="mean", value_is_loss=True,
        wide=("ids", "loss_mask"),
    )


# ---------------------------------------------------------------- l090
@declare("s/d01")
def rollout_rows(m, fn):
    rows = m.make(0)["rows"] + m.make(1)["rows"]

    def sampled(x):
        return x["role"] == "assistant" and "generation_logprobs" in x

    def stage(examples):
        out = fn(examples)
        ids, mask = padded([r["input_ids"] for r in out], -1), padded([r["token_mask"] for r in out], -1)
        labels = padded([[t if k else -100 for t, k in zip(r["input_ids"], r["token_mask"])] for r in out], -100)
        return {
            "input_ids": ids, "token_mask": mask, "labels": labels,
            "generation_logprobs": padded([r["generation_logprobs"] for r in out], 9.0, torch.float32),
            "reward": torch.tensor([[r["reward"]] for r in out], dtype=torch.float32),
        }

    def every(f):
        return lambda e: [v for x in e["message_log"] for v in f(x)]

    return Collator(
        fn=stage, examples=rows, pads={"input_ids": -1, "token_mask": -1, "labels": -100, "generation_logprobs": 9.0},
        targets=every(lambda x: x["token_ids"] if sampled(x) else []),
        columns={
            "input_ids": every(lambda x: x["token_ids"]),
            "token_mask": every(lambda x: [int(sampled(x))] * len(x["token_ids"])),
            "generation_logprobs": every(
                lambda x: x["generation_logprobs"] if sampled(x) else [0.0] * len(x["token_ids"])
            ),
            "reward": lambda e: [e["reward"]],
        },
    )


# ---------------------------------------------------------------- l091
@declare("s/r16")
def inverse_root(m, fn):
    def rates(total, ranks=1, **settings):
        opt = m.make(0)["optimizer"]
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 1.0})
        sched, out = fn(opt, **settings), []
        for _ in range(total):
            out.append([g["lr"] for g in opt.param_groups])
            opt.step()
            sched.step()
        return out

    total, k, scale = 400, 100, 0.5
    return Schedule(
        rates=rates, peak=[scale / k**0.5] * 2, final=[scale / total**0.5] * 2, total=total, warmup=0,
        settings={"k": k, "scale": scale},
    )


# ---------------------------------------------------------------- l092
@declare("s/d06")
def image_collator(m, fn):
    rows = m.make(0)["rows"] + m.make(1)["rows"]

    def one(pad_id, image):
        def collate(examples):
            out = fn(examples, image_id=image, pad_id=pad_id)
            ids, at, pixels = out["input_ids"], 0, []
            for row in ids:  # the patches that a row's placeholders read
                n = int((row == image).sum())
                pixels.append(out["pixels"][at : at + n].flatten().tolist())
                at += n
            return {
                "input_ids": ids, "attention_mask": out["attention_mask"], "labels": out["labels"],
                "attended": ids.masked_fill(out["attention_mask"] == 0, -1),
                "pixels": padded(pixels, 99.0, torch.float32),
                "patches": torch.full((len(ids), 1), int(at == len(out["pixels"]))),
            }

        def whole(e):
            return [t for x in e["text_ids"] for t in ([image] * len(e["pixels"]) if x == image else [x])]

        examples = [{**e, "text_ids": [image if t == 49 else t for t in e["text_ids"]]} for e in rows]
        return Collator(
            fn=collate, examples=examples,
            pads={"input_ids": pad_id, "attention_mask": 0, "labels": -100, "attended": -1, "pixels": 99.0},
            targets=lambda e: [t for t in e["text_ids"] if t != image],
            columns={
                "input_ids": whole, "attention_mask": lambda e: [1] * len(whole(e)), "attended": whole,
                "labels": lambda e: [-100 if t == image else t for t in whole(e)],
                "pixels": lambda e: e["pixels"].flatten().tolist(), "patches": lambda e: [1],
            },
        )

    return [one(0, 49), one(60, 49), one(0, 70)]


# ---------------------------------------------------------------- l093
@declare("t/d09")
def data_order(m, fn):
    def epoch(e, n, batch, world, seed=3407):
        per = n // (batch * world)
        return [
            int(i) for s in range(e * per, (e + 1) * per) for r in range(world)
            for i in fn(r, s, n=n, batch=batch, world=world, seed=seed)
        ]

    def rank_draw(rank, first):
        return torch.tensor([int(i) for s in range(first, first + 4) for i in fn(rank, s, n=48, batch=3, world=4)])

    subjects = [
        Ranks(draw=lambda rank: rank_draw(rank, 0)),
        Ranks(draw=lambda rank: rank_draw(rank, 4)),
        Ranks(draw=lambda e: torch.tensor(epoch(e, 24, 3, 2))),  # each epoch has its own order
        Ranks(draw=lambda s: torch.tensor(epoch(0, 24, 3, 2, seed=100 + 10 * s))),  # and so has each seed
    ]
    for n, batch, world in ((24, 3, 2), (48, 2, 4)):
        for e in range(3):
            subjects.append(Census(
                wanted=[str(i) for i in range(n)], found=[str(i) for i in epoch(e, n, batch, world)],
                what=f"rows of epoch {e} over {world} ranks", once=True,
            ))
    return subjects


# ---------------------------------------------------------------- l094
@declare("v/r22")
def gspo_token(m, fn):
    given = m.make(0)
    b = given["batch"]

    def loss(model, batch, clip_low, clip_high):
        return fn(model, {
            "ids": batch["ids"], "response_mask": first_zero(batch["mask"]), "old_logprobs": batch["old_logprobs"],
            "advantages": batch["advantages"],
        }, clip_low=clip_low, clip_high=clip_high)

    return Step(
        model=given["model"], loss=loss,
        batch={"ids": b["ids"], "mask": b["response_mask"][:, 1:].clone(), "old_logprobs": b["old_logprobs"],
               "advantages": b["advantages"]},
        roles={"ids": "ids", "mask": "mask", "behaviour": "old_logprobs", "advantages": "advantages"},
        settings={"clip_low": Setting(3e-4, "clip"), "clip_high": Setting(4e-4, "clip high")},
        logprobs=lambda model, batch: token_logprobs(model, batch["ids"]),
        value_is_loss=False, reduction="mean", empty_rows=False,
        wide=("ids", "mask", "old_logprobs", "advantages"),
    )


# ---------------------------------------------------------------- l095
@declare("t/r06")
def packed_collator(m, fn):
    rows = m.make(0)["rows"] + m.make(1)["rows"]

    def unpack(batch):
        starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist() + [batch["position_ids"].shape[1]]
        return [{k: batch[k][0, a:b] for k in ("input_ids", "position_ids", "labels")} for a, b in zip(starts, starts[1:])]

    def labels(e):
        return [t if k and i else -100 for i, (t, k) in enumerate(zip(e["input_ids"], e["completion_mask"]))]

    return Collator(
        fn=fn, examples=rows, rows=False, unpack=unpack, targets=lambda e: [t for t in labels(e) if t != -100],
        columns={"input_ids": lambda e: e["input_ids"], "labels": labels,
                 "position_ids": lambda e: list(range(len(e["input_ids"])))},
    )


# ---------------------------------------------------------------- l096, l097
@declare("u/r23")
def on_policy_distillation(m, fn):
    given = m.make(0)
    model = given.pop("model")
    ids, mask, sampled = given["ids"], given["loss_mask"], given["sampled_logprobs"]

    def with_advantages(model, batch):  # advantage = teacher - sampled
        return fn(model, {
            "ids": batch["ids"], "loss_mask": batch["mask"], "sampled_logprobs": batch["sampled_logprobs"],
            "teacher_logprobs": batch["sampled_logprobs"] + batch["advantages"],
        })

    advantages = given["teacher_logprobs"] - sampled
    return [
        Step(
            model=model, loss=with_advantages,
            batch={"ids": ids, "mask": mask, "sampled_logprobs": sampled, "advantages": advantages},
            roles={"ids": "ids", "mask": "mask", "behaviour": "sampled_logprobs", "advantages": "advantages"},
            logprobs=lambda model, batch: first_zero(token_logprobs(model, batch["ids"])),
            metrics={"reverse_kl": Metric(moves=False)}, reduction="mean", value_is_loss=True,
            wide=("ids", "mask", "sampled_logprobs", "advantages"), family="policy gradient",
        ),
        Step(
            model=model, loss=fn, batch=given,
            roles={"ids": "ids", "mask": "loss_mask", "behaviour": "sampled_logprobs", "teacher": "teacher_logprobs"},
            metrics={"reverse_kl": Metric(moves=False)}, reduction="mean", value_is_loss=True,
            wide=("ids", "loss_mask", "sampled_logprobs", "teacher_logprobs"), family="policy gradient",
        ),
    ]


@declare("s/r25")
def reverse_kl_gradient(m, fn):
    given = m.make(0)
    model = given.pop("model")
    ids, mask, sampled = given["ids"], given["mask"], given["sample_logp"]

    def with_advantages(model, batch, coef):  # advantage = -coef * (sampled - teacher)
        return fn(model, {
            "ids": batch["ids"], "mask": batch["mask"], "sample_logp": batch["sample_logp"],
            "teacher_logp": batch["sample_logp"] + batch["advantages"],
        }, coef=coef)

    return [
        Step(
            model=model, loss=with_advantages,
            batch={"ids": ids, "mask": mask, "sample_logp": sampled, "advantages": given["teacher_logp"] - sampled},
            roles={"ids": "ids", "mask": "mask", "behaviour": "sample_logp", "advantages": "advantages"},
            logprobs=lambda model, batch: first_zero(token_logprobs(model, batch["ids"])),
            settings={"coef": Setting(1.0, "weight")}, reduction="mean", value_is_loss=True,
            wide=("ids", "mask", "sample_logp", "advantages"), family="policy gradient",
        ),
        Step(
            model=model, loss=fn, batch=given,
            roles={"ids": "ids", "mask": "mask", "behaviour": "sample_logp", "teacher": "teacher_logp"},
            settings={"coef": Setting(1.0, "weight")}, reduction="mean", value_is_loss=True,
            wide=("ids", "mask", "sample_logp", "teacher_logp"), family="policy gradient",
        ),
    ]


# ---------------------------------------------------------------- l098
@declare("s/r02")
def whitened_gae(m, fn):
    def gae(rewards, values, mask, gamma, lam):
        """Two rows of one token, whose advantages are 0 and 1, give the shift and the factor of the whitening."""
        b, t = rewards.shape
        r, v, k = (torch.cat([x.double(), torch.zeros(2, t, dtype=torch.float64)]) for x in (rewards, values, mask))
        k[b:, 0], r[b + 1, 0] = 1, 1
        out = fn(r, v, k, gamma=gamma, lam=lam)
        zero, one = out[b, 0], out[b + 1, 0]
        return ((out[:b] - zero) / (one - zero) * mask).to(rewards.dtype)

    def one_token(rewards, groups):
        n = len(rewards)
        r, v, k = torch.zeros(n, 3), torch.tensor([7.0, 0.0, -5.0]).repeat(n, 1), torch.zeros(n, 3)
        r[:, 1], k[:, 1] = rewards, 1
        return fn(r, v, k)[:, 1]

    given = [m.make(0), m.make(1)]
    rows = torch.cat([torch.stack([g["rewards"], g["values"], g["mask"]], 1) for g in given])

    def spread(shards):  # of all trained tokens, whatever rank their rows are on
        r, v, k = torch.cat([s if torch.is_tensor(s) else torch.stack(list(s)) for s in shards]).unbind(1)
        return float(fn(r, v, k)[k > 0].std())

    return [
        GAE(fn=gae, holes=True),
        AdvantageEstimator(fn=one_token, scale="free", over="batch"),
        Ranks(metric=spread, rows=rows, single=lambda shards: 1.0),  # the notes: whitened with the unbiased std
    ]


# ---------------------------------------------------------------- l099
@declare("t/r09")
def update_over_ranks(m, fn):
    given = m.make(0)
    model, optimizer = given["model"], given["optimizer"]
    batch = cat_batches([b for rank in given["batches"] for b in rank])  # 12 rows

    def loss(model, b):
        return F.cross_entropy(model(b["ids"]).flatten(0, 1), b["labels"].flatten(), ignore_index=-100)

    def two_ranks(batches):
        half = len(batches) // 2
        return [batches[:half], batches[half:]] if len(batches) % 2 == 0 else [batches]

    arranged = {
        "ranks": lambda batches: [[b] for b in batches],
        "micro-batches": lambda batches: [batches],
        "ranks of micro-batches": two_ranks,
    }
    made = [
        Accumulation(model=model, accumulate=accumulator(fn, arrange, 0.3), batch=batch, split=[1, 5, 4, 2], what=what)
        for what, arrange in arranged.items()
    ]
    for arrange in arranged.values():
        made.append(Update(
            model=model, optimizer=optimizer, loss=loss, batch=batch, split=[1, 5, 4, 2],
            update=lambda batches, norm, arrange=arrange: fn(model, Clipping(optimizer, model, norm), arrange(list(batches))),
        ))
    return made


# ---------------------------------------------------------------- l100
@declare("v/r08")
def padded_pack(m, fn):
    rows = m.make(0)["rows"] + m.make(1)["rows"][:3]

    def one(multiple, pad_id):
        def unpack(batch):
            ids, labels, pos = batch["input_ids"][0], batch["labels"][0], batch["position_ids"][0]
            cu = batch["cu_seqlens"].tolist()
            total = len(ids)
            padding = total - int((ids != pad_id).nonzero().max()) - 1
            facts = [
                int(total % multiple == 0 and padding < multiple),
                int(cu[0] == 0 and cu[-1] == total and all(a < b for a, b in zip(cu, cu[1:]))),
                int(int(batch["max_seqlen"]) == max(b - a for a, b in zip(cu, cu[1:]))),
                int(bool((labels[total - padding :] == -100).all())),
                int(pos[total - padding :].tolist() == list(range(padding))),
            ]
            return [
                {"input_ids": ids[a:b], "labels": labels[a:b], "position_ids": pos[a:b], "facts": torch.tensor(facts)}
                for a, b in zip(cu, cu[1:]) if not bool((ids[a:b] == pad_id).all())
            ]

        return Collator(
            fn=lambda examples: fn(examples, multiple=multiple, pad_id=pad_id), examples=rows, rows=False, unpack=unpack,
            targets=lambda e: [t for t in e["labels"][1:] if t != -100],
            columns={"input_ids": lambda e: e["input_ids"], "labels": lambda e: [-100] + e["labels"][1:],
                     "position_ids": lambda e: list(range(len(e["input_ids"]))), "facts": lambda e: [1] * 5},
        )

    return [one(8, 0), one(16, 77), one(1, 0)]  # the last has never any padding


# ---------------------------------------------------------------- l101
@declare("s/r19")
def repeated_domains(m, fn):
    rows = m.make(0)["rows"]
    usual = {"wiki": 2.4, "web": 0.5, "code": 1.0}

    def stage(examples):
        out = fn(examples)
        place = {e["id"]: i for i, e in enumerate(examples)}
        keys = [(r["epoch"], place[r["id"]]) for r in out]
        own = [[r for r in out if r["id"] == e["id"]] for e in examples]
        facts = []
        for e, copies in zip(examples, own):
            w = usual[e["domain"]]
            facts.append([
                int(all(list(r["input_ids"]) == list(e["input_ids"]) and r["domain"] == e["domain"] for r in copies)),
                int([r["epoch"] for r in copies] == list(range(len(copies)))),
                int(math.floor(w) <= len(copies) <= math.ceil(w)),
                int(keys == sorted(keys)),
            ])
        return {
            "copies": torch.tensor([[len(c)] for c in own]),
            "epochs": padded([[r["epoch"] for r in c] for c in own], -1),
            "input_ids": padded([[t for r in c for t in r["input_ids"]] for c in own], -1),
            "facts": torch.tensor(facts),
        }

    whole = {"wiki": 2.0, "web": 3.0, "code": 1.0}

    def domains(rows):
        out = {}
        for r in rows:
            out[r["domain"]] = out.get(r["domain"], 0) + 1
        return out

    extra = [{"id": f"new/{i}", "domain": "other", "input_ids": [1, 2]} for i in range(5)]
    wanted = {d: n * whole.get(d, 1.0) for d, n in domains(rows + extra).items()}

    def rounded(x, setting):
        """x becomes weights of domains, in units in which the largest is 3·setting; copies are rounded at random."""
        flat = x.detach().double().flatten()
        unit = float(flat.abs().max()) / (3 * setting)
        if unit == 0:
            return x.clone()
        names = torch.randint(0, 2**62, (len(flat),)).tolist()
        many = [{"id": f"{n}/{i}", "domain": f"d{i}", "input_ids": [i]} for i, n in enumerate(names)]
        out = fn(many, weights={f"d{i}": abs(float(v)) / unit for i, v in enumerate(flat)})
        count = torch.zeros(len(flat), dtype=torch.float64)
        for r in out:
            count[int(r["domain"][1:])] += 1
        return (count * unit * flat.sign()).view(x.shape).to(x.dtype)

    return [
        Collator(
            fn=stage, examples=rows[:48], pads={"epochs": -1, "input_ids": -1},
            columns={"facts": lambda e: [1, 1, 1, 1]},
        ),
        Census(wanted=wanted, found={d: float(n) for d, n in domains(fn(rows + extra, weights=whole)).items()},
               what="rows of each domain"),
        Unbiased(fn=rounded),
    ]


# ---------------------------------------------------------------- l102
@declare("v/r19")
def pass_at_k(m, fn):
    given = m.make(0)
    rows = torch.tensor([s for rank in given["per_rank"] for s in rank])

    def lists(shards):
        return [[(int(p), int(ok)) for p, ok in (s.tolist() if torch.is_tensor(s) else [r.tolist() for r in s])] for s in shards]

    def one(k):
        def single(shards):
            seen = {}
            for p, ok in (x for s in lists(shards) for x in s):
                seen.setdefault(p, []).append(ok)
            return sum(
                1.0 - math.comb(len(v) - sum(v), k) / math.comb(len(v), k) for v in seen.values()
            ) / len(seen)

        return Ranks(metric=lambda shards: float(fn(lists(shards), k=k)), rows=rows, single=single)

    return [one(given["k"]), one(2)]


# ---------------------------------------------------------------- l104
@declare("t/d03")
def distilled_update(m, fn):
    given = m.make(0)
    model, optimizer = given["model"], given["optimizer"]
    batch = cat_batches(given["batches"] + m.make(1)["batches"])  # 8 rows

    def loss(model, b):  # the notes: reverse KL, summed over distilled tokens, divided by their number
        s, t = model(b["ids"]).log_softmax(-1), b["teacher_logits"].log_softmax(-1)
        kl = (s.exp() * (s - t)).sum(-1)
        return (kl * b["loss_mask"]).sum() / b["loss_mask"].sum()

    return [
        Accumulation(model=model, accumulate=accumulator(fn, lambda b: b, 0.5), batch=batch, split=[1, 4, 3]),
        Update(
            model=model, optimizer=optimizer, loss=loss, batch=batch, split=[1, 4, 3],
            update=lambda batches, norm: fn(model, Clipping(optimizer, model, norm), list(batches)),
        ),
    ]


# ---------------------------------------------------------------- l105
@declare("s/r04")
def cut_template(m, fn):
    given = m.make(0)["messages"]
    text = lambda ids: "".join(chr(i + 20) for i in ids)  # ids 12… are the characters from the blank on
    code = lambda s: [ord(c) - 20 if ord(c) >= 32 else 5000 + ord(c) for c in s]
    messages = [{**x, "content": text(x["content"])} for x in given]
    complete = [{k: v for k, v in x.items() if k != "cut"} for x in messages]

    def tokens(msgs):
        return fn([{**x, "content": code(x["content"])} for x in msgs])

    def prompt(msgs):
        return list(tokens(msgs)[0]) + [1, 6, 3]

    def targets(e):
        out = []
        for x in e:
            if x["role"] == "assistant" and x.get("train", True):
                call = [8, *x["tool_call"], 9] if x.get("tool_call") else []
                out += [*x["content"], *call, *([] if x.get("cut") else [2])]
        return out

    return [
        ChatTemplate(tokens=tokens, prompt=prompt, messages=complete, end=2, trained=[2, 6]),
        ChatTemplate(tokens=tokens, prompt=prompt, messages=messages, trained=[2, 6]),  # a cut answer has no end
        supervised_spans(fn, [given, given[:3], given[1:5], m.make(1)["messages"]], targets),
    ]
