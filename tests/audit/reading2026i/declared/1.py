import math
import torch
import torch.nn.functional as F
from tests.audit.reading2026i.reading import declare, no_subject
from earnest_audit import (Accumulation, AdvantageEstimator, Census, Collator, GAE, Grader, Metric, Ranks, Schedule, Setting, Step,
                           Update)


# ---- forms -----------------------------------------------------------------------------------------------------------------------

def cat(batches):
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


def rowsof(shard):
    return shard if isinstance(shard, torch.Tensor) else torch.stack(list(shard))


def pad(lists, value):
    width = max([1, *map(len, lists)])
    return torch.tensor([list(x) + [value] * (width - len(x)) for x in lists])


class Keep(torch.optim.SGD):
    """Learning rate 0; keeps the gradients that it is stepped with."""

    def __init__(self, params):
        super().__init__(params, lr=0.0)
        self.kept = None

    def step(self, closure=None):
        self.kept = [None if p.grad is None else p.grad.detach().clone() for p in self.param_groups[0]["params"]]


def accumulating(call):
    """call(model, optimizer, batches) is one update; the gradients that its optimizer receives are left in .grad"""
    left = {}

    def accumulate(model, batches):
        params = list(model.parameters())
        for p in params:
            placed, own = left.pop(id(p), (None, None))
            if placed is not None and p.grad is placed:
                p.grad = own  # what the update itself left
        optimizer = Keep(params)
        call(model, optimizer, list(batches))
        if optimizer.kept is not None:
            for p, g in zip(params, optimizer.kept):
                left[id(p)] = (g, p.grad)
                p.grad = g

    return accumulate


