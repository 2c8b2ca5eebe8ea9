import copy
import json

import numpy as np
import torch
import torch.nn.functional as F
from earnest_audit import AdapterStart, Census, ChatTemplate, Collator, Ema, Grader, Resume, Setting, Step
from tests.audit.reading2026d.reading import declare


def pad(tensors):
    """Rows of several tensors as one tensor; shorter ones are padded on the right with 0 (mask 0)."""
    wide = max(t.shape[1] for t in tensors)
    return torch.cat([F.pad(t, (0, wide - t.shape[1])) for t in tensors])


def token_logprobs(m):
    return lambda model, batch: m.logp(model, batch["ids"])


def sums(m, model, ids, mask, mean=False):
    total = (m.logp(model, ids) * mask).sum(1)
    return total / mask.sum(1) if mean else total


# ---------------------------------------------------------------- h26
class Average:
    def __init__(self, m, fn):
        self.fn, self.model, self.state, self.last = fn, m.make(0)["model"], None, None

    def __deepcopy__(self, memo):
        new = object.__new__(Average)
        new.fn = self.fn
        new.model, new.state, new.last = copy.deepcopy((self.model, self.state, self.last), memo)
        return new

    @torch.no_grad()
    def put(self, flat):
        at = 0
        for p in self.model.parameters():
            p.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()

    @torch.no_grad()
    def __call__(self, average, current, rate):
        if self.state is None:
            self.put(average)
            self.state = self.fn(self.model, None)  # the first call copies the weights
        elif self.last is None or not torch.equal(self.last, average):
            at = 0
            for name, p in self.model.named_parameters():
                self.state["shadow"][name] = average[at : at + p.numel()].view_as(p).clone()
                at += p.numel()
        self.put(current)
        self.state = self.fn(self.model, self.state, decay=1 - rate)
        current.copy_(torch.cat([p.flatten() for p in self.model.parameters()]))  # shows a model that is written into
        self.last = torch.cat([self.state["shadow"][n].flatten() for n, _ in self.model.named_parameters()])
        return self.last.clone()


@declare("h/r26")
def ema(m, fn):
    model = m.make(0)["model"]
    params = {n for n, _ in model.named_parameters()}
    wanted = {f"first {k} {v.dtype}": float(v.double().sum()) for k, v in model.state_dict().items()}
    state = fn(model, None)
    torch.manual_seed(1)
    for _ in range(3):
        model(torch.randn(8, 4))  # moves the buffers in place
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1)
        if not any(k.startswith("then") for k in wanted):
            found = {f"first {k} {v.dtype}": float(v.double().sum()) for k, v in state["shadow"].items()}
            wanted["then"] = 0.0
        state = fn(model, state)
    wanted.pop("then")
    for k, v in model.state_dict().items():
        wanted[f"later {k} {v.dtype}"] = v.numel() if k in params else float(v.double().sum())
    for k, v in state["shadow"].items():
        found[f"later {k} {v.dtype}"] = v.numel() if k in params else float(v.double().sum())
    size = sum(p.numel() for p in model.parameters())
    return [
        Ema(update=Average(m, fn), size=size, dtype=torch.float32, rate=0.001),
        Census(wanted=wanted, found=found, what="tensors of the average (first call, and buffers later)"),
    ]


# ---------------------------------------------------------------- h27
class Reader:
    def __init__(self, fn, n):
        self.fn, self.n, self.k, self.w, self.after, self.at = fn, n, 0, 0.0, None, 0

    def run(self, steps):
        if self.after is None:  # a run without a break: items before a save that comes later
            seen = self.fn(self.n, self.k + steps)[0][self.k :]
        else:
            seen = self.after[self.at : self.at + steps]
            self.at += steps
        self.k += steps
        for item in seen:
            self.w = 0.9 * self.w + item
        return list(seen)

    def save(self, folder):
        (folder / "state.json").write_text(json.dumps({"k": self.k, "w": self.w, "loader": self.fn(self.n, self.k)[1]}))

    def load(self, folder):
        saved = json.loads((folder / "state.json").read_text())
        self.k, self.w, self.at = saved["k"], saved["w"], 0
        self.after = self.fn(self.n, self.k)[2]


