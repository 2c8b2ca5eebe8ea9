import copy
import math
import pickle
from collections import Counter

import torch
import torch.nn.functional as F
from earnest_audit import (
    GAE,
    Accumulation,
    AdvantageEstimator,
    Census,
    ChatTemplate,
    Collator,
    Ema,
    Metric,
    Ranks,
    Resume,
    RoundTrip,
    Schedule,
    Setting,
    Step,
    Update,
)
from tests.audit.reading2026i.reading import declare, no_subject


def inputs(m):
    given = m.make(0)
    model = given.pop("model")
    return model, given.pop("batch", given)


def padded(rows, value, dtype=torch.long):
    width = max((len(r) for r in rows), default=0)
    return torch.tensor([list(r) + [value] * (width - len(r)) for r in rows], dtype=dtype).reshape(len(rows), width)


# ---------------------------------------------------------------------------------------------------------- losses


@declare("t/d07")
def packed_attention(m, fn):
    model, batch = inputs(m)
    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"ids": "ids", "labels": "labels", "positions": "position_ids", "documents": "attention_mask"},
        family="sft",
        reduction="mean",
        value_is_loss=True,
        all_supervised=True,
        wide=("ids", "labels", "position_ids", "attention_mask"),
    )


@declare("s/r23")
def cispo(m, fn):
    model, batch = inputs(m)
    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "behaviour": "old_logp", "advantages": "advantage"},
        settings={"eps_high": Setting(0.5, "bound")},
        logprobs=lambda model, b: m._logp(model, b["ids"]),
        reduction="mean",
        value_is_loss=False,
        wide=("ids", "mask", "old_logp"),
    )


@declare("t/r22")
def cispo_absolute(m, fn):
    model, batch = inputs(m)
    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logprobs", "advantages": "advantages"},
        settings={"eps_high": Setting(2.0, "bound")},
        logprobs=lambda model, b: m.logp(model, b["ids"]),
        reduction="mean",
        value_is_loss=False,
        wide=("ids", "loss_mask", "old_logprobs"),
    )


@declare("u/d08")
def two_sided_padding(m, fn):
    model, batch = inputs(m)

    def logprobs(model, b):
        ids, text = b["ids"], b["attention_mask"].bool()
        positions = (text.long().cumsum(1) - 1).clamp(min=0)
        t = ids.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool).tril() & (text[:, None, :] == text[:, :, None])
        lp = model(ids, positions, mask)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return F.pad(lp, (1, 0))

    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={
            "ids": "ids",
            "attention": "attention_mask",
            "mask": "completion_mask",
            "advantages": "advantages",
        },
        settings={"pad_id": Setting(2, "inert", modes=(0, 5))},
        logprobs=logprobs,
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "attention_mask", "completion_mask"),
    )


@declare("u/r08")
def context_parallel(m, fn):
    model, batch = inputs(m)
    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"ids": "ids", "mask": "loss_mask"},
        settings={"ranks": Setting(2, "inert", modes=(1, 4, 8))},
        family="sft",
        reduction="mean",
        value_is_loss=True,
        all_supervised=None,
        wide=("ids", "loss_mask"),
    )


@declare("v/r23")
def kto(m, fn):
    model, batch = inputs(m)
    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "reference": "ref_logp", "correct": "desirable"},
        settings={
            "beta": Setting(0.1, "setting"),
            "w_good": Setting(1.0, "weight"),
            "w_bad": Setting(1.33, "weight"),
        },
        metrics={"kl": Metric(low=0.0), "reward_good": Metric()},
        family="preference",
        pairwise=False,
        rows_interact=True,
        value_is_loss=False,  # z0 has no gradient
        reduction="mean",
        masks=("kl_mask",),
        wide=("ids", "mask", "kl_ids", "kl_mask"),
    )


@declare("t/d04")
def jsd(m, fn):
    model, given = inputs(m)
    # the loss is taken on ids[:, 1:]: mask and teacher of these targets. labels are the ids of the response
    batch = {
        "ids": given["ids"],
        "mask": (given["labels"][:, 1:] != -100).float(),
        "teacher_logits": given["teacher_logits"][:, :-1].clone(),
    }

    def loss(model, b, **settings):
        ids = b["ids"]
        labels = torch.full_like(ids, -100)
        labels[:, 1:] = torch.where(b["mask"] > 0, ids[:, 1:], labels[:, 1:])
        teacher = torch.cat([b["teacher_logits"], torch.zeros_like(b["teacher_logits"][:, :1])], 1)
        return fn(model, {"ids": ids, "labels": labels, "teacher_logits": teacher}, **settings)

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "teacher": "teacher_logits"},
        settings={"beta": Setting(0.5, "mixture")},
        student=lambda model, b: model(b["ids"])[:, :-1],
        family="divergence",
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "mask", "teacher_logits"),
    )