class Clipping:
    """The run's optimizer, with the clip that Update asks for, for updates that have none of their own."""

    def __init__(self, optimizer, norm):
        self._optimizer, self._norm = optimizer, norm

    def step(self, *args, **kwargs):
        if self._norm is not None:
            torch.nn.utils.clip_grad_norm_([p for g in self._optimizer.param_groups for p in g["params"]], self._norm)
        return self._optimizer.step(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


# ---- cases -----------------------------------------------------------------------------------------------------------------------

@declare("v/d10")
def next_token_labels(m, fn):
    def made(width, padding):
        def full(row):
            return (row["prompt"] + row["caption"])[:width]

        def ids(row):
            x = full(row)
            return torch.tensor(x + [padding] * (width - len(x)))

        def labels(row):
            x, p = full(row), len(row["prompt"])
            y = [t if i + 1 >= p else -100 for i, t in enumerate(x[1:])]
            return torch.tensor(y + [-100] * (width - len(y)))

        rows = m.make(0)["rows"] + m.make(1)["rows"][:2]
        rows.append({"prompt": list(range(3, 10)), "caption": list(range(10, 30)) + [2]})  # longer than max_text_len
        return Collator(
            fn=lambda examples: fn(examples, max_text_len=width, pad_id=padding),
            examples=rows,  # every row has the width max_text_len, so whole rows are compared
            targets=lambda row: full(row)[len(row["prompt"]):],
            columns={"input_ids": ids, "labels": labels},
        )

    return [made(20, 0), made(12, 1)]


def spread(m, fn, single, rows):
    return [
        Ranks(metric=lambda shards: fn([rowsof(s) for s in shards]), rows=rows, single=single),
        # ranks without a row
        Ranks(
            metric=lambda shards: fn([rows[:0]] + [x for s in shards for x in (rowsof(s), rows[:0])]), rows=rows, single=single
        ),
    ]


@declare("v/r21")
def population_std(m, fn):
    def single(shards):
        x = torch.cat([rowsof(s) for s in shards]).double()
        return ((x - x.mean()) ** 2).mean().sqrt().item()

    rows = torch.cat(m.make(0)["per_rank"])
    return [*spread(m, fn, single, rows), *spread(m, fn, single, rows + 1000)]  # in float64: also far from 0


@declare("t/r12")
def tensor_parallel_clip(m, fn):
    def batch():
        b = cat(m.make(0)["batches"] + m.make(1)["batches"])
        for i, n in enumerate((0, 6, 4, 7, 3, 5, 0, 6)):
            b["labels"][i, :n] = -100
        return b

    def loss(model, b):
        return F.cross_entropy(model(b["ids"]).flatten(0, 1), b["labels"].flatten(), ignore_index=-100)

    out = []
    for tp in (2, 3, 1):
        given = m.make(0)
        model, optimizer = given["model"], given["optimizer"]
        out.append(
            Update(
                model=model,
                optimizer=optimizer,
                update=lambda batches, norm, model=model, optimizer=optimizer, tp=tp: fn(
                    model, optimizer, list(batches), max_norm=norm, tp=tp
                ),
                loss=loss,
                batch=batch(),
            )
        )
    out.append(
        Accumulation(
            model=m.make(0)["model"],
            accumulate=accumulating(lambda model, optimizer, batches: fn(model, optimizer, batches, max_norm=1e9, tp=2)),
            batch=batch(),
        )
    )
    return out


@declare("v/r17")
def fill_in_the_middle(m, fn):
    def restored(ids):
        """The pieces in their first order, without special ids."""
        ids = list(ids)
        if ids and ids[-1] == 4:
            body = ids[:-1]
            if body[:1] == [1] and body.count(1) == body.count(3) == body.count(2) == 1:
                s, e = body.index(3), body.index(2)
                if s < e:
                    return body[1:s] + body[e + 1:] + body[s + 1:e] + [4]
        return ids

    def stage(**settings):
        def run(examples):
            out = fn(examples, **settings)
            return {
                "ids": pad([r["ids"] for r in out], -100),
                "labels": pad([r["labels"] for r in out], -100),
                "key": torch.tensor([[r["key"]] for r in out]),
                "restored": pad([restored(r["ids"]) for r in out], -100),
                "restored_labels": pad([restored(r["labels"]) for r in out], -100),
                "special": pad([[t for t in r["ids"] if t < 5] for r in out], -100),
                "start": pad([[t if t < 5 else 5 for t in r["ids"][:2]] for r in out], -100),
                "length": torch.tensor([[len(r["ids"])] for r in out]),
            }

        return run

    def drawn(rows, seed):
        out = [r["ids"] for r in fn(rows, fim_rate=1.0, spm_rate=0.5, seed=seed)]
        return torch.tensor([x[:24] + [0] * (24 - len(x)) for x in out])

    def forms(fim_rate, spm_rate):
        """What occurs among many rows. Without a prefix both forms are the same, which is so in a tenth of the rows."""
        many = [{"ids": list(range(5, 25)), "key": k} for k in range(200)]
        out = [list(r["ids"]) for r in fn(many, fim_rate=fim_rate, spm_rate=spm_rate, seed=0)]
        moved = [x for x in out if x[0] == 1]
        suffix_first = sum(x[1] == 3 for x in moved)
        found = ["not reordered"] if len(moved) < len(out) else []
        found += ["prefix first"] if suffix_first < len(moved) else []
        return found + (["suffix first"] if suffix_first > 0.3 * len(moved) else [])

    names = ("ids", "labels", "restored", "restored_labels", "special", "start")
    pads = dict.fromkeys(names, -100)
    rows = m.make(0)["rows"] + [{"ids": [7], "key": 50}, {"ids": [8, 9], "key": 51}]
    whole = lambda row: torch.tensor(row["ids"] + [4])
    common = {"key": lambda row: torch.tensor([row["key"]]), "restored": whole, "restored_labels": whole}
    reordered = {
        **common,
        "special": lambda row: torch.tensor([1, 3, 2, 4]),
        "length": lambda row: torch.tensor([len(row["ids"]) + 4]),
    }
    return [
        Collator(fn=stage(fim_rate=0.5, spm_rate=0.5, seed=0), examples=rows, pads=pads, columns=common),
        Collator(
            fn=stage(fim_rate=0.0, spm_rate=0.5, seed=0),
            examples=rows,
            pads=pads,
            targets=lambda row: row["ids"] + [4],
            columns={**common, "ids": whole, "labels": whole},
        ),
        Collator(fn=stage(fim_rate=1.0, spm_rate=0.0, seed=3), examples=rows, pads=pads, columns=reordered),
        Collator(
            fn=stage(fim_rate=1.0, spm_rate=1.0, seed=1),
            examples=rows,
            pads=pads,
            columns={**reordered, "start": lambda row: torch.tensor([1, 3])},
        ),
        # choices depend on the seed and on the key
        Ranks(draw=lambda rank: drawn([{"ids": list(range(5, 25)), "key": k} for k in range(12)], rank)),
        Ranks(draw=lambda rank: drawn([{"ids": list(range(5, 25)), "key": 12 * rank + k} for k in range(12)], 0)),
        *(
            Census(wanted=wanted, found=forms(fim_rate, spm_rate), what="forms of rows")
            for fim_rate, spm_rate, wanted in (
                (0.5, 0.5, ["not reordered", "prefix first", "suffix first"]),
                (0.5, 0.0, ["not reordered", "prefix first"]),
                (1.0, 0.5, ["prefix first", "suffix first"]),
            )
        ),
    ]


@declare("s/r22")
def accuracy_once(m, fn):
    def deal(rows, world):
        size = len(rows)
        each = -(-size // world)
        index = [torch.tensor([(j * world + r) % size for j in range(each)]) for r in range(world)]
        return [{"predictions": rows[i, 0], "labels": rows[i, 1]} for i in index]

    def single(shards):
        x = torch.cat([rowsof(s) for s in shards])
        return (x[:, 0] == x[:, 1]).float().mean().item()

    def whole(shards):
        return torch.cat([rowsof(s) for s in shards])

    torch.manual_seed(0)
    rows = torch.randint(0, 3, (11, 2))
    rows[:4, 0] = rows[:4, 1]
    rows[4:, 0] = (rows[4:, 1] + torch.tensor([1, 0, 2, 1, 1, 0, 1])) % 3
    return [
        # the sampler deals the rows to as many ranks as there are shards
        Ranks(metric=lambda shards: fn(deal(whole(shards), len(shards)), size=len(whole(shards))), rows=rows, single=single),
        Ranks(metric=lambda shards: fn(deal(whole(shards), 4), size=len(whole(shards))), rows=rows[:10], single=single),
        Ranks(metric=lambda shards: fn(deal(whole(shards), 4), size=len(whole(shards))), rows=rows[:9], single=single),
    ]


@declare("s/r10")
def sharded_norm(m, fn):
    loss = lambda model, b: F.mse_loss(model(b["x"]), b["y"])
    out = []
    for ranks in (2, 4, 1):
        given = m.make(0)
        model, optimizer = given["model"], given["optimizer"]
        out.append(
            Update(
                model=model,
                optimizer=optimizer,
                update=lambda batches, norm, model=model, optimizer=optimizer, ranks=ranks: fn(
                    model, optimizer, list(batches), max_norm=norm, ranks=ranks
                ),
                loss=loss,
                batch=cat(given["batches"]),
                split=(6, 6, 6),  # micro-batches have equal sizes
            )
        )
    given = m.make(0)
    out.append(
        Accumulation(
            model=given["model"],
            accumulate=accumulating(lambda model, optimizer, batches: fn(model, optimizer, batches, max_norm=1e9, ranks=2)),
            batch=cat(given["batches"]),
            split=(6, 6, 6),
        )
    )
    return out


@declare("t/r07")
def dpo_in_one_row(m, fn):
    def answer(model, prompt, tokens):
        """log-probability of an answer in a row of its own"""
        ids = torch.cat([prompt, tokens])[None]
        t = ids.shape[1]
        see = torch.ones(1, t, t, dtype=torch.bool).tril()
        lp = torch.log_softmax(model(ids, torch.arange(t)[None], see), -1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
        return lp[len(prompt) - 1:].sum()

    def dpo(pair, batch, beta):
        gap = pair[0] - batch["ref_chosen"] - (pair[1] - batch["ref_rejected"])
        return -F.logsigmoid(beta * gap).mean()

    # 1: as it is; "segment" is 0 on padding, 1 prompt, 2 chosen, 3 rejected, so that more padding is 0
    def packed(model, batch, beta=0.1):
        b = {k: batch[k] for k in ("ids", "ref_chosen", "ref_rejected")}
        return fn(model, {**b, "part": (batch["segment"] - 1) % 4}, beta=beta)

    def logprobs(model, batch):
        parts = lambda i, *kinds: torch.cat([batch["ids"][i][batch["segment"][i] == k] for k in kinds])
        return tuple(
            torch.stack([answer(model, parts(i, 1), parts(i, kind)) for i in range(len(batch["ids"]))]) for kind in (2, 3)
        )

    given = m.make(0)
    model = given.pop("model")
    first = Step(
        model=model,
        loss=packed,
        batch={
            "ids": given["ids"],
            "segment": (given["part"] + 1) % 4,
            "ref_chosen": given["ref_chosen"],
            "ref_rejected": given["ref_rejected"],
        },
        roles={"ids": "ids", "reference_chosen": "ref_chosen", "reference_rejected": "ref_rejected"},
        settings={"beta": Setting(0.1, "setting")},
        family="preference",
        logprobs=logprobs,
        paths={"answers in rows of their own": lambda model, batch, beta=0.1: dpo(logprobs(model, batch), batch, beta)},
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "segment"),
        name="packed pairs",
    )

    # 2: the same rows as pairs
    def cut(batch, i):
        on = batch["chosen_mask"][i] > 0
        start = int(on.nonzero()[0]) if on.any() else len(on)
        return batch["chosen"][i][:start], batch["chosen"][i][on], batch["rejected"][i][batch["rejected_mask"][i] > 0]

    def from_pairs(model, batch, beta=0.1):
        rows, parts = [], []
        for i in range(len(batch["chosen"])):
            pieces = cut(batch, i)
            rows.append(torch.cat(pieces))
            parts.append(torch.cat([torch.full((len(x),), k) for k, x in enumerate(pieces)]))
        rows = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        parts = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=3)
        rows, parts = F.pad(rows, (0, 1)), F.pad(parts, (0, 1), value=3)
        b = {"ids": rows, "part": parts, "ref_chosen": batch["ref_chosen"], "ref_rejected": batch["ref_rejected"]}
        return fn(model, b, beta=beta)

    def pair_logprobs(model, batch):
        pieces = [cut(batch, i) for i in range(len(batch["chosen"]))]
        return tuple(torch.stack([answer(model, p[0], p[k]) for p in pieces]) for k in (1, 2))

    given = m.make(0)
    model = given.pop("model")
    pairs = {k: torch.zeros(3, 10, dtype=torch.long) for k in ("chosen", "rejected")}
    pairs |= {k: torch.zeros(3, 10) for k in ("chosen_mask", "rejected_mask")}
    for i in range(3):
        prompt, *answers = [given["ids"][i][given["part"][i] == k] for k in range(3)]
        for k, x in zip(("chosen", "rejected"), answers):
            n = len(prompt) + len(x)
            pairs[k][i, :n] = torch.cat([prompt, x])
            pairs[k + "_mask"][i, len(prompt):n] = 1
    second = Step(
        model=model,
        loss=from_pairs,
        batch={**pairs, "ref_chosen": given["ref_chosen"], "ref_rejected": given["ref_rejected"]},
        roles={
            "chosen": "chosen",
            "rejected": "rejected",
            "chosen_mask": "chosen_mask",
            "rejected_mask": "rejected_mask",
            "reference_chosen": "ref_chosen",
            "reference_rejected": "ref_rejected",
        },
        settings={"beta": Setting(0.1, "setting")},
        logprobs=pair_logprobs,
        reduction="mean",
        value_is_loss=True,
        wide=("chosen", "rejected", "chosen_mask", "rejected_mask"),
        name="pairs, packed by the loss",
    )
    return [first, second]


@declare("v/d06")
def pair_accuracy(m, fn):
    def batches(rows, sizes):
        out, at = [], 0
        for n in sizes:
            if len(rows[at:at + n]):
                out.append({"chosen": rows[at:at + n, 0], "rejected": rows[at:at + n, 1]})
            at += n
        return out

    def even(shards):  # as many ranks as shards, the same number of pairs each; the last batch is shorter
        x = torch.cat([rowsof(s) for s in shards])
        return fn([batches(part, [5] * len(part)) for part in x.chunk(len(shards))])

    def cut(shards):  # two ranks of equal size; the shards are their batches
        x = torch.cat([rowsof(s) for s in shards])
        sizes, at, half = [], 0, len(x) // 2
        ends = torch.tensor([len(s) for s in shards]).cumsum(0).tolist()
        for e in ends:
            e = half if e == ends[-1] else e // 2
            sizes.append(e - at)
            at = e
        return fn([batches(x[:half], sizes), batches(x[half:], sizes)])

    def single(shards):
        x = torch.cat([rowsof(s) for s in shards])
        return (x[:, 0] > x[:, 1]).double().mean().item()

    torch.manual_seed(0)
    rows = torch.randn(12, 2)
    better = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 0, 0]).bool()
    rows = torch.where((better == (rows[:, 0] > rows[:, 1]))[:, None], rows, rows.flip(1))
    rows[2, 0] = rows[2, 1]  # a tie is not right
    return [Ranks(metric=even, rows=rows, single=single), Ranks(metric=cut, rows=rows, single=single)]