@declare("h/r27")
def loader(m, fn):
    given = m.make(0)
    n = given["n"]
    made = [
        Resume(
            make=lambda: Reader(fn, n),
            run=lambda x, k: x.run(k),
            save=lambda x, folder: x.save(folder),
            load=lambda x, folder: x.load(folder),
            state=lambda x: torch.tensor([x.w, float(x.k)], dtype=torch.float64),
            steps=steps,
        )
        for steps in (given["k"], n, n + 3)  # inside an epoch, at its end, inside the second
    ]
    before, _, after = fn(n, given["k"])
    wanted = [f"epoch {e} item {i}" for e in range(3) for i in range(n)]
    found = [f"epoch {j // n} item {i}" for j, i in enumerate([*before, *after])]
    return [*made, Census(wanted=wanted, found=found, what="items of three epochs", once=True)]


# ---------------------------------------------------------------- h28
@declare("h/r28")
def reward_scale(m, fn):
    given = [m.make(s) for s in range(3)]
    rewards = [row for g in given for row in g["rewards"]]
    dones = [row for g in given for row in g["dones"]]

    class Run:
        at, state, out = 0, None, ()

    def run(x, n):
        x.out, x.state = fn(rewards[x.at : x.at + n], dones[x.at : x.at + n], x.state)
        x.at += n
        return list(range(x.at - n, x.at))

    def save(x, folder):
        (folder / "s.json").write_text(json.dumps({"at": x.at, "state": x.state}))

    def load(x, folder):
        saved = json.loads((folder / "s.json").read_text())
        x.at, x.state = saved["at"], saved["state"]

    def state(x):
        s = x.state or {"n": 0.0, "mean": 0.0, "m2": 0.0, "ret": [0.0] * 3}
        last = x.out[-1] if len(x.out) else [0.0] * 3
        return torch.tensor([s["n"], s["mean"], s["m2"], *s["ret"], *last], dtype=torch.float64)

    def collate(examples):
        outs = [fn(e["rewards"], e["dones"], e["state"]) for e in examples]
        scaled = torch.tensor([o for o, _ in outs], dtype=torch.float64)
        return {
            "scaled": scaled.round(decimals=4).flatten(1),
            "sign": scaled.sign().flatten(1),
            "count": torch.tensor([[s["n"]] for _, s in outs], dtype=torch.float64).round(decimals=6),
        }

    def definition(e):
        r, d, ret, seen, out = np.array(e["rewards"]), np.array(e["dones"]), 0.0, [], []
        for t in range(len(r)):
            ret = 0.99 * ret + r[t]
            seen = np.concatenate([seen, ret])
            n = len(seen) + 1e-4
            mean = seen.sum() / n
            var = (1e-4 * (1 + mean**2) + ((seen - mean) ** 2).sum()) / n  # count 1e-4 of mean 0 and variance 1
            out.append(np.clip(r[t] / np.sqrt(var + 1e-8), -10, 10))
            ret = np.where(d[t], 0.0, ret)
        return torch.tensor(np.array(out)).round(decimals=4).flatten()

    def count(e):
        return torch.tensor([1e-4 + sum(map(len, e["rewards"]))], dtype=torch.float64).round(decimals=6)

    return [
        Resume(make=Run, run=run, save=save, load=load, state=state, steps=6),
        Collator(
            fn=collate,
            examples=[m.make(s) for s in range(4)],
            columns={
                "scaled": definition,
                "sign": lambda e: torch.tensor(e["rewards"], dtype=torch.float64).sign().flatten(),
                "count": count,
            },
        ),
    ]


