"""Declarations of k071 to k105."""
import copy

import torch
import torch.nn.functional as F

from earnest_audit import (
    GAE,
    Accumulation,
    AdvantageEstimator,
    Census,
    ChatTemplate,
    Collator,
    Merge,
    MergedLayer,
    Metric,
    Ranks,
    Schedule,
    Setting,
    Step,
    Update,
)
from tests.audit.reading2026h.reading import declare


# helpers -------------------------------------------------------------------------------------------------------------
class Catch(torch.optim.SGD):
    """An optimizer that keeps the gradients that it receives, and moves nothing."""

    def __init__(self, params):
        super().__init__(params, lr=0.0)
        self.caught = None

    def step(self, closure=None):
        self.caught = [None if p.grad is None else p.grad.detach().clone() for g in self.param_groups for p in g["params"]]


def accumulator(call):
    """call(model, optimizer, batches) makes an update; here its gradient stays in .grad"""

    def accumulate(model, batches):
        params = list(model.parameters())
        opt = Catch(params)
        call(model, opt, list(batches))
        for p, g in zip(params, opt.caught):
            p.grad = g

    return accumulate


def over_ranks(batches):
    return [[b] for b in batches]


def over_micro(batches):
    return [list(batches)]


def over_both(batches):
    """two ranks with several micro-batches each"""
    batches = list(batches)
    half = len(batches) // 2
    return [batches[:half], batches[half:]] if half else [batches]


def cat(batches):
    batches = list(batches)
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


def widen(t, width):
    return F.pad(t, (0, width - t.shape[1]))


def joined(batches):
    batches = list(batches)
    width = max(b["ids"].shape[1] for b in batches)
    return {k: torch.cat([widen(b[k], width) for b in batches]) for k in batches[0]}


def front(t):
    """targets [B, T-1] -> [B, T] at the token's own place"""
    return F.pad(t, (1, 0))


def firsts(documents):
    """1 on the first token of each document"""
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return first


def restart(documents):
    """position of each token in its document"""
    t = torch.arange(documents.shape[1]).expand_as(documents)
    start = torch.where(firsts(documents), t, torch.zeros_like(t)).cummax(1).values
    return t - start


def spans(documents):
    """(row, begin, end) of each document"""
    out, width = [], documents.shape[1]
    for r, row in enumerate(firsts(documents)):
        at = row.nonzero()[:, 0].tolist() + [width]
        out += [(r, a, b) for a, b in zip(at, at[1:])]
    return out


# agents --------------------------------------------------------------------------------------------------------------
@declare("r/r01")
def gae_gaps(m, fn):
    def gae(rewards, values, mask, gamma, lam):
        mask = mask.to(rewards.dtype)
        return fn(rewards, values, mask, gamma=gamma, lam=lam) * mask  # only entries with mask 1 have a meaning

    return GAE(gae, gamma=0.95, lam=0.9, holes=True, length=14)


@declare("w/r04")
def gae_observations(m, fn):
    def gae(rewards, values, mask, gamma, lam):
        return fn(rewards, torch.arange(len(rewards)), values, mask.to(rewards.dtype), gamma=gamma, lam=lam)

    given = m.make(0)
    out = fn(**given)
    past = float((out * (1 - given["mask"])).abs().sum())
    return [
        GAE(gae, gamma=0.97, lam=0.9, holes=True, length=14),
        Census({"advantages where the mask is 0": 0.0}, {"advantages where the mask is 0": past}, what="sums"),
    ]


@declare("q/r03")
def gae_whitened(m, fn):
    def raw(rewards, values, mask, gamma, lam):
        """Two further rows of one token, whose advantages are 0 and 1, give the shift and the factor."""
        r, v, k = (t.double() for t in (rewards, values, mask))
        more = torch.zeros(2, r.shape[1], dtype=torch.float64)
        reward, one = more.clone(), more.clone()
        reward[1, 0] = 1.0
        one[:, 0] = 1.0
        out = fn(torch.cat([r, reward]), torch.cat([v, more]), torch.cat([k, one]), gamma=gamma, lam=lam)
        zero, unit = out[-2, 0], out[-1, 0]
        return (((out[:-2] - zero) / (unit - zero)) * k).to(rewards.dtype)

    def both(rewards, values, mask, gamma, lam):
        k = mask.to(rewards.dtype)
        returns = (raw(rewards, values, k, gamma, lam) + values) * k
        return fn(rewards, values, k, gamma=gamma, lam=lam), returns

    given = m.make(0)
    out, mask = fn(**given).double(), given["mask"].bool()
    found = {
        "mean": round(float(out[mask].mean()), 3),
        "variance": round(float(out[mask].var()), 3),
        "where the mask is 0": float(out[~mask].abs().sum()),
    }
    return [
        GAE(raw, gamma=0.95, lam=0.9, holes=True, length=14),
        GAE(both, gamma=0.95, lam=0.9, holes=True, whitened=True, length=14),
        Census({"mean": 0.0, "variance": 1.0, "where the mask is 0": 0.0}, found, what="numbers of the whitening"),
    ]