@declare("s/d10")
def distillation_over_vocabulary_shards(m, fn):
    model, batch = inputs(m)
    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"ids": "ids", "labels": "labels", "teacher": "teacher_logits"},
        settings={
            "kd_ratio": Setting(0.5, "mixture", pure=1.0),
            "temperature": Setting(2.0, "setting"),
            "tp": Setting(2, "inert", modes=(1, 4, 8)),
        },
        student=lambda model, b: model(b["ids"]),
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "labels", "teacher_logits"),
    )


@declare("u/r24")
def robust_dpo(m, fn):
    model, given = inputs(m)
    (ci, ri), (cm, rm), (cr, rr) = (given[k].chunk(2) for k in ("ids", "loss_mask", "ref_logprobs"))
    batch = {
        "chosen": ci.clone(),
        "rejected": ri.clone(),
        "chosen_mask": cm.clone(),
        "rejected_mask": rm.clone(),
        "ref_chosen": cr.clone(),
        "ref_rejected": rr.clone(),
    }

    def both(b, first, second):
        width = max(b[first].shape[1], b[second].shape[1])
        return torch.cat([F.pad(b[k], (0, width - b[k].shape[1])) for k in (first, second)])

    def loss(model, b, **settings):
        rows = {
            "ids": both(b, "chosen", "rejected"),
            "loss_mask": both(b, "chosen_mask", "rejected_mask"),
            "ref_logprobs": torch.cat([b["ref_chosen"], b["ref_rejected"]]),
        }
        return fn(model, rows, **settings)

    def logprobs(model, b):
        def one(ids, mask):
            lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            return (lp * mask[:, 1:]).sum(1)

        return one(b["chosen"], b["chosen_mask"]), one(b["rejected"], b["rejected_mask"])

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={
            "chosen": "chosen",
            "rejected": "rejected",
            "chosen_mask": "chosen_mask",
            "rejected_mask": "rejected_mask",
            "reference_chosen": "ref_chosen",
            "reference_rejected": "ref_rejected",
        },
        settings={"beta": Setting(0.1, "setting"), "eps": Setting(0.2, "smoothing")},
        metrics={"accuracy": Metric(0.0, 1.0)},
        logprobs=logprobs,
        family="preference",
        reduction="mean",
        value_is_loss=True,
        wide=("chosen", "rejected", "chosen_mask", "rejected_mask"),
    )


@declare("v/d02")
def implicit_q(m, fn):
    model, batch = inputs(m)
    other, all_ended = inputs(m)
    metrics = {k: Metric(low=0.0, weight=1.0) for k in ("value", "q", "twin")}

    def ended(model, b, **settings):
        """every episode has ended: the critics' target is the reward, so that the value is the loss"""
        rows = {**b, "next_obs": torch.zeros_like(b["obs"]), "terminated": torch.ones_like(b["rewards"])}
        return fn(model, rows, **settings)

    return [
        Step(
            model=model,
            loss=fn,
            batch=batch,
            settings={"gamma": Setting(0.99, "setting"), "expectile": Setting(0.8, "setting")},
            metrics=metrics,
            reduction="mean",
            value_is_loss=False,  # the value of the next state has no gradient
        ),
        Step(
            model=other,
            loss=ended,
            batch={k: all_ended[k] for k in ("obs", "actions", "rewards")},
            settings={"expectile": Setting(0.8, "setting")},
            metrics=metrics,
            reduction="mean",
            value_is_loss=True,
        ),
    ]


@declare("t/r23")
def two_hot_value(m, fn):
    model, batch = inputs(m)
    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"ids": "ids", "mask": "loss_mask", "returns": "returns"},
        settings={"low": Setting(-5.0, "setting"), "high": Setting(5.0, "setting")},
        reduction="mean",
        value_is_loss=True,
        all_supervised=None,
        wide=("ids", "loss_mask", "returns"),
    )