# ---------------------------------------------------------------- h29, h32
def supervised(fn, examples, targets):
    def collate(examples):
        made = [fn(e) for e in examples]
        wide = max(len(ids) for ids, _ in made)
        ids, labels = torch.full((len(made), wide), -1), torch.full((len(made), wide), -100)
        for i, (row, mask) in enumerate(made):
            ids[i, : len(row)] = torch.tensor(row)
            labels[i, : len(row)] = torch.where(torch.tensor(mask) == 1, torch.tensor(row), torch.tensor(-100))
        return {"input_ids": ids, "labels": labels}

    return Collator(fn=collate, examples=examples, pads={"input_ids": -1, "labels": -100}, targets=targets)


@declare("h/r29")
def thoughts(m, fn):
    def prompt(messages):
        ids = list(fn([*messages, {"role": "assistant", "content": ""}])[0])
        return ids[: len(ids) - 1 - ids[::-1].index(m.END)]  # up to where the answer begins

    more = [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "<think>so</think>yes"}]
    messages = [*m.make(0)["messages"], *more]
    examples = [m.make(s)["messages"] + (more if s % 2 else []) for s in range(4)]
    return [
        ChatTemplate(tokens=fn, prompt=prompt, messages=messages, end=m.END, trained=(5,)),
        supervised(fn, examples, lambda e: [ord(c) for c in e[-1]["content"]] + [m.END]),
    ]


@declare("h/r32")
def tools(m, fn):
    more = [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "yes"}]
    messages = [*m.make(0)["messages"], *more]
    examples = [m.make(s)["messages"] + (more if s % 2 else []) for s in range(4)]
    return [
        ChatTemplate(
            tokens=fn,
            prompt=lambda messages: [ord(c) for c in m.render(list(messages), True)],
            messages=messages,
            end=ord("]"),
        ),
        supervised(
            fn, examples, lambda e: [ord(c) for x in e if x["role"] == "assistant" for c in x["content"] + "]"]
        ),
    ]


# ---------------------------------------------------------------- h30
@declare("h/r30")
def cosine(m, fn):
    row = m.make(0)["row"]

    def grade(answer):
        return fn(dict(row), answer.split())

    def text(n, last):
        return " ".join(["w"] * (n - 1) + [last])

    return [
        Grader(
            grade,
            right=[text(n, "4") for n in (1, 2, 6, 12, 19)],
            wrong=[text(n, "5") for n in (1, 3, 8, 19)] + ["4 w"],
            question="2+2=?",
        ),
        Grader(grade, right=[text(n, "4") for n in (1, 19)], wrong=[text(n, "4") for n in (20, 21, 30)]),  # the limit
        Grader(grade, right=[text(n, "5") for n in (15, 18)], wrong=[text(n, "5") for n in (1, 5)]),  # wrong: long is better
        Grader(grade, right=[text(n, "4") for n in (1, 5)], wrong=[text(n, "4") for n in (15, 18)]),  # right: short is better
    ]


# ---------------------------------------------------------------- h31
@declare("h/r31")
def dora(m, fn):
    given = m.make(0)
    x = given["x"]
    base = copy.deepcopy(given["base"])
    torch.manual_seed(1)
    model = fn(copy.deepcopy(base))
    with torch.no_grad():  # away from the start, where B = 0 gives A no gradient
        model.B.add_(0.3 * torch.randn_like(model.B))
        model.magnitude.mul_(1.1)

    def loss(model, batch, alpha):
        made = fn(copy.deepcopy(base), alpha=alpha)
        out = torch.func.functional_call(made, dict(model.named_parameters()), (batch["x"],))
        return (out - batch["y"]).square().mean()

    return [
        AdapterStart(model=given["base"], attach=fn, outputs=lambda model: model(x)),
        Step(
            model=model,
            loss=loss,
            batch={"x": x, "y": torch.randn(7, 5).double()},
            settings={"alpha": Setting(6.0, "setting")},
            reduction="mean",
            value_is_loss=False,  # the norm is detached
        ),
        Census(
            wanted=["A", "B", "magnitude"],
            found=[n for n, p in fn(copy.deepcopy(base)).named_parameters() if p.requires_grad],
            what="trainable parameters",
        ),
    ]


