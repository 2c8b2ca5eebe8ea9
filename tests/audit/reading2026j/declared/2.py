import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.audit.reading2026j.reading import declare, no_subject
from earnest_audit import (
    Accumulation, ChatTemplate, Collator, Metric, OuterStep, Ranks, Resume, Schedule, Setting, Step, Update,
)


def contiguous(mask):
    """First place and number of places of each row's single run of ones; anything else the case does not take."""
    mask = mask.bool()
    n = mask.sum(1)
    first = mask.long().argmax(1)
    where = torch.arange(mask.shape[1])
    if not torch.equal(mask, (where >= first[:, None]) & (where < (first + n)[:, None])):
        raise ValueError("the case takes one run of answer tokens")
    return first, n


def token_logps(model, ids):
    """[B, T]: the log-prob of ids[:, t], 0 for the first token."""
    lp = model(ids[:, :-1]).float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return F.pad(lp, (1, 0))


# ---------------------------------------------------------------- m026, m032: outer steps


class Told(nn.Module):
    """A worker's model that its first local batch puts where the replica is to be; then it has a real gradient."""

    def __init__(self, start):
        super().__init__()
        self.w = nn.Parameter(start.detach().clone())

    def forward(self, x):
        scale = 1.0
        if float(x[0, -1]) > 0.5:
            with torch.no_grad():
                self.w.copy_(x[0, :-1])
        else:
            scale = float(x[0, 0])  # of this batch's gradient: some are above the clip and some below
        c = torch.linspace(0.2, 1.0, self.w.numel())
        return scale * (self.w * c).sum() * torch.ones(len(x), 1)