@declare("x/r01")
def step_groups(m, fn):
    def one_step(rewards, groups):
        rows = rewards[:, None]
        return fn(rows, groups, torch.zeros_like(rows, dtype=torch.long), torch.ones_like(rows))[:, 0]

    def steps(rewards, groups, **settings):
        """three steps of five are real, the reward is at the last of them; the states come again"""
        n = len(rewards)
        alive = torch.tensor([1.0, 1, 1, 0, 0], dtype=rewards.dtype).repeat(n, 1)
        states = torch.tensor([0, 1, 0, 0, 1]).repeat(n, 1)
        rows = torch.zeros(n, 5, dtype=rewards.dtype)
        rows[:, 2] = rewards
        return fn(rows, groups, states, alive, **settings)

    def first(rewards, groups):
        """every step has a state of its own: the first step's advantage"""
        n = len(rewards)
        rows = torch.zeros(n, 3, dtype=rewards.dtype)
        rows[:, 2] = rewards
        return fn(rows, groups, torch.arange(3).repeat(n, 1), torch.ones_like(rows))[:, 0]

    given = m.make(0)
    past = float((fn(**given) * (1 - given["alive"])).abs().sum())
    return [
        AdvantageEstimator(one_step, scale="equal"),
        AdvantageEstimator(lambda r, g: steps(r, g).sum(1), scale="equal"),
        AdvantageEstimator(lambda r, g: steps(r, g, omega=0.0)[:, 0], scale="equal"),
        AdvantageEstimator(lambda r, g: (steps(r, g, omega=1.0) - steps(r, g, omega=0.0)).sum(1), scale="equal"),
        AdvantageEstimator(first, scale="equal"),
        Census({"advantages past the end": 0.0}, {"advantages past the end": past}, what="sums"),
    ]


@declare("q/r04")
def trajectory_steps(m, fn):
    # all trajectories answer one task: a row is a trajectory, and it is centred over the batch
    def one_step(rewards, groups):
        n = len(rewards)
        return fn(rewards, torch.arange(n), torch.zeros(n, dtype=torch.long))

    def steps(rewards, at, **settings):
        n = len(rewards)
        rows = torch.zeros(n, 3, dtype=rewards.dtype)
        rows[:, at] = rewards
        out = fn(rows.flatten(), torch.arange(n).repeat_interleave(3), torch.tensor([7, 3, 7]).repeat(n), **settings)
        return out.view(n, 3)

    both = {"scale": "equal", "over": "batch"}
    return [
        AdvantageEstimator(one_step, **both),
        AdvantageEstimator(lambda r, g: steps(r, 2).sum(1), **both),
        AdvantageEstimator(lambda r, g: steps(r, 0).sum(1), **both),
        AdvantageEstimator(lambda r, g: steps(r, 2, omega=0.0)[:, 0], **both),
        AdvantageEstimator(lambda r, g: (steps(r, 2, omega=1.0) - steps(r, 2, omega=0.0)).sum(1), **both),
    ]


@declare("w/d02")
def tool_tokens(m, fn):
    def step(trained, other):
        """the trained tokens as one of the two masks, the other one as it is"""
        given = m.make(0)
        model = given.pop("model")
        mask = (given["completion_mask"] * given["tool_mask"])[:, 1:]

        def loss(model, batch, clip):
            return fn(model, {**batch, trained: front(batch["mask"])}, clip=clip)

        batch = {k: given[k] for k in ("ids", "old_logps", "advantages", other)} | {"mask": mask}
        return Step(
            model=model,
            loss=loss,
            batch=batch,
            roles={"ids": "ids", "mask": "mask", "behaviour": "old_logps", "advantages": "advantages"},
            settings={"clip": Setting(0.2, "clip")},
            logprobs=lambda model, batch: m.token_logps(model, batch["ids"]),
            value_is_loss=True,
            reduction="mean",
            wide=("ids", "mask", "old_logps", other),
            name=f"{trained} is the mask",
        )

    return [step("tool_mask", "completion_mask"), step("completion_mask", "tool_mask")]