def masked_nll(model, b):
    nll = F.cross_entropy(model(b["ids"][:, :-1]).transpose(1, 2), b["ids"][:, 1:], reduction="none")
    return (nll * b["loss_mask"][:, 1:]).sum() / b["loss_mask"][:, 1:].sum()


def without_clip(m, loss, batch, calls):
    """An update without a clip of its own. calls: name -> call(model, optimizer, batches)"""
    out = []
    for name, call in calls.items():
        out.append(Accumulation(model=m.make(0)["model"], accumulate=accumulating(call), batch=batch(), what=name))
        given = m.make(0)
        model, optimizer = given["model"], given["optimizer"]
        out.append(
            Update(
                model=model,
                optimizer=optimizer,
                update=lambda batches, norm, model=model, optimizer=optimizer, call=call: call(
                    model, Clipping(optimizer, norm), list(batches)
                ),
                loss=loss,
                batch=batch(),
            )
        )
    return out


@declare("v/d01")
def zero2(m, fn):
    def batch():
        b = cat(m.make(0)["batches"])
        b["loss_mask"][0, 4:], b["loss_mask"][3, 6:] = 0, 0
        return b

    return without_clip(m, masked_nll, batch, {"micro-batches": lambda model, optimizer, batches: fn(model, optimizer, batches)})