class Outer:
    """An outer optimizer with its memory from round to round."""

    def __init__(self, fn):
        self.fn, self.memory = fn, None

    def round(self, model, lr, momentum, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
        if self.memory is not None:
            optimizer.state[model.w]["momentum_buffer"] = self.memory.clone()
        run(optimizer)
        kept = optimizer.state[model.w].get("momentum_buffer")
        self.memory = None if kept is None else kept.detach().clone()
        return model.w.detach().clone()


class Diloco(Outer):
    def __call__(self, start, locals, lr=0.7, momentum=0.9, inner_lr=0.01, clip=1.0):
        model = Told(start)

        def local(there):
            first = torch.cat([there.detach(), torch.ones(1)])[None]
            large, small = torch.zeros_like(first), torch.zeros_like(first)
            large[0, 0], small[0, 0] = 1.0, 0.1
            return [{"x": x, "y": torch.tensor([y])} for x, y in ((first, 9.0), (small, 1.0), (large, 9.0), (small, -1.0))]

        batches = [[local(there) for there in locals]]
        return self.round(model, lr, momentum, lambda o: self.fn(model, o, batches, inner_lr=inner_lr, clip=clip))


def resumes(m, fn, batches):
    """n calls, each a run of the case; everything that lasts is in the model and the outer optimizer."""

    def make():
        given = m.make(0)
        return {"model": given["model"], "optimizer": given["optimizer"], "at": 0}

    def run(x, n):
        seen = []
        for _ in range(n):
            fn(x["model"], x["optimizer"], batches(x["at"]))
            seen.append(x["at"])
            x["at"] += 1
        return seen

    def save(x, folder):
        state = {"model": x["model"].state_dict(), "optimizer": x["optimizer"].state_dict(), "at": x["at"]}
        torch.save(state, folder / "all.pt")

    def load(x, folder):
        state = torch.load(folder / "all.pt", weights_only=False)
        x["model"].load_state_dict(state["model"])
        x["optimizer"].load_state_dict(state["optimizer"])
        x["at"] = state["at"]

    def state(x):
        kept = [p.detach().flatten() for p in x["model"].parameters()]
        for p in x["model"].parameters():
            for v in x["optimizer"].state.get(p, {}).values():
                if torch.is_tensor(v):
                    kept.append(v.detach().flatten())
        return torch.cat(kept)

    return Resume(make=make, run=run, save=save, load=load, state=state)


@declare("aa/r19")
def diloco_rounds(m, fn):
    given = m.make(0)
    return [
        OuterStep(
            step=Diloco(fn),
            knobs={"lr": 0.7, "momentum": 0.9, "inner_lr": 0.01, "clip": 1.0},
            plain={"inner_lr": 0.0, "clip": 1e9},
        ),
        resumes(m, fn, lambda at: [given["batches"][at % 4], given["batches"][(at + 1) % 4]]),
    ]


class Placed(nn.Module):
    """As Told, for token ids: a first id of r + 1 puts the weights where rank r is to be, 0 leaves them."""

    def __init__(self, start, places):
        super().__init__()
        self.w = nn.Parameter(start.detach().clone())
        self.places = [p.detach().clone() for p in places]

    def forward(self, ids):
        r = int(ids[0, 0])
        if r:
            with torch.no_grad():
                self.w.copy_(self.places[r - 1])
        c = torch.linspace(0.2, 1.0, self.w.numel())
        vocab = max(2, len(self.places) + 1)
        return (self.w * c).sum() * F.one_hot(torch.zeros_like(ids), vocab).float()


class OneRound(Outer):
    def __call__(self, start, locals, lr=0.7, momentum=0.9, inner_lr=0.01):
        model = Placed(start, locals)
        later = torch.tensor([[0, 1, 1]])
        batches = [[{"ids": torch.tensor([[r + 1, 0, 1]])}, {"ids": later}, {"ids": later}] for r in range(len(locals))]
        return self.round(model, lr, momentum, lambda o: self.fn(model, o, batches, inner_lr=inner_lr))


@declare("bb/r06")
def outer_round(m, fn):
    g = torch.Generator().manual_seed(5)
    rounds = [[[{"ids": torch.randint(0, 19, (4, 9), generator=g)} for _ in range(3)] for _ in range(2)] for _ in range(8)]
    return [
        OuterStep(
            step=OneRound(fn),
            knobs={"lr": 0.7, "momentum": 0.9, "inner_lr": 0.01},
            plain={"inner_lr": 0.0},
        ),
        resumes(m, fn, lambda at: rounds[at % 8]),
    ]


# ---------------------------------------------------------------- m027: schedule-free SGD


@declare("aa/r23")
def schedule_free(m, fn):
    given = m.make(0)

    def rates(total, ranks=1):
        fresh = m.make(0)
        model = fresh["model"].double()
        optimizer = type(fresh["optimizer"])(model.parameters())
        params = list(model.parameters())
        seen = []
        hook = optimizer.register_step_pre_hook(
            lambda *_: seen.append(torch.cat([p.grad.flatten() for p in params]).clone())
        )
        z = lambda: torch.cat([optimizer.state[p]["z"].flatten() for p in params]).clone()
        g = torch.Generator().manual_seed(3)
        out = []
        for _ in range(total):
            batch = {"x": torch.randn(5, 6, generator=g).double(), "y": torch.randn(5, generator=g).double()}
            before = z()
            fn(model, optimizer, [batch])
            moved = before - z()
            out.append(round(float(moved @ seen[-1] / (seen[-1] @ seen[-1])), 7))
        hook.remove()
        return out

    # one batch a call: chained calls, between which the weights are in eval mode
    return [
        resumes(m, fn, lambda at: [given["batches"][at % len(given["batches"])]]),
        Schedule(rates=rates, peak=0.05, final=0.05, total=40, warmup=3, ends=3),
    ]


# ---------------------------------------------------------------- m028: ORPO


@declare("y/r12")
def orpo(m, fn):
    given = m.make(0)
    model = given.pop("model")
    batch = {
        "chosen_ids": given["chosen_ids"],
        "chosen_answer": (given["chosen_labels"] != -100).float(),
        "chosen_attention_mask": given["chosen_attention_mask"],
        "rejected_ids": given["rejected_ids"],
        "rejected_answer": (given["rejected_labels"] != -100).float(),
    }

    def labels(ids, answer):
        return ids.masked_fill(answer == 0, -100)

    def loss(model, batch, lam):
        return fn(
            model,
            {
                "chosen_ids": batch["chosen_ids"],
                "chosen_labels": labels(batch["chosen_ids"], batch["chosen_answer"]),
                "chosen_attention_mask": batch["chosen_attention_mask"],
                "rejected_ids": batch["rejected_ids"],
                "rejected_labels": labels(batch["rejected_ids"], batch["rejected_answer"]),
            },
            lam=lam,
        )

    def mean(model, ids, answer):
        lp = token_logps(model, ids)[:, 1:] * answer[:, 1:]
        return lp.sum(1) / answer[:, 1:].sum(1)

    def logprobs(model, batch):
        return (
            mean(model, batch["chosen_ids"], batch["chosen_answer"]),
            mean(model, batch["rejected_ids"], batch["rejected_answer"]),
        )

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={
            "chosen": "chosen_ids",
            "chosen_mask": "chosen_answer",
            "chosen_attention": "chosen_attention_mask",
            "rejected": "rejected_ids",
            "rejected_mask": "rejected_answer",
        },
        settings={"lam": Setting(0.1, "weight")},
        metrics={"nll": Metric(low=0.0), "log_odds": Metric()},
        logprobs=logprobs,
        family="preference",
        value_is_loss=True,
        reduction="mean",
        empty_rows=False,
    )


# ---------------------------------------------------------------- m029: distillation across tokenizers