@declare("x/r04")
def grpo_truncated(m, fn):
    def logprobs(model, batch):
        return model(batch["ids"]).log_softmax(-1)[:, :-1].gather(-1, batch["ids"][:, 1:, None])[..., 0]

    settings = {"group": Setting(4, "setting", modes=(2, 8)), "clip": Setting(0.2, "clip")}

    given = m.make(0)
    model = given.pop("model")
    batch = {k: given[k] for k in ("ids", "rewards", "truncated")}
    batch |= {"mask": given["action_mask"][:, 1:], "old": given["old_logprobs"][:, 1:]}

    def loss(model, batch, group, clip):
        made = {"action_mask": front(batch["mask"]), "old_logprobs": front(batch["old"])}
        return fn(model, {**batch, **made}, group=group, clip=clip)

    full = Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "behaviour": "old", "rewards": "rewards"},
        settings=settings,
        logprobs=logprobs,
        value_is_loss=True,
        reduction="mean",
        rows_interact=True,
        drops_tokens=True,
        wide=("ids", "mask", "old"),
        name="GRPO",
    )

    # truncated rows have no trained token; their sampled tokens stay in the action mask
    given = m.make(0)
    model = given.pop("model")
    sampled = given["action_mask"][:, 1:]
    batch = {k: given[k] for k in ("ids", "rewards", "truncated")}
    batch |= {"mask": sampled * (1 - given["truncated"])[:, None], "sampled": sampled, "old": given["old_logprobs"][:, 1:]}

    def trained(model, batch, group, clip):
        action = torch.where(batch["truncated"][:, None] > 0, batch["sampled"], batch["mask"])
        made = {"action_mask": front(action), "old_logprobs": front(batch["old"])}
        return fn(model, {**batch, **made}, group=group, clip=clip)

    rows = Step(
        model=model,
        loss=trained,
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "behaviour": "old"},
        settings=settings,
        family="policy gradient",
        value_is_loss=True,
        rows_interact=True,
        wide=("ids", "mask", "old", "sampled"),
        name="truncated rows",
    )
    return [full, rows]


@declare("x/r02")
def chat(m, fn):
    def ids(content):
        return [10 + ord(c) for c in content] if isinstance(content, str) else list(content)

    def tokens(messages):
        out, mask = fn([{**x, "content": ids(x["content"])} for x in messages])
        return list(out), list(mask)

    def prompt(messages):
        return tokens(messages)[0] + [1, 6, 3]  # im_start, assistant, newline

    texts = ["be kind", "what is 2+2", "let me see", "four", "4.0", "it is four", "right", "done"]
    messages = [{**x, "content": t} for x, t in zip(m.make(0)["messages"], texts, strict=True)]
    trained = [i for i, x in enumerate(messages) if x["role"] == "assistant" and x.get("train", True)]
    return ChatTemplate(tokens=tokens, prompt=prompt, messages=messages, end=2, trained=trained)


# packing -------------------------------------------------------------------------------------------------------------
@declare("r/d02")
def packed_stream(m, fn):
    """Rows of documents, laid end to end; a document's first token is in the batch's mask not trained (never predicted)."""
    given = m.make(0)
    model = given["model"]
    width, rows = 40, []
    for seed in range(4):
        g = m.make(seed)
        n = len(g["ids"])
        doc = torch.repeat_interleave(torch.arange(1, len(g["cu_seqlens"])), g["cu_seqlens"].diff())
        ids, mask = g["ids"], g["loss_mask"].float()
        if n < width:  # one more document fills the row: a prompt of one token, then trained ones
            more = width - n
            gen = torch.Generator().manual_seed(seed)
            ids = torch.cat([ids, torch.randint(1, 32, (more,), generator=gen)])
            doc = torch.cat([doc, torch.full((more,), int(doc.max()) + 1)])
            mask = torch.cat([mask, torch.ones(more)])
        rows.append((ids[:width], doc[:width], mask[:width]))
    ids, doc, mask = (torch.stack(t) for t in zip(*rows))
    mask = mask * ~firsts(doc)

    def stream(batch):
        ids, doc, mask = batch["ids"], batch["documents"], batch["mask"]
        first = firsts(doc)
        following = torch.zeros_like(mask)
        following[:, :-1] = mask[:, 1:] * ~first[:, 1:]
        own = torch.where(first, following, mask).long()  # plain text is trained from its first token on
        at = first.flatten().nonzero()[:, 0]
        return {
            "ids": ids.flatten(),
            "loss_mask": own.flatten(),
            "cu_seqlens": torch.cat([at, torch.tensor([ids.numel()])]),
        }

    def loss(model, batch):
        return fn(model, stream(batch))

    def alone(model, batch):
        total, count = 0.0, 0.0
        for r, a, b in spans(batch["documents"]):
            n = float(batch["mask"][r, a + 1 : b].sum())
            if n:
                one = {k: batch[k][r : r + 1, a:b] for k in ("ids", "documents", "mask")}
                total, count = total + n * fn(model, stream(one)), count + n
        return total / count

    return Step(
        model=model,
        loss=loss,
        batch={"ids": ids, "documents": doc, "mask": mask},
        roles={"ids": "ids", "documents": "documents", "mask": "mask"},
        paths={"each document alone": alone},
        family="sft",
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "documents", "mask"),
    )


