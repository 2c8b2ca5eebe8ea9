"""Declarations of k036 to k070."""
import contextlib
import math

import torch
import torch.nn.functional as F
from torch import nn

from earnest_audit import (
    Accumulation,
    AdvantageEstimator,
    Census,
    ChatTemplate,
    Collator,
    Grader,
    Metric,
    Ranks,
    Resume,
    Schedule,
    Setting,
    Step,
    Update,
)
from tests.audit.reading2026h.reading import declare, no_subject  # noqa: F401


@contextlib.contextmanager
def own_rng():
    with torch.random.fork_rng(devices=[]):
        yield


def padded(rows, pad):
    width = max(len(r) for r in rows)
    return torch.tensor([list(r) + [pad] * (width - len(r)) for r in rows])


def quantised(x):
    return round(x * 1024) / 1024  # exact in fp32 too


def joined(batches):
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


class Clipping:
    """The case has no clip of its own: it is added between the case's call and the optimizer's step."""

    def __init__(self, model, optimizer, bound):
        self.model, self.optimizer, self.bound = model, optimizer, bound

    def __getattr__(self, name):
        return getattr(self.optimizer, name)

    def step(self, *args, **kwargs):
        if self.bound and math.isfinite(self.bound):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.bound)
        return self.optimizer.step(*args, **kwargs)


class Holding:
    """Keeps the gradients that the optimizer would receive, and takes no step."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.held = model, optimizer, None

    def __getattr__(self, name):
        return getattr(self.optimizer, name)

    def step(self, *args, **kwargs):
        self.held = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]


def front(mask):
    """A mask of the targets [B, T-1] at the targets' own index [B, T]."""
    return torch.cat([torch.zeros_like(mask[:, :1]), mask], 1)


def token_logps(model, ids):
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


@declare("r/r15")
def teacher_momentum(m, fn):
    # 1 - m is the rate at which the teacher follows the student: it falls from 1 - base to 0
    def rates(total, ranks, base=0.99):
        return [1 - fn(k, base=base, total=total) for k in range(total)]

    def longer(total, ranks):
        return [1 - fn(k, base=0.99, total=500) for k in range(total)]

    return [
        Schedule(rates=rates, peak=0.01, final=0.0, total=500, settings={"base": 0.99}),
        Schedule(rates=longer, peak=0.01, final=0.0, total=600, ends=500),
    ]


@declare("w/d09")
def last_turn(m, fn):
    header = [m.BOT, m.ROLES["assistant"], m.NL]

    def tokens(messages):
        ids, mask = fn(messages)
        mask = list(mask)
        at = len(m.apply_chat_template(list(messages[:-1])))
        for i in range(at, min(at + len(header), len(mask))):
            mask[i] = 0  # the header may be trained or not
        return ids, mask

    def prompt(messages):
        return m.apply_chat_template(list(messages)) + header

    def collate(examples):
        ids, labels = [], []
        for messages in examples:
            row, mask = tokens(messages)
            label = [t if k else -100 for t, k in zip(row, mask)]
            if row[-1] == m.NL:
                label[-1] = -100  # the new line after the end mark
            ids.append(row)
            labels.append(label)
        return {"ids": padded(ids, -1), "labels": padded(labels, -100)}

    conversation = m.make(0)["messages"]
    examples = [m.make(s)["messages"] for s in range(4)]
    examples.append([{"role": "system", "content": "sum of two"}, *m.make(5)["messages"][2:]])
    return [
        ChatTemplate(tokens=tokens, prompt=prompt, messages=conversation, end=m.EOT, trained=(3,)),
        Collator(
            fn=collate,
            examples=examples,
            pads={"ids": -1, "labels": -100},
            targets=lambda ms: m._words(ms[-1]["content"]) + [m.EOT],
            columns={"ids": lambda ms: m.apply_chat_template(ms)},
        ),
    ]


@declare("q/r07")
def skipped_positions(m, fn):
    rows = m.make(0)["rows"] + m.make(1)["rows"]
    rows.append({**m.make(2)["rows"][0], "u": 0.999, "cut": 1})
    rows.append({**m.make(2)["rows"][1], "u": 0.0, "cut": 11})

    def subject(target):
        def positions(row):
            n = len(row["input_ids"])
            jump = math.floor(row["u"] * (target - n + 1))
            return [t + (jump if t >= row["cut"] else 0) for t in range(n)]

        return Collator(
            fn=lambda examples: fn(examples, target=target),
            examples=rows,
            targets=lambda r: r["input_ids"],
            columns={"input_ids": lambda r: r["input_ids"], "labels": lambda r: r["input_ids"], "position_ids": positions},
        )

    return [subject(48), subject(100)]