@declare("y/r19")
def sorted_distillation(m, fn):
    given = m.make(0)
    model = given.pop("model")
    ids, start, length = given["ids"], given["answer_start"], given["answer_len"]
    rows, time = ids.shape
    where = torch.arange(time)
    mask = ((where >= start[:, None]) & (where < (start + length)[:, None])).float()
    # the teacher's probabilities stand at the place of the token that they predict
    teacher = torch.full((rows, time, 40), 1 / 40)
    for b in range(rows):
        n = min(given["teacher_probs"].shape[1], time - int(start[b]))
        teacher[b, start[b]:start[b] + n] = given["teacher_probs"][b, :n]
    batch = {"ids": ids, "mask": mask, "teacher": teacher, "teacher_len": given["teacher_len"]}

    def loss(model, batch, ce_weight, uld_weight):
        first, n = contiguous(batch["mask"])
        if (n < 1).any() or (first < 1).any():
            raise ValueError("an answer has at least one token, and does not begin the row")
        time = batch["ids"].shape[1]
        at = (first[:, None] + torch.arange(time)).clamp(max=time - 1)
        probs = batch["teacher"].gather(1, at[..., None].expand(-1, -1, batch["teacher"].shape[-1]))
        return fn(
            model,
            {
                "ids": batch["ids"],
                "answer_start": first,
                "answer_len": n,
                "teacher_probs": probs,
                "teacher_len": batch["teacher_len"],
            },
            ce_weight=ce_weight,
            uld_weight=uld_weight,
        )

    def student(model, batch):
        p = model(batch["ids"]).log_softmax(-1).exp()
        p = torch.cat([p[:, :1], p[:, :-1]], 1).sort(-1, descending=True).values
        return F.pad(p, (0, 40 - p.shape[-1]))

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "teacher": "teacher"},
        settings={"ce_weight": Setting(1.0, "weight", pure=0.0), "uld_weight": Setting(1.5, "weight")},
        metrics={"ce": Metric(low=0.0, weight="ce_weight"), "uld": Metric(low=0.0, high=2.0, weight="uld_weight")},
        student=student,
        wide=("ids", "mask", "teacher"),
        family="divergence",
        value_is_loss=True,
        reduction="mean",
        empty_rows=False,
    )


# ---------------------------------------------------------------- m030: policy gradient with a world model


@declare("aa/r08")
def agent_world(m, fn):
    given = m.make(0)
    model = given.pop("model")
    batch = {
        "ids": given["ids"],
        "act": (given["role"] == 1).float(),
        "obs": (given["role"] == 2).float(),
        "adv": given["adv"],
    }

    def loss(model, batch, beta):
        act, obs = batch["act"].bool(), batch["obs"].bool()
        if (act & obs).any():
            raise ValueError("a token has one role")
        return fn(model, {"ids": batch["ids"], "role": act.long() + 2 * obs.long(), "adv": batch["adv"]}, beta=beta)

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "mask": "act", "advantages": "adv"},
        masks=("obs",),
        wide=("ids", "act", "obs"),
        settings={"beta": Setting(0.1, "weight")},
        metrics={"policy": Metric(weight=1.0), "world": Metric(low=0.0, weight="beta")},
        logprobs=lambda model, batch: token_logps(model, batch["ids"]),
        family="policy gradient",
        value_is_loss=True,
        reduction="mean",
    )


# ---------------------------------------------------------------- m031: several completions of one prompt in a row


@declare("z/r20")
def branches(m, fn):
    given = m.make(0)
    model = given.pop("model")
    packed = {
        "ids": given["ids"],
        "branch": given["branch"].clamp(min=0),
        "attention": (given["branch"] >= 0).long(),
        "pos": given["pos"],
    }

    def right_padded(attention):
        a = attention.bool()
        if (a[:, 1:] & ~a[:, :-1]).any():
            raise ValueError("padding is on the right")
        return a

    def native(batch):
        a = right_padded(batch["attention"])
        return {"ids": batch["ids"], "branch": batch["branch"].masked_fill(~a, -1), "pos": batch["pos"]}

    def loss(model, batch):
        return fn(model, native(batch))

    def unrolled(model, batch):
        """Each completion in a row of its own, after its prompt."""
        b = native(batch)
        ids, branch, pos = [], [], []
        for i in range(len(b["ids"])):
            row = b["branch"][i]
            for k in range(1, int(row.max()) + 1):
                if not (row == k).any():
                    continue
                keep = (row == 0) | (row == k)
                ids.append(b["ids"][i][keep])
                branch.append((row[keep] == k).long())
                pos.append(b["pos"][i][keep])
        pad = lambda rows, value: nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
        return fn(model, {"ids": pad(ids, 0), "branch": pad(branch, -1), "pos": pad(pos, 0)})

    many = Step(
        model=model,
        loss=loss,
        batch=packed,
        roles={"ids": "ids", "attention": "attention", "positions": "pos"},
        paths={"one row per completion": unrolled},
        wide=("ids", "branch", "attention", "pos"),
        value_is_loss=True,
        reduction="mean",
        name="several completions in a row",
    )

    # one completion per row: plain supervised training
    g = torch.Generator().manual_seed(7)
    time = 11
    ids = torch.zeros(4, time, dtype=torch.long)
    mask, attention, pos = torch.zeros(4, time), torch.zeros(4, time, dtype=torch.long), torch.zeros(4, time, dtype=torch.long)
    for i, (p, c) in enumerate([(4, 7), (2, 5), (6, 2), (3, 4)]):
        ids[i, :p + c] = torch.randint(1, 31, (p + c,), generator=g)
        mask[i, p:p + c], attention[i, :p + c], pos[i, :p + c] = 1.0, 1, torch.arange(p + c)

    def single(model, batch):
        a = right_padded(batch["attention"])
        answer = batch["mask"].bool() & a
        contiguous(answer)
        if answer[:, 0].any() or (answer[:, :-1] & ~answer[:, 1:] & a[:, 1:]).any():
            raise ValueError("a row is a prompt, a completion and padding")
        return fn(model, {"ids": batch["ids"], "branch": answer.long().masked_fill(~a, -1), "pos": batch["pos"]})

    one = Step(
        model=m.make(0)["model"],
        loss=single,
        batch={"ids": ids, "mask": mask, "attention": attention, "pos": pos},
        roles={"ids": "ids", "mask": "mask", "attention": "attention", "positions": "pos"},
        wide=("ids", "mask", "attention", "pos"),
        family="sft",
        value_is_loss=True,
        reduction="mean",
        name="one completion in a row",
    )
    return [many, one]


