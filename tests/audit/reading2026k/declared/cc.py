import copy
import re
import zlib

import torch
import torch.nn.functional as F
from tests.audit.reading2026k.reading import declare, step_of

from earnest_audit import GAE, Accumulation, AdvantageEstimator, Census, ChatTemplate, Collator, Grader, Setting


def readable(messages, words):
    """The toy tokenizers know few words: another word is read as one of these."""
    if all(w in words for m in messages for w in m["content"].split()):
        return messages
    def known(text):
        return " ".join(w if w in words else words[zlib.crc32(w.encode()) % len(words)] for w in text.split())
    return [dict(m, content=known(m["content"])) for m in messages]


def padded(lists, pad):
    n = max([len(x) for x in lists] + [1])
    return torch.tensor([list(x) + [pad] * (n - len(x)) for x in lists], dtype=torch.long).reshape(len(lists), n)


# ---------------------------------------------------------------- agents

@declare("cc/d01")
def _(module, fn):
    def prompt(messages):
        ids = []
        for m in readable(messages, module.WORDS):
            ids += [module.IM_START, module.ROLES[m["role"]], module.NL] + module.encode(m["content"]) + [module.IM_END, module.NL]
        return ids + [module.IM_START, module.ROLES["assistant"], module.NL]
    return ChatTemplate(tokens=lambda messages: fn(readable(messages, module.WORDS)), prompt=prompt,
                        messages=module.make(0)["messages"], end=module.IM_END)


@declare("cc/d02")
def _(module, fn):
    def of_rollouts(rewards, groups):
        # one entry per rollout; the code takes one row per turn, the number of turns varies
        turns = torch.tensor([1 + (7 * i) % 5 for i in range(len(rewards))])
        rollouts = torch.repeat_interleave(torch.arange(len(rewards)), turns)
        out = fn(rewards[rollouts], groups[rollouts], rollouts)
        return out[turns.cumsum(0) - 1]
    return AdvantageEstimator(of_rollouts, scale="free")


@declare("cc/d03")
def _(module, fn):
    def grader(seed):
        x = module.make(seed)
        row, turns = x["row"], x["completion"]
        others = [w for w in ("red", "blue", "green") if w != row["answer"]]
        def grade(text):
            return fn(row, turns[:-1] + [dict(turns[-1], text=text)])
        return Grader(grade, right=["ANSWER: " + row["answer"]], wrong=["ANSWER: " + w for w in others] + ["call search"])
    return [grader(0), grader(1)]


@declare("cc/r01")
def _(module, fn):
    return GAE(fn, gamma=0.99, lam=0.9, holes=True)


@declare("cc/r02")
def _(module, fn):
    def logprobs(model, batch):
        lp = model(batch["ids"])[:, :-1].log_softmax(-1).gather(-1, batch["ids"][:, 1:, None])[..., 0]
        return F.pad(lp, (1, 0))
    return step_of(module, fn, roles={"ids": "ids", "mask": "action_mask", "rewards": "rewards", "group": "groups"},
                   settings={"eps": Setting(1e-6, "setting")}, logprobs=logprobs, family="policy gradient",
                   rows_interact=True, drops_tokens=True)


@declare("cc/r03")
def _(module, fn):
    def of_episodes(rewards, groups):
        # episodes of two steps, the reward at the second; every episode begins in state 0 and goes on to state 1
        n = len(rewards)
        steps = torch.stack([torch.zeros_like(rewards), rewards], 1).reshape(-1)
        return fn(steps, groups.repeat_interleave(2), torch.arange(n).repeat_interleave(2), torch.tensor([0, 1]).repeat(n))[::2]
    return AdvantageEstimator(of_episodes, scale="free")


# ---------------------------------------------------------------- data, templates, graders

@declare("cc/d04")
def _(module, fn):
    def prompt(messages):
        ids = [module.BOS]
        for m in readable(messages, module.WORDS):
            ids += [module.ROLES[m["role"]]] + [10 + module.WORDS.index(w) for w in m["content"].split()] + [module.END]
        return ids + [module.ROLES["assistant"]]
    return ChatTemplate(tokens=lambda messages: fn(readable(messages, module.WORDS)), prompt=prompt,
                        messages=module.make(0)["messages"], end=module.END)


