import math
import random

import torch
import torch.nn.functional as F

from earnest_audit import (
    GAE, Accumulation, AdvantageEstimator, Census, ChatTemplate, Collator, Ranks, Schedule, Setting, Step, Update,
)
from tests.audit.reading2026c.reading import declare, no_subject


# ---------------------------------------------------------------- forms
class Record(torch.optim.Optimizer):
    """Steps no weight: sums what a step would apply (gradient + decay * weight) of each parameter that has a gradient."""

    def __init__(self, params, decay=0.0):
        super().__init__(params, {"lr": 0.0})
        self.decay, self.total = decay, {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    move = p.grad + self.decay * p
                    self.total[p] = self.total[p] + move if p in self.total else move.clone()


def recorded(model, call, decay=0.0):
    """call(optimizer), then what the optimizer received in .grad."""
    params = list(model.parameters())
    optimizer = Record(params, decay)
    call(optimizer)
    for p in params:
        p.grad = optimizer.total[p].detach().clone() if p in optimizer.total else None


class Clipping:
    """The given optimizer, with a clip of the norm before its step."""

    def __init__(self, optimizer, model, bound):
        self.real, self.model, self.bound = optimizer, model, bound

    def __getattr__(self, name):
        return getattr(self.real, name)

    def step(self, *args, **kwargs):
        if self.bound is not None:
            torch.nn.utils.clip_grad_norm_(list(self.model.parameters()), self.bound)
        return self.real.step(*args, **kwargs)


def padded(rows, value, dtype=torch.long):
    width = max(1, max(len(r) for r in rows))
    return torch.tensor([list(r) + [value] * (width - len(r)) for r in rows], dtype=dtype)


def names(call):
    """The names that a call gives; where it raises, a name that was not wanted."""
    try:
        return list(call())
    except Exception as e:
        return [f"raised {type(e).__name__}: {e}"]


def aligned(labels):
    """Labels of the next token -> labels in the places of their own tokens."""
    return F.pad(labels[:, :-1], (1, 0), value=-100)


def shifted(labels):
    return F.pad(labels[:, 1:], (0, 1), value=-100)


# ---------------------------------------------------------------- cases
@declare("e/d20")
def jsd_update(m, fn):
    given = m.make(0)
    model, pieces = given["model"], given["batches"]
    wide = max(b["ids"].shape[1] for b in pieces)
    pad = lambda x, value: F.pad(x, (0, wide - x.shape[1]), value=value)
    batch = {
        "ids": torch.cat([pad(b["ids"], 0) for b in pieces]),
        "labels": torch.cat([pad(b["labels"], -100) for b in pieces]),
        "teacher_logits": torch.cat([F.pad(b["teacher_logits"], (0, 0, 0, wide - b["ids"].shape[1])) for b in pieces]),
    }

    def whole(beta):
        def loss(model, b):
            s, t = model(b["ids"])[:, :-1].log_softmax(-1), b["teacher_logits"][:, :-1].log_softmax(-1)
            mix = ((1 - beta) * s.exp() + beta * t.exp()).log()
            jsd = beta * (t.exp() * (t - mix)).sum(-1) + (1 - beta) * (s.exp() * (s - mix)).sum(-1)
            return jsd[b["labels"][:, 1:] != -100].mean()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = lambda beta: lambda batches, bound: fn(model, Clipping(optimizer, model, bound), list(batches), beta=beta)
    return [
        Accumulation(model, lambda model, batches: recorded(model, lambda o: fn(model, o, list(batches))), batch),
        Update(model, optimizer, update(0.5), whole(0.5), batch),
        Update(model, optimizer, update(0.3), whole(0.3), batch),
    ]


@declare("f/d03")
def rollout_rows(m, fn):
    EOS = 2

    def expected(row):
        ids, mask, lps = [], [], []
        for n, turn in enumerate(row["turns"]):
            last = n == len(row["turns"]) - 1
            own = list(zip(turn["ids"], turn["logprobs"]))
            if not last and own[-1][0] == EOS:
                own = own[:-1]
            for i, lp in own:
                ids.append(i), mask.append(1), lps.append(lp)
            for i in turn["observation"]:
                ids.append(i), mask.append(0), lps.append(0.0)
        rewards = [0.0] * len(ids)
        rewards[max(i for i, x in enumerate(mask) if x)] = row["reward"]
        if ids[-1] != EOS:
            ids.append(EOS), mask.append(0), lps.append(0.0), rewards.append(0.0)
        return {"ids": ids, "mask": mask, "logprobs": lps, "rewards": rewards}

    def collate(rows):
        out = fn(rows)
        return {
            "ids": padded([r["ids"] for r in out], -1),
            "mask": padded([r["mask"] for r in out], -1),
            "logprobs": padded([r["logprobs"] for r in out], 9.0, torch.float64),
            "rewards": padded([r["rewards"] for r in out], -9.0, torch.float64),
            "labels": padded([[i if x else -100 for i, x in zip(r["ids"], r["mask"])] for r in out], -100),
        }

    real = lambda key: lambda row: torch.tensor(expected(row)[key], dtype=torch.float64)
    whole = lambda key: lambda row: torch.tensor(expected(row)[key])
    return Collator(
        collate, m.make(0)["rows"] + m.make(1)["rows"],
        pads={"ids": -1, "mask": -1, "logprobs": 9.0, "rewards": -9.0, "labels": -100},
        targets=lambda row: [i for i, x in zip(expected(row)["ids"], expected(row)["mask"]) if x],
        columns={"ids": whole("ids"), "mask": whole("mask"), "logprobs": real("logprobs"), "rewards": real("rewards")},
    )


@declare("f/r13")
def left_right(m, fn):
    def collate(rows):
        out = fn(rows)
        ids, labels, positions = out["ids"], out["labels"], out["position_ids"]
        left = max(len(r["prompt"]) for r in rows)
        first = (labels != -100).long().argmax(1)
        return {
            **out,
            # a 0 on padding becomes -1, so that the 0 of the first real token is no padding
            "position_ids": torch.where((ids == 0) & (positions == 0), -1, positions),
            "ids_at_labels": torch.where(labels != -100, ids, -100),
            "answer_starts": (first == left).long()[:, None],
        }

    return Collator(
        collate, m.make(0)["rows"],
        pads={"ids": 0, "attention_mask": 0, "position_ids": -1, "labels": -100, "ids_at_labels": -100},
        targets=lambda r: list(r["answer"]),
        columns={
            "ids": lambda r: torch.tensor(r["prompt"] + r["answer"]),
            "attention_mask": lambda r: torch.ones(len(r["prompt"]) + len(r["answer"]), dtype=torch.long),
            "position_ids": lambda r: torch.arange(len(r["prompt"]) + len(r["answer"])),
            "labels": lambda r: torch.tensor(r["answer"]),
            "ids_at_labels": lambda r: torch.tensor(r["answer"]),
            "answer_starts": lambda r: torch.tensor([1]),
        },
    )


@declare("f/d07")
def context_parallel_mtp(m, fn):
    given = m.make(0)
    model = given["model"]
    batch = {"ids": torch.cat([b["ids"] for b in given["batches"]])}  # 6 rows; micro-batches have one shape: 2 rows each

    def whole(weight):
        def loss(model, b):
            ids = b["ids"]
            h = model.rnn(model.emb(ids))[0][:, :-2]
            main = F.cross_entropy(model.head(h).flatten(0, 1), ids[:, 1:-1].flatten())
            return main + weight * F.cross_entropy(model.mtp(h).flatten(0, 1), ids[:, 2:].flatten())
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def update(cp, weight):
        call = lambda batches, bound: fn(model, Clipping(optimizer, model, bound), list(batches), cp=cp, mtp_weight=weight)
        return Update(model, optimizer, call, whole(weight), batch, split=(2, 2, 2))

    accumulate = lambda model, batches: recorded(model, lambda o: fn(model, o, list(batches)))
    return [
        Accumulation(model, accumulate, batch, split=(2, 2, 2)),
        update(2, 0.3), update(1, 0.3), update(4, 0.3), update(8, 0.3), update(2, 0.7),
    ]


@declare("e/r15")
def sampler(m, fn):
    def epoch(world, samples, e):
        per = -(-samples // world)
        return [int(fn(rank, e * per + at, world=world, samples=samples)) for at in range(per) for rank in range(world)]

    out = [Ranks(draw=lambda rank: torch.tensor([int(fn(rank, step)) for step in range(12)]))]
    for world, samples, e in ((4, 22, 0), (4, 22, 1), (3, 20, 0), (4, 24, 2)):
        wanted = [str(i) for i in range(samples)]
        drawn = names(lambda: [str(i) for i in epoch(world, samples, e)])
        what = f"samples of epoch {e}, {world} ranks"
        out.append(Census(wanted, drawn, what=what))
        out.append(Census(wanted, drawn[:samples], what=what + ", before the repeats", once=True))
    return out


@declare("f/r11")
def ramp_schedule(m, fn):
    def rates(total, ranks=1, **settings):
        ramp = ((40, 16), (40, 32), (total - 80, 64))
        rows = [16] * 40 + [32] * 40 + [64] * (total - 80)
        # without the factor of the batch, which the words define: what is left is peak * shape
        return [fn(k, ramp=ramp, **settings) / math.sqrt(rows[k] / 64) for k in range(total)]

    return Schedule(rates, peak=1e-3, final=1e-4, total=140, warmup=20,
                    settings={"peak": 1e-3, "floor": 0.1, "warmup_rows": 320})


@declare("e/r02")
def last_turn_template(m, fn):
    encode = lambda x: [10 + ord(c) for c in x] if isinstance(x, str) else list(x)

    def ready(messages):
        out = []
        for x in messages:
            y = {**x, "content": encode(x["content"])}
            if x["role"] == "assistant":
                y["thoughts"] = encode(x.get("thoughts", ""))
            out.append(y)
        return out

    def tokens(messages):
        if any(isinstance(x["content"], str) for x in messages):
            messages = ready(messages)
        return fn(messages)

    def prompt(messages):
        mark = 10_000_000
        ids, _ = fn(ready(messages) + [{"role": "assistant", "content": [mark], "thoughts": [mark]}])
        return ids[:ids.index(mark)]

    words = [
        {"role": "user", "content": "what is it?"},
        {"role": "assistant", "content": "a lookup", "thoughts": "need a tool"},
        {"role": "tool", "content": "value 17"},
        {"role": "assistant", "content": "it is 17", "thoughts": "the tool said so"},
        {"role": "user", "content": "and twice?"},
        {"role": "assistant", "content": "thirty-four", "thoughts": "two times"},
    ]
    out = [
        ChatTemplate(tokens, prompt, words[:2], end=2, trained=(1,)),
        ChatTemplate(tokens, prompt, words[:4], end=2, prefix=False, trained=(3,)),
        ChatTemplate(tokens, prompt, words, end=2, prefix=False, trained=(5,)),
    ]

    def collate(examples):
        rows = [fn(x) for x in examples]
        return {
            "ids": padded([ids for ids, _ in rows], 0),
            "mask": padded([mask for _, mask in rows], -1),
            "labels": padded([[i if x else -100 for i, x in zip(ids, mask)] for ids, mask in rows], -100),
        }

    dialogues = [m.make(s)["messages"][:n] for s in (0, 1) for n in (2, 4, 6)]
    out.append(Collator(
        collate, dialogues, pads={"ids": 0, "mask": -1, "labels": -100},
        targets=lambda x: x[-1]["thoughts"] + [m.UNTHINK] + x[-1]["content"] + [m.END],
    ))
    return out


@declare("e/r06")
def prefix_lm(m, fn):
    given = m.make(0)
    model, ids = given["model"], given["ids"]
    at = torch.arange(ids.shape[1])
    mask = ((at >= given["prompt_length"][:, None]) & (at < given["length"][:, None])).float()

    def loss(model, batch):
        on = batch["mask"] > 0
        at = torch.arange(on.shape[1]).expand(on.shape)
        first = torch.where(on, at, on.shape[1]).amin(1)
        end = torch.where(on, at + 1, 0).amax(1)
        first = torch.where(on.any(1), first, end)
        if not torch.equal(((at >= first[:, None]) & (at < end[:, None])).float(), batch["mask"].float()):
            raise ValueError("a completion is one span of whole tokens: prompt_length and length cannot state this mask")
        return fn(model, {"ids": batch["ids"], "prompt_length": first, "length": end})

    return Step(model=model, loss=loss, batch={"ids": ids, "mask": mask}, roles={"ids": "ids", "mask": "mask"},
                family="sft", reduction="mean", value_is_loss=True)


@declare("f/r18")
def bits_per_byte(m, fn):
    ranks = [r for s in (0, 1) for r in m.make(s)["ranks"]]
    rows = torch.cat([torch.stack([r["nll"].double(), r["target"].double()], 1) for r in ranks])
    metric = lambda shards: fn([{"nll": s[:, 0], "target": s[:, 1].long()} for s in shards])

    def single(shards):
        nats = size = 0.0
        for row in torch.cat(list(shards)):
            for nll, token in zip(row[0].tolist(), row[1].long().tolist()):
                if token >= 0 and int(m.BYTES[token]) > 0:
                    nats, size = nats + nll, size + int(m.BYTES[token])
        return nats / (math.log(2) * size)

    return Ranks(metric=metric, rows=rows, single=single)


def filled(fn, rows, weight, **settings):
    """A batch with fill rows -> its real rows, and what the fill rows have, beside each of them."""
    out, n = dict(fn(rows, **settings)), len(rows)
    fills = {k: v[n:] for k, v in out.items()}
    beside = lambda x: torch.full((n, 1), float(x))
    real = {k: v[:n] for k, v in out.items()}
    real[weight] = real[weight][:, None]
    real["labels_in_place"] = None  # set by the caller
    real["fill_trained"] = beside((fills["labels"] != -100).sum() + fills[weight].abs().sum())
    real["rows"] = beside(len(out["ids"]))
    return real, fills, beside


@declare("f/r15")
def fill_rows(m, fn):
    def collate(rows):
        out, fills, beside = filled(fn, rows, "weight")
        out["labels_in_place"] = torch.where((out["ids"] == 0) & (out["labels"] == -100), -999, out["labels"])
        out["rows"] = beside(len(out["ids"]) + len(fills["ids"]) == -(-len(rows) // 4) * 4)
        out["fill_empty"] = beside((fills["ids"] == 0).all(1).sum())
        return out

    return Collator(
        collate, m.make(0)["rows"], pads={"ids": 0, "labels": -100, "labels_in_place": -999},
        targets=lambda r: [x for x in r["labels"] if x != -100],
        columns={
            "ids": lambda r: torch.tensor(r["ids"]),
            "labels_in_place": lambda r: torch.tensor(r["labels"]),
            "weight": lambda r: torch.tensor([1.0]),
            "fill_trained": lambda r: torch.tensor([0.0]),
            "rows": lambda r: torch.tensor([1.0]),
            "fill_empty": lambda r: torch.tensor([0.0]),
        },
    )


@declare("f/d04")
def staged_packing(m, fn):
    given = m.make(0)
    model = given.pop("model")
    given["labels"] = aligned(given["labels"])  # a document's first token has -100
    loss = lambda model, batch: fn(model, {**batch, "labels": shifted(batch["labels"])})
    return Step(model=model, loss=loss, batch=given,
                roles={"ids": "ids", "documents": "segments", "positions": "positions", "labels": "labels"},
                family="sft", reduction="mean", value_is_loss=True, all_supervised=True)


@declare("f/d06")
def packer(m, fn):
    rows = m.make(0)["rows"]

    def unbroken(capacity):
        packs = [[]]
        for row in rows:
            if packs[-1] and sum(map(len, packs[-1])) + len(row) > capacity:
                packs.append([])
            packs[-1].append(row)
        return packs

    label = lambda packs: [f"{i}: {[list(r) for r in p]}" for i, p in enumerate(packs)]
    out = [
        Census(label(unbroken(capacity)), names(lambda: label(fn([list(r) for r in rows], after, capacity=capacity))),
               what=f"packs, saved after {after}, capacity {capacity}", once=True)
        for after, capacity in ((3, 16), (1, 16), (5, 16), (4, 12))
    ]

    def collate(examples):
        packs = fn(examples, 3)
        return {
            "ids": padded([[x for r in p for x in r] for p in packs], 0),
            "documents": padded([[n for n, r in enumerate(p) for _ in r] for p in packs], -1),
        }

    def unpack(batch):
        return [
            {"ids": ids[docs == n]}
            for ids, docs in zip(batch["ids"], batch["documents"]) for n in range(int(docs.max()) + 1)
        ]

    out.append(Collator(collate, rows, pads={"ids": 0, "documents": -1}, rows=False, unpack=unpack))
    return out


@declare("e/d07")
def zigzag(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(model=model, loss=fn, batch=given, roles={"ids": "ids", "labels": "labels"},
                settings={"cp": Setting(2, "inert", modes=(1, 4, 8))}, family="sft", reduction="mean", value_is_loss=True)


@declare("f/d12")
def rollout_schedule(m, fn):
    def of(rollout_batch, train_batch):
        per = rollout_batch // train_batch

        def rates(total, ranks=1, **settings):
            given = {"rollouts": total // per, "rollout_batch": rollout_batch, "train_batch": train_batch, **settings}
            return [float(fn(k, **given)) for k in range(total)]
        return rates

    return [
        Schedule(of(64, 16), peak=2e-5, final=2e-6, total=100, warmup=4, settings={"lr": 2e-5, "floor": 0.1}),
        Schedule(of(128, 16), peak=2e-5, final=2e-6, total=200, warmup=8,
                 settings={"lr": 2e-5, "floor": 0.1, "warmup_ratio": 0.04}),
        Schedule(of(64, 64), peak=2e-5, final=2e-6, total=50, warmup=2),
    ]


@declare("e/d14")
def mixture(m, fn):
    def of(counts):
        return [{"source": s, "id": f"{s}-{i}"} for s, n in enumerate(counts) for i in range(n)]

    out = []
    for counts, settings in (
        ((0, 5, 3), {}), ((5, 0, 3), {}), ((5, 3, 0), {}), ((4, 5, 3), {}), ((4, 5, 3), {"seed": 1}),
        ((0, 6, 4), {"probabilities": (0.6, 0.3, 0.1)}), ((0, 0, 4), {}),
    ):
        rows = of(counts)
        out.append(Census([r["id"] for r in rows], names(lambda: [r["id"] for r in fn(rows, **settings)]),
                          what=f"rows of sources with {counts} rows", once=True))

    def collate(rows):
        mixed = fn(rows)
        return {"source": torch.tensor([r["source"] for r in mixed]),
                "id": torch.tensor([int(r["id"].split("-")[1]) for r in mixed])}

    def unpack(batch):
        return [{"source": torch.tensor([s]), "id": torch.tensor([i])}
                for s, i in sorted(zip(batch["source"].tolist(), batch["id"].tolist()))]

    out.append(Collator(collate, m.make(0)["rows"], rows=False, unpack=unpack))
    return out


@declare("e/r11")
def token_schedule(m, fn):
    def rates(total, ranks=1, **settings):
        factor = lambda k: math.sqrt(1 if k < 50 else 2 if k < 90 else 4)
        # without the factor of the batch, which the words define: what is left is base_lr * shape
        return [fn(k, **settings) / factor(k) for k in range(total)]

    settings = {"base_lr": 1e-3, "total_tokens": 250000, "warmup_tokens": 10000}
    return [
        Schedule(rates, peak=1e-3, final=0.0, total=120, warmup=10, settings=settings),
        Schedule(rates, peak=1e-3, final=0.0, total=140, warmup=10, ends=120),
    ]


@declare("f/d01")
def reinforce_pp(m, fn):
    def outcome(rewards, groups):
        """Outcome rewards, no discount: a row's advantage is the mean over its model tokens (as many in each row)."""
        n, time = len(rewards), 12
        mask, tokens = torch.zeros(n, time, dtype=torch.float64), torch.zeros(n, time, dtype=torch.float64)
        for r in range(n):
            first, hole = 2 + r % 3, 1 + r % 2
            mask[r, :first] = 1
            mask[r, first + hole:hole + 7] = 1
        last = [hole + 6 for hole in (1 + r % 2 for r in range(n))]
        tokens = tokens.index_put((torch.arange(n), torch.tensor(last)), rewards.double())
        out = fn(tokens, groups, mask, gamma=1.0)
        return (out.sum(1) / mask.sum(1)).to(rewards.dtype)

    def discounted(rewards, values, mask, gamma, lam):
        """The estimator discounts a sum of rewards: of temporal differences, at γ·λ, it is GAE, whitened."""
        r, v, on = rewards.double(), values.double(), mask > 0
        ahead, delta = torch.zeros(len(r), dtype=torch.float64), torch.zeros_like(r)
        for t in reversed(range(r.shape[1])):
            delta[:, t] = torch.where(on[:, t], r[:, t] + gamma * ahead - v[:, t], 0.0)
            ahead = torch.where(on[:, t], v[:, t], ahead)
        white = fn(delta, torch.arange(len(r)), mask.double(), gamma=gamma * lam)
        # its own whitening is taken back for the returns
        plain, run = torch.zeros_like(r), torch.zeros(len(r), dtype=torch.float64)
        for t in reversed(range(r.shape[1])):
            run = torch.where(on[:, t], delta[:, t] + gamma * lam * run, run)
            plain[:, t] = run
        mean, std = plain[on].mean(), (plain[on].var(unbiased=False) + 1e-8).sqrt()
        returns = torch.where(on, white * std + mean + v, 0.0)
        return white.to(rewards.dtype), returns.to(rewards.dtype)

    return [AdvantageEstimator(outcome, scale="free", over="batch"), GAE(discounted, whitened=True, holes=True)]


@declare("f/r04")
def random_offsets(m, fn):
    given = m.make(0)
    model = given.pop("model")
    given["labels"] = aligned(given["labels"])

    def loss(model, batch):
        # documents by the order in which they begin, as the offsets have them; other documents (padding) begin at 0
        number = torch.zeros_like(batch["segments"])
        for r, row in enumerate(batch["segments"].tolist()):
            seen = list(dict.fromkeys(x for x in row if x >= 0))
            number[r] = torch.tensor([seen.index(x) if x >= 0 else len(seen) for x in row])
        extra = max(0, int(number.max()) + 1 - batch["offsets"].shape[1])
        return fn(model, {**batch, "segments": number, "offsets": F.pad(batch["offsets"], (0, extra)),
                          "labels": shifted(batch["labels"])})

    return Step(model=model, loss=loss, batch=given, roles={"ids": "ids", "documents": "segments", "labels": "labels"},
                family="sft", reduction="mean", value_is_loss=True, all_supervised=True,
                wide=("ids", "segments", "labels"))


@declare("f/r09")
def vocabulary_parallel(m, fn):
    given = m.make(0)
    model = given.pop("model")
    given["loss_mask"][:, 0] = 0  # the first token is no target
    real = lambda batch: {**batch, "ids": batch["ids"] % m.REAL}  # ids are real tokens

    def logprobs(model, batch):
        ids = real(batch)["ids"]
        lp = model(ids)[:, :-1, :m.REAL].log_softmax(-1)
        return F.pad(lp.gather(-1, ids[:, 1:, None])[..., 0], (1, 0))

    return Step(model=model, loss=lambda model, batch, ranks: fn(model, real(batch), ranks=ranks), batch=given,
                roles={"ids": "ids", "mask": "loss_mask"}, settings={"ranks": Setting(4, "inert", modes=(1, 2, 8, 16))},
                family="sft", reduction="mean", value_is_loss=True, all_supervised=None, logprobs=logprobs)


@declare("e/r08")
def ranks_and_micro_batches(m, fn):
    given = m.make(0)
    model = given["model"]
    pieces = [b for rank in given["batches"] for b in rank]
    batch = {k: torch.cat([b[k] for b in pieces]) for k in ("x", "y")}
    over_ranks = lambda batches: [[b] for b in batches]
    over_micro = lambda batches: [list(batches)]
    mixed = lambda batches: [[b] for b in batches[:1]] + ([list(batches[1:])] if len(batches) > 1 else [])
    loss = lambda model, b: F.cross_entropy(model(b["x"]), b["y"], ignore_index=-100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    out = []
    for cut, what in ((over_ranks, "ranks"), (over_micro, "micro-batches"), (mixed, "ranks with unequal numbers of micro-batches")):
        accumulate = lambda model, batches, cut=cut: recorded(model, lambda o: fn(model, o, cut(list(batches))))
        out.append(Accumulation(model, accumulate, batch, what=what))
        update = lambda batches, bound, cut=cut: fn(model, Clipping(optimizer, model, bound), cut(list(batches)))
        out.append(Update(model, optimizer, update, loss, batch))
    return out


@declare("e/r16")
def std_over_ranks(m, fn):
    rows = torch.cat(m.make(0)["ranks"]).double()
    single = lambda shards: torch.cat(list(shards)).std().item() if sum(len(s) for s in shards) > 1 else 0.0
    return [
        Ranks(metric=lambda shards: fn(list(shards)), rows=rows, single=single),
        Ranks(metric=lambda shards: fn([torch.empty(0, dtype=torch.float64), *shards, torch.empty(0, dtype=torch.float64)]),
              rows=rows, single=single),  # ranks may be empty
    ]


@declare("e/d10")
def max_steps_schedule(m, fn):
    run = lambda **given: lambda total, ranks=1, **settings: [fn(k, **{**given, **settings}) for k in range(total)]
    stops = lambda total, ranks=1, **settings: [fn(k, max_steps=total, **settings) for k in range(total)]
    settings = {"base_lr": 1e-3, "warmup": 10}
    return [
        Schedule(stops, peak=1e-3, final=0.0, total=120, warmup=10, settings=settings),
        Schedule(run(max_steps=None, num_epochs=3, steps_per_epoch=50), peak=1e-3, final=0.0, total=150, warmup=10,
                 settings={**settings, "num_epochs": 3, "steps_per_epoch": 50}),
        Schedule(run(max_steps=120, scheduler_total_steps=80), peak=1e-3, final=0.0, total=120, warmup=10, ends=80,
                 settings={**settings, "scheduler_total_steps": 80}),
    ]


@declare("e/d17")
def sharded_norm(m, fn):
    full = {}
    for shard in m.make(0)["ranks"]:
        for k, v in shard.items():
            full.setdefault(k, []).append(v.double())
    full = {k: torch.cat(v) for k, v in full.items()}
    keys, rows = list(full), []
    for n, k in enumerate(keys):  # a row: the number of its parameter, then its values
        for v in full[k]:
            rows.append(F.pad(v.reshape(-1), (0, 5 - v.numel())).tolist() + [float(n)])
    rows = torch.tensor(rows, dtype=torch.float64)

    def ranks(shards):
        out = []
        for s in shards:
            own = {}
            for n, k in enumerate(keys):
                mine = s[s[:, -1] == n]
                own[k] = mine[:, 0] if full[k].dim() == 1 else mine[:, :full[k].shape[1]]
            out.append(own)
        return out

    single = lambda shards: torch.cat(list(shards))[:, :-1].norm().item()
    return Ranks(metric=lambda shards: fn(ranks(shards)), rows=rows, single=single)


@declare("e/d08")
def interleaved_streams(m, fn):
    sources = m.make(0)["sources"]
    number = {x: 1000 * s + i for s, source in enumerate(sources) for i, x in enumerate(source)}
    out = [Ranks(draw=lambda rank: torch.tensor([number[fn(rank, step, sources)] for step in range(16)]))]
    for world, steps, settings in ((4, 20, {}), (2, 30, {}), (4, 14, {"probabilities": (1.0, 0.0)}), (3, 20, {"seed": 7})):
        drawn = names(lambda: [fn(rank, step, sources, world=world, **settings) for step in range(steps) for rank in range(world)])
        if "probabilities" in settings:
            a, b = world * steps, 0
        else:  # each source is read from its beginning, as often as it was drawn
            a = sum(x in set(sources[0]) for x in drawn)
            b = world * steps - a
        out.append(Census(sources[0][:a] + sources[1][:b], drawn, what=f"samples of {world} ranks", once=True))
    return out


@declare("f/d17")
def throughput(m, fn):
    ranks = m.make(0)["ranks"]
    r = random.Random(0)
    metrics = ranks[0]["metrics"]
    rows = torch.tensor([[p, n, r.uniform(1, 2)] for p, n in zip(metrics["prompt_lengths"], metrics["response_lengths"])],
                        dtype=torch.float64)

    def metric(time):
        def of(shards):
            every = torch.cat(list(shards))
            whole = {"prompt_lengths": every[:, 0].long().tolist(), "response_lengths": every[:, 1].long().tolist()}
            return fn([{"batch": [[1] * int(n) for n in s[:, 1]], "metrics": whole, "seconds": time(s[:, 2])} for s in shards])
        return of

    def single(time):
        def of(shards):
            every = torch.cat(list(shards))
            return float(every[:, :2].sum()) / max(time(s[:, 2]) for s in shards)
        return of

    longest = lambda x: float(x.max()) if len(x) else 0.0  # a rank's time: its slowest row
    added = lambda x: float(x.sum())  # its rows one after another: depends on the cut
    return [
        Ranks(metric=metric(longest), rows=rows, single=single(longest)),
        Ranks(metric=metric(added), rows=rows, single=single(added), by_rank=True),
    ]


@declare("e/d09")
def recurrent_shards(m, fn):
    given = m.make(0)
    model = given.pop("model")
    batch = {"ids": given["ids"], "labels": aligned(given["targets"])}
    loss = lambda model, b, shards: fn(model, {"ids": b["ids"], "targets": shifted(b["labels"])}, shards=shards)
    return Step(model=model, loss=loss, batch=batch, roles={"ids": "ids", "labels": "labels"},
                settings={"shards": Setting(2, "inert", modes=(1, 3, 4, 6))}, family="sft", reduction="mean",
                value_is_loss=True, all_supervised=None)


@declare("e/r03")
def tree(m, fn):
    given = m.make(0)
    model = given.pop("model")

    def logprobs(model, batch):
        ids = batch["ids"]
        return F.pad(model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0], (1, 0))

    return Step(model=model, loss=fn, batch=given, roles={"ids": "ids", "mask": "action_mask", "advantages": "advantages"},
                family="policy gradient", rows_interact=True, reduction="mean", value_is_loss=True,
                wide=("ids", "action_mask", "node"), logprobs=logprobs)


@declare("f/d10")
def resumed_schedule(m, fn):
    def rates(**given):
        return lambda total, ranks=1, **settings: [fn(k, **{"total": total, **given, **settings}) for k in range(total)]

    breaks = (10_000, 5, 40, 70)  # the first is never saved
    of_rank = lambda total, rank: [fn(k, total=total, resume_at=breaks[rank % 4]) for k in range(total)]
    settings = {"peak": 1e-3, "floor": 1e-4, "warmup": 10}
    return [
        Schedule(rates(), peak=1e-3, final=1e-4, total=100, warmup=10, settings=settings, of_rank=of_rank),
        Schedule(rates(resume_at=5), peak=1e-3, final=1e-4, total=100, warmup=10),
        Schedule(rates(resume_at=70, batch=16), peak=1e-3, final=1e-4, total=100, warmup=10),
    ]


@declare("e/r17")
def pass_at_k(m, fn):
    rows = torch.tensor([p for s in (0, 1) for row in m.make(s)["ranks"] for p in row])
    ranks = lambda shards: [[(int(n), int(c)) for n, c in s] for s in shards]

    def single(k):
        def of(shards):
            problems = [p for row in ranks(shards) for p in row]
            return sum(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in problems) / len(problems)
        return of

    return [Ranks(metric=lambda shards, k=k: fn(ranks(shards), k=k), rows=rows, single=single(k)) for k in (4, 1, 2)]


@declare("f/d16")
def reward_per_rollout(m, fn):
    rows = torch.tensor([[r["rollout"], r["turn"], r["reward"]] for rank in m.make(0)["ranks"] for r in rank],
                        dtype=torch.float64)
    ranks = lambda shards: [[{"rollout": int(a), "turn": int(b), "reward": float(c)} for a, b, c in s.tolist()] for s in shards]

    def single(shards):
        reward = {}
        for a, _, c in torch.cat(list(shards)).tolist():
            reward.setdefault(int(a), c)
        return sum(reward.values()) / len(reward)

    return Ranks(metric=lambda shards: fn(ranks(shards)), rows=rows, single=single)


@declare("e/r13")
def fixed_shape(m, fn):
    def collate(rows):
        out, fills, beside = filled(fn, rows, "weights")
        out["labels_in_place"] = torch.where((out["ids"] == 1) & (out["labels"] == -100), -999, out["labels"])
        out["rows"] = beside(len(out["ids"]) + len(fills["ids"]))
        out["time"] = beside(out["ids"].shape[1] % 8)
        out["fill_unseen"] = beside((fills["attention_mask"].sum(1) == 0).sum())
        return out

    return Collator(
        collate, m.make(0)["rows"], pads={"ids": 1, "labels": -100, "attention_mask": 0, "labels_in_place": -999},
        targets=lambda r: [x for x in r["labels"] if x != -100],
        columns={
            "ids": lambda r: torch.tensor(r["ids"]),
            "labels_in_place": lambda r: torch.tensor(r["labels"]),
            "attention_mask": lambda r: torch.ones(len(r["ids"]), dtype=torch.long),
            "weights": lambda r: torch.tensor([1.0]),
            "fill_trained": lambda r: torch.tensor([0.0]),
            "rows": lambda r: torch.tensor([6.0]),
            "time": lambda r: torch.tensor([0.0]),
            "fill_unseen": lambda r: torch.tensor([0.0]),
        },
    )


@declare("e/r07")
def split_head(m, fn):
    given = m.make(0)
    model = given.pop("model")

    def logprobs(model, batch):
        ids = batch["ids"]
        lp = (model(ids)[:, :-1] @ model.head.T).log_softmax(-1)
        return F.pad(lp.gather(-1, ids[:, 1:, None])[..., 0], (1, 0))

    return Step(model=model, loss=fn, batch=given, roles={"ids": "ids", "mask": "loss_mask"},
                settings={"tp": Setting(4, "inert", modes=(1, 2, 3, 7, 30))}, family="sft", reduction="mean",
                value_is_loss=True, logprobs=logprobs)


@declare("e/d18")
def scored_groups(m, fn):
    one = lambda rewards, groups: fn(torch.stack([rewards, torch.full_like(rewards, float("nan"))], 1), groups)
    both = lambda rewards, groups: fn(torch.stack([rewards / 2, rewards], 1), groups)  # 1.0 and 0.5 are their weights
    return [AdvantageEstimator(one, scale="free"), AdvantageEstimator(both, scale="free")]


@declare("f/d05")
def ppo_padding(m, fn):
    given = m.make(0)
    model = given.pop("model")
    logprobs = lambda model, batch: m.logprobs(model, batch, m.padding_blocked(batch["ids"]))
    return Step(model=model, loss=fn, batch=given,
                roles={"ids": "ids", "positions": "positions", "mask": "completion_mask", "behaviour": "old_logprobs",
                       "advantages": "advantages"},
                settings={"clip": Setting(0.2, "clip")}, family="policy gradient", reduction="mean", value_is_loss=True,
                wide=("ids", "positions", "completion_mask", "old_logprobs"), logprobs=logprobs)


@declare("f/r05")
def shared_prompt(m, fn):
    given = m.make(0)
    model = given.pop("model")
    packed = {"ids": given["ids"], "part": given["part"] + 1, "advantages": given["advantages"]}  # 0 is padding, 1 the prompt
    loss = lambda model, batch: fn(model, {**batch, "part": batch["part"] - 1})

    def alone(model, batch):
        """Each answer with its prompt in a row of its own."""
        total = 0.0
        for ids, part, advantages in zip(batch["ids"], batch["part"] - 1, batch["advantages"]):
            for a, advantage in enumerate(advantages):
                own = (part == 0) | (part == a + 1)
                total = total + fn(model, {"ids": ids[own][None], "part": (part[own] > 0).long()[None],
                                           "advantages": advantage.reshape(1, 1)})
        return total / batch["advantages"].numel()

    # the same answers as rows, which are packed with those that have the same prompt
    answers, masks = [], []
    for ids, part in zip(given["ids"], given["part"]):
        for a in range(3):
            own = (part == 0) | (part == a + 1)
            answers.append(ids[own].tolist())
            masks.append((part[own] > 0).long().tolist())
    rows = {"ids": padded(answers, 0), "mask": padded(masks, 0).float(), "advantages": given["advantages"].flatten().clone()}

    def pack(model, batch):
        groups = {}
        for ids, mask, advantage in zip(batch["ids"], batch["mask"], batch["advantages"]):
            on = (mask > 0).nonzero()[:, 0].tolist()
            if on != list(range(on[0], on[-1] + 1)) if on else False:
                raise ValueError("an answer is one span of tokens")
            if not torch.equal(mask, (mask > 0).to(mask.dtype)):
                raise ValueError("a token is in an answer or not")
            first, end = (on[0], on[-1] + 1) if on else (1, 1)
            groups.setdefault(tuple(ids[:first].tolist()), []).append((ids[first:end], advantage))
        total = 0.0
        for prompt, own in groups.items():
            part = [0] * len(prompt) + [n + 1 for n, (answer, _) in enumerate(own) for _ in answer]
            total = total + len(own) * fn(model, {
                "ids": torch.cat([torch.tensor(prompt, dtype=torch.long), *(answer for answer, _ in own)])[None],
                "part": torch.tensor(part)[None], "advantages": torch.stack([a for _, a in own])[None],
            })
        return total / len(batch["ids"])

    def logprobs(model, batch):
        ids = batch["ids"]
        return F.pad(model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0], (1, 0))

    return [
        Step(model=model, loss=loss, batch=packed, roles={"ids": "ids"}, family="policy gradient", reduction="mean",
             value_is_loss=True, wide=("ids", "part"), paths={"one answer per row": alone}, name="packed groups"),
        Step(model=model, loss=pack, batch=rows, roles={"ids": "ids", "mask": "mask", "advantages": "advantages"},
             family="policy gradient", reduction="mean", value_is_loss=True, logprobs=logprobs, name="answers as rows"),
    ]


@declare("f/d15")
def geometric_ratio(m, fn):
    ranks = [r for s in (0, 1) for r in m.make(s)["ranks"]]
    rows = torch.cat([
        torch.stack([r["log_ratio"].double(), r["mask"].double(), r["sample_mask"].double()[:, None].expand(-1, 8)], 1)
        for r in ranks
    ])
    metric = lambda shards: fn([{"log_ratio": s[:, 0], "mask": s[:, 1], "sample_mask": s[:, 2, 0]} for s in shards])

    def single(shards):
        values = [float(r[0][r[1] > 0].mean().exp()) for r in torch.cat(list(shards)) if r[2, 0] > 0]
        return sum(values) / len(values)

    return Ranks(metric=metric, rows=rows, single=single)


@declare("e/r12")
def layer_schedule(m, fn):
    def rates(groups):
        def of(total, ranks=1, **settings):
            optimizer = m.make(0)["optimizer"]
            scheduler = fn(optimizer, total=total, **settings)
            out = []
            for _ in range(total):
                lrs = [float(g["lr"]) for g in optimizer.param_groups]
                out.append(lrs[groups] if isinstance(groups, int) else lrs[groups])
                optimizer.step()
                scheduler.step()
            return out
        return of

    top = 0.1 * (1 - 8 / 30)  # freeze 5 and warm-up 4: in full at step 8
    return [
        Schedule(rates(slice(0, 2)), peak=(0.25 * top, 0.5 * top), final=(0.0, 0.0), total=30, warmup=8,
                 settings={"freeze": 5, "warmup": 4, "decay": 0.5}),
        Schedule(rates(2), peak=0.1, final=0.0, total=30, warmup=0),
    ]


@declare("f/r07")
def sharded_optimizer(m, fn):
    given = m.make(0)
    model = given["model"]
    batch = {"ids": torch.cat([b["ids"] for b in given["batches"]])}  # ranks have equal shapes: 2 rows each
    loss = lambda model, b: F.cross_entropy(model(b["ids"])[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-4)

    def update(batches, bound):
        recorded(model, lambda o: fn(model, o, list(batches)))  # each rank steps its own parameters: together one step
        Clipping(optimizer, model, bound).step()
        optimizer.zero_grad()

    plain = lambda model, batches: recorded(model, lambda o: fn(model, o, list(batches)))
    decayed = lambda model, batches: recorded(model, lambda o: fn(model, o, list(batches)), decay=0.1)
    return [
        Accumulation(model, plain, batch, split=(2, 2, 2), what="ranks"),
        Accumulation(model, decayed, batch, split=(2, 2, 2), what="ranks, with a weight decay"),
        Update(model, optimizer, update, loss, batch, split=(2, 2, 2)),
    ]


@declare("e/d15")
def weighted_rewards(m, fn):
    rows = torch.cat(m.make(0)["ranks"]).double().nan_to_num(nan=-1.0)  # -1: does not apply
    absent = lambda shards: [torch.where(s < 0, float("nan"), s) for s in shards]

    def single(w):
        def of(shards):
            every = torch.cat(list(shards))
            return ((every * torch.tensor(w)) * (every >= 0)).sum(1).mean().item()
        return of

    return [Ranks(metric=lambda shards, w=w: fn(absent(shards), reward_weights=w), rows=rows, single=single(w))
            for w in ((0.7, 0.1, 0.2), (0.2, 0.5, 0.3))]


@declare("f/d13")
def dynamic_filter(m, fn):
    made = m.make(0)["rows"] + [{**r, "prompt": r["prompt"] + 6, "completion": f"{r['prompt'] + 6}-{i % 4}"}
                                for i, r in enumerate(m.make(1)["rows"])]
    groups = [made[i:i + 4] for i in range(0, len(made), 4)]
    uneven = [g for g in groups if len({r["reward"] for r in g}) > 1]
    number = lambda completion: int(completion.split("-")[0]) * 10 + int(completion.split("-")[1])

    def stage(examples):
        """An example is a group whose rewards differ; before each stands one whose rewards are equal."""
        rows = []
        for n, group in enumerate(examples):
            rows += [{"prompt": 100 + n, "completion": f"{100 + n}-{i}", "reward": float(n % 2)} for i in range(4)]
            rows += group
        out = fn(rows, size=4 * len(examples))
        cut = lambda key, of=float: torch.tensor([of(r[key]) for r in out], dtype=torch.float64).reshape(-1, 4)
        return {"prompt": cut("prompt"), "completion": cut("completion", number), "total_reward": cut("total_reward"),
                "baseline": cut("baseline"), "filtered_reward": cut("filtered_reward")}

    column = lambda of: lambda group: torch.tensor([float(of(r)) for r in group], dtype=torch.float64)
    reward = column(lambda r: r["reward"])
    out = [Collator(
        stage, uneven,
        columns={
            "prompt": column(lambda r: r["prompt"]), "completion": column(lambda r: number(r["completion"])),
            "total_reward": reward, "filtered_reward": reward,
            "baseline": lambda group: torch.full((4,), sum(r["reward"] for r in group) / 4, dtype=torch.float64),
        },
    )]
    kept = [(r, sum(x["reward"] for x in g) / 4) for g in uneven for r in g]
    for size in (8, 4, 100):
        wanted = [f"{r['prompt']} {r['completion']} {r['reward']} {b} {r['reward']}" for r, b in kept[:size]]
        found = names(lambda: [
            f"{r['prompt']} {r['completion']} {r['total_reward']} {r['baseline']} {r['filtered_reward']}"
            for r in fn(made, size=size)
        ])
        out.append(Census(wanted, found, what=f"rows kept, at most {size}", once=True))
    return out