@declare("q/r18")
def mixing(m, fn):
    def censuses(weights, n, seed):
        rows = m.make(seed)["rows"]
        out = fn(rows, weights=weights, n=n)
        pools = [[r["id"] for r in rows if r["source"] == s] for s in range(len(weights))]
        drawn = [[r["id"] for r in out if r["source"] == s] for s in range(len(weights))]
        wanted, found = {"all rows": n}, {"all rows": len(out)}
        for s, w in enumerate(weights):
            near = abs(len(drawn[s]) - w * n) <= 1.0 + 1e-9  # "by at most about 1"
            wanted[f"source {s}"] = w * n
            found[f"source {s}"] = w * n if near else len(drawn[s])
        order = [f"source {s}, draw {i}: {p[i % len(p)]}" for s, p in enumerate(pools) for i in range(len(drawn[s]))]
        seen = [f"source {s}, draw {i}: {x}" for s, d in enumerate(drawn) for i, x in enumerate(d)]
        return [
            Census(wanted=wanted, found=found, what="rows of each source"),
            Census(wanted=order, found=seen, what="rows in the order of their source"),
        ]

    def stage(examples):
        out = fn(examples)
        return {"id": torch.tensor([r["id"] for r in out]), "source": torch.tensor([r["source"] for r in out])}

    return [
        *censuses((0.5, 0.3, 0.2), 20, 0),
        *censuses((0.5, 0.3, 0.2), 50, 1),
        *censuses((0.1, 0.2, 0.7), 40, 2),
        Collator(fn=stage, examples=m.make(0)["rows"], rows=False),
    ]


@declare("x/d08")
def evaluation_between(m, fn):
    with own_rng():
        given = m.make(0)
        model, seen = given["model"], []
        drop = next(x for x in model.modules() if isinstance(x, nn.Dropout))

        def record(module, args, out):
            seen.append((torch.is_grad_enabled(), drop.training))

        steps = []
        given["optimizer"].register_step_post_hook(lambda *a: steps.append(1))
        handle = model.register_forward_hook(record)
        torch.manual_seed(0)
        fn(**given)
        handle.remove()
        found, k = [], 0
        for trains, active in seen:
            k += trains
            found.append(f"{'training step %d' % k if trains else 'evaluation'} {'with' if active else 'without'} dropout")
        found += [f"optimizer step {i + 1}" for i in range(len(steps))]
        wanted = [f"training step {i + 1} with dropout" for i in range(6)] + ["evaluation without dropout"]
        wanted += [f"optimizer step {i + 1}" for i in range(6)]
        plain = m.make(0)

    def make():
        x = m.make(0)
        x["at"] = 0
        return x

    def run(x, n):
        places = [(x["at"] + i) % len(x["batches"]) for i in range(n)]
        x["at"] += n
        fn(x["model"], x["optimizer"], [x["batches"][i] for i in places], x["eval_batches"])
        return places

    def save(x, folder):
        state = {"model": x["model"].state_dict(), "optimizer": x["optimizer"].state_dict(), "at": x["at"]}
        torch.save({**state, "rng": torch.get_rng_state()}, folder / "state.pt")

    def load(x, folder):
        state = torch.load(folder / "state.pt")
        x["model"].load_state_dict(state["model"])
        x["optimizer"].load_state_dict(state["optimizer"])
        x["at"] = state["at"]
        torch.set_rng_state(state["rng"])

    # the gradient of a step, where dropout keeps everything
    calm, sgd = plain["model"], plain["optimizer"]
    for x in calm.modules():
        if isinstance(x, nn.Dropout):
            x.p = 0.0

    def update(batches, max_grad_norm):
        whole = joined(batches)  # one optimizer step per batch
        fn(calm, Clipping(calm, sgd, max_grad_norm), [whole], plain["eval_batches"])

    return [
        Census(wanted=wanted, found=found, what="forward passes and optimizer steps"),
        Resume(
            make=make,
            run=run,
            save=save,
            load=load,
            state=lambda x: torch.cat([p.detach().flatten() for p in x["model"].parameters()]),
            steps=3,
        ),
        Update(
            model=calm,
            optimizer=sgd,
            update=update,
            loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
            batch=joined(plain["batches"][:2]),
        ),
    ]


@declare("r/r24")
def jsd(m, fn):
    given = m.make(0)
    model = given.pop("model")
    # the mask and the teacher of the predicted tokens, [B, T-1]; the teacher's last column is unused
    batch = {
        "ids": given["ids"],
        "mask": given["loss_mask"][:, 1:].clone(),
        "teacher_logits": given["teacher_logits"][:, :-1].clone(),
    }

    def loss(model, batch, beta, temperature):
        t = batch["teacher_logits"]
        full = {
            "ids": batch["ids"],
            "loss_mask": front(batch["mask"]),
            "teacher_logits": torch.cat([t, torch.zeros_like(t[:, :1])], 1),
        }
        return fn(model, full, beta=beta, temperature=temperature)

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "teacher": "teacher_logits"},
        settings={"beta": Setting(0.3, "mixture"), "temperature": Setting(0.9, "setting")},
        student=lambda model, batch: model(batch["ids"])[:, :-1],
        wide=("ids", "mask", "teacher_logits"),
        reduction="mean",
        value_is_loss=True,
    )