# ---------------------------------------------------------------- m033: context parallel


@declare("bb/r02")
def context_parallel(m, fn):
    given = m.make(0)
    model = given.pop("model")

    def loss(model, batch, cp_ranks):
        more = -batch["ids"].shape[1] % (2 * cp_ranks)  # time is divisible by 2 * cp_ranks
        return fn(
            model,
            {"ids": F.pad(batch["ids"], (0, more)), "loss_mask": F.pad(batch["loss_mask"], (0, more))},
            cp_ranks=cp_ranks,
        )

    def one_process(model, batch, cp_ranks):
        target = batch["ids"].masked_fill(batch["loss_mask"] == 0, -100)[:, 1:]
        total = F.cross_entropy(model(batch["ids"])[:, :-1].flatten(0, 1), target.flatten(), reduction="sum")
        return total / (target != -100).sum().clamp(min=1)

    return Step(
        model=model,
        loss=loss,
        batch=given,
        roles={"ids": "ids", "mask": "loss_mask"},
        settings={"cp_ranks": Setting(2, "inert", modes=(1, 4))},
        paths={"one process": one_process},
        wide=("ids", "loss_mask"),
        family="sft",
        value_is_loss=True,
        reduction="mean",
    )


# ---------------------------------------------------------------- m034: decontamination


def pieces_of(rows, out):
    """One row per document: its pieces' characters, each after a 1; padding 0. Pieces out of order stay behind."""
    at, found = 0, []
    for row in rows:
        mine = []
        while at < len(out) and out[at]["id"] == row["id"]:
            mine.append(out[at]["text"])
            at += 1
        found.append(mine)
    if found:
        found[-1] += [o["text"] for o in out[at:]]
    coded = [coded_pieces(f) for f in found]
    width = max([1] + [len(c) for c in coded])
    return {
        "text": torch.tensor([c + [0] * (width - len(c)) for c in coded]),
        "id": torch.tensor([row["id"] for row in rows]),
    }


def coded_pieces(texts):
    return [c for t in texts for c in [1] + [ord(x) for x in t]]


@declare("aa/r15")
def decontaminate(m, fn):
    rows = m.make(0)["rows"]
    plain = lambda examples: [{"id": e["id"], "text": e["text"]} for e in examples]

    def each(examples):  # with no n-gram too common, each document is cut by itself
        return pieces_of(examples, fn(examples, common=1000))

    clean = [{"id": i, "text": t} for i, t in enumerate(
        ["sand", "boat lamp", "the old harbour wall", "corn gate milk road drum leaf sail coal " * 4, "Lamp, road; the town of two gates"]
    )]

    def cut(i, before, found, after):
        text = before + found + after
        return {"id": i, "text": text, "a": len(before), "b": len(before) + len(found)}

    words = "sand boat lamp corn wall gate milk road drum leaf sail coal "
    found = [
        cut(0, words, "the old harbour clock", " " + words.strip()),
        cut(1, words * 2, "River Crosses the Town of", " sand boat"),
        cut(2, "lamp ", "seven past nine on friday", " " + words * 2),
        cut(3, "lamp ", "stopped at seven past", " corn"),
        cut(4, words, "clock stopped at seven past nine", ", " + words),
    ]

    def kept(example):
        text, a, b = example["text"], max(0, example["a"] - 15), min(len(example["text"]), example["b"] + 15)
        return torch.tensor(coded_pieces([p for p in (text[:a], text[b:]) if len(p) >= 15]), dtype=torch.long)

    many = [dict(id=i, text=(words + "the old harbour clock ") * n + words) for i, n in enumerate((3, 4, 5))]
    filler = [{"id": 1000 + i, "text": "which river crosses the sand"} for i in range(6)]
    common = [{"id": i, "text": f"{words}which river crosses the {w} {words}"} for i, w in enumerate(("wall", "gate", "milk"))]

    def with_filler(examples):  # six more documents hold the n-gram, so it is ignored
        out = fn(plain(examples) + [dict(f) for f in filler])
        return pieces_of(examples, [o for o in out if o["id"] < 1000])

    def with_settings(examples):
        return pieces_of(examples, fn(plain(examples)))

    same = lambda e: torch.tensor(coded_pieces([e["text"]]))
    pads = {"text": 0}
    return [
        Collator(fn=each, examples=rows, pads=pads),
        Collator(fn=lambda e: pieces_of(e, fn(e)), examples=rows, pads=pads, rows=False),
        Collator(fn=lambda e: pieces_of(e, fn(e)), examples=clean, pads=pads, columns={"text": same}),
        Collator(fn=with_settings, examples=found, pads=pads, columns={"text": kept}),
        Collator(
            fn=with_settings, examples=many, pads=pads,
            columns={"text": lambda e: torch.zeros(0, dtype=torch.long)},  # more than 3 pieces: dropped
        ),
        Collator(fn=with_filler, examples=common, pads=pads, columns={"text": same}),
    ]