@declare("t/r25")
def balance_loss(m, fn):
    model, batch = inputs(m)
    # "next token": of make they are random. The last real token of a row has none
    labels = torch.full_like(batch["labels"], -100)
    known = (batch["labels"][:, :-1] != -100) & (batch["attention_mask"][:, 1:] == 1)
    labels[:, :-1] = torch.where(known, batch["ids"][:, 1:], labels[:, :-1])
    batch["labels"] = labels
    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"ids": "ids", "labels": "labels", "attention": "attention_mask"},
        settings={"coef": Setting(0.02, "weight"), "top_k": Setting(2, "setting", modes=(1, 3))},
        metrics={"ce": Metric(low=0.0, weight=1.0), "aux": Metric(low=0.0, weight="coef")},
        family="sft",
        rows_interact=True,
        reduction="mean",
        value_is_loss=True,  # f is constant between two changes of the top k
        wide=("ids", "labels", "attention_mask"),
    )


# ------------------------------------------------------------------------------------------------------ data stages


@declare("t/r17")
def mixture(m, fn):
    rows = m.make(0)["rows"]

    def fields(examples, **settings):
        out = fn(examples, **settings)
        width = max(len(r["text"]) for r in out)
        return {
            "source": torch.tensor([ord(r["source"][0]) for r in out]),
            "text": padded([[ord(c) for c in r["text"]] for r in out], -1) if width else torch.zeros(len(out), 0),
        }

    size = Counter(r["source"] for r in rows)

    def placed(**settings):
        """sources in order of size, and in each source whole passes first, then the first rows of the next one"""
        out = fn(copy.deepcopy(rows), **settings)
        taken = Counter(r["source"] for r in out)
        texts = {s: [r["text"] for r in rows if r["source"] == s] for s in size}
        wanted = [texts[s][i % size[s]] for s in sorted(size, key=size.get) for i in range(taken[s])]
        return Census(
            wanted=[f"{k}: {t}" for k, t in enumerate(wanted)],
            found=[f"{k}: {r['text']}" for k, r in enumerate(out)],
            what=f"places of the mixture {settings}",
            once=True,
        )

    def number(budget, most):
        out = fn(copy.deepcopy(rows), budget=budget, max_epochs=most)
        often = Counter(r["text"] for r in out)
        return Census(
            wanted={"rows": min(budget, most * len(rows)), "rows that appear too often": 0},
            found={"rows": len(out), "rows that appear too often": sum(n > most for n in often.values())},
            what=f"rows of the mixture, budget {budget}, at most {most} times",
        )

    capped = fn(copy.deepcopy(rows), budget=1000, max_epochs=3)  # all sources are capped
    return [
        Collator(fields, rows, pads={"text": -1}, rows=False),
        placed(),
        placed(budget=25, max_epochs=2),
        number(40, 3),
        number(25, 2),
        number(150, 3),
        Census({r["text"]: 3 for r in rows}, dict(Counter(r["text"] for r in capped)), "rows where all sources are capped"),
    ]


@declare("u/r15")
def fill_in_the_middle(m, fn):
    examples = m.make(0)["rows"] + m.make(1)["rows"]
    pre, suf, mid, end = m.PRE, m.SUF, m.MID, m.END

    def document(ids):
        """the document that a row was made from: PRE pre SUF suf MID mid END, or as it is"""
        ids = list(ids)
        if ids and ids[-1] == end:
            ids = ids[:-1]
        if ids and ids[0] == pre and suf in ids and mid in ids and ids.index(suf) < ids.index(mid):
            s, k = ids.index(suf), ids.index(mid)
            return ids[1:s] + ids[k + 1 :] + ids[s + 1 : k]
        return ids

    def stage(rows):
        out = fn(rows)
        return {
            "ids": padded([r["ids"] for r in out], -1),
            "key": torch.tensor([r["key"] for r in out]),
            "document": padded([document(r["ids"]) for r in out], -1),
            "last": torch.tensor([r["ids"][-1] for r in out]),
            "ends": torch.tensor([list(r["ids"]).count(end) for r in out]),
        }

    # "rate 0.5, SPM rate 0.5": long documents, of which few have an empty prefix
    g = torch.Generator().manual_seed(5)
    long = [{"ids": torch.randint(4, 32, (100,), generator=g).tolist(), "key": k} for k in range(600)]
    made = [list(r["ids"]) for r in fn(copy.deepcopy(long))]
    changed = [ids for ids in made if ids[0] == pre]
    suffix_first = [ids for ids in changed if ids[1] == suf]
    share = {
        "documents that are changed, within 0.4 to 0.6": float(0.4 < len(changed) / len(made) < 0.6),
        "of these suffix first, within 0.4 to 0.6": float(0.4 < len(suffix_first) / max(1, len(changed)) < 0.6),
    }
    census = Census(wanted=dict.fromkeys(share, 1.0), found=share, what="rates of the stage")
    return [
        census,
        Collator(
            stage,
            examples,
            pads={"ids": -1, "document": -1},
            columns={
                "key": lambda e: e["key"],
                "document": lambda e: e["ids"],
                "last": lambda e: end,
                "ends": lambda e: 1,
            },
        ),
    ]