def alone(fn, weight):
    """The rows one at a time, by the loss itself, put together as its words say."""

    def path(model, batch, **settings):
        total, whole, logged = 0.0, 0.0, {}
        n = len(batch["ids"])
        for i in range(n):
            row = {k: v[i:i + 1] for k, v in batch.items()}
            w = weight(row)
            got = fn(model, row, **settings)
            if isinstance(got, tuple):
                got, metrics = got
                for k, v in metrics.items():
                    logged[k] = logged.get(k, 0.0) + float(w) * float(v)
            total, whole = total + w * got, whole + w
        if logged:
            return total / whole, {k: v / float(whole) for k, v in logged.items()}
        return total / whole

    return path


@declare("u/d03")
def gspo(m, fn):
    given = m.make(0)
    model = given.pop("model")

    def logprobs(model, batch):
        ids = batch["ids"]
        lp = torch.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
        return torch.cat([torch.zeros_like(lp[:, :1]), lp], 1)

    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logprobs", "advantages": "advantages"},
        settings={"clip": Setting(0.2, "clip")},
        logprobs=logprobs,
        paths={"rows alone, weighed by their tokens": alone(fn, lambda row: row["loss_mask"].sum())},
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "loss_mask", "old_logprobs", "advantages"),
    )


@declare("u/d04")
def last_box(m, fn):
    out = []
    for seed in (0, 1):
        given = m.make(seed)
        row = given["row"]
        texts = [c for _, c in given["cases"]]
        answer = row["answer"]
        good = "\\boxed{%s}" % answer
        spaced = "\\boxed{ %s }" % answer.replace("}{", "} {")
        out.append(
            Grader(
                grade=lambda text, row=row: fn(row, text),
                right=[
                    texts[1],
                    texts[2],
                    good,
                    spaced,
                    "Maybe \\boxed{}, no: %s" % good,
                    "\\boxed{\\frac{1}{2}} and then %s, done {so}." % good,
                ],
                wrong=[
                    texts[0],
                    texts[3],
                    texts[4],
                    texts[5],
                    "It is %s" % answer,
                    "\\boxed{%s + 1}" % answer,
                    "\\boxed{-%s}" % answer,
                    "\\boxed{\\frac{1}{2}}",
                    "Surely %s, or \\boxed{ }" % good,
                    "Surely %s, or \\boxed{%s" % (good, answer),
                    "\\boxed{%s" % answer,
                    "\\boxed{}",
                ],
                question=row["prompt"],
            )
        )
    row = {"prompt": "How much is 12 / 4?", "answer": "3"}
    out.append(
        Grader(
            grade=lambda text: fn(row, text),
            right=["\\boxed{3}", "First \\boxed{4}, then \\boxed{3}.", "\\boxed{ 3 }"],
            wrong=["3", "\\boxed{33}", "\\boxed{4}", "\\boxed{3} or \\boxed{4}", "\\boxed{3} or \\boxed{", "\\boxed{3} or \\boxed{}"],
            question=row["prompt"],
        )
    )
    return out


@declare("v/r15")
def teacher_momentum(m, fn):
    # the weight of the student, 1 - m: it falls from 0.004 to 0
    def of_run(total, ranks=1, base=0.996, final=1.0):
        epochs = 10 if total % 10 == 0 else 1
        return [1 - fn(k, base=base, final=final, epochs=epochs, iters=total // epochs) for k in range(total)]

    def fixed(total, ranks=1, epochs=10, iters=30):
        return [1 - fn(k, epochs=epochs, iters=iters) for k in range(total)]

    return [
        Schedule(rates=of_run, peak=0.004, final=0.0, total=300, settings={"base": 0.996, "final": 1.0}),
        Schedule(rates=fixed, peak=0.004, final=0.0, total=300, settings={"epochs": 10, "iters": 30}),
        Schedule(rates=fixed, peak=0.004, final=0.0, total=340, ends=300),  # the last entry is held
    ]


@declare("t/r15")
def prepared_scheduler(m, fn):
    def made(total, accumulation):
        def rates(total, ranks=1, lr=0.1, warmup_steps=4):
            return [
                fn(k, lr=lr, warmup_steps=warmup_steps, total_steps=total, world=ranks, accumulation=accumulation)
                for k in range(total)
            ]

        return Schedule(rates=rates, peak=0.1, final=0.0, total=total, warmup=4, settings={"lr": 0.1, "warmup_steps": 4})

    return [made(20, 2), made(40, 1), made(40, 4)]


@declare("t/d05")
def logits_to_keep(m, fn):
    given = m.make(0)
    model = given.pop("model")

    def every_logit(model, batch):
        logits = model(batch["ids"])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)

    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles={"ids": "ids", "labels": "labels"},
        family="sft",
        paths={"logits of all positions": every_logit},
        rows_interact=True,  # exactly one row
        empty_rows=False,
        value_is_loss=True,
        wide=("ids", "labels"),
    )