# ---------------------------------------------------------------- policy gradients
PG = {"ids": "ids", "mask": "mask", "behaviour": "old_logp", "advantages": "adv"}


@declare("h/r33")
def gspo_token(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles=PG,
        settings={"eps": Setting(0.0003, "clip")},
        logprobs=token_logprobs(m),
        reduction="mean",
        empty_rows=False,
        value_is_loss=True,  # one ratio and one advantage per row: the value's own gradient is the same
    )


@declare("h/r34")
def cispo(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles=PG,
        settings={"high": Setting(1.2, "bound")},
        logprobs=token_logprobs(m),
        reduction="mean",
        value_is_loss=False,
    )


@declare("h/r35")
def dual_clip(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles=PG,
        settings={"eps": Setting(0.2, "clip"), "c": Setting(3.0, "bound")},
        logprobs=token_logprobs(m),
        reduction="mean",
        value_is_loss=True,
    )


@declare("h/r36")
def dr_grpo(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles={"ids": "ids", "mask": "mask", "advantages": "adv"},
        settings={"max_len": Setting(10, "setting")},
        logprobs=token_logprobs(m),
        reduction="mean",
        value_is_loss=False,  # exp(lp - lp.detach()) is 1
    )


@declare("h/r42")
def trajectory_balance(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles={"ids": "ids", "mask": "mask", "rewards": "logr"},
        settings={"temp": Setting(0.5, "setting")},
        family="policy gradient",
        reduction="mean",
        value_is_loss=True,
    )


@declare("h/r44")
def entropy_top(m, fn):
    given = m.base(0, rows=5)
    model = given.pop("model")
    given["mask"][2, 3:] = 0  # 20 trained tokens, so that a share of 0.2 is a whole number
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles=PG,
        settings={"top": Setting(0.2, "setting", modes=(0.5, 0.9))},
        logprobs=token_logprobs(m),
        reduction="mean",
        rows_interact=True,
        drops_tokens=True,
        value_is_loss=True,
    )


# ---------------------------------------------------------------- preferences
def halves(m, seeds, *keys):
    """First half chosen, second half rejected, of several draws."""
    draws = [m.make(s) for s in seeds]
    n = len(draws[0]["ids"]) // 2
    return draws[0]["model"], {
        key: (torch.cat([d[key][:n] for d in draws]), torch.cat([d[key][n:] for d in draws])) for key in keys
    }


PAIRS = {
    "chosen": "chosen",
    "rejected": "rejected",
    "chosen_mask": "chosen_mask",
    "rejected_mask": "rejected_mask",
}
REFERENCES = {"reference_chosen": "ref_chosen", "reference_rejected": "ref_rejected"}


def pair_logprobs(m, mean):
    def both(model, b):
        return tuple(sums(m, model, b[s], b[f"{s}_mask"], mean) for s in ("chosen", "rejected"))

    return both