@declare("u/d01")
def best_fit(m, fn):
    examples = m.make(0)["rows"] + m.make(1)["rows"]

    def unpack(batch):
        found = []
        for x, y in zip(batch["inputs"].tolist(), batch["targets"].tolist()):
            n = len(x)
            text = max((i for i, t in enumerate(x) if t != m.BOS), default=-1) + 1  # after it only BOS: the filling
            starts = [i for i in range(text) if x[i] == m.BOS]
            if text and (not starts or starts[0] != 0):
                starts = [0, *starts]
            for a, b in zip(starts, [*starts[1:], text]):
                ids, targets = x[a:b], y[a:b]
                if b == n:  # a full row: its last token is only a target
                    if targets[-1] != -1:
                        ids, targets = [*ids, targets[-1]], [*targets, -1]
                found.append({"ids": torch.tensor(ids), "targets": torch.tensor(targets)})
            if any(t != -1 for t in y[text:]):  # filling that is trained is one document too many
                found.append({"ids": torch.tensor(x[text:]), "targets": torch.tensor(y[text:])})
        return found

    return Collator(
        fn,
        examples,
        rows=False,
        unpack=unpack,
        targets=lambda e: [t for t, k in zip(e["ids"][1:], e["mask"][1:]) if k],
        labels="targets",
        ignore=-1,
        columns={
            "ids": lambda e: e["ids"],
            "targets": lambda e: [t if k else -1 for t, k in zip(e["ids"][1:], e["mask"][1:])] + [-1],
        },
    )


@declare("t/d06")
def turns(m, fn):
    words = ["hello", "what is 2+2", "four", "and 3+3", "six", "thanks"]
    messages = [{"role": ("user", "assistant")[i % 2], "content": w} for i, w in enumerate(words)]

    def prompt(messages):
        return list(fn(messages)[0]) + [m.SOT, m.ROLE["assistant"], m.NL]

    def stage(conversations):
        made = [fn(c) for c in conversations]
        return {
            "ids": padded([ids for ids, _ in made], -1),
            "labels": padded([[t if k else -100 for t, k in zip(ids, mask)] for ids, mask in made], -100),
        }

    def targets(conversation):
        return [t for x in conversation if x["role"] == "assistant" for t in [*m.encode(x["content"]), m.EOT]]

    return [
        ChatTemplate(tokens=fn, prompt=prompt, messages=messages, end=m.EOT),
        ChatTemplate(tokens=fn, prompt=prompt, messages=m.make(0)["messages"], end=m.EOT),
        Collator(
            stage,
            [messages, *(m.make(s)["messages"] for s in (0, 1, 2))],
            pads={"ids": -1, "labels": -100},
            targets=targets,
            labels="labels",
            ignore=-100,
        ),
    ]


@declare("s/r03")
def row_per_turn(m, fn):
    examples = m.make(0)["rows"] + m.make(1)["rows"]

    def stage(rows):
        """one row per conversation: its output rows, one after the other"""
        out = list(fn(rows))
        made, at = [], 0
        for k, row in enumerate(rows):
            n = len(row["turns"])
            made.append(out[at : at + n] if k < len(rows) - 1 else out[at:])
            at += n
        flat = lambda key: [[t for r in rs for t in r[key]] for rs in made]
        return {
            "input_ids": padded(flat("input_ids"), -1),
            "loss_mask": padded(flat("loss_mask"), -1),
            "labels": padded([[t if k else -100 for r in rs for t, k in zip(r["input_ids"], r["loss_mask"])] for rs in made], -100),
            "advantage": padded([[r["advantage"] for r in rs] for rs in made], -1000.0, torch.float32),
        }

    def targets(e):
        return [t for turn in e["turns"] for t in turn["think"] + [4] + turn["answer"] + [5]]

    return Collator(
        stage,
        examples,
        pads={"input_ids": -1, "loss_mask": -1, "labels": -100, "advantage": -1000.0},
        targets=targets,
        labels="labels",
        ignore=-100,
        columns={"advantage": lambda e: [e["advantage"]] * len(e["turns"])},
    )