@declare("r/r03")
def trajectories(m, fn):
    given = m.make(0)
    model = given.pop("model")
    given["mask"] = given.pop("loss_mask")[:, 1:].clone()

    def loss(model, batch):
        names = torch.unique(batch["trajectory"], return_inverse=True)[1]  # 0 ... n-1
        return fn(
            model,
            {
                "ids": batch["ids"],
                "loss_mask": front(batch["mask"]),
                "trajectory": names,
                "advantages": batch["advantages"],
            },
        )

    return Step(
        model=model,
        loss=loss,
        batch=given,
        roles={"ids": "ids", "mask": "mask", "advantages": "advantages", "group": "trajectory"},
        logprobs=lambda model, batch: token_logps(model, batch["ids"]),
        wide=("ids", "mask"),
        reduction="mean",
        value_is_loss=True,
        rows_interact=True,
        empty_rows=False,
    )


@declare("x/r19")
def gradient_norm(m, fn):
    ranks = m.make(0)["ranks"]
    w1 = torch.cat([r["split"]["w1"] for r in ranks])
    w2 = torch.cat([r["split"]["w2"] for r in ranks])
    shared = ranks[0]["replicated"]
    rows = torch.cat([F.pad(w1, (0, 2)), F.pad(w2, (0, 1), value=1.0)])  # the last column: which tensor

    def parts(shards, empty):
        shards = [rows[:0], *shards] if empty else list(shards)
        return [
            {
                "split": {"w1": s[s[:, 5] == 0][:, :4], "w2": s[s[:, 5] == 1][:, :5]},
                "replicated": {k: v.clone() for k, v in shared.items()},
                "rank": r,
            }
            for r, s in enumerate(shards)
        ]

    def single(shards):
        whole = torch.cat(list(shards))[:, :5].double().square().sum()
        return math.sqrt(float(whole + sum(v.double().square().sum() for v in shared.values())))

    return [
        Ranks(metric=lambda shards: float(fn(parts(shards, False))), rows=rows, single=single),
        Ranks(metric=lambda shards: float(fn(parts(shards, True))), rows=rows, single=single),
    ]


def sharded_vocabulary(m, fn, modes):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles={"ids": "ids", "mask": "loss_mask"},
        settings={"tp": Setting(4, "inert", modes=modes)},
        family="sft",
        wide=("ids", "loss_mask"),
        reduction="mean",
        value_is_loss=True,
    )


@declare("r/r11")
def vocabulary_parallel(m, fn):
    return sharded_vocabulary(m, fn, (1, 2, 8, 16))


@declare("q/d01")
def packed_roberta(m, fn):
    start = m.PAD_ID + 1

    def unpack(batch):
        pos = batch["position_ids"][0].tolist()
        cuts = [i for i in range(len(pos)) if i == 0 or pos[i] != pos[i - 1] + 1] + [len(pos)]
        return [{k: v[0, a:b] for k, v in batch.items()} for a, b in zip(cuts, cuts[1:])]

    return Collator(
        fn=fn,
        examples=m.make(0)["rows"] + m.make(1)["rows"][:2] + [{"input_ids": [17, 21]}],
        rows=False,
        unpack=unpack,
        targets=lambda r: r["input_ids"][1:],
        columns={
            "input_ids": lambda r: r["input_ids"],
            "labels": lambda r: [-100] + r["input_ids"][1:],
            "position_ids": lambda r: list(range(start, start + len(r["input_ids"]))),
        },
    )


@declare("q/r06")
def packed_tail(m, fn):
    keys = ("input_ids", "labels", "position_ids")

    def unpack(batch):
        cu, width = [int(c) for c in batch["cu_seqlens"]], batch["input_ids"].shape[1]
        pieces = [(a, b, True) for a, b in zip(cu, cu[1:])]
        pieces += [(a, b, False) for a, b in ((0, cu[0]), (cu[-1], width)) if a < b]  # what no segment covers
        out = []
        for a, b, covered in pieces:
            if covered and a < b and bool((batch["input_ids"][0, a:b] == 0).all()):
                continue  # the tail
            out.append({k: batch[k][0, a:b] for k in keys})
        return out

    def subject(multiple):
        return Collator(
            fn=lambda examples: fn(examples, multiple=multiple),
            examples=m.make(0)["rows"] + m.make(1)["rows"][:2],
            rows=False,
            unpack=unpack,
            targets=lambda r: r["input_ids"][1:],
            columns={
                "input_ids": lambda r: r["input_ids"],
                "labels": lambda r: [-100] + r["input_ids"][1:],
                "position_ids": lambda r: list(range(len(r["input_ids"]))),
            },
        )

    def segments(lengths, multiple):
        rows = [{"input_ids": [7 + i] * n} for i, n in enumerate(lengths)]
        made = fn(rows, multiple=multiple)
        total = sum(lengths)
        width = -(-total // multiple) * multiple
        ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)] + ([width] if width > total else [])
        wanted = {f"boundary {i}": e for i, e in enumerate(ends)}
        found = {f"boundary {i}": int(e) for i, e in enumerate(made["cu_seqlens"].tolist())}
        for k in keys:
            wanted[f"width of {k}"], found[f"width of {k}"] = width, made[k].shape[1]
        wanted["labels"] = total - len(lengths)
        found["labels"] = int((made["labels"] != -100).sum())
        wanted["padding"], found["padding"] = width - total, int((made["input_ids"] == 0).sum())
        return Census(wanted=wanted, found=found, what="segments of a pack")

    return [subject(8), subject(5), segments((5, 3, 6), 8), segments((5, 3, 8), 8), segments((4, 3), 4), segments((9,), 8)]