@declare("w/r06")
def left_padded(m, fn):
    given = m.make(0)
    model = given.pop("model")
    attention = given["attention_mask"]
    count = attention.cumsum(1)
    mask = ((count > given["prompt_lens"][:, None]) & attention.bool())[:, 1:].float()

    def loss(model, batch):
        # the completion is the end of the row: the real tokens before it are the prompt
        lens = batch["attention_mask"].sum(1) - batch["mask"].sum(1).long()
        return fn(model, {"ids": batch["ids"], "attention_mask": batch["attention_mask"], "prompt_lens": lens})

    return Step(
        model=model,
        loss=loss,
        batch={"ids": given["ids"], "attention_mask": attention, "mask": mask},
        roles={"ids": "ids", "attention": "attention_mask", "mask": "mask"},
        family="sft",
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "attention_mask", "mask"),
    )


@declare("x/r06")
def prefix_lm(m, fn):
    """The mask is 1 on suffix tokens; the tokens of a document before them are its prefix."""
    given = [m.make(seed) for seed in range(3)]
    model = given[0]["model"]
    ids, doc, pre = (torch.cat([g[k] for g in given]) for k in ("ids", "doc", "prefix"))
    mask = ((doc > 0) & (pre == 0)).float()

    def form(batch):
        doc, mask = batch["documents"].clone(), batch["mask"] > 0
        pre = ~mask & (doc > 0)
        for r, a, b in spans(batch["documents"]):
            last = mask[r, a:b].nonzero()
            if len(last) and a + int(last[-1]) + 1 < b:  # what stands after the suffix is padding
                doc[r, a + int(last[-1]) + 1 : b] = 0
        return {"ids": batch["ids"], "doc": doc, "prefix": (pre & (doc > 0)).float()}

    def loss(model, batch):
        return fn(model, form(batch))

    def alone(model, batch):
        total, count = 0.0, 0.0
        for r, a, b in spans(batch["documents"]):
            n = float(batch["mask"][r, a + 1 : b].sum())
            if n:
                one = {k: batch[k][r : r + 1, a:b] for k in ("ids", "documents", "mask")}
                total, count = total + n * fn(model, form(one)), count + n
        return total / count

    return Step(
        model=model,
        loss=loss,
        batch={"ids": ids, "documents": doc, "mask": mask},
        roles={"ids": "ids", "documents": "documents", "mask": "mask"},
        paths={"one document per row": alone},
        family="sft",
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "documents", "mask"),
    )


@declare("w/r05")
def full_rows(m, fn):
    given = m.make(0)
    model = given.pop("model")
    documents = (given["position_ids"] == 0).cumsum(1)

    def loss(model, batch):
        return fn(model, {"ids": batch["ids"], "position_ids": restart(batch["documents"])})

    def alone(model, batch):
        total, count = 0.0, 0
        for r, a, b in spans(batch["documents"]):
            n = b - a - 1
            if n:
                one = {"ids": batch["ids"][r : r + 1, a:b], "position_ids": torch.arange(n + 1)[None]}
                total, count = total + n * fn(model, one), count + n
        return total / count

    packed = Step(
        model=model,
        loss=loss,
        batch={"ids": given["ids"], "documents": documents},
        roles={"ids": "ids", "documents": "documents"},
        paths={"one document per row": alone},
        family="sft",
        reduction="mean",
        value_is_loss=True,
        all_supervised=True,
        name="packed rows",
    )
    given = m.make(0)
    ids = given["ids"][:, :12]
    single = Step(
        model=given["model"],
        loss=lambda model, batch: fn(model, batch),
        batch={"ids": ids, "position_ids": torch.arange(12).repeat(len(ids), 1)},
        roles={"ids": "ids", "positions": "position_ids"},
        family="sft",
        reduction="mean",
        value_is_loss=True,
        all_supervised=True,
        name="one document per row",
    )
    return [packed, single]


@declare("q/r05")
def one_packed_row(m, fn):
    """Several rows are laid end to end in one row; their documents stay apart."""
    given = [m.make(seed) for seed in range(3)]
    model = given[0]["model"]
    batch = {k: torch.cat([g[k] for g in given]) for k in ("ids", "labels", "position_ids", "doc_ids")}

    def loss(model, batch):
        doc = batch["doc_ids"]
        low = doc.min()
        doc = (doc - low) + torch.arange(len(doc))[:, None] * (doc.max() - low + 1)
        row = {k: batch[k].reshape(1, -1) for k in ("ids", "labels", "position_ids")}
        return fn(model, {**row, "doc_ids": doc.reshape(1, -1)})

    def alone(model, batch):
        total, count = 0.0, 0
        for r, a, b in spans(batch["doc_ids"]):
            n = int((batch["labels"][r, a + 1 : b] != -100).sum())
            if n:
                one = {k: batch[k][r : r + 1, a:b] for k in ("ids", "labels", "position_ids", "doc_ids")}
                total, count = total + n * fn(model, one), count + n
        return total / count

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "labels": "labels", "positions": "position_ids", "documents": "doc_ids"},
        paths={"separate documents": alone},
        family="sft",
        reduction="mean",
        value_is_loss=True,
        all_supervised=True,
        wide=("ids", "labels", "position_ids", "doc_ids"),
    )