@declare("t/r01")
def turns(m, fn):
    def logprobs(model, batch):
        ids = batch["ids"]
        lp = torch.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
        return torch.cat([torch.zeros_like(lp[:, :1]), lp], 1)

    def each(model, batch, norm_length=16):  # the mean over trajectories, each alone
        of = batch["trajectory"]
        parts = [fn(model, {k: v[of == t] for k, v in batch.items()}, norm_length=norm_length) for t in of.unique()]
        return torch.stack(parts).mean()

    def single_turn(model, batch, norm_length=16):  # every row is a trajectory of its own
        return fn(model, {**batch, "trajectory": torch.arange(len(batch["ids"]))}, norm_length=norm_length)

    common = dict(
        roles={"ids": "ids", "mask": "loss_mask", "advantages": "advantages"},
        settings={"norm_length": Setting(16, "setting")},
        logprobs=logprobs,
        family="policy gradient",
        value_is_loss=True,
        wide=("ids", "loss_mask"),
    )
    given = m.make(0)
    model = given.pop("model")
    first = Step(
        model=model,
        loss=fn,
        batch=given,
        paths={"the mean over trajectories": each},
        rows_interact=True,  # rows of one trajectory belong together
        name="turns of trajectories",
        **common,
    )
    given = m.make(0)
    model = given.pop("model")
    given.pop("trajectory")
    second = Step(
        model=model, loss=single_turn, batch=given, reduction="mean", name="trajectories of one turn", **common
    )
    return [first, second]


@declare("u/r03")
def void_turns(m, fn):
    def groups():
        out = {}
        for seed in (0, 1):
            for r in m.make(seed)["rows"]:
                out.setdefault((seed, r["group"]), []).append(dict(r, group=10 * seed + r["group"]))
        return [{"rows": rows} for rows in out.values()]

    def stage(interleaved):
        def run(examples):
            n = [len(e["rows"]) for e in examples]
            if interleaved:
                where = [(i, k) for k in range(max(n)) for i in range(len(examples)) if k < n[i]]
            else:
                where = [(i, k) for i in range(len(examples)) for k in range(n[i])]
            dropped = {"ids": [-7], "loss_mask": [-7], "advantage": -7.0, "reward": -7.0, "group": -7}
            made = dict.fromkeys(where, dropped)
            made |= zip(where, fn([examples[i]["rows"][k] for i, k in where]))
            of = lambda i, key: [made[i, k][key] for k in range(n[i])]
            return {
                "ids": pad([sum(of(i, "ids"), []) for i in range(len(n))], -1),
                "loss_mask": pad([sum(of(i, "loss_mask"), []) for i in range(len(n))], -1),
                "lengths": torch.tensor([[len(x) for x in of(i, "ids")] for i in range(len(n))]),
                "mask_lengths": torch.tensor([[len(x) for x in of(i, "loss_mask")] for i in range(len(n))]),
                "advantage": torch.tensor([of(i, "advantage") for i in range(len(n))], dtype=torch.float64),
                "reward": torch.tensor([of(i, "reward") for i in range(len(n))], dtype=torch.float64),
                "group": torch.tensor([of(i, "group") for i in range(len(n))]),
            }

        return run

    def void(r):
        return any(t["by_model"] and not t["has_code"] and not t["has_answer"] for t in r["turns"])

    def mask(e):
        return torch.tensor(
            [int(t["by_model"] and not void(r)) for r in e["rows"] for t in r["turns"] for _ in t["ids"]]
        )

    def advantage(e):
        x = torch.tensor([r["reward"] for r in e["rows"]], dtype=torch.float64)
        return x - x.mean()

    lengths = lambda e: torch.tensor([sum(len(t["ids"]) for t in r["turns"]) for r in e["rows"]])
    columns = {
        "ids": lambda e: torch.tensor([i for r in e["rows"] for t in r["turns"] for i in t["ids"]]),
        "loss_mask": mask,
        "lengths": lengths,
        "mask_lengths": lengths,
        "advantage": advantage,
        "reward": lambda e: torch.tensor([r["reward"] for r in e["rows"]], dtype=torch.float64),
        "group": lambda e: torch.tensor([r["group"] for r in e["rows"]]),
    }

    def estimator(voids):
        def advantages(rewards, groups):
            rows = []
            for i, (r, g) in enumerate(zip(rewards.tolist(), groups.tolist())):
                turn = {"ids": [5, 2], "by_model": True, "has_code": False, "has_answer": not (voids and i % 3 == 0)}
                rows.append({"group": g, "reward": r, "turns": [turn]})
            return torch.tensor([r["advantage"] for r in fn(rows)], dtype=rewards.dtype)

        return AdvantageEstimator(fn=advantages, scale="equal", over="group")

    pads = {"ids": -1, "loss_mask": -1}
    return [
        # an example is a whole group
        Collator(fn=stage(False), examples=groups(), pads=pads, columns=columns),
        Collator(fn=stage(True), examples=groups(), pads=pads, columns=columns),
        estimator(False),
        estimator(True),
    ]


@declare("u/r25")
def critic_bins(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles={"ids": "ids", "mask": "loss_mask", "returns": "returns"},
        settings={"sigma": Setting(0.1, "setting")},
        metrics={"value_error": Metric(low=0.0)},
        paths={"rows alone, weighed by their tokens": alone(fn, lambda row: row["loss_mask"].sum())},
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "loss_mask", "returns"),
    )


@declare("v/r05")
def packed_sequences(m, fn):
    def runs(batch):
        """Where the documents with a trained token stand; padding has none."""
        doc, mask = batch["documents"][0], batch["loss_mask"][0]
        starts = [0] + [i for i in range(1, len(doc)) if doc[i] != doc[i - 1]] + [len(doc)]
        return [(a, b) for a, b in zip(starts, starts[1:]) if mask[a + 1:b].any()]

    def call(model, batch, where):
        keep = lambda k: torch.cat([batch[k][:, a:b] for a, b in where], 1)
        cu = torch.tensor([0] + [b - a for a, b in where]).cumsum(0)
        return fn(model, {**{k: keep(k) for k in ("ids", "positions", "loss_mask")}, "cu_seqlens": cu})

    def packed(model, batch):
        return call(model, batch, runs(batch))

    def each(model, batch):  # the mean over sequences, each alone
        return torch.stack([call(model, batch, [w]) for w in runs(batch)]).mean()

    def made(first_tokens, roles, name):
        given = m.make(0)
        b = given["batch"]
        cu = b.pop("cu_seqlens")
        b["documents"] = torch.repeat_interleave(torch.arange(1, len(cu)), cu[1:] - cu[:-1])[None]  # 0: padding
        b["loss_mask"][0, cu[:-1]] = first_tokens
        return Step(
            model=given["model"],
            loss=packed,
            batch=b,
            roles=roles,
            family="sft",
            paths={"the mean over sequences, each alone": each},
            rows_interact=True,  # exactly one row
            empty_rows=False,
            value_is_loss=True,
            wide=("ids", "positions", "loss_mask", "documents"),
            name=name,
        )

    return [
        made(0.0, {"ids": "ids", "positions": "positions", "mask": "loss_mask", "documents": "documents"}, "packed sequences"),
        # first tokens are marked as trained, and still no target
        made(1.0, {"ids": "ids", "positions": "positions"}, "packed sequences, first tokens marked"),
    ]