@declare("r/r13")
def sqrt_cooldown(m, fn):
    def rates(total, ranks, peak=6e-4, warmup=20, decay_fraction=0.2):
        return [fn(k, peak=peak, warmup=warmup, total=total, decay_fraction=decay_fraction) for k in range(total)]

    return [
        Schedule(
            rates=rates,
            peak=6e-4,
            final=0.0,
            total=400,
            warmup=20,
            settings={"peak": 6e-4, "warmup": 20, "decay_fraction": 0.2},
        ),
        Schedule(
            rates=lambda total, ranks: [fn(k, total=400) for k in range(total)],
            peak=6e-4,
            final=0.0,
            total=440,
            warmup=20,
            ends=400,
        ),
    ]


@declare("w/r25")
def soft_bins(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,  # bins is the model's width, so it has no other value
        batch=given,
        roles={"ids": "ids", "mask": "mask", "returns": "returns"},
        settings={
            "low": Setting(-1.2, "setting"),
            "high": Setting(1.2, "setting"),
            "sigma_bins": Setting(0.75, "setting"),
        },
        metrics={"value_error": Metric(low=0.0)},
        wide=("ids", "mask", "returns"),
        reduction="mean",
        value_is_loss=True,
    )


@declare("x/d06")
def routed_pack(m, fn):
    def given():
        made = m.make(0)
        model, shifted = made.pop("model"), made["labels"]
        # labels at the index of their own token, -100 on each document's first
        labels = torch.cat([torch.full_like(shifted[:, :1], -100), shifted[:, :-1]], 1)
        documents = torch.repeat_interleave(torch.arange(len(made["lengths"])), made["lengths"])[None]
        return model, made["ids"], labels, made["lengths"], documents

    def back(labels):
        return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)

    def balanced(model, batch, ring, aux_coef, pad_id):
        n = int(batch["lengths"].sum())  # a pack has no padding of its own
        pack = {"ids": batch["ids"][:, :n], "labels": back(batch["labels"][:, :n]), "lengths": batch["lengths"]}
        return fn(model, pack, ring=ring, aux_coef=aux_coef, pad_id=pad_id)

    def apart(model, batch, ring, pad_id):  # without the term that is taken over the whole pack
        lengths = torch.unique_consecutive(batch["documents"][0], return_counts=True)[1]
        pack = {"ids": batch["ids"], "labels": back(batch["labels"]), "lengths": lengths}
        return fn(model, pack, ring=ring, aux_coef=0.0, pad_id=pad_id)

    inert = {"ring": Setting(2, "inert", modes=(1, 3, 4)), "pad_id": Setting(0, "inert", modes=(1, 5, 39))}
    model, ids, labels, lengths, _ = given()
    first = Step(
        model=model,
        loss=balanced,
        batch={"ids": ids, "labels": labels, "lengths": lengths},
        roles={"ids": "ids", "labels": "labels"},
        settings={**inert, "aux_coef": Setting(0.1, "weight")},
        family="sft",
        wide=("ids", "labels"),
        rows_interact=True,
        empty_rows=False,
        all_supervised=True,
        value_is_loss=True,
        name="the pack with its balancing loss",
    )
    model, ids, labels, _, documents = given()
    second = Step(
        model=model,
        loss=apart,
        batch={"ids": ids, "labels": labels, "documents": documents},
        roles={"ids": "ids", "labels": "labels", "documents": "documents"},
        settings=inert,
        family="sft",
        wide=("ids", "labels", "documents"),
        rows_interact=True,
        empty_rows=False,
        all_supervised=True,
        value_is_loss=True,
        name="the documents of the pack",
    )
    return [first, second]


@declare("r/d10")
def boxed(m, fn):
    def subject(row, also=()):
        a = row["answer"]
        box = "\\boxed{" + a + "}"
        talk = "We solve the system step by step. "
        other = a[:-1] + ("1" if a[-1] != "1" else "2")
        return Grader(
            grade=lambda answer: fn(row, answer),
            right=[
                box,
                talk + box,
                talk * 12 + box,
                talk * 3 + "\\boxed{7} is not it, but " + box,
                talk + box + ".",
                talk * 5 + box + " Both equations hold."[: 300 - len(box)],
                talk * 5 + box + "." * min(120, 300 - len(box)),
                *also,
            ],
            wrong=[
                talk + "\\boxed{7}",
                talk + "\\boxed{}",
                talk + a,
                talk + "\\boxed{" + a,
                talk + "\\boxed{" + other + "}",
                talk + "\\boxed{" + a[1:] + "}",
                talk + "\\boxed{" + a + " }",
                talk + "\\boxed{" + a + a[-1] + "}",
                box + " and then \\boxed{7}",
                box + talk * 12,
            ],
            question=row["prompt"],
        )

    rows = [m.make(s) for s in (0, 1)]
    subjects = [subject(g["row"], (g["completion"],)) for g in rows]
    long = "(12,\\frac{3}{47})," * 8 + "(1234567,89012)"  # 8 * 18 + 15 = 159
    assert len(long) == 159
    prompt = rows[0]["row"]["prompt"]
    return [*subjects, subject({"prompt": prompt, "answer": long}), subject({"prompt": prompt, "answer": "42"})]