@declare("v/d05")
def cluster_sampler(m, fn):
    def make():
        return fn(**m.make(0))

    def run(x, n):
        return [sample for _ in range(n) for sample in x.next_batch()]

    def state(x):
        return torch.tensor([float(v) for c in x.clusters for v in c] + [float(v) for v in x.position] + [float(x.consumed)])

    def save(x, folder):
        (folder / "sampler.pkl").write_bytes(pickle.dumps(x.state_dict()))

    def load(x, folder):
        x.load_state_dict(pickle.loads((folder / "sampler.pkl").read_bytes()))

    kept = {}

    def keep(x, folder):
        kept[str(folder)] = x.state_dict()

    def restore(x, folder):
        x.load_state_dict(kept[str(folder)])

    def outputs(x):
        return torch.tensor([v for sample in run(copy.deepcopy(x), 6) for v in sample])

    return [
        Resume(make=make, run=run, save=save, load=load, state=state, steps=6),
        Resume(make=make, run=run, save=keep, load=restore, state=state, steps=6),
        RoundTrip(make=make, perturb=lambda x: run(x, 5) and None, save=save, load=load, outputs=outputs),
        RoundTrip(make=make, perturb=lambda x: run(x, 5) and None, save=keep, load=restore, outputs=outputs),
    ]


# ---------------------------------------------------------------------------------------------------------- metrics


@declare("t/d02")
def valid_tokens(m, fn):
    rows = torch.cat([m.make(s)["ranks"][i]["global_loss_mask"] for s in (0, 1) for i in (0, -1)])
    rows[0, 5:] = 0

    def subject(cp):
        def metric(shards):
            return fn(
                [
                    {"dp": d, "cp": c, "loss_mask": m.split(s, c, cp), "global_loss_mask": s}
                    for d, s in enumerate(torch.as_tensor(s) if not isinstance(s, list) else torch.stack(s) for s in shards)
                    for c in range(cp)
                ]
            )

        return Ranks(metric=metric, rows=rows, single=lambda shards: float(sum(r.sum().item() for s in shards for r in s)))

    return [subject(4), subject(2), subject(1)]


@declare("u/r19")
def perplexity(m, fn):
    def subject(low, high):
        g = torch.Generator().manual_seed(3)
        rows = torch.full((10, 9), -1.0)  # one row is one batch of a rank; -1: no token
        for i, n in enumerate((2, 9, 4, 7, 3, 8, 5, 2, 6, 9)):
            rows[i, :n] = low + (high - low) * (i % 4) / 4 + torch.rand(n, generator=g) * (high - low) / 4
        batches = lambda shard: [r[r >= 0] for r in shard]
        return Ranks(
            metric=lambda shards: fn([batches(s) for s in shards] + [[]]),  # and a rank without batches
            rows=rows,
            single=lambda shards: math.exp(min(20.0, torch.cat([b for s in shards for b in batches(s)]).double().mean().item())),
        )

    return [subject(0.0, 6.0), subject(2.0, 30.0), subject(15.0, 40.0)]  # some above 20; the mean above 20


@declare("t/r19")
def bits_per_byte(m, fn):
    ranks = m.make(0)["ranks"]
    table = ranks[0]["token_bytes"]
    rows = torch.cat([torch.stack([r["nll"], r["targets"].float()], 1) for r in ranks])
    none = {"nll": torch.zeros(0), "targets": torch.zeros(0, dtype=torch.long), "token_bytes": table}

    def columns(shard):
        shard = torch.stack(list(shard)) if len(shard) else rows[:0]
        return shard[:, 0], shard[:, 1].round().long()

    def metric(shards):
        return fn([dict(zip(("nll", "targets"), columns(s)), token_bytes=table) for s in shards] + [none])

    def single(shards):
        nats, n = 0.0, 0
        for s in shards:
            for loss, t in zip(*(c.tolist() for c in columns(s))):
                if t >= 0 and int(table[t]) > 0:
                    nats, n = nats + loss, n + int(table[t])
        return nats / (math.log(2) * n) if n else math.inf

    return Ranks(metric=metric, rows=rows, single=single)