@declare("h/r37")
def kto(m, fn):
    given = m.make(0)
    model = given.pop("model")
    good = given["good"] == 1
    batch = {
        "chosen": given["ids"][good],
        "rejected": given["ids"][~good],
        "chosen_mask": given["mask"][good],
        "rejected_mask": given["mask"][~good],
        "ref_chosen": given["ref_logp"][good],
        "ref_rejected": given["ref_logp"][~good],
        "kl_chosen": given["kl_ids"][good],
        "kl_rejected": given["kl_ids"][~good],
        "kl_ref_chosen": given["kl_ref"][good],
        "kl_ref_rejected": given["kl_ref"][~good],
    }

    def loss(model, b, beta):
        ref = torch.cat([b["ref_chosen"], b["ref_rejected"]])
        rows = {
            "ids": pad([b["chosen"], b["rejected"]]),
            "mask": pad([b["chosen_mask"], b["rejected_mask"]]),
            "kl_ids": pad([b["kl_chosen"], b["kl_rejected"]]),
            "ref_logp": ref,
            "kl_ref": torch.cat([b["kl_ref_chosen"], b["kl_ref_rejected"]]),
            "good": torch.cat([torch.ones_like(b["ref_chosen"]), torch.zeros_like(b["ref_rejected"])]),
        }
        wide = max(rows["ids"].shape[1], rows["kl_ids"].shape[1])
        for key in ("ids", "kl_ids"):
            rows[key] = F.pad(rows[key], (0, wide - rows[key].shape[1]))
        rows["mask"] = F.pad(rows["mask"], (0, wide - 1 - rows["mask"].shape[1]))
        return fn(model, rows, beta=beta)

    paired = Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={**PAIRS, **REFERENCES},
        settings={"beta": Setting(0.1, "setting")},
        logprobs=pair_logprobs(m, mean=False),
        reduction="mean",
        rows_interact=True,
        pairwise=False,
        value_is_loss=False,  # the KL is a constant
        wide=("chosen", "rejected", "chosen_mask", "rejected_mask", "kl_chosen", "kl_rejected"),
    )
    plain = Step(
        model=copy.deepcopy(model),
        loss=fn,
        batch=given,
        roles={"ids": "ids", "mask": "mask", "reference": "ref_logp", "correct": "good"},
        settings={"beta": Setting(0.1, "setting")},
        family="preference",
        reduction="mean",
        rows_interact=True,
        pairwise=False,
        value_is_loss=False,
        wide=("ids", "mask", "kl_ids"),
    )
    return [paired, plain]


@declare("h/r39")
def orpo(m, fn):
    model, h = halves(m, (0, 1), "ids", "mask")
    batch = {"chosen": h["ids"][0], "rejected": h["ids"][1], "chosen_mask": h["mask"][0], "rejected_mask": h["mask"][1]}
    batch["rejected_mask"][2, 3:] = 0

    def loss(model, b, lam):
        rows = {"ids": pad([b["chosen"], b["rejected"]]), "mask": pad([b["chosen_mask"], b["rejected_mask"]])}
        return fn(model, rows, lam=lam)

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles=PAIRS,
        settings={"lam": Setting(0.5, "weight")},
        logprobs=pair_logprobs(m, mean=True),
        reduction="mean",
        empty_rows=False,
        value_is_loss=True,
    )


@declare("h/r49")
def ipo(m, fn):
    model, h = halves(m, (0, 1), "ids", "mask", "ref")
    batch = {
        "chosen": h["ids"][0],
        "rejected": h["ids"][1],
        "chosen_mask": h["mask"][0],
        "rejected_mask": h["mask"][1],
        "ref_chosen": h["ref"][0],
        "ref_rejected": h["ref"][1],
    }
    batch["rejected_mask"][2, 3:] = 0

    def loss(model, b, beta):
        rows = {
            "ids": pad([b["chosen"], b["rejected"]]),
            "mask": pad([b["chosen_mask"], b["rejected_mask"]]),
            "ref": torch.cat([b["ref_chosen"], b["ref_rejected"]]),
        }
        return fn(model, rows, beta=beta)

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={**PAIRS, **REFERENCES},
        settings={"beta": Setting(0.5, "setting")},
        logprobs=pair_logprobs(m, mean=True),
        reduction="mean",
        empty_rows=False,
        value_is_loss=True,
    )


# ---------------------------------------------------------------- distillation
@declare("h/r38")
def top_k(m, fn):
    given = m.make(0)
    model = given.pop("model")
    idx, lp = given["top_idx"], given["top_lp"]
    k, vocab = idx.shape[-1], 20
    rest = torch.log((1 - lp.exp().sum(-1, keepdim=True)) / (vocab - k))
    teacher = rest.expand(*lp.shape[:-1], vocab).clone().scatter(-1, idx, lp)  # the whole distribution of these entries

    def loss(model, b):
        v, i = b["teacher"].log_softmax(-1).topk(k, -1)
        return fn(model, {"ids": b["ids"], "mask": b["mask"], "top_idx": i, "top_lp": v})

    return Step(
        model=model,
        loss=loss,
        batch={"ids": given["ids"], "mask": given["mask"], "teacher": teacher},
        roles={"ids": "ids", "mask": "mask", "teacher": "teacher"},
        student=lambda model, b: model(b["ids"][:, :-1]).log_softmax(-1),
        family="divergence",
        reduction="mean",
        value_is_loss=True,
    )