def boxed(row):
    found = re.findall(r"\\boxed\{(\d+)\}", row["response"])
    return found[-1] if found else None


@declare("cc/d05")
def _(module, fn):
    def stage(rows):
        out = fn(rows)
        return {"id": torch.tensor([r["id"] for r in out]), "reward": torch.tensor([r["reward"] for r in out]),
                "extracted": torch.tensor([-1.0 if r["extracted"] is None else float(r["extracted"]) for r in out])}
    return Collator(stage, module.make(0)["rows"], columns={
        "id": lambda row: row["id"],
        "reward": lambda row: 1.0 if boxed(row) == row["answer"] else 0.0,
        "extracted": lambda row: -1.0 if boxed(row) is None else float(boxed(row))})


@declare("cc/d06")
def _(module, fn):
    def side(row, which):
        ids = (row["prompt"] + row[which] + [2])[:12]
        return ids[:-1] + [2]
    def stage(rows):
        out = fn(rows)
        return {"id": torch.tensor([r["id"] for r in out], dtype=torch.long), "chosen_ids": padded([r["chosen_ids"] for r in out], 0),
                "rejected_ids": padded([r["rejected_ids"] for r in out], 0)}
    return Collator(stage, module.make(0)["rows"], pads={"chosen_ids": 0, "rejected_ids": 0},
                    keeps=lambda row: side(row, "chosen") != side(row, "rejected"),
                    columns={"id": lambda row: row["id"], "chosen_ids": lambda row: side(row, "chosen"), "rejected_ids": lambda row: side(row, "rejected")})


@declare("cc/d07")
def _(module, fn):
    def collate(rows):
        # [2 * rows, time]: first all chosen, then all rejected; a batch without margins has margin 0
        out, n = fn(rows), len(rows)
        return {"chosen": out["input_ids"][:n], "rejected": out["input_ids"][n:], "chosen_attention": out["attention_mask"][:n],
                "rejected_attention": out["attention_mask"][n:], "margin": out.get("margin", torch.zeros(n))}
    return Collator(collate, module.make(0)["rows"], pads={"chosen": 0, "rejected": 0, "chosen_attention": 0, "rejected_attention": 0},
                    columns={"chosen": lambda r: r["chosen_ids"], "rejected": lambda r: r["rejected_ids"],
                             "chosen_attention": lambda r: [1] * len(r["chosen_ids"]), "rejected_attention": lambda r: [1] * len(r["rejected_ids"]),
                             "margin": lambda r: r.get("margin", 0.0)})


@declare("cc/r04")
def _(module, fn):
    def prompt(messages):
        ids = [module.PREFIX]
        for m in readable(messages, module.WORDS):
            ids += [module.ROLES[m["role"]]] + [10 + module.WORDS.index(w) for w in m["content"].split()]
        return ids + [module.ROLES["assistant"]]
    # no end=: an answer ends with the role token of whatever follows, which is not one id
    return ChatTemplate(tokens=lambda messages: fn(readable(messages, module.WORDS)), prompt=prompt, messages=module.make(0)["messages"])


@declare("cc/r05")
def _(module, fn):
    def document(ids):
        t = ids[:-1]
        if module.PRE not in t:
            return t
        i, j = t.index(module.SUF), t.index(module.MID)
        return t[1:i] + t[j + 1:] + t[i + 1:j]  # prefix, middle, suffix
    def stage(rows):
        out = fn(rows)
        return {"id": torch.tensor([r["id"] for r in out]), "ids": padded([r["ids"] for r in out], 0),
                "document": padded([document(r["ids"]) for r in out], 0)}
    return Collator(stage, module.make(0)["rows"], pads={"ids": 0, "document": 0},
                    columns={"id": lambda row: row["id"], "document": lambda row: row["ids"]})