def mean_ce(model, b):
    return F.cross_entropy(model(b["ids"]).flatten(0, 1), b["labels"].flatten(), ignore_index=-100)


@declare("t/r11")
def uneven_ranks(m, fn):
    def batch():
        b = cat([x for rank in m.make(0)["batches"] for x in rank])
        b["labels"][1, 2:], b["labels"][4, 3:] = -100, -100
        b["labels"][1, 0] = 7
        return b

    calls = {
        "ranks": lambda model, optimizer, batches: fn(model, optimizer, [[b] for b in batches]),
        "micro-batches beside a rank without any": lambda model, optimizer, batches: fn(model, optimizer, [list(batches), []]),
        "ranks with unequal numbers of micro-batches": lambda model, optimizer, batches: fn(
            model, optimizer, [list(batches[:-1]), [], list(batches[-1:])]
        ),
    }
    return without_clip(m, mean_ce, batch, calls)


def fill(source, target, first, end=1):
    """The text again: spans of the target in the place of the source's sentinels (ids from first on)."""
    spans, at = {}, None
    for t in target:
        if t >= first:
            at = t
            spans[at] = []
        elif t == end:
            break
        elif at is not None:
            spans[at].append(t)
    return [x for t in source for x in (spans.get(t, [t]) if t >= first else [t])]


@declare("u/r17")
def two_spans(m, fn):
    def run(rows):
        out = fn(rows)
        xs = [[t for t in x if t != 0] for x in out["input_ids"].tolist()]
        ys = [[t for t in y if t != -100] for y in out["labels"].tolist()]
        return {
            **out,
            "restored": pad([fill(x, y, 40) for x, y in zip(xs, ys)], -1),
            "marks": pad([[t if t >= 40 or t == 1 else 5 for t in y] for y in ys], -1),
            "sentinels": pad([[t for t in x if t >= 40] for x in xs], -1),
            "adjacent": torch.tensor([[sum(a >= 40 and b >= 40 for a, b in zip(x, x[1:]))] for x in xs]),
        }

    def drawn(key):  # random by the row's key
        return fn([{"ids": list(range(2, 22)), "key": 6 * key + k} for k in range(6)])["input_ids"]

    collator = Collator(
        fn=run,
        examples=m.make(0)["rows"] + m.make(1)["rows"],
        pads={"input_ids": 0, "attention_mask": 0, "labels": -100, "restored": -1, "marks": -1, "sentinels": -1},
        columns={
            "restored": lambda row: torch.tensor(row["ids"] + [1]),
            "marks": lambda row: torch.tensor([49, 5, 5, 48, 5, 5, 1]),
            "sentinels": lambda row: torch.tensor([49, 48]),
            "adjacent": lambda row: torch.tensor([0]),
            "attention_mask": lambda row: torch.ones(len(row["ids"]) - 1, dtype=torch.long),
        },
    )
    return [collator, Ranks(draw=drawn)]


@declare("u/d09")
def trajectories_once(m, fn):
    def number(groups):
        seen, out = {}, []
        for g in groups.tolist():
            out.append(seen.get(g, 0))
            seen[g] = out[-1] + 1
        return torch.tensor(out)

    def one_turn(rewards, groups):
        return fn(rewards, groups, number(groups))

    def several(order):
        def advantages(rewards, groups):
            turns = torch.tensor([1 + (3 * i) % 5 for i in range(len(rewards))])
            at = torch.repeat_interleave(torch.arange(len(rewards)), turns)
            if order:
                at = at[torch.randperm(len(at), generator=torch.Generator().manual_seed(1))]
            got = fn(rewards[at], groups[at], number(groups)[at])
            return torch.stack([got[at == i].double().mean() for i in range(len(rewards))]).to(got.dtype)

        return advantages

    return [
        AdvantageEstimator(fn=one_turn, scale="free", over="group"),
        AdvantageEstimator(fn=several(False), scale="free", over="group"),
        AdvantageEstimator(fn=several(True), scale="free", over="group"),
    ]


@declare("s/r20")
def bits_per_byte(m, fn):
    token_bytes = m.make(0)["token_bytes"]
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 50, (9, 8), generator=g)
    for i, n in enumerate((8, 3, 6, 1, 8, 0, 5, 2, 7)):
        labels[i, n:] = -100
    labels[0, 2], labels[4, 1], labels[6, 0] = 0, 3, 2  # special tokens
    nll = torch.rand(9, 8, generator=g) * 4 + torch.arange(9)[:, None] * 0.3
    rows = torch.stack([nll.double(), labels.double()], 1)

    def batches(s):
        s = rowsof(s)
        return [{"nll": s[i:i + 2, 0].float(), "labels": s[i:i + 2, 1].long()} for i in range(0, len(s), 2)]

    def single(shards):
        x = torch.cat([rowsof(s) for s in shards])
        nll, labels = x[:, 0].flatten().float().double(), x[:, 1].flatten().long()
        nll, labels = nll[labels >= 0], labels[labels >= 0]
        size = token_bytes[labels]
        return (nll[size > 0].sum() / math.log(2) / size.sum()).item()

    ignored = {"nll": torch.ones(2, 8), "labels": torch.full((2, 8), -100)}
    return [
        Ranks(metric=lambda shards: fn([batches(s) for s in shards], token_bytes), rows=rows, single=single),
        # and a rank whose targets are all ignored
        Ranks(metric=lambda shards: fn([batches(s) for s in shards] + [[ignored]], token_bytes), rows=rows, single=single),
    ]