@declare("x/r08")
def chunks(m, fn):
    length, eos = 8, 0

    def collate(examples):
        # a first document of another token fills up the stream, so that no tail is dropped
        total = sum(len(x["ids"]) + 1 for x in examples)
        fill = (-total) % length or length  # fill + 1 + total - 1 is a multiple of length
        out = fn([{"ids": [49] * fill}, *examples])
        return {"ids": torch.nn.utils.rnn.pad_sequence([torch.tensor(x["ids"]) for x in out], True, -1)}

    def unpack(batch):
        rows = [[t for t in row if t >= 0] for row in batch["ids"].tolist()]
        stream = rows[0] + [t for row in rows[1:] for t in row[1:]] if rows else []
        docs, now = [], []
        for t in stream:
            now.append(t)
            if t == eos:
                docs.append(now)
                now = []
        docs += [now] if now else []
        return [{"ids": torch.tensor(d)} for d in docs[1:]]

    examples = m.make(0)["rows"]
    out = fn(copy.deepcopy(examples))
    total = sum(len(x["ids"]) + 1 for x in examples)
    return [
        Collator(
            collate,
            examples,
            pads={"ids": -1},
            rows=False,
            unpack=unpack,
            columns={"ids": lambda x: [*x["ids"], eos]},
        ),
        Census(
            {f"chunk {i}": length + 1 for i in range((total - 1) // length)},
            {f"chunk {i}": len(x["ids"]) for i, x in enumerate(out)},
            what="tokens of the chunks",
        ),
    ]


# data stages ---------------------------------------------------------------------------------------------------------
@declare("w/r16")
def fill_in_the_middle(m, fn):
    PRE, SUF, MID, EOT = 1, 2, 3, 4

    def document(ids):
        """the document again: before, middle and after, from what stands between the sentinels"""
        body = ids[:-1] if ids and ids[-1] == EOT else ids
        if not (body and body[0] == PRE):
            return body
        if SUF not in body or MID not in body:
            return body
        s, e = body.index(SUF), body.index(MID)
        return body[1:s] + body[e + 1 :] + body[s + 1 : e]

    def pad(rows):
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(r, dtype=torch.long) for r in rows], True, -1)

    def collate(examples):
        out = fn(examples)
        return {
            "ids": pad([x["ids"] for x in out]),
            "document": pad([document(x["ids"]) for x in out]),
            "tokens": pad([sorted(t for t in x["ids"] if t >= 10) for x in out]),
            "last": torch.tensor([x["ids"][-1] for x in out]),
            "index": torch.tensor([x["index"] for x in out]),
        }

    def collator(call):
        return Collator(
            call,
            m.make(0)["rows"],
            pads={"ids": -1, "document": -1, "tokens": -1},
            columns={
                "document": lambda x: x["ids"],
                "tokens": lambda x: sorted(x["ids"]),
                "last": lambda x: EOT,
                "index": lambda x: x["index"],
            },
        )

    many = [{"ids": [10 + (i + j) % 40 for j in range(300)], "index": i} for i in range(1000)]

    def share(test, among=None, **rates):
        out = [x["ids"] for x in fn(copy.deepcopy(many), **rates)]
        among = [x for x in out if among is None or among(x)]
        return round(sum(test(x) for x in among) / max(len(among), 1), 1)

    changed, spm = (lambda x: x[0] == PRE), (lambda x: x[:2] == [PRE, SUF])
    wanted = {
        "rearranged at 0.5": 0.5,
        "rearranged at 0": 0.0,
        "rearranged at 1": 1.0,
        "SPM at 0.5": 0.5,
        "SPM at 0": 0.0,
        "SPM at 1": 1.0,
    }
    found = {
        "rearranged at 0.5": share(changed),
        "rearranged at 0": share(changed, fim_rate=0.0),
        "rearranged at 1": share(changed, fim_rate=1.0),
        "SPM at 0.5": share(spm, changed),
        "SPM at 0": share(spm, changed, spm_rate=0.0),
        "SPM at 1": share(spm, changed, spm_rate=1.0),
    }
    return [collator(collate), Census(wanted, found, what="shares of documents")]