@declare("w/r02")
def merged_turns(m, fn):
    rows = [r for r in m.make(0)["rows"]]
    for r in m.make(1)["rows"]:
        rows.append({**r, "traj": r["traj"] + 4})
    for r in rows:
        r["logprobs"] = [quantised(x) for x in r["logprobs"]]
    examples = [[r for r in rows if r["traj"] == t] for t in range(8)]  # the turns of one trajectory

    def stage(examples):
        out = fn([turn for example in examples for turn in example])
        flat = lambda make: torch.tensor([[x for i, r in enumerate(out) for x in make(i, r)]])  # noqa: E731
        return {
            "ids": flat(lambda i, r: r["ids"]),
            "mask": flat(lambda i, r: r["mask"]),
            "logprobs": flat(lambda i, r: r["logprobs"]),
            "labels": flat(lambda i, r: [t if k else -100 for t, k in zip(r["ids"], r["mask"])]),
            "row": flat(lambda i, r: [i] * len(r["ids"])),
            "traj": flat(lambda i, r: [r["traj"]] * len(r["ids"])),
        }

    def unpack(batch):
        documents = []
        for t in dict.fromkeys(batch["traj"][0].tolist()):
            mine = batch["traj"][0] == t
            ids, mask, lp, row = (batch[k][0][mine] for k in ("ids", "mask", "logprobs", "row"))
            contexts = []
            for r in dict.fromkeys(row.tolist()):
                text, trained = ids[row == r].tolist(), mask[row == r].tolist()
                for j, k in enumerate(trained):
                    if k:
                        contexts += text[:j] + [-1]
            documents.append(
                {
                    "ids": ids,
                    "mask": mask,
                    "logprobs": lp,
                    "labels": batch["labels"][0][mine],
                    "traj": batch["traj"][0][mine][:1],
                    "sampled": lp[mask == 1],
                    "elsewhere": (lp[mask == 0] != 0).sum()[None],
                    "contexts": torch.tensor(contexts),
                }
            )
        return documents

    def contexts(example):
        out = []
        for turn in example:
            for j in range(len(turn["completion_ids"])):
                out += turn["prompt_ids"] + turn["completion_ids"][:j] + [-1]
        return out

    return Collator(
        fn=stage,
        examples=examples,
        rows=False,
        unpack=unpack,
        targets=lambda example: [t for turn in example for t in turn["completion_ids"]],
        columns={
            "sampled": lambda example: [x for turn in example for x in turn["logprobs"]],
            "elsewhere": lambda example: [0],
            "contexts": contexts,
            "traj": lambda example: [example[0]["traj"]],
        },
    )


@declare("x/r03")
def turns_without_thoughts(m, fn):
    rows = m.make(0)["rows"] + m.make(1)["rows"]
    for i, r in enumerate(rows):
        r["id"], r["advantage"] = i, quantised(r["advantage"])

    def stage(examples):
        out = fn(examples)
        flat = lambda make: torch.tensor([[x for r in out for x in make(r)]])  # noqa: E731
        return {
            "ids": flat(lambda r: r["ids"]),
            "mask": flat(lambda r: r["mask"]),
            "labels": flat(lambda r: [t if k else -100 for t, k in zip(r["ids"], r["mask"])]),
            "token_episode": flat(lambda r: [r["episode"]] * len(r["ids"])),
            "length": flat(lambda r: [len(r["ids"])]),
            "advantage": flat(lambda r: [r["advantage"]]),
            "weight": flat(lambda r: [r["weight"]]),
            "episode": flat(lambda r: [r["episode"]]),
        }

    def unpack(batch):
        documents = []
        for e in dict.fromkeys(batch["episode"][0].tolist()):
            tokens, mine = batch["token_episode"][0] == e, batch["episode"][0] == e
            one = {k: batch[k][0][tokens] for k in ("ids", "mask", "labels")}
            one |= {k: batch[k][0][mine] for k in ("length", "advantage")}
            one["episode"] = batch["episode"][0][mine]
            one["share"] = torch.tensor([round(float(batch["weight"][0][mine].double().sum()), 4)])
            documents.append(one)
        return documents

    def turns(example):
        history = example["system"] + [m.END]
        for turn in example["turns"]:
            prompt = history + turn["user"] + [m.END]
            yield prompt, [m.OPEN] + turn["think"] + [m.CLOSE] + turn["answer"] + [m.END]
            history = prompt + turn["answer"] + [m.END]  # the thought is gone

    return Collator(
        fn=stage,
        examples=rows,
        rows=False,
        unpack=unpack,
        targets=lambda ex: [t for _, sampled in turns(ex) for t in sampled],
        columns={
            "ids": lambda ex: [t for prompt, sampled in turns(ex) for t in prompt + sampled],
            "mask": lambda ex: [k for p, s in turns(ex) for k in [0] * len(p) + [1] * len(s)],
            "length": lambda ex: [len(p + s) for p, s in turns(ex)],
            "advantage": lambda ex: [ex["advantage"]] * len(ex["turns"]),
            "episode": lambda ex: [ex["id"]] * len(ex["turns"]),
            "share": lambda ex: [1.0],
        },
    )