@declare("u/d02")
def bits_per_byte_of_pieces(m, fn):
    rows = torch.cat([torch.stack([r["nll"], r["ids"].float()], 1) for r in m.make(0)["ranks"]])

    def columns(shard):
        shard = torch.stack(list(shard)) if len(shard) else rows[:0]
        return {"ids": shard[:, 1].round().long(), "nll": shard[:, 0]}

    def single(shards):
        parts = [columns(s) for s in shards]
        return m.single(torch.cat([p["ids"] for p in parts]), torch.cat([p["nll"] for p in parts]))

    return Ranks(metric=lambda shards: fn([columns(s) for s in shards]), rows=rows, single=single)


# -------------------------------------------------------------------------------------------------------- schedules


class Decayed:
    """an average whose decay is that of the schedule, once per optimizer step"""

    def __init__(self, fn):
        self.fn, self.step = fn, 0

    def __call__(self, average, current, rate):
        self.step += 1
        decay = self.fn(self.step, max_decay=1.0 - rate)
        return decay * average + (1.0 - decay) * current


@declare("t/r14")
def ema_decay(m, fn):
    return [
        Ema(Decayed(fn)),
        # with max_decay 0.9 the bound is reached at n = 80
        Schedule(
            rates=lambda total, ranks=1, **settings: [fn(k + 1, **settings) for k in range(total)],
            peak=0.9,
            final=0.9,
            total=200,
            warmup=181,
            ends=181,
            settings={"max_decay": 0.9, "min_decay": 0.3, "start": 100},
        ),
    ]


@declare("v/d04")
def momentum_cycle(m, fn):
    total = 60
    return Schedule(
        rates=lambda total, ranks=1, **settings: [fn(k, **settings) for k in range(total)],
        peak=0.95,
        final=0.95 / (1 + 0.05 * (total - 20) / 5),
        total=total,
        restarts=True,
        settings={
            "min_mom": 0.85,
            "max_mom": 0.95,
            "first": 10,
            "second": 10,
            "decay_step_size": 5,
            "decay_mom_rate": 0.05,
        },
    )


@declare("u/r14")
def rate_in_samples(m, fn):
    # samples before each step: 0 8 16 24 32 48 64 88 112, then + 32: the peak (64) at step 6, the end (640) at step 25
    return Schedule(
        rates=lambda total, ranks=1, **settings: [fn(k, **settings) for k in range(total)],
        peak=1e-3,
        final=1e-4,
        total=40,
        warmup=6,
        ends=25,
        settings={
            "base_lr": 1e-3,
            "min_lr": 1e-4,
            "start_batch": 8,
            "increment": 8,
            "batch": 32,
            "ramp_samples": 96,
            "warmup_samples": 64,
            "decay_samples": 640,
        },
    )


@declare("v/r13")
def one_minus_sqrt(m, fn):
    return Schedule(
        rates=lambda total, ranks=1, **settings: [fn(k, total=total, **settings) for k in range(total)],
        peak=1e-3,
        final=0.0,
        total=200,
        warmup=20,
        settings={"peak": 1e-3, "warmup": 20, "cooldown": 40},
    )


@declare("t/d10")
def half_cosine(m, fn):
    rates = lambda total, ranks=1, **settings: [fn(k, **settings) for k in range(total)]
    settings = {"lr": 1e-4, "warmup": 10, "scheduler_steps": 100, "min_factor": 0.05}
    return Schedule(rates, peak=1e-4, final=0.05 * 1e-4, total=180, warmup=10, ends=110, settings=settings)


@declare("u/r12")
def warm_stable_sqrt(m, fn):
    return Schedule(
        rates=lambda total, ranks=1, **settings: [fn(k, total=total, **settings) for k in range(total)],
        peak=3e-4,
        final=0.0,
        total=100,
        warmup=10,
        settings={"base_lr": 3e-4, "warmup": 10, "decay": 20},
    )


# ------------------------------------------------------------------------------------------------------- advantages


def differences(rewards, values, mask, gamma):
    """r + gamma * V' - V on the answer's tokens, V' at the answer's next one; 0 elsewhere"""
    out, after = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    for t in range(values.shape[1] - 1, -1, -1):
        on = mask[:, t].bool()
        out[:, t] = torch.where(on, rewards[:, t] + gamma * after - values[:, t], torch.zeros_like(after))
        after = torch.where(on, values[:, t], after)
    return out