@declare("q/r17")
def rolled_completions(m, fn):
    """An example is a batch within which completions are rolled."""
    END, names = -2, ("prompt", "completion", "label", "kl_prompt", "kl_completion")

    def flat(rows, name):
        return [t for r in rows for t in [*([int(r[name])] if name == "label" else r[name]), END]]

    def collator(size):
        def collate(examples):
            rows = [r for x in examples for r in x]
            out = fn(rows, size=size)
            parts = [out[i : i + size] for i in range(0, len(out), size)]
            pad = torch.nn.utils.rnn.pad_sequence
            return {n: pad([torch.tensor(flat(p, n)) for p in parts], True, -1) for n in names}

        def before(x):
            return [t for i in range(size) for t in [*x[i - 1]["completion"], END]]

        rows = [r for seed in range(3) for r in m.make(seed)["rows"]]
        return Collator(
            collate,
            [rows[i : i + size] for i in range(0, len(rows), size)],
            pads={n: -1 for n in names},
            columns={
                "prompt": lambda x: flat(x, "prompt"),
                "completion": lambda x: flat(x, "completion"),
                "label": lambda x: flat(x, "label"),
                "kl_prompt": lambda x: flat(x, "prompt"),
                "kl_completion": before,
            },
        )

    return [collator(4), collator(3)]


# sharding ------------------------------------------------------------------------------------------------------------
@declare("r/r12")
def balancing_over_ranks(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=lambda model, batch, ranks, top_k, coef: fn(model, batch, ranks=ranks, top_k=top_k, coef=coef),
        batch=given,
        roles={"ids": "ids"},
        settings={
            "ranks": Setting(4, "inert", modes=(1, 2, 8)),
            "top_k": Setting(2, "setting", modes=(1, 3)),
            "coef": Setting(0.01, "weight"),
        },
        rows_interact=True,
        reduction="mean",
        all_supervised=None,
    )


@declare("x/r10")
def vocabulary_parallel(m, fn):
    given = m.make(0)
    model = given.pop("model")

    def loss(model, batch, ranks):
        return fn(model, {"ids": batch["ids"], "loss_mask": front(batch["mask"])}, ranks=ranks)

    def plain(model, batch, ranks):
        logits = model(batch["ids"])[:, :-1]
        nll = F.cross_entropy(logits.transpose(1, 2), batch["ids"][:, 1:], reduction="none")
        return (nll * batch["mask"]).sum() / batch["mask"].sum()

    return Step(
        model=model,
        loss=loss,
        batch={"ids": given["ids"], "mask": given["loss_mask"][:, 1:]},
        roles={"ids": "ids", "mask": "mask"},
        settings={"ranks": Setting(4, "inert", modes=(1, 2, 5, 8))},
        paths={"plain cross entropy": plain},
        family="sft",
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "mask"),
    )


@declare("w/d08")
def sharded_clip(m, fn):
    def update(**shards):
        given = m.make(0)
        model, optimizer = given["model"], given["optimizer"]

        def loss(model, batch):
            return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())

        def step(batches, max_grad_norm):
            # the code makes one update of each batch: the micro-batches are one
            fn(model, optimizer, [cat(batches)], max_norm=max_grad_norm, **shards)

        return Update(model, optimizer, step, loss, cat(given["batches"]))

    return [update(), update(shards=1), update(shards=3)]


def accumulations(m, fn, form, call=None, cuts=(("ranks", over_ranks), ("micro-batches", over_micro)), **more):
    call = call or (lambda model, opt, batches: fn(model, opt, batches))
    out = []
    for what, cut in cuts:
        given = m.make(0)
        flat = [b for rank in given["batches"] for b in rank]
        accumulate = accumulator(lambda model, opt, batches, cut=cut: call(model, opt, cut(batches)))
        out.append(Accumulation(given["model"], accumulate, form(flat), what=what, **more.get(what, {})))
    return out


BOTH = "ranks with micro-batches"


@declare("q/r09")
def ranks_and_micro(m, fn):
    cuts = (("ranks", over_ranks), ("micro-batches", over_micro), (BOTH, over_both))
    return accumulations(m, fn, cat, cuts=cuts, **{BOTH: {"split": (1, 4, 2, 3, 2)}})


@declare("w/r09")
def ranks_and_empty_micro(m, fn):
    cuts = (("ranks", over_ranks), ("micro-batches", over_micro), (BOTH, over_both), ("a rank without tokens", over_ranks))
    # rows 4 and 5 have no trained token
    splits = {BOTH: {"split": (1, 3, 2, 4, 2)}, "a rank without tokens": {"split": (4, 2, 6)}}
    return accumulations(m, fn, joined, cuts=cuts, **splits)