@declare("s/r15")
def average_decay(m, fn):
    # the weight of the current weights, 1 - d: 1 at first, then it falls to 1 - decay
    def rates(total, ranks=1, decay=0.999, update_after=100):
        return [1 - fn(k, decay=decay, update_after=update_after) for k in range(total)]

    return Schedule(
        rates=rates, peak=1.0, final=0.001, total=10000, ends=9091, settings={"decay": 0.999, "update_after": 100}
    )


@declare("t/r16")
def best_fit(m, fn):
    def examples():
        lengths = (2, 9, 23, 3, 5, 10, 7, 4, 12, 20, 2)
        return [{"input_ids": [100 * i + k for k in range(n)]} for i, n in enumerate(lengths)]

    def made(length):
        def run(rows):
            out = fn(rows, seq_length=length)
            fit = lambda x, n: list(x)[:n] + [-1] * (n - len(x))  # a bin has no more places
            return {
                "input_ids": torch.tensor([fit(r["input_ids"], length) for r in out]),
                "seq_lengths": torch.tensor([fit(r["seq_lengths"], length) for r in out]),
            }

        def unpack(batch):
            pieces = {}
            for ids, sizes in zip(batch["input_ids"].tolist(), batch["seq_lengths"].tolist()):
                ids, sizes = [t for t in ids if t >= 0], [n for n in sizes if n > 0]
                if sum(sizes) > len(ids):
                    ids = ids + [-5] * (sum(sizes) - len(ids))
                at = 0
                for n in sizes:
                    piece = ids[at:at + n]
                    pieces.setdefault(piece[0] // 100, []).append(piece)
                    at += n
            return [{"input_ids": torch.tensor(sum(sorted(p), []))} for _, p in sorted(pieces.items())]

        return Collator(
            fn=run, examples=examples(), rows=False, unpack=unpack, columns={"input_ids": lambda e: torch.tensor(e["input_ids"])}
        )

    tokens = [str(t) for e in examples() for t in e["input_ids"]]
    found = [str(t) for r in fn(examples()) for t in r["input_ids"]]
    return [made(10), made(7), Census(wanted=tokens, found=found, what="tokens", once=True)]


@declare("v/r02")
def gae_over_actions(m, fn):
    return GAE(
        fn=lambda rewards, values, mask, gamma, lam: fn(rewards, values, mask.to(rewards.dtype), gamma=gamma, lam=lam),
        gamma=0.97,
        lam=0.9,
        holes=True,
        length=16,
    )


@declare("u/r01")
def right_aligned(m, fn):
    given = m.make(0)
    model = given.pop("model")
    given.pop("response_length")

    def loss(model, batch):
        mask = batch["loss_mask"]
        time = mask.shape[1]
        first = [int(r.nonzero()[0]) if r.any() else time - 1 for r in mask]
        return fn(model, {**batch, "response_length": torch.tensor([min(time - 1, time - f) for f in first])})

    return Step(
        model=model,
        loss=loss,
        batch=given,
        roles={"ids": "ids", "mask": "loss_mask"},
        family="sft",
        paths={"the mean over rows, each alone": alone(loss, lambda row: 1.0)},
        reduction="mean",
        empty_rows=False,
        value_is_loss=True,
        wide=("ids", "loss_mask"),
    )


def sample_std(shards):
    x = torch.cat([rowsof(s) for s in shards]).double()
    return ((x - x.mean()) ** 2).sum().div(len(x) - 1).sqrt().item() if len(x) > 1 else 0.0


@declare("t/r21")
def reward_std(m, fn):
    rows = torch.cat(m.make(0)["ranks"])
    each = Ranks(metric=lambda shards: fn([r.reshape(1) for s in shards for r in rowsof(s)]), rows=rows, single=sample_std)
    # one sample in total: 0
    one = Ranks(
        metric=lambda shards: fn([rowsof(s) for s in shards]) + fn([rows[:0], rows[:1]]), rows=rows, single=sample_std
    )
    return [*spread(m, fn, sample_std, rows), each, one]


@declare("s/r09")
def token_mean_over_ranks(m, fn):
    def batch():
        return cat([b for rank in m.make(0)["batches"] for b in rank])

    def loss(model, b):
        return F.cross_entropy(model(b["x"]), b["y"], ignore_index=-100)

    silent = lambda b: {"x": b["x"][:2], "y": torch.full_like(b["y"][:2], -100)}
    calls = {
        "ranks": lambda model, optimizer, batches: fn(model, optimizer, [[b] for b in batches]),
        "micro-batches": lambda model, optimizer, batches: fn(model, optimizer, [list(batches)]),
        "ranks with unequal numbers of micro-batches": lambda model, optimizer, batches: fn(
            model, optimizer, [part for part in (list(batches[:-1]), list(batches[-1:])) if part]
        ),
        "ranks, one without a trained token": lambda model, optimizer, batches: fn(
            model, optimizer, [[b] for b in batches] + [[silent(batches[0])]]
        ),
    }
    return without_clip(m, loss, batch, calls)


@declare("u/r21")
def return_std(m, fn):
    rows = torch.cat(m.make(0)["ranks"])
    return spread(m, fn, sample_std, rows)


@declare("s/r18")
def span_corruption(m, fn):
    def made(density=0.3, mean_span=2, vocab=50, padding=0, end=1):
        def run(rows):
            out = fn(rows, density=density, mean_span=mean_span, vocab=vocab, pad=padding, end=end)
            xs = [[t for t in x if t != padding] for x in out["input_ids"].tolist()]
            ys = [[t for t in y if t != -100] for y in out["labels"].tolist()]
            return {
                **out,
                "restored": pad([fill(x, y, 40, end) for x, y in zip(xs, ys)], -1),
                "noise": torch.tensor([[sum(1 < t < 40 for t in y)] for y in ys]),
                "sentinels": pad([[t for t in x if t >= 40] for x in xs], -1),
                "target_sentinels": pad([[t for t in y if t >= 40] for y in ys], -1),
                "adjacent": torch.tensor([[sum(a >= 40 and b >= 40 for a, b in zip(x, x[1:]))] for x in xs]),
                "first": torch.tensor([[x[0]] for x in xs]),
                "last": torch.tensor([[y[-1]] for y in ys]),
            }

        def noise(row):
            n = len(row["input_ids"])
            return min(max(round(n * density), 1), n - 1)

        def spans(row):
            return min(max(round(noise(row) / mean_span), 1), len(row["input_ids"]) - noise(row))

        return Collator(
            fn=run,
            examples=m.make(0)["rows"] + m.make(1)["rows"] + [{"id": 77, "input_ids": [9, 8, 7, 6]}],
            pads={
                "input_ids": padding,
                "attention_mask": 0,
                "labels": -100,
                "restored": -1,
                "sentinels": -1,
                "target_sentinels": -1,
            },
            columns={
                "restored": lambda row: torch.tensor(row["input_ids"] + [end]),
                "noise": lambda row: torch.tensor([noise(row)]),
                "sentinels": lambda row: torch.tensor([vocab - 1 - i for i in range(spans(row))]),
                "target_sentinels": lambda row: torch.tensor([vocab - 1 - i for i in range(spans(row) + 1)]),
                "adjacent": lambda row: torch.tensor([0]),
                "first": lambda row: torch.tensor([row["input_ids"][0]]),
                "last": lambda row: torch.tensor([end]),
                "attention_mask": lambda row: torch.ones(
                    len(row["input_ids"]) - noise(row) + spans(row) + 1, dtype=torch.long
                ),
            },
        )

    def drawn(rank):  # the noise depends on the row's id
        return fn([{"id": 6 * rank + k, "input_ids": list(range(2, 22))} for k in range(6)])["input_ids"]

    return [made(), made(density=0.4, mean_span=3, vocab=60, padding=1, end=0), Ranks(draw=drawn)]


@declare("v/d03")
def tool_turns(m, fn):
    given = m.make(0)
    model, batch = given["model"], given["batch"]
    batch["mask"] = batch.pop("response_mask")[:, 1:]  # like old_logprobs; the first token is never the policy's

    def loss(model, batch, clip=0.2):
        b = {k: v for k, v in batch.items() if k != "mask"}
        return fn(model, {**b, "response_mask": F.pad(batch["mask"], (1, 0))}, clip=clip)

    def logprobs(model, batch):
        return model(batch["ids"][:, :-1]).log_softmax(-1).gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "behaviour": "old_logprobs", "advantages": "advantages"},
        settings={"clip": Setting(0.2, "clip")},
        logprobs=logprobs,
        paths={"rows alone, weighed by their tokens": alone(loss, lambda row: row["mask"].sum())},
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "mask", "old_logprobs"),
    )