@declare("w/r01")
def constant_divisor(m, fn):
    given = m.make(0)
    model = given.pop("model")
    given["mask"] = given.pop("loss_mask")[:, 1:].clone()

    def loss(model, batch, max_completion_length):
        groups = torch.unique(batch["groups"], return_inverse=True)[1]  # prompt indices 0 ... n-1
        full = {
            "ids": batch["ids"],
            "loss_mask": front(batch["mask"]),
            "rewards": batch["rewards"],
            "groups": groups,
        }
        return fn(model, full, max_completion_length=max_completion_length)

    return Step(
        model=model,
        loss=loss,
        batch=given,
        roles={"ids": "ids", "mask": "mask", "rewards": "rewards", "group": "groups"},
        settings={"max_completion_length": Setting(64, "setting")},
        logprobs=lambda model, batch: token_logps(model, batch["ids"]),
        wide=("ids", "mask"),
        reduction="mean",
        value_is_loss=False,
        rows_interact=True,
    )


@declare("r/d08")
def grpo(m, fn):
    def beside(extra):
        def advantages(rewards, groups):
            last = int(groups.max()) + 1
            r = torch.cat([rewards, torch.tensor(extra, dtype=rewards.dtype)])
            g = torch.cat([groups, torch.full((len(extra),), last, dtype=groups.dtype)])
            return fn(r, g)[: len(rewards)]

        return advantages

    def make(f, **more):
        return AdvantageEstimator(fn=f, scale="free", over="group", interleaved=False, **more)

    return [
        make(lambda r, g: fn(r, g), groups=4, size=4),  # as planned
        make(lambda r, g: fn(r, g), groups=3, size=4),
        make(beside([0.0, 1.0]), groups=3, size=4),  # prompts with different numbers of samples
        make(beside([1.0]), groups=3, size=4),
    ]


@declare("w/r19")
def bits_per_byte(m, fn):
    per_rank = m.make(0)["per_rank"]
    sizes = per_rank[0]["token_bytes"]
    rows = torch.cat([torch.stack([r["losses"], r["targets"].float()], 1) for r in per_rank])
    special = torch.tensor([[1.5, 0.0], [0.7, -1.0], [2.0, 3.0]])

    def parts(shards):
        return [{"losses": s[:, 0], "targets": s[:, 1].long(), "token_bytes": sizes} for s in shards]

    def single(shards):
        nats, size = 0.0, 0
        for loss, target in torch.cat(list(shards)).tolist():
            n = int(sizes[int(target)]) if target >= 0 else 0
            if n:
                nats, size = nats + loss, size + n
        return nats / (math.log(2) * size) if size else math.inf

    return [
        Ranks(metric=lambda shards: fn(parts(shards)), rows=rows, single=single),
        Ranks(metric=lambda shards: fn(parts([*shards, special])), rows=rows, single=single),
    ]


@declare("w/r12")
def sqrt_decay(m, fn):
    def rates(total, ranks, lr=1e-3, warmup=20, decay_share=0.2):
        return [fn(k, lr=lr, warmup=warmup, total=total, decay_share=decay_share) for k in range(total)]

    return [
        Schedule(
            rates=rates,
            peak=1e-3,
            final=0.0,
            total=200,
            warmup=20,
            settings={"lr": 1e-3, "warmup": 20, "decay_share": 0.2},
        ),
        Schedule(
            rates=lambda total, ranks: [fn(k, total=200) for k in range(total)],
            peak=1e-3,
            final=0.0,
            total=240,
            warmup=20,
            ends=200,
        ),
    ]


@declare("x/r14")
def growing_decay(m, fn):
    # mirrored (start + end - value), so that it falls from 0.4 to 0.04 as a rate does
    def rates(total, ranks, start=0.04, end=0.4):
        return [round(0.44 - fn(k, start=start, end=end, total=total), 12) for k in range(total)]

    return [
        Schedule(rates=rates, peak=0.4, final=0.04, total=100, settings={"start": 0.04, "end": 0.4}),
        Schedule(
            rates=lambda total, ranks: [round(0.44 - fn(k, total=100), 12) for k in range(total)],
            peak=0.4,
            final=0.04,
            total=130,
            ends=100,
        ),
    ]


@declare("q/r13")
def by_tokens(m, fn):
    settings = {
        "lr": 6e-4,
        "small": 1000,
        "full": 8000,
        "ramp": 50,
        "warm_tokens": 20000,
        "decay_tokens": 600000,
        "floor": 0.1,
    }
    seen, after = 0, []
    for s in range(120):
        seen += int(1000 + 7000 * min(1.0, s / 50))
        after.append(seen)
    warmup = next(s for s, t in enumerate(after) if t >= 20000) + 1
    ends = next(s for s, t in enumerate(after) if t >= 600000)

    def rates(total, ranks, **given):
        return [fn(k, **{**settings, **given}) for k in range(total)]

    return Schedule(rates=rates, peak=6e-4, final=6e-5, total=120, warmup=warmup, ends=ends, settings=settings)