@declare("x/r09")
def ranks_and_clip(m, fn):
    def loss(model, batch):
        logits = model(batch["ids"])[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)

    def update(cut, **more):
        given = m.make(0)
        model, optimizer = given["model"], given["optimizer"]

        def step(batches, max_grad_norm):
            fn(model, optimizer, cut(batches), max_norm=max_grad_norm)

        return Update(model, optimizer, step, loss, cat([b for rank in given["batches"] for b in rank]), **more)

    def even(batches):  # the number of micro-batches is the same on each rank
        return over_both(batches) if len(batches) % 2 == 0 else over_ranks(batches)

    cuts = (("ranks", over_ranks), ("micro-batches", over_micro), (BOTH, even))
    call = lambda model, opt, batches: fn(model, opt, batches, max_norm=1e9)
    made = accumulations(m, fn, cat, call, cuts, **{BOTH: {"split": (1, 2, 1, 3)}})
    return [*made, update(over_micro), update(over_ranks), update(even, split=(1, 2, 1, 3))]


@declare("w/d05")
def rollout_seeds(m, fn):
    given = m.make(0)
    rank, step = given["rank"], given["step"]

    def census(workers, prompts, rollouts):
        more = {"workers": workers, "prompts_per_worker": prompts, "rollouts": rollouts}
        seeds = [fn(r, step, **more) for r in range(workers)]
        total = workers * prompts * rollouts
        found = {"requests": sum(map(len, seeds)), "different seeds": len({s for x in seeds for s in x})}
        return Census({"requests": total, "different seeds": total}, found, what="seeds of one step")

    return [
        Ranks(draw=lambda r: torch.tensor(fn(r, step))),
        Ranks(draw=lambda s: torch.tensor(fn(rank, step + s))),  # steps differ
        census(4, 12, 4),
        census(3, 5, 2),
        census(2, 3, 8),
    ]


# adapters ------------------------------------------------------------------------------------------------------------
@declare("w/d07")
def merged_four_bits(m, fn):
    layer = m.make(0)["layer"]
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    now = {"module": layer}

    @torch.no_grad()
    def outputs():
        return now["module"](x)

    def merge():
        now["module"] = fn(layer)

    base = m.make(0)["layer"]
    eye = torch.eye(64)

    @torch.no_grad()
    def delta(w):
        weighed = copy.deepcopy(base)
        weighed.scale = base.scale * w
        return fn(weighed)(eye) - base.base(eye)

    @torch.no_grad()
    def applied(w):
        return w * base.scale * (base.a @ base.b)

    return [MergedLayer(outputs, merge), Merge(delta, applied)]


# metrics -------------------------------------------------------------------------------------------------------------
@declare("q/d05")
def logged_mean(m, fn):
    rows = torch.tensor([x for seed in range(2) for r in m.make(seed)["values"] for x in r])

    def lists(shards):
        return [torch.as_tensor(s).tolist() for s in shards]

    return Ranks(metric=lambda shards: fn(lists(shards)), rows=rows, single=lambda shards: m.single(lists(shards)))


@declare("w/r21")
def pass_at_k(m, fn):
    rows = torch.tensor([p for seed in range(2) for r in m.make(seed)["per_rank"] for p in r])

    def pairs(shards):
        return [[(int(n), int(c)) for n, c in torch.as_tensor(s).reshape(-1, 2).tolist()] for s in shards]

    def ranks(more, **k):
        return Ranks(
            metric=lambda shards: fn(pairs(shards) + more, **k),
            rows=rows,
            single=lambda shards: m.single([p for s in pairs(shards) for p in s], **k),
        )

    return [ranks([]), ranks([[]]), ranks([], k=2)]  # as it is, with a rank without problems, another k


@declare("q/r21")
def deviation_over_ranks(m, fn):
    rows = torch.cat(m.make(0)["rewards"])

    def ranks(more):
        return Ranks(
            metric=lambda shards: fn([torch.as_tensor(s) for s in shards] + more),
            rows=rows,
            single=lambda shards: m.single([torch.as_tensor(s) for s in shards]),
        )

    return [ranks([]), ranks([torch.zeros(0)])]


# losses --------------------------------------------------------------------------------------------------------------
@declare("r/r25")
def histogram_critic(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=lambda model, batch, low, high, sigma_ratio: fn(model, batch, low=low, high=high, sigma_ratio=sigma_ratio),
        batch=given,
        roles={"ids": "ids", "mask": "mask", "returns": "returns"},
        settings={
            "low": Setting(-2.0, "setting"),
            "high": Setting(2.0, "setting"),
            "sigma_ratio": Setting(0.75, "setting"),
        },
        metrics={"squared_error": Metric(low=0.0)},
        value_is_loss=True,
        reduction="mean",
        wide=("ids", "mask", "returns"),
    )


@declare("x/d05")
def mixture_of_experts(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=lambda model, batch, top_k, aux_coef: fn(model, batch, top_k=top_k, aux_coef=aux_coef),
        batch=given,
        roles={"ids": "ids"},
        settings={"top_k": Setting(2, "setting", modes=(1, 3)), "aux_coef": Setting(0.5, "weight")},
        family="sft",
        rows_interact=True,
        reduction="mean",
        all_supervised=True,
    )