@declare("cc/r06")
def _(module, fn):
    def grade(text):
        return fn({"answer": "7"}, {"text": text, "n_tokens": min(100, len(text.split()))})
    return Grader(grade, right=["Answer: 7", "We add 3 and 4. Answer: 7", "so we add and get more " * 12 + "Answer: 7"],
                  wrong=["Answer: 8", "I think it is 7", "Answer: 7 no wait, Answer: 9", "Answer: 7 " + "abcdefghijklmnopqrstuvwxyz" * 14],
                  question="What is 3 + 4?")


@declare("cc/r07")
def _(module, fn):
    rows = module.make(0)["rows"]
    pads = {"input_ids": 0, "attention_mask": 0, "labels": -100, "KL_input_ids": 0, "KL_attention_mask": 0, "KL_labels": -100}
    def own(rows):
        return {k: v for k, v in fn(rows).items() if not k.startswith("KL_")}
    return [
        Collator(own, rows, pads={k: v for k, v in pads.items() if not k.startswith("KL_")}, targets=lambda r: r["completion_ids"],
                 columns={"input_ids": lambda r: r["prompt_ids"] + r["completion_ids"], "label": lambda r: r["label"]}),
        # the KL columns pair a row with its neighbour, by design
        Collator(fn, rows, pads=pads, rows=False),
    ]


# ---------------------------------------------------------------- mixture of experts

def dense(weights, idx, outputs, experts):
    """sum over the chosen experts of weight * output, from all experts' outputs [experts, ..., width]."""
    full = (F.one_hot(idx, experts) * weights[..., None]).sum(-2)
    return torch.einsum("...e,e...d->...d", full, outputs)


@declare("cc/d08")
def _(module, fn):
    V, E = module.V, module.E
    def twin(model, batch, top_k, aux_coef):
        x = model.embed(batch["ids"])
        prob = model.gate(x).softmax(-1)
        w, idx = prob.topk(top_k, dim=-1)
        if top_k > 1:
            w = w / w.sum(-1, keepdim=True)
        outputs = torch.stack([F.silu(x @ model.up[e]) @ model.down[e] for e in range(E)])
        lp = model.head(x + dense(w, idx, outputs, E)).log_softmax(-1)
        keep = batch["labels"] != -100
        ce = -lp.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0][keep].sum() / keep.sum()
        share = torch.stack([(idx == e).sum() for e in range(E)]) / idx[..., 0].numel()
        return ce + aux_coef * E * (share * prob.mean((0, 1))).sum()
    whole = step_of(module, fn, roles={"ids": "ids", "labels": "labels"}, paths={"all experts, then weighed": twin},
                    settings={"top_k": Setting(1, "setting", modes=(2,)), "aux_coef": Setting(5e-4, "weight")},
                    rows_interact=True, reduction="mean", empty_rows=False, wide=(), name="cross entropy and balance")
    # "the router by both terms": the cross entropy alone reaches every parameter
    alone = step_of(module, lambda model, batch, top_k: fn(model, batch, top_k=top_k, aux_coef=0.0), roles={"ids": "ids", "labels": "labels"},
                    settings={"top_k": Setting(1, "setting", modes=(2,))}, reduction="mean", name="cross entropy")
    return [whole, alone]


@declare("cc/d09")
def _(module, fn):
    x = module.make(0)
    counted = copy.deepcopy(x["model"])
    with torch.no_grad():
        for b in x["batches"]:
            counted(b["x"])
    wanted = {}
    for i, layer in enumerate(counted.layers):
        n, c = layer.tokens_per_expert, layer.load_balance_coeff
        move = torch.zeros_like(n) if c is None else c * torch.sign(n.mean() - n)
        left = n if c is None else torch.zeros_like(n)
        for e in range(module.E):
            wanted[f"layer {i} bias {e}"] = float(move[e] - move.mean())
            wanted[f"layer {i} counter {e}"] = float(left[e])
    fn(**x)
    found = {}
    for i, layer in enumerate(x["model"].layers):
        for e in range(module.E):
            found[f"layer {i} bias {e}"] = float(layer.expert_bias[e])
            found[f"layer {i} counter {e}"] = float(layer.tokens_per_expert[e])
    return Census(wanted, found, what="biases and counters after one step")