@declare("u/r02")
def turn_grpo(m, fn):
    def discounted(rewards, values, mask, gamma, lam):
        # all trajectories in one task: the discounted sum of differences by gamma * lam, normalised over all turns
        delta = differences(rewards, values, mask, gamma)
        whitened = fn(delta.clone(), torch.zeros(len(delta), dtype=torch.long), gamma=gamma * lam)
        plain, run = torch.zeros_like(delta), torch.zeros_like(delta[:, 0])
        for t in range(delta.shape[1] - 1, -1, -1):
            run = delta[:, t] + gamma * lam * run
            plain[:, t] = run
        return whitened, plain + values

    return [
        AdvantageEstimator(lambda r, g: fn(r[:, None], g)[:, 0], scale="free"),
        # two turns each, of which none is discounted into the one before
        AdvantageEstimator(
            lambda r, g: fn(r.reshape(-1, 2), g[::2], gamma=0.0).reshape(-1), scale="free", interleaved=False, size=4
        ),
        GAE(discounted, gamma=0.9, lam=0.7, whitened=True),
    ]


@declare("u/r04")
def turn_returns(m, fn):
    def turns(mask):
        on = mask.bool()
        return torch.where(on, on.long().cumsum(1) - 1, torch.full_like(on.long(), -1))

    def one(rewards, values, mask, gamma, lam):  # each token is a turn; without a critic the rewards are differences
        adv = fn(differences(rewards, values, mask, gamma), turns(mask), gamma=gamma * lam)
        return adv, adv + values

    def two(place):
        def fn_(rewards, values, mask, gamma, lam):  # each turn has two tokens, the reward is at the second
            delta = differences(rewards, values, mask, gamma)
            wide = torch.stack([torch.zeros_like(delta), delta], 2).flatten(1)
            adv = fn(wide, turns(mask).repeat_interleave(2, 1), gamma=gamma * lam)[:, place::2]
            return adv, adv + values

        return fn_

    return [GAE(f, gamma=0.9, lam=0.7, holes=True) for f in (one, two(0), two(1))]


@declare("t/r02")
def gae_over_tools(m, fn):
    def gae(rewards, values, mask, gamma, lam):
        # only the last trained token has a reward: rewards before it move into the values, with the same differences
        delta = differences(rewards, values, mask, gamma)
        moved, last = values.clone(), torch.zeros_like(values[:, 0])
        after, seen = torch.zeros_like(last), torch.zeros_like(last).bool()
        for t in range(values.shape[1] - 1, -1, -1):
            on = mask[:, t].bool()
            first = on & ~seen
            last = torch.where(first, rewards[:, t], last)
            here = torch.where(first, values[:, t], gamma * after - delta[:, t])
            moved[:, t] = torch.where(on, here, values[:, t])
            after = torch.where(on, here, after)
            seen = seen | on
        adv = fn(last, torch.arange(len(values)), moved, mask.to(values.dtype), gamma=gamma, lam=lam)
        return adv, adv + values

    return GAE(gae, gamma=0.99, lam=0.95, holes=True)


# ---------------------------------------------------------------------------------------------------------- updates


class Clipping:
    """the run's optimizer, whose step clips first: for code that has no clip of its own"""

    def __init__(self, optimizer, max_norm):
        self.optimizer, self.max_norm = optimizer, max_norm
        self.param_groups = optimizer.param_groups

    def zero_grad(self, *a, **k):
        self.optimizer.zero_grad(*a, **k)

    def step(self):
        if math.isfinite(self.max_norm):
            torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], self.max_norm)
        self.optimizer.step()


class Keeping:
    """an optimizer that keeps the gradients it receives and changes nothing"""

    def __init__(self, model):
        self.model, self.kept = model, None
        self.param_groups = [{"params": list(model.parameters()), "lr": 0.0}]

    def zero_grad(self, *a, **k):
        for p in self.model.parameters():
            p.grad = None

    def step(self):
        self.kept = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]


def received(model, call):
    """.grad is what call(optimizer) hands to the optimizer"""
    keeping = Keeping(model)
    keeping.zero_grad()
    call(keeping)
    for p, g in zip(model.parameters(), keeping.kept):
        p.grad = g


def joined(batches):
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


@declare("s/d05")
def expert_clip(m, fn):
    given = m.make(0)
    model, optimizer = given["model"], given["optimizer"]
    batch = joined(given["batches"])
    return [
        Update(
            model=model,
            optimizer=optimizer,
            update=lambda batches, max_grad_norm: fn(model, optimizer, list(batches), max_norm=max_grad_norm),
            loss=lambda model, b: (model(b["x"], b["expert"]) - b["y"]).square().mean(),
            batch=batch,
        ),
        Accumulation(
            model=model,
            accumulate=lambda model, batches: received(model, lambda o: fn(model, o, list(batches), max_norm=1e9)),
            batch=batch,
        ),
    ]