# ---------------------------------------------------------------- m035: clip over tensor-parallel ranks


@declare("bb/r08")
def tensor_parallel_clip(m, fn):
    def made(ranks):
        given = m.make(0)
        model, optimizer = given["model"], given["optimizer"]
        batch = {"ids": torch.cat([b["ids"] for b in given["batches"]])}

        def update(batches, max_grad_norm):
            # micro-batches have the same number of tokens: one row each
            rows = [{"ids": row[None]} for b in batches for row in b["ids"]]
            fn(model, optimizer, rows, tp_ranks=ranks, max_norm=max_grad_norm)

        def loss(model, batch):
            return F.cross_entropy(model(batch["ids"][:, :-1]).flatten(0, 1), batch["ids"][:, 1:].flatten())

        return Update(model=model, optimizer=optimizer, update=update, loss=loss, batch=batch)

    return [made(2), made(4), made(1)]


# ---------------------------------------------------------------- m036: noise scale


@declare("bb/r21")
def noise_scale(m, fn):
    rows = torch.stack(m.make(0)["ranks"])  # a row is a rank's table [steps, dim]

    def made(small):
        def single(shards):
            tables = torch.cat(list(shards))
            spread = tables.var(0, unbiased=True).sum(-1)  # of one rank's mean of `small` samples
            signal = tables.mean(0).square().sum(-1) - spread / len(tables)
            return float((small * spread).mean() / signal.mean())

        return Ranks(metric=lambda shards: fn([t for s in shards for t in s], small=small), rows=rows, single=single)

    return [made(4), made(7)]


# ---------------------------------------------------------------- m037: schedule


@declare("bb/r11")
def cosine_constant_anneal(m, fn):
    settings = {
        "peak": 3e-4, "const": 1.65e-4, "minimum": 3e-5, "warmup": 20, "cooldown": 100, "anneal_start": 300, "anneal": 50,
    }

    def rates(total, ranks=1, **s):
        return [fn(k, **{**settings, **s}) for k in range(total)]

    def never(total, ranks=1, **s):
        return [fn(k, **{**settings, **s, "anneal_start": None}) for k in range(total)]

    return [
        Schedule(rates=rates, peak=3e-4, final=3e-5, total=400, warmup=20, ends=350, settings=settings),
        Schedule(
            rates=never, peak=3e-4, final=1.65e-4, total=400, warmup=20, ends=120,
            settings={k: settings[k] for k in ("peak", "const", "warmup", "cooldown")},
        ),
    ]


# ---------------------------------------------------------------- m038: turn ratios


@declare("aa/r03")
def turn_ratios(m, fn):
    given = m.make(0, rows=12)  # so that both bounds are met
    model = given.pop("model")
    batch = {
        "ids": given["ids"],
        "mask": (given["turn"] >= 0).float(),
        "turn": given["turn"].clamp(min=0),
        "old_logp": given["old_logp"],
        "adv": given["adv"],
    }

    def loss(model, batch, low, high):
        turn = batch["turn"].masked_fill(batch["mask"] == 0, -1)
        return fn(
            model, {"ids": batch["ids"], "turn": turn, "old_logp": batch["old_logp"], "adv": batch["adv"]}, low=low, high=high
        )

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "behaviour": "old_logp", "advantages": "adv"},
        wide=("ids", "mask", "turn", "old_logp"),
        settings={"low": Setting(0.05, "bound"), "high": Setting(0.08, "bound")},
        metrics={"turns": Metric(low=0.0, moves=False)},
        logprobs=lambda model, batch: token_logps(model, batch["ids"]),
        family="policy gradient",
        value_is_loss=True,
        reduction="mean",
    )