@declare("cc/d10")
def _(module, fn):
    V, E = module.V, module.E
    def twin(model, batch, top_k):
        x = model.embed(batch["ids"])
        logit, idx = model.router(x).topk(top_k, dim=-1)
        outputs = torch.stack([F.silu(x @ model.w1[e] + model.b1[e]) @ model.w2[e] + model.b2[e] for e in range(E)])
        lp = model.head(x + dense(logit.softmax(-1), idx, outputs, E))[:, :-1].log_softmax(-1)
        m = batch["loss_mask"][:, 1:]
        return -(lp.gather(-1, batch["ids"][:, 1:, None])[..., 0] * m).sum() / m.sum()
    return step_of(module, fn, roles={"ids": "ids", "mask": "loss_mask"}, settings={"top_k": Setting(2, "setting", modes=(3,))},
                   paths={"all experts, then weighed": twin}, family="sft", reduction="mean")


@declare("cc/r08")
def _(module, fn):
    x = module.make(0)
    model, batches = x["model"], x["batches"]
    batch = {k: torch.cat([b[k] for b in batches]) for k in ("x", "y")}
    def accumulate(model, micro):
        # a rate of 0 and the bias put back: what is left are the gradients
        before = model.expert_bias.clone()
        fn(model, torch.optim.SGD(model.parameters(), lr=0.0), micro)
        with torch.no_grad():
            model.expert_bias.copy_(before)
    y = module.make(0)
    start = y["model"].expert_bias.clone()
    with torch.no_grad():
        score = torch.sigmoid(torch.cat([b["x"] for b in y["batches"]]) @ y["model"].gate.weight.T)
        chosen = (score + start).argsort(-1, descending=True)[:, : module.K]
        load = torch.stack([(chosen == e).sum() for e in range(module.E)]).float()
        d = 0.01 * torch.sign(load.mean() - load)
    fn(**y)
    return [Accumulation(model, accumulate, batch, split=[10, 7, 13]),
            Census({f"bias {e}": float((start + d - d.mean())[e]) for e in range(module.E)},
                   {f"bias {e}": float(y["model"].expert_bias[e]) for e in range(module.E)}, what="biases after one step")]


@declare("cc/r09")
def _(module, fn):
    V, E = module.V, module.E
    def twin(model, batch, top_k, aux, z):
        x = model.embed(batch["ids"])
        logits = model.gate(x)
        prob = logits.exp() / logits.exp().sum(-1, keepdim=True)
        w, idx = prob.topk(top_k, dim=-1)
        outputs = torch.stack([F.silu(x @ model.experts[e]) for e in range(E)])
        lp = model.head(x + dense(w, idx, outputs, E)).log_softmax(-1)
        keep, real = batch["labels"] != -100, batch["attention_mask"].to(prob.dtype)
        ce = -lp.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0][keep].sum() / keep.sum()
        f = ((F.one_hot(idx, E).sum(-2) * real[..., None]).sum((0, 1)) / (real.sum() * top_k)).detach()
        P = (prob * real[..., None]).sum((0, 1)) / real.sum()
        zz = (logits.exp().sum(-1).log() ** 2 * real).sum() / real.sum()
        return ce + aux * E * (f * P).sum() + z * zz
    return step_of(module, fn, roles={"ids": "ids", "attention": "attention_mask", "labels": "labels"},
                   settings={"top_k": Setting(2, "setting", modes=(1, 3)), "aux": Setting(0.01, "weight"), "z": Setting(0.001, "weight")},
                   paths={"all experts, then weighed": twin}, rows_interact=True, reduction="mean", empty_rows=False)


@declare("cc/r10")
def _(module, fn):
    def logprobs(model, batch):
        logits = model(batch["ids"], batch["routed_experts"])[:, :-1]
        return F.pad(logits.log_softmax(-1).gather(-1, batch["ids"][:, 1:, None])[..., 0], (1, 0))
    return step_of(module, fn, roles={"ids": "ids", "mask": "mask", "behaviour": "old_logp", "advantages": "advantages"},
                   settings={"clip": Setting(0.2, "clip")}, logprobs=logprobs, family="policy gradient", reduction="mean",
                   wide=("ids", "mask", "old_logp", "routed_experts"))