@declare("q/d10")
def resumed_epoch(m, fn):
    def subject(n, resume_step, seed):
        with own_rng():
            seen = fn(n=n, resume_step=resume_step, seed=seed)
        return Census(
            wanted=[f"sample {i}" for i in range(n)],
            found=[f"sample {i}" for i in seen],
            what="samples of an epoch",
            once=True,
        )

    return [subject(**m.make(0)), subject(**m.make(3)), subject(50, 1, 7), subject(33, 32, 11)]


@declare("q/r10")
def vocabulary_parallel_2(m, fn):
    return sharded_vocabulary(m, fn, (1, 2, 8, 16))


def context_parallel(m, fn, modes):
    given = m.make(0)
    model = given.pop("model")

    def loss(model, batch, cp):
        more = -batch["ids"].shape[1] % (2 * cp)  # time must divide by 2 * cp
        return fn(model, {k: F.pad(v, (0, more)) for k, v in batch.items()}, cp=cp)

    return Step(
        model=model,
        loss=loss,
        batch=given,
        roles={"ids": "ids", "mask": "loss_mask"},
        settings={"cp": Setting(2, "inert", modes=modes)},
        family="sft",
        wide=("ids", "loss_mask"),
        reduction="mean",
        value_is_loss=True,
    )


@declare("w/r08")
def zigzag(m, fn):
    return context_parallel(m, fn, (1, 4, 8))


@declare("r/d05")
def truncation(m, fn):
    rows = m.make(0)["rows"] + m.make(1)["rows"][:4]

    def subject(side, length, examples):
        def kept(x):
            return x[-length:] if side == "left" else x[:length]

        def stage(examples):
            out = fn(examples, max_length=length, truncation=side)
            labels = [[t if k else -100 for t, k in zip(r["input_ids"], r["loss_mask"])] for r in out]
            return {
                "input_ids": padded([r["input_ids"] for r in out], -1),
                "loss_mask": padded([r["loss_mask"] for r in out], -1),
                "labels": padded(labels, -100),
            }

        return Collator(
            fn=stage,
            examples=examples,
            pads={"input_ids": -1, "loss_mask": -1, "labels": -100},
            targets=lambda r: [t for t, k in zip(kept(r["input_ids"]), kept(r["loss_mask"])) if k],
            columns={
                "input_ids": lambda r: kept(r["input_ids"]),
                "loss_mask": lambda r: kept(r["loss_mask"]),
            },
        )

    short = [r for r in rows if len(r["input_ids"]) <= 16]
    return [subject("left", 12, rows), subject("left", 9, rows), subject("right", 12, rows), subject("error", 16, short)]


@declare("x/r22")
def soft_bins_2(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles={"ids": "ids", "mask": "mask", "returns": "returns"},
        settings={
            "sigma": Setting(0.15, "setting"),
            "low": Setting(-1.0, "setting"),
            "high": Setting(1.0, "setting"),
        },
        metrics={"value_mse": Metric(low=0.0)},
        wide=("ids", "mask", "returns"),
        reduction="mean",
        value_is_loss=True,
    )


@declare("x/d07")
def tool_episodes(m, fn):
    rows = m.make(0)["rows"] + m.make(1)["rows"]
    third, fourth = m.make(2)["rows"][0], m.make(3)["rows"][1]
    third["turns"][1]["tool"] = [9, 10, 11]  # two tools, three turns
    third["turns"].append(fourth["turns"][1])
    rows.append(third)
    for r in rows:
        for turn in r["turns"]:
            turn["logprobs"] = [quantised(x) for x in turn["logprobs"]]
    last = rows[1]["turns"][1]
    last["ids"], last["logprobs"] = last["ids"] + [m.PAD], last["logprobs"] + [-0.5]

    def expected(row):
        ids = [m.BOS, m.USER] + row["prompt"] + [m.EOS, m.ASSISTANT]
        mask, logps = [0] * len(ids), [0.0] * len(ids)
        for turn in row["turns"]:
            for t, lp in zip(turn["ids"], turn["logprobs"]):
                if t not in (m.PAD, m.EOS):
                    ids, mask, logps = ids + [t], mask + [1], logps + [lp]
            if turn["tool"] is None:
                break
            seen = [m.EOS, m.TOOL] + turn["tool"] + [m.EOS, m.ASSISTANT]
            ids, mask, logps = ids + seen, mask + [0] * len(seen), logps + [0.0] * len(seen)
        return ids, mask, logps

    def stage(examples):
        out = fn(examples)
        return {
            "ids": padded([r["ids"] for r in out], -1),
            "mask": padded([r["mask"] for r in out], -1),
            "logprobs": padded([r["logprobs"] for r in out], 1.0),
            "labels": padded([[t if k else -100 for t, k in zip(r["ids"], r["mask"])] for r in out], -100),
        }

    return Collator(
        fn=stage,
        examples=rows,
        pads={"ids": -1, "mask": -1, "logprobs": 1.0, "labels": -100},
        targets=lambda r: [t for t, k in zip(*expected(r)[:2]) if k],
        columns={
            "ids": lambda r: expected(r)[0],
            "mask": lambda r: expected(r)[1],
            "logprobs": lambda r: expected(r)[2],
        },
    )