# ---------------------------------------------------------------- m039: pass@k


@declare("bb/r19")
def pass_at_k(m, fn):
    rows = torch.cat([torch.stack([r["prompt"], r["correct"]], 1) for r in m.make(0)["ranks"]])

    def made(k):
        def metric(shards):
            return fn([{"prompt": s[:, 0].long(), "correct": s[:, 1].long()} for s in shards], k=k)

        def single(shards):
            every = torch.cat(list(shards)).long()
            values = []
            for prompt in every[:, 0].unique().tolist():
                right = every[every[:, 0] == prompt, 1].tolist()
                if len(right) >= k:
                    drawn = [max(c) for c in itertools.combinations(right, k)]
                    values.append(sum(drawn) / len(drawn))
            return sum(values) / len(values) if values else float("nan")

        return Ranks(metric=metric, rows=rows, single=single)

    return [made(3), made(2)]


# ---------------------------------------------------------------- m040: Plackett-Luce


@declare("y/r15")
def listwise(m, fn):
    given = m.make(0)
    model = given.pop("model")
    lists = Step(
        model=model,
        loss=lambda model, batch, beta: fn(model, batch, beta=beta),
        batch=given,
        roles={"reference": "ref_logps"},
        settings={"beta": Setting(0.1, "setting")},
        family="preference",
        value_is_loss=True,
        reduction="mean",
        name="lists of answers",
    )

    # two answers, the others missing: a pair
    pairs = {
        "chosen": given["ids"][:, 0].clone(),
        "chosen_mask": given["completion_mask"][:, 0].clone(),
        "rejected": given["ids"][:, 1].clone(),
        "rejected_mask": given["completion_mask"][:, 1].clone(),
        "ref_chosen": given["ref_logps"][:, 0].clone(),
        "ref_rejected": given["ref_logps"][:, 1].clone(),
    }

    def of_four(a, b):
        width = max(a.shape[1], b.shape[1])
        a, b = F.pad(a, (0, width - a.shape[1])), F.pad(b, (0, width - b.shape[1]))
        return torch.stack([a, b, torch.zeros_like(a), torch.zeros_like(a)], 1)

    def loss(model, batch, beta):
        none = torch.zeros_like(batch["ref_chosen"])
        have = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(len(batch["chosen"]), 4)
        return fn(
            model,
            {
                "ids": of_four(batch["chosen"], batch["rejected"]),
                "completion_mask": of_four(batch["chosen_mask"], batch["rejected_mask"]),
                "answer_mask": have,
                "ref_logps": torch.stack([batch["ref_chosen"], batch["ref_rejected"], none, none], 1),
            },
            beta=beta,
        )

    def logprobs(model, batch):
        return tuple((token_logps(model, batch[k]) * batch[f"{k}_mask"]).sum(1) for k in ("chosen", "rejected"))

    two = Step(
        model=m.make(0)["model"],
        loss=loss,
        batch=pairs,
        roles={
            "chosen": "chosen",
            "chosen_mask": "chosen_mask",
            "rejected": "rejected",
            "rejected_mask": "rejected_mask",
            "reference_chosen": "ref_chosen",
            "reference_rejected": "ref_rejected",
        },
        settings={"beta": Setting(0.1, "setting")},
        logprobs=logprobs,
        family="preference",
        value_is_loss=True,
        reduction="mean",
        name="two answers",
    )
    return [lists, two]


# ---------------------------------------------------------------- m041: KTO


@declare("y/r11")
def kto(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=lambda model, batch, beta, weight_good, weight_bad: fn(
            model, batch, beta=beta, weight_good=weight_good, weight_bad=weight_bad
        ),
        batch=given,
        roles={"ids": "ids", "mask": "completion_mask", "correct": "desirable", "reference": "ref_logps"},
        settings={
            "beta": Setting(0.1, "setting"),
            "weight_good": Setting(1.0, "weight"),
            "weight_bad": Setting(1.33, "weight"),
        },
        metrics={"kl": Metric(low=0.0)},
        wide=("ids", "completion_mask", "kl_ids", "kl_mask"),
        family="preference",
        pairwise=False,
        rows_interact=True,  # one baseline for the batch
        value_is_loss=False,  # the baseline is detached
        reduction="mean",
    )


# ---------------------------------------------------------------- m042: prefix LM


@declare("z/r08")
def prefix_lm(m, fn):
    given = m.make(0)
    model = given.pop("model")
    where = torch.arange(given["ids"].shape[1])
    batch = {
        "ids": given["ids"],
        "mask": ((where >= given["prefix_len"][:, None]) & (where < given["length"][:, None])).float(),
        "attention": (where < given["length"][:, None]).long(),
    }

    def loss(model, batch):
        a = batch["attention"].bool()
        if (a[:, 1:] & ~a[:, :-1]).any():
            raise ValueError("padding is on the right")
        first, n = contiguous(batch["mask"].bool() & a)
        if (n < 1).any() or (first < 1).any():
            raise ValueError("a row has a prefix and a suffix")
        return fn(model, {"ids": batch["ids"], "prefix_len": first, "length": first + n})

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "attention": "attention"},
        wide=("ids", "mask", "attention"),
        family="sft",
        value_is_loss=True,
        reduction="mean",
        empty_rows=False,
    )