@declare("r/d09")
def critic_micro_batches(m, fn):
    def call(model, opt, batches):
        fn(model, opt, batches)

    def subject(what, **more):
        given = m.make(0)
        return Accumulation(given["model"], accumulator(call), joined(given["batches"]), what=what, **more)

    return [subject("micro-batches"), subject("the mini-batch's own cut", split=(2, 3, 2, 1))]


@declare("w/r24")
def top_k_teacher(m, fn):
    given = m.make(0)
    model = given.pop("model")
    batch = {k: given[k] for k in ("ids", "teacher_ids", "teacher_logps")} | {"mask": given["loss_mask"][:, 1:]}

    def loss(model, batch):
        return fn(model, {**batch, "loss_mask": front(batch["mask"])})

    def student(model, batch):
        return model(batch["ids"])[:, :-1].log_softmax(-1).gather(-1, batch["teacher_ids"])

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "teacher": "teacher_logps"},
        student=student,
        family="divergence",
        value_is_loss=True,
        reduction="mean",
        wide=("ids", "mask", "teacher_ids", "teacher_logps"),
    )


@declare("q/d09")
def balanced_experts(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model,
        loss=lambda model, batch, coeff, zcoeff: fn(model, batch, coeff=coeff, zcoeff=zcoeff),
        batch=given,
        roles={"ids": "ids", "attention": "padding_mask", "labels": "targets"},
        settings={"coeff": Setting(0.1, "weight"), "zcoeff": Setting(0.01, "weight")},
        family="sft",
        may_idle=("experts.*", "*.experts.*"),
        rows_interact=True,
        reduction="mean",
        all_supervised=True,
        wide=("ids", "padding_mask", "targets"),
    )


@declare("q/r24")
def on_policy_distillation(m, fn):
    def logprobs(model, batch):
        return model(batch["ids"])[:, :-1].log_softmax(-1).gather(-1, batch["ids"][:, 1:, None])[..., 0]

    def inputs():
        given = m.make(0)
        return given["model"], {"ids": given["ids"]} | {k: given[k][:, 1:] for k in ("mask", "sample_logps", "teacher_logps")}

    def call(model, batch, teacher, coef):
        made = {"mask": batch["mask"], "sample_logps": batch["sample_logps"], "teacher_logps": teacher}
        return fn(model, {"ids": batch["ids"]} | {k: front(v) for k, v in made.items()}, coef=coef)

    common = {
        "settings": {"coef": Setting(1.0, "weight")},
        "family": "policy gradient",
        "value_is_loss": True,
        "reduction": "mean",
    }
    model, batch = inputs()
    given = Step(
        model=model,
        loss=lambda model, batch, coef: call(model, batch, batch["teacher_logps"], coef),
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "behaviour": "sample_logps", "teacher": "teacher_logps"},
        wide=("ids", "mask", "sample_logps", "teacher_logps"),
        name="distillation",
        **common,
    )
    # as a policy gradient: the teacher's log-probs are the sampler's plus the advantages
    model, batch = inputs()
    batch["advantages"] = batch.pop("teacher_logps") - batch["sample_logps"]
    policy = Step(
        model=model,
        loss=lambda model, batch, coef: call(model, batch, batch["sample_logps"] + batch["advantages"], coef),
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "behaviour": "sample_logps", "advantages": "advantages"},
        logprobs=logprobs,
        wide=("ids", "mask", "sample_logps", "advantages"),
        name="its policy gradient",
        **common,
    )
    return [given, policy]


# schedules -----------------------------------------------------------------------------------------------------------
@declare("x/r13")
def relora(m, fn):
    def rates(total, ranks=1, **settings):
        return [fn(k, total=total, **settings) for k in range(total)]

    return Schedule(
        rates,
        peak=1e-3,
        final=1e-4,
        total=200,
        warmup=20,
        restarts=True,
        settings={"lr": 1e-3, "first_warmup": 20, "cycle": 50, "restart_warmup": 5, "floor": 0.1},
    )


@declare("w/d10")
def layer_decay(m, fn):
    layers = (0, 4, 8, 12)

    def rates(total, ranks=1, **settings):
        return [[fn(k, layer=n, total=total, **settings) for n in layers] for k in range(total)]

    return Schedule(
        rates,
        peak=[1e-3 * 0.65 ** (12 - n) for n in layers],
        final=[2e-5 * 0.65 ** (12 - n) for n in layers],
        total=100,
        warmup=10,
        settings={"lr": 1e-3, "min_lr": 2e-5, "warmup": 10, "layer_decay": 0.65, "num_layers": 12},
    )