@declare("w/d01")
def hardest_negatives(m, fn):
    def loss(model, batch):  # the margin loss of a whole batch, as the notes have it
        anchor, positive = model(batch["anchor"]), model(batch["positive"])
        scores = (anchor @ positive.T).detach().fill_diagonal_(-2.0)
        negative = positive[scores.argmax(1)]
        near = F.relu(0.8 - (anchor * positive).sum(-1))
        far = F.relu((anchor * negative).sum(-1) - 0.3)
        return (near + far).mean()

    def subject(mini):
        given = m.make(0)
        model, optimizer = given["model"], given["optimizer"]

        def update(batches, max_grad_norm):
            rows = mini or len(batches[0]["anchor"])
            fn(model, Clipping(model, optimizer, max_grad_norm), [joined(batches)], mini=rows)

        return Update(model=model, optimizer=optimizer, update=update, loss=loss, batch=given["batches"][0])

    return [subject(None), subject(4), subject(3)]


@declare("r/d06")
def training_perplexity(m, fn):
    ranks = m.make(0)["ranks"]
    logp = torch.cat([r["log_prob"] for r in ranks])
    mask = torch.cat([r["response_mask"] for r in ranks])
    real = mask.sum(-1) > 0
    rows = torch.stack([logp[real], mask[real]], 1)  # [N, 2, T]

    def parts(shards, more):
        height = max(len(s) for s in shards) + more
        out = []
        for s in shards:
            filler = rows[:1].clone()
            filler[:, 1] = 0
            s = torch.cat([s, filler.expand(height - len(s), *rows.shape[1:])])
            out.append({"log_prob": s[:, 0], "response_mask": s[:, 1]})
        return out

    def single(shards):
        x = torch.cat(list(shards)).double()
        return float(torch.exp(-(x[:, 0] * x[:, 1]).sum(-1) / x[:, 1].sum(-1)).mean())

    return [
        Ranks(metric=lambda shards: fn(parts(shards, 0)), rows=rows, single=single),
        Ranks(metric=lambda shards: fn(parts(shards, 2)), rows=rows, single=single),
    ]


@declare("w/r22")
def cispo(m, fn):
    given = m.make(0)
    model = given.pop("model")
    given["mask"] = given.pop("loss_mask")[:, 1:].clone()

    def loss(model, batch, eps_high):
        full = {k: batch[k] for k in ("ids", "old_logps", "advantages")}
        return fn(model, {**full, "loss_mask": front(batch["mask"])}, eps_high=eps_high)

    return Step(
        model=model,
        loss=loss,
        batch=given,
        roles={"ids": "ids", "mask": "mask", "behaviour": "old_logps", "advantages": "advantages"},
        settings={"eps_high": Setting(0.3, "bound")},
        metrics={"clipped": Metric(low=0.0, high=1.0, neutral=0.0)},
        logprobs=lambda model, batch: token_logps(model, batch["ids"]),
        wide=("ids", "mask", "old_logps"),
        reduction="mean",
        value_is_loss=False,
    )


@declare("q/r11")
def cooldown(m, fn):
    def rates(total, ranks, lr=1e-3, warmup=10, cooldown=40):
        return [fn(k, lr=lr, warmup=warmup, total=total, cooldown=cooldown) for k in range(total)]

    return [
        Schedule(
            rates=rates,
            peak=1e-3,
            final=0.0,
            total=200,
            warmup=10,
            settings={"lr": 1e-3, "warmup": 10, "cooldown": 40},
        ),
        Schedule(
            rates=lambda total, ranks: [fn(k, total=200) for k in range(total)],
            peak=1e-3,
            final=0.0,
            total=220,
            warmup=10,
            ends=200,
        ),
    ]


@declare("q/r08")
def zigzag_2(m, fn):
    return context_parallel(m, fn, (1, 4, 8))


@declare("r/r10")
def data_parallel(m, fn):
    def given():
        made = m.make(0)
        width = max(b["ids"].shape[1] for b in made["batches"])
        wide = [{k: F.pad(v, (0, width - v.shape[1])) for k, v in b.items()} for b in made["batches"]]
        return made["model"], made["optimizer"], joined(wide), [len(b["ids"]) for b in wide]

    def loss(model, b):
        nll = F.cross_entropy(model(b["ids"])[:, :-1].transpose(1, 2), b["ids"][:, 1:], reduction="none")
        mask = b["loss_mask"][:, 1:]
        return (nll * mask).sum() / mask.sum()

    first, optimizer, batch, split = given()

    def accumulate(model, batches):
        holding = Holding(model, optimizer)
        fn(model, holding, list(batches))
        for p, g in zip(model.parameters(), holding.held):
            p.grad = g

    second, sgd, same, _ = given()

    def update(batches, max_grad_norm):
        fn(second, Clipping(second, sgd, max_grad_norm), list(batches))

    return [
        Accumulation(model=first, accumulate=accumulate, batch=batch, split=split, what="ranks"),
        Update(model=second, optimizer=sgd, update=update, loss=loss, batch=same, split=split),
    ]