@declare("u/d10")
def context_parallel_step(m, fn):
    given = m.make(0)
    model, optimizer = given["model"], given["optimizer"]
    micros = given["batches"] + m.make(1)["batches"]
    batch = {k: torch.cat([micro[0][k] for micro in micros]) for k in ("ids", "target", "loss_mask")}
    batch["loss_mask"][1, :7] = 0  # a shard may have no trained token
    batch["loss_mask"][3, 7:] = 0

    def steps(batches):
        """each sequence is a micro-step of two ranks"""
        return [
            [{**{k: b[k][i : i + 1] for k in ("ids", "target", "loss_mask")}, "span": s} for s in ((0, 7), (7, 14))]
            for b in batches
            for i in range(len(b["ids"]))
        ]

    def loss(model, b):
        nll = F.cross_entropy(model(b["ids"]).transpose(1, 2), b["target"], reduction="none")
        return (nll * b["loss_mask"]).sum() / b["loss_mask"].sum()

    return [
        Update(
            model=model,
            optimizer=optimizer,
            update=lambda batches, max_grad_norm: fn(model, Clipping(optimizer, max_grad_norm), steps(batches)),
            loss=loss,
            batch=batch,
        ),
        Accumulation(
            model=model,
            accumulate=lambda model, batches: received(model, lambda o: fn(model, o, steps(batches))),
            batch=batch,
        ),
    ]


@declare("v/d09")
def moe_clip(m, fn):
    def loss(model, b):
        return F.cross_entropy(model(b["ids"][:, :-1]).transpose(1, 2), b["ids"][:, 1:])

    def rows(batches):
        """the mean of the micro-batches' means: each row is a micro-batch, so that all have the same number of tokens"""
        return [{"ids": row[None]} for b in batches for row in b["ids"]]

    def subject(tp):
        given = m.make(0)
        model, optimizer = given["model"], given["optimizer"]
        return Update(
            model=model,
            optimizer=optimizer,
            update=lambda batches, max_grad_norm: fn(model, optimizer, rows(batches), max_norm=max_grad_norm, tp=tp),
            loss=loss,
            batch=joined(given["batches"]),
        )

    given = m.make(0)
    model = given["model"]
    return [
        subject(2),
        subject(4),
        subject(1),
        Accumulation(
            model=model,
            accumulate=lambda model, batches: received(model, lambda o: fn(model, o, rows(batches), max_norm=1e9)),
            batch=joined(given["batches"]),
        ),
    ]


@declare("s/d03")
def running_balance(m, fn):
    given = m.make(0)
    model, optimizer = given["model"], given["optimizer"]
    micros = given["batches"] + m.make(1)["batches"][1:3]
    batch = {k: torch.stack([b[k] for b in micros]) for k in micros[0]}  # each row is a micro-batch

    def parts(batches):
        return [{k: b[k][i] for k in ("x", "valid", "y")} for b in batches for i in range(len(b["x"]))]

    def loss(model, b, coeff=0.1, topk=2):
        """the definition: all micro-batches in order; the frequency is of all of them so far"""
        micros, main, balance, before = parts([b]), 0.0, 0.0, []
        for micro in micros:
            logits, probs, _ = model(micro["x"][micro["valid"]], topk)
            main = main + F.cross_entropy(logits, micro["y"][micro["valid"]], reduction="sum")
            before.append(F.one_hot(probs.detach().topk(topk, -1).indices, probs.shape[1]).sum(1).to(probs.dtype))
            balance = balance + probs.shape[1] * (torch.cat(before).mean(0) / topk * probs.mean(0)).sum()
        return main / b["valid"].sum() + coeff * balance / len(micros)

    one = given["batches"][2]
    return [
        Update(
            model=model,
            optimizer=optimizer,
            update=lambda batches, max_grad_norm: fn(model, Clipping(optimizer, max_grad_norm), parts(batches)),
            loss=loss,
            batch=batch,
        ),
        Accumulation(
            model=model,
            accumulate=lambda model, batches: received(model, lambda o: fn(model, o, list(batches))),
            batch={k: v.clone() for k, v in one.items()},
            rows_interact=True,
        ),
    ]