# ---------------------------------------------------------------- values
@declare("h/r40")
def hl_gauss(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles={"ids": "ids", "mask": "vmask", "returns": "ret"},
        settings={"sigma": Setting(0.75, "setting")},
        reduction="mean",
        value_is_loss=True,
        all_supervised=None,
    )


@declare("h/r48")
def iql(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles={"ids": "ids", "mask": "mask", "returns": "rew"},
        settings={"tau": Setting(0.8, "setting"), "gamma": Setting(0.9, "setting")},
        reduction="mean",
        value_is_loss=False,  # semi-gradients
        wide=("ids", "mask", "rew", "done"),
    )


# ---------------------------------------------------------------- diffusion, contrastive
@declare("h/r41")
def diffusion(m, fn):
    given = m.make(0)
    model = given.pop("model")

    def loss(model, b, mask_id):  # x time: the sum over masked positions / rows, which padding leaves alone
        rows = {"ids": b["ids"], "hit": b["hit"], "t": 1 / b["weights"]}
        return fn(model, rows, mask_id=mask_id) * b["ids"].shape[1]

    return Step(
        model=model,
        loss=loss,
        batch={"ids": given["ids"], "hit": given["hit"], "weights": 1 / given["t"]},
        roles={"ids": "ids", "mask": "hit", "weights": "weights"},
        settings={"mask_id": Setting(19, "setting", modes=(18,))},
        reduction="mean",
        value_is_loss=True,
        all_supervised=None,
    )


@declare("h/r43")
def siglip(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles={"ids": "ids"},
        rows_interact=True,
        value_is_loss=True,
        all_supervised=None,
    )


# ---------------------------------------------------------------- supervised
SFT = {"ids": "ids", "mask": "mask"}


@declare("h/r45")
def unlikelihood(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles=SFT,
        settings={"alpha": Setting(1.0, "weight")},
        family="sft",
        reduction="mean",
        value_is_loss=True,
    )


@declare("h/r46")
def chunked(m, fn):
    given = m.make(0)
    model = given.pop("model")

    def plain(model, batch, chunk):
        return -(m.logp(model, batch["ids"]) * batch["mask"]).sum() / batch["mask"].sum()

    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles=SFT,
        settings={"chunk": Setting(5, "inert", modes=(1, 3, 7, 24, 100))},
        paths={"without chunks": plain},
        logprobs=token_logprobs(m),
        family="sft",
        reduction="mean",
        value_is_loss=True,
    )


@declare("h/r47")
def balance(m, fn):
    given = m.make(0)
    model = given.pop("model")
    given["mask"][1] = torch.tensor([0, 0, 0, 1, 1, 1]).double()  # no token after the last trained one

    def trimmed(model, batch, coef):  # columns after every row's last trained token are padding: all others count
        ids, mask = batch["ids"], batch["mask"]
        used = int(mask.any(0).nonzero().max()) + 1
        return fn(model, {"ids": ids[:, : used + 1], "mask": mask[:, :used]}, coef=coef)

    whole = Step(
        model=model,
        loss=trimmed,
        batch=given,
        roles={"ids": "ids"},
        settings={"coef": Setting(0.01, "weight")},
        rows_interact=True,
        value_is_loss=True,
        name="cross entropy and balance",
    )
    second = m.make(0)
    alone = Step(
        model=second.pop("model"),
        loss=lambda model, batch: fn(model, batch, coef=0.0),
        batch=second,
        roles=SFT,
        family="sft",
        reduction="mean",
        may_idle=("router*",),
        value_is_loss=True,
        name="cross entropy alone",
    )
    return [whole, alone]


@declare("h/r50")
def z_loss(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles=SFT,
        settings={"z": Setting(0.01, "weight")},
        family="sft",
        reduction="mean",
        value_is_loss=True,
    )