# ---------------------------------------------------------------- m043: chat template with channels


@declare("aa/r02")
def channels(m, fn):
    say = lambda channel, text, **k: {"role": "assistant", "channel": channel, "content": text, **k}
    longer = [
        {"role": "system", "content": "rain warm"},
        {"role": "user", "content": "ask nine wind"},
        say("final", "Oslo rain warm"),
        {"role": "user", "content": "wind Oslo nine"},
        say("analysis", "ask warm rain"),
        say("commentary", "wind nine", recipient="weather"),
        {"role": "tool", "name": "weather", "content": "nine warm"},
        say("commentary", "Oslo nine", recipient="weather"),
        {"role": "tool", "name": "weather", "content": "wind rain"},
        say("analysis", "rain rain ask"),
        say("final", "nine Oslo wind"),
    ]

    def prompt(messages):
        ids = list(fn(messages)[0])
        if messages[-1]["role"] != "assistant":  # else the model goes on by itself, from <|start|>
            ids += [m.START] + list(b"assistant")
        return ids

    ends = lambda ids: [m.END if i in (m.CALL, m.RETURN) else i for i in ids]

    def with_one_end(messages):
        ids, mask = fn(messages)
        return ends(ids), mask

    made = []
    for messages in (m.make(0)["messages"], longer):
        query = max(i for i, x in enumerate(messages) if x["role"] == "user")
        trained = [i for i, x in enumerate(messages) if x["role"] == "assistant" and i > query]
        made.append(ChatTemplate(tokens=fn, prompt=prompt, messages=messages, trained=trained))
        made.append(
            ChatTemplate(
                tokens=with_one_end, prompt=lambda x: ends(prompt(x)), messages=messages, end=m.END, trained=trained
            )
        )
    return made


# ---------------------------------------------------------------- m044: effective sample size


@declare("bb/r22")
def effective_share(m, fn):
    def single(shards):
        x = torch.cat(list(shards))
        w = x.softmax(0)
        return float(1 / (len(x) * w.square().sum()))

    return Ranks(metric=lambda shards: fn(list(shards)), rows=torch.cat(m.make(0)["ranks"]), single=single)


# ---------------------------------------------------------------- m045: discretisation steps


@declare("bb/r10")
def discretisation(m, fn):
    # it rises from s0 to s1 + 1: mirrored, it falls from s1 + 1 to s0, as a rate does
    def made(share):
        def rates(total, ranks=1, s0=2, s1=150):
            return [s0 + s1 + 1 - fn(k, s0=s0, s1=s1, total=int(share * total)) for k in range(total)]

        whole = int(share * 1000)
        ends = next(k for k in range(whole + 1) if k * (151**2 - 4) + 4 * whole > 150**2 * whole)
        return Schedule(rates=rates, peak=151.0, final=2.0, total=1000, ends=ends, settings={"s0": 2, "s1": 150})

    return [made(1.0), made(0.8)]


# ---------------------------------------------------------------- m046: cyclical weight


@declare("bb/r13")
def cyclical(m, fn):
    def rates(total, ranks=1, cycles=4, ramp=0.5):
        return [fn(k, total=total, cycles=cycles, ramp=ramp) for k in range(total)]

    return Schedule(
        rates=rates, peak=1.0, final=1.0, total=400, warmup=50, ends=350, restarts=True, settings={"cycles": 4, "ramp": 0.5}
    )


# ---------------------------------------------------------------- m047: KTO collator