@declare("s/r13")
def sqrt_cooldown(m, fn):
    def rates(total, ranks=1, **settings):
        return [fn(k, total=total, **settings) for k in range(total)]

    def longer(total, ranks=1):
        return [fn(k, total=1000) for k in range(total)]

    return [
        Schedule(
            rates=rates,
            peak=3e-4,
            final=3e-5,
            total=1000,
            warmup=100,
            settings={"peak": 3e-4, "warmup": 100, "cooldown": 200, "floor": 0.1},
        ),
        Schedule(rates=longer, peak=3e-4, final=3e-5, total=1100, warmup=100, ends=1000),
    ]


@declare("v/r09")
def items_over_ranks(m, fn):
    def batch():
        b = cat([b for rank in m.make(0)["batches"] for b in rank])
        b["loss_mask"][2, 4:], b["loss_mask"][7, 3:] = 0, 0
        b["loss_mask"][:, 2] = 1
        return b

    calls = {
        "ranks": lambda model, optimizer, batches: fn(model, optimizer, [[b] for b in batches]),
        "micro-batches": lambda model, optimizer, batches: fn(model, optimizer, [list(batches)]),
        "ranks with unequal numbers of micro-batches": lambda model, optimizer, batches: fn(
            model, optimizer, [part for part in (list(batches[:-1]), list(batches[-1:])) if part]
        ),
    }
    return without_clip(m, masked_nll, batch, calls)


@declare("s/r24")
def kto(m, fn):
    given = m.make(0)
    model = given.pop("model")
    given["ref_kl_logp"] = given["ref_kl_logp"] - 4.0  # so that z is above 0 and its inputs matter
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles={"ids": "ids", "mask": "mask", "reference": "ref_logp", "correct": "good"},
        settings={
            "beta": Setting(0.1, "setting"),
            "good_weight": Setting(1.0, "weight"),
            "bad_weight": Setting(1.5, "weight"),
        },
        family="preference",
        pairwise=False,
        rows_interact=True,  # z is a mean over rows
        value_is_loss=False,  # z is a constant
        reduction="mean",
        empty_rows=False,
        wide=("ids", "kl_ids", "mask"),
    )


@declare("s/r14")
def ramped_batch(m, fn):
    # 4 × 20, 8 × 10, 12 × 7 steps of the ramp: 244 samples; 480 are reached at step 52, 4800 at step 322
    def rates(total, ranks=1, **settings):
        return [fn(k, **settings) for k in range(total)]

    settings = {
        "peak": 1e-3,
        "minimum": 1e-4,
        "start_batch": 4,
        "increment": 4,
        "full_batch": 16,
        "ramp_samples": 240,
        "warmup_samples": 480,
        "decay_samples": 4800,
    }
    return [
        Schedule(rates=rates, peak=1e-3, final=1e-4, total=323, warmup=52, settings=settings),
        Schedule(rates=rates, peak=1e-3, final=1e-4, total=400, warmup=52, ends=322),
    ]