@declare("aa/r16")
def kto_collator(m, fn):
    rows = m.make(0)["rows"] + [
        {"prompt": [7, 8], "completion": [9, 10, 11, 12], "label": True},
        {"prompt": [13, 14, 15, 16, 17], "completion": [18], "label": False},
    ]
    full = lambda prompt, completion: torch.tensor(list(prompt) + list(completion) + [1])

    def own(examples):  # a last row, so that there are two
        out = fn(list(examples) + [{"prompt": [2], "completion": [3], "label": True}])
        return {k: out[k][:-1] for k in ("input_ids", "attention_mask", "labels")} | {"desirable": out["desirable"][:-1].long()}

    others = [[21], [22, 23, 24, 25, 26, 27, 28, 29], [30, 31], [32, 33, 34], [35, 36], [37], [38, 39, 2, 3], [4, 5, 6]]
    mixed = [{**row, "other": others[i]} for i, row in enumerate(rows)]

    def mismatched(examples):  # before each row stands one with the completion that it is to be paired with
        pairs = []
        for e in examples:
            pairs += [{"prompt": [5], "completion": e["other"], "label": False}, e]
        out = fn(pairs)
        return {k: out[k][1::2] for k in ("kl_input_ids", "kl_attention_mask", "kl_labels")}

    return [
        Collator(
            fn=own,
            examples=rows,
            pads={"input_ids": 0, "attention_mask": 0, "labels": -100},
            targets=lambda e: list(e["completion"]) + [1],
            columns={
                "input_ids": lambda e: full(e["prompt"], e["completion"]),
                "attention_mask": lambda e: torch.ones(len(e["prompt"]) + len(e["completion"]) + 1, dtype=torch.long),
                "desirable": lambda e: int(e["label"]),
            },
        ),
        Collator(
            fn=mismatched,
            examples=mixed,
            pads={"kl_input_ids": 0, "kl_attention_mask": 0, "kl_labels": -100},
            targets=lambda e: list(e["other"]) + [1],
            labels="kl_labels",
            columns={
                "kl_input_ids": lambda e: full(e["prompt"], e["other"]),
                "kl_attention_mask": lambda e: torch.ones(len(e["prompt"]) + len(e["other"]) + 1, dtype=torch.long),
            },
        ),
        Collator(
            fn=fn,
            examples=rows,
            pads={"input_ids": 0, "attention_mask": 0, "labels": -100, "kl_input_ids": 0, "kl_attention_mask": 0, "kl_labels": -100},
            rows=False,
        ),
    ]


# ---------------------------------------------------------------- m048: label smoothing


@declare("z/r03")
def smoothed(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=lambda model, batch, eps: fn(model, batch, eps=eps),
        batch=given,
        roles={"ids": "ids", "labels": "target"},
        ignore_index=0,
        wide=("ids", "target"),
        settings={"eps": Setting(0.1, "smoothing")},
        metrics={"nll_bits": Metric(low=0.0), "tokens": Metric(low=0.0, moves=False)},
        family="sft",
        value_is_loss=True,
        reduction="mean",
        all_supervised=True,
    )


# ---------------------------------------------------------------- m049: likelihood weighted by its own probability


@declare("z/r04")
def weighted_by_probability(m, fn):
    given = m.make(0)
    model = given.pop("model")

    def minus_mean_probability(model, batch):
        w = batch["loss_mask"][:, 1:]
        return -(token_logps(model, batch["ids"])[:, 1:].exp() * w).sum() / w.sum()

    return Step(
        model=model,
        loss=lambda model, batch: fn(model, batch),
        batch=given,
        roles={"ids": "ids", "mask": "loss_mask"},
        paths={"minus the mean probability": minus_mean_probability},
        wide=("ids", "loss_mask"),
        family="sft",
        value_is_loss=False,
        reduction="mean",
    )


# ---------------------------------------------------------------- m050: a scheduler over ranks


@declare("bb/r16")
def stepper(m, fn):
    def update(optimizer):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        optimizer.step()

    def made(skips):
        def rates(total, ranks=1, warmup=2):
            optimizer = m.make(0)["optimizer"]
            # total and warmup are counted in single-process steps
            schedule = fn(optimizer, world=ranks, warmup=warmup * ranks, total=total * ranks)
            out = []
            for k in range(total):
                schedule.step(sync=False)  # a micro-batch without an update
                if skips and k % 3 == 1:
                    schedule.step(sync=True, skipped=True)  # an update that a loss scaler skipped
                assert schedule.get_last_lr() == [g["lr"] for g in optimizer.param_groups]
                out.append(schedule.get_last_lr()[0])
                update(optimizer)
                schedule.step()
            return out

        return Schedule(rates=rates, peak=0.1, final=0.0, total=20, warmup=2, settings={"warmup": 2})

    def make():
        optimizer = m.make(0)["optimizer"]
        return {"optimizer": optimizer, "schedule": fn(optimizer), "at": 0}

    def run(x, n):
        seen = []
        for _ in range(n):
            update(x["optimizer"])
            x["schedule"].step()
            seen.append(x["at"])
            x["at"] += 1
        return seen

    def params(x):
        return x["optimizer"].param_groups[0]["params"]

    def save(x, folder):
        state = {
            "params": [p.detach().clone() for p in params(x)],
            "optimizer": x["optimizer"].state_dict(),
            "schedule": x["schedule"].state_dict(),
            "at": x["at"],
        }
        torch.save(state, folder / "all.pt")

    def load(x, folder):
        state = torch.load(folder / "all.pt", weights_only=False)
        with torch.no_grad():
            for p, saved in zip(params(x), state["params"]):
                p.copy_(saved)
        x["optimizer"].load_state_dict(state["optimizer"])
        x["schedule"].load_state_dict(state["schedule"])
        x["at"] = state["at"]

    def state(x):
        rate = torch.tensor([g["lr"] for g in x["optimizer"].param_groups])
        return torch.cat([p.detach().flatten() for p in params(x)] + [rate])

    return [made(False), made(True), Resume(make=make, run=run, save=save, load=load, state=state)]
