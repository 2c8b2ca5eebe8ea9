import copy, itertools, json
import torch
from torch import nn
from tests.audit.reading2026g.reading import declare, no_subject
from earnest_audit import (GAE, Accumulation, AdapterStart, AdvantageEstimator, Census, ChatTemplate, Collator, Grader, Metric,
                           Ranks, Resume, RoundTrip, Schedule, Setting, Step, Unbiased, Update, WeightSync)


def token_logprobs(model, batch):
    """Column t belongs to ids[:, t]; column 0 has none."""
    ids = batch["ids"]
    lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return nn.functional.pad(lp, (1, 0))


def more(m, keys, seeds=(0, 1)):
    made = [m.make(s) for s in seeds]
    return made[0]["model"], {k: torch.cat([x[k] for x in made]) for k in keys}


@declare("n/r01")
def n01(m, fn):
    given = m.make(0); model = given.pop("model")
    return Step(model=model, loss=fn, batch=given,
                roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logprobs", "advantages": "advantages"},
                settings={"clip": Setting(0.2, "clip"), "budget": Setting(32, "setting")},
                logprobs=token_logprobs, reduction="mean", value_is_loss=True, family="policy gradient",
                wide=("ids", "loss_mask", "old_logprobs"))


@declare("n/r02")
def n02(m, fn):
    def spread(rewards, groups, lengths):
        """Each row is a trajectory whose reward comes at its last step; states: steps to go. The flat place of each step is kept."""
        r, g, t, s, first, last = [], [], [], [], [], []
        for i, n in enumerate(lengths):
            for k in range(n):
                if k == 0: first.append(len(t))
                if k == n - 1: last.append(len(t))
                r.append(rewards[i] if k == n - 1 else torch.zeros_like(rewards[i]))
                g.append(groups[i]); t.append(i); s.append(n - 1 - k)
        return torch.stack(r), torch.stack(g), torch.tensor(t), torch.tensor(s), first, last
    def at_last(rewards, groups):
        r, g, t, s, _, last = spread(rewards, groups, [1 + (i * 2) % 5 for i in range(len(rewards))])
        return fn(r, g, t, s)[last]
    def at_first(rewards, groups):
        r, g, t, s, first, _ = spread(rewards, groups, [3] * len(rewards))
        return fn(r, g, t, s)[first]
    def single(rewards, groups):
        return fn(rewards, groups, torch.arange(len(rewards)), torch.zeros(len(rewards), dtype=torch.long))
    def gae(rewards, values, mask, gamma, lam):
        """The discounted return of a step: beside a twin trajectory without a reward, the step advantage is half of it."""
        out = torch.zeros_like(values)
        for b in range(len(values)):
            at = mask[b].bool().nonzero()[:, 0]
            n = len(at)
            if not n: continue
            v = values[b, at]
            delta = rewards[b, at] + gamma * torch.cat([v[1:], v.new_zeros(1)]) - v
            r = torch.cat([delta, torch.zeros_like(delta)])
            g = torch.zeros(2 * n, dtype=torch.long)
            t, s = torch.arange(2).repeat_interleave(n), torch.arange(n).repeat(2)
            both = fn(r, g, t, s, gamma=gamma * lam, omega=1.0) - fn(r, g, t, s, gamma=gamma * lam, omega=0.0)
            out[b, at] = 2 * both[:n]
        return out
    return [AdvantageEstimator(fn=at_last, scale="equal"), AdvantageEstimator(fn=at_first, scale="equal"),
            AdvantageEstimator(fn=single, scale="equal"), GAE(fn=gae, gamma=0.95, lam=0.8)]


@declare("n/r03")
def n03(m, fn):
    def gae(rewards, values, mask, gamma, lam):
        B, T = rewards.shape
        flat = fn(rewards.reshape(-1), torch.arange(B).repeat_interleave(T), values.reshape(-1), mask.reshape(-1).to(rewards.dtype),
                  gamma=gamma, lam=lam)
        return flat.reshape(B, T)
    return GAE(fn=gae, gamma=0.9, lam=0.8, holes=True)


@declare("n/r04")
def n04(m, fn):
    messages = m.make(0)["messages"]
    header = [m.START] + list(b"assistant\n")
    def prompt(before):
        return list(fn(before)[0]) + header
    one = [messages[0]] + messages[5:]
    return [ChatTemplate(tokens=fn, prompt=prompt, messages=messages, end=m.END, prefix=False, trained=[6, 9]),
            ChatTemplate(tokens=fn, prompt=prompt, messages=messages[:5], end=m.END),
            ChatTemplate(tokens=fn, prompt=prompt, messages=one, end=m.END)]


@declare("n/r05")
def n05(m, fn):
    row = m.make(0)["row"]
    a, b = row["calls"]
    def say(*calls, think="look", lines=None):
        return f"<think>{think}</think>\n<tool_call>\n" + "\n".join(lines or [json.dumps(c) for c in calls]) + "\n</tool_call>"
    def but(call, name=None, **arguments):
        return {"name": name or call["name"], "arguments": {**call["arguments"], **arguments}}
    grade = lambda text: fn(row, text)
    q = row["prompt"]
    right = [say(a, b), say(b, a), say(a, b, think="another\nthought") + "\n",
             say(lines=[json.dumps({"arguments": dict(reversed(list(c["arguments"].items()))), "name": c["name"]}) for c in (b, a)])]
    extra = [say(a, b, {"name": "lookup", "arguments": {}}), say({"name": "lookup", "arguments": {"q": 1}}, b, a)]
    one_wrong = [say(but(a, q=a["arguments"]["q"] + 1), b), say(b, but(a, q=str(a["arguments"]["q"]))), say(a, but(b, unit="K"))]
    worse = [say(but(a, q=99, unit="K"), but(b, q=98, unit="K"))]
    missing = [say(a), say(b)]
    names = [say(but(a, name="clock"), but(b, name="mail"))]
    broken = ["", "the weather is fine", "<tool_call>\n" + json.dumps(a) + "\n</tool_call>", say(lines=["{not json"]),
              "\n".join(json.dumps(c) for c in (a, b)), say(lines=['{"name": "weather"}']), say(a, b) + " and more words"]
    tiers = [right, extra, one_wrong, worse, names, broken]
    made = [Grader(grade=grade, right=tiers[i], wrong=sum(tiers[i + 1:], []), question=q) for i in range(len(tiers) - 1)]
    return made + [Grader(grade=grade, right=one_wrong, wrong=missing + names + broken, question=q),
                   Grader(grade=grade, right=missing, wrong=names + broken, question=q)]


@declare("n/r06")
def n06(m, fn):
    rows = [dict(r, id=i) for i, r in enumerate(m.make(0)["rows"])]
    tasks = [[r for r in rows if r["task"] == t] for t in range(4)]
    live = lambda row: all(t["has_call"] or t["has_answer"] for t in row["turns"])
    def stage(examples):
        out = fn([r for e in examples for r in e])
        table = {k: [] for k in ("id", "reward", "advantage", "turns")}
        for e in examples:
            mine = [r for r in out if r["task"] == e[0]["task"]]
            pad = [-9.0] * (len(rows) - len(mine))
            for k in ("id", "reward", "advantage"):
                table[k].append([float(r[k]) for r in mine] + pad)
            table["turns"].append([float(len(r["turns"])) for r in mine] + pad)
        return {k: torch.tensor(v, dtype=torch.double) for k, v in table.items()}
    number = lambda values: torch.tensor(values, dtype=torch.double)
    columns = {"id": lambda e: number([float(r["id"]) for r in e if live(r)]),
               "reward": lambda e: number([r["reward"] for r in e if live(r)]),
               "turns": lambda e: number([float(len(r["turns"])) for r in e if live(r)]),
               "advantage": lambda e: number([r["reward"] - sum(x["reward"] for x in e) / len(e) for r in e if live(r)])}
    good = [{"text": "t", "has_call": True, "has_answer": False}, {"text": "t", "has_call": False, "has_answer": True}]
    void = [{"text": "t", "has_call": False, "has_answer": False}] + good
    def lines(rewards, groups, turns):
        return [{"task": int(g), "reward": float(r), "turns": copy.deepcopy(t), "id": i} for i, (r, g, t) in enumerate(zip(rewards, groups, turns))]
    def whole(rewards, groups):
        out = fn(lines(rewards, groups, [good] * len(rewards)))
        return torch.tensor([r["advantage"] for r in out], dtype=rewards.dtype)
    def filtered(rewards, groups):
        """The advantage of each row, where every second of the others is dropped by the filter."""
        found = []
        for i in range(len(rewards)):
            turns = [good if k == i or k % 2 else void for k in range(len(rewards))]
            found += [r["advantage"] for r in fn(lines(rewards, groups, turns)) if r["id"] == i]
        return torch.tensor(found, dtype=rewards.dtype)
    mixed = [tasks[t][k] for k in range(5) for t in range(4)]
    kept = [r["id"] for r in mixed if live(r)]
    return [Collator(fn=stage, examples=tasks, pads={k: -9.0 for k in columns}, columns=columns),
            AdvantageEstimator(fn=whole, scale="equal"), AdvantageEstimator(fn=filtered, scale="equal"),
            Census(wanted=[f"place {k}: row {i}" for k, i in enumerate(kept)],
                   found=[f"place {k}: row {r['id']}" for k, r in enumerate(fn(copy.deepcopy(mixed)))], what="kept rows in their order", once=True)]


class Fixed(nn.Module):
    """Gives the same logits for every token."""
    def __init__(self, logits):
        super().__init__(); self.logits = nn.Parameter(logits)
    def forward(self, ids, *rest, **more):
        return self.logits.expand(*ids.shape, -1)


def perturbation(model):
    kept = copy.deepcopy(model.state_dict())
    g = torch.Generator().manual_seed(7)
    def perturb():
        with torch.no_grad():
            for p in model.parameters(): p.add_(0.3 * torch.randn(p.shape, generator=g))
    return perturb, lambda: model.load_state_dict(kept)


def thinning(fn, settings, prompt):
    """x at the sampled token, divided by the token's probability: its mean is x if the sample has the stated distribution."""
    count = itertools.count(1)
    def thin(x, temperature):
        flat = x.reshape(-1)
        size = -(-len(flat) // 4) * 4
        logits = torch.linspace(-0.6, 0.6, size)
        ids, _ = fn(Fixed(logits), prompt, {**settings, "temperature": temperature, "seed": next(count)})
        tok = int(ids[len(prompt)])
        out = torch.zeros_like(flat)
        if tok < len(flat): out[tok] = flat[tok] / (logits / temperature).softmax(-1)[tok].to(flat.dtype)
        return out.reshape(x.shape)
    return thin


@declare("n/r07")
def n07(m, fn):
    given = m.make(0); model, prompt, settings = given["model"], given["prompt_ids"], given["settings"]
    new, room = settings["max_new"], 64
    def walk(ids):
        """Which places the model wrote, and what the tool had to answer, by the words of the case."""
        wrote, tools, at, written = [], {}, len(prompt), 0
        while at < len(ids):
            wrote.append(at); written += 1
            if ids[at] == m.CALL and written < new:
                tools.update(zip(range(at + 1, at + 4), [4, (ids[at - 1] + 1) % 40, 5])); at += 3
            at += 1
        return wrote, tools
    def fill(lp): return nn.functional.pad(lp, (0, room - len(lp)))
    @torch.no_grad()
    def trainer():
        ids = fn(model, prompt, settings)[0]
        lp = (model(ids[None])[0, :-1] / settings["temperature"]).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        out = torch.zeros(room)
        for at in walk(ids.tolist())[0]: out[at] = lp[at - 1]
        return out
    def sampler(): return fill(fn(model, prompt, settings)[1])
    wanted, found = [], []
    for seed in range(20):
        ids = fn(model, prompt, {**settings, "seed": seed})[0].tolist()
        wrote, tools = walk(ids)
        ended = m.EOS in [ids[i] for i in wrote]
        want = prompt.tolist() + [tools.get(i, ids[i] if i < len(ids) else None) for i in range(len(prompt), max([len(ids)] + [1 + i for i in tools]))]
        wanted += [f"seed {seed} place {i}: {t}" for i, t in enumerate(want)]
        found += [f"seed {seed} place {i}: {t}" for i, t in enumerate(ids)]
        ends = [i for i in wrote if ids[i] == m.EOS]
        wanted.append(f"seed {seed}: {(wrote.index(ends[0]) + 1) if ended else new} tokens written"); found.append(f"seed {seed}: {len(wrote)} tokens written")
    perturb, undo = perturbation(model)
    return [Ranks(draw=lambda rank: fn(model, prompt, {**settings, "seed": rank})[0]),
            WeightSync(perturb=perturb, push=lambda: None, trainer=trainer, sampler=sampler, undo=undo),
            Unbiased(fn=thinning(fn, {"max_new": 1}, prompt), settings=(0.7, 1.5)),
            Census(wanted=wanted, found=found, what="tokens of the prompt, the model and the tool", once=True)]


@declare("n/r08")
def n08(m, fn):
    given = m.make(0); model = given.pop("model"); second = m.make(1)
    both = {k: torch.cat([given[k], second[k]]) for k in ("ids", "turn_ids")}
    B, T = both["ids"].shape
    turn = torch.ones(B, T, dtype=torch.long); turn[:, 8:13] = 2; turn[:, 13:] = 3
    mask = (both["turn_ids"] > 0).float()
    with torch.no_grad():
        old = token_logprobs(model, both) + 0.05 * torch.randn(B, T, generator=torch.Generator().manual_seed(3))
    batch = {"ids": both["ids"], "mask": mask, "turn": turn, "old_logprobs": old, "advantages": torch.cat([given["turn_advantages"], second["turn_advantages"]])[:, 0]}
    share = torch.tensor([1.0, 0.6, 1.5])          # a row's advantage is that of its turns, times a number of the turn
    def advantages(b): return b["advantages"][:, None] * share.to(b["advantages"].dtype)
    def loss(model, b, clip_low, clip_high):
        turn_ids = b["turn"] * (b["mask"] > 0).long()
        return fn(model, {"ids": b["ids"], "turn_ids": turn_ids, "old_logprobs": b["old_logprobs"], "turn_advantages": advantages(b)}, clip_low=clip_low, clip_high=clip_high)
    def turns_as_rows(model, b, clip_low, clip_high):
        rows = {k: [] for k in ("ids", "turn_ids", "old_logprobs", "turn_advantages")}
        for k in (1, 2, 3):
            mine = (b["turn"] == k) & (b["mask"] > 0)
            at = mine.any(1)
            rows["ids"].append(b["ids"][at]); rows["turn_ids"].append(mine[at].long())
            rows["old_logprobs"].append(b["old_logprobs"][at]); rows["turn_advantages"].append(advantages(b)[at, k - 1:k])
        return fn(model, {k: torch.cat(v) for k, v in rows.items()}, clip_low=clip_low, clip_high=clip_high)
    return Step(model=model, loss=loss, batch=batch,
                roles={"ids": "ids", "mask": "mask", "behaviour": "old_logprobs", "advantages": "advantages"},
                settings={"clip_low": Setting(0.03, "clip"), "clip_high": Setting(0.04, "clip high")},
                logprobs=token_logprobs, paths={"each turn in a row of its own": turns_as_rows}, reduction="mean",
                value_is_loss=True, family="policy gradient", wide=("ids", "mask", "turn", "old_logprobs"))


@declare("n/r09")
def n09(m, fn):
    given = m.make(0); model = given.pop("model")
    ids = given["ids"]
    ended = (ids == m.EOS).long()
    batch = {"ids": ids.clone(), "doc": ended.cumsum(1) - ended}
    def text(b):
        """ids whose documents end with EOS, and that have it nowhere else (a row's last document may be cut)."""
        ids, doc = b["ids"], b["doc"]
        ends = torch.zeros_like(ids, dtype=torch.bool); ends[:, :-1] = doc[:, 1:] != doc[:, :-1]
        inside = ids.masked_fill(ids == m.EOS, 1)
        inside[:, -1] = ids[:, -1]
        return inside.masked_fill(ends, m.EOS)
    def loss(model, b): return fn(model, {"ids": text(b)})
    def alone(model, b):
        ids, total, count = text(b), 0.0, 0
        for row, doc in zip(ids, b["doc"]):
            for d in doc.unique():
                mine = row[doc == d]
                if len(mine) > 1:
                    total, count = total + (len(mine) - 1) * fn(model, {"ids": mine[None]}), count + len(mine) - 1
        return total / count
    return Step(model=model, loss=loss, batch=batch, roles={"ids": "ids", "documents": "doc"}, family="sft", all_supervised=True,
                reduction="mean", value_is_loss=True, paths={"each document in a row of its own": alone}, wide=("ids", "doc"))


@declare("n/r10")
def n10(m, fn):
    rows = m.make(0)["rows"] + [{"input_ids": [7, 8, 9, 10], "labels": [7, 8, 9, 10]}]
    def unpack(batch):
        cu = batch["cu_seqlens"].tolist()
        out = []
        for i, (a, b) in enumerate(zip(cu, cu[1:])):
            piece = {k: batch[k][0, a:b] for k in ("input_ids", "labels", "position_ids")}
            piece["seq"] = batch["seq_idx"][0, a:b] - i
            if i == len(cu) - 2 and (piece["input_ids"] == m.PAD).all() and (piece["labels"] == -100).all(): break
            out.append(piece)
        return out
    columns = {"input_ids": lambda e: list(e["input_ids"]), "labels": lambda e: [-100] + e["labels"][1:],
               "position_ids": lambda e: list(range(len(e["input_ids"]))), "seq": lambda e: [0] * len(e["input_ids"])}
    def numbers(rows, multiple):
        out = fn(copy.deepcopy(rows), multiple=multiple)
        found = {f"cu_seqlens {i}": float(x) for i, x in enumerate(out["cu_seqlens"].tolist())}
        found |= {f"width of {k}": float(out[k].shape[1]) for k in ("input_ids", "labels", "position_ids", "seq_idx")}
        found |= {f"rows of {k}": float(out[k].shape[0]) for k in ("input_ids", "labels", "position_ids", "seq_idx")}
        found |= {"max_seqlen": float(out["max_seqlen"]), "seq_idx at the end": float(out["seq_idx"][0, -1]),
                  "trained labels": float((out["labels"] != -100).sum())}
        cu = [0]
        for r in rows: cu.append(cu[-1] + len(r["input_ids"]))
        width = -(-cu[-1] // multiple) * multiple
        full = width > cu[-1]
        if full: cu.append(width)
        wanted = {f"cu_seqlens {i}": float(x) for i, x in enumerate(cu)}
        for k in ("input_ids", "labels", "position_ids", "seq_idx"): wanted |= {f"width of {k}": float(width), f"rows of {k}": 1.0}
        wanted |= {"max_seqlen": float(max(b - a for a, b in zip(cu, cu[1:]))), "seq_idx at the end": float(len(rows) - (not full)),
                   "trained labels": float(sum(x != -100 for r in rows for x in r["labels"][1:]))}
        return Census(wanted=wanted, found=found, what="lengths of the packed row")
    packed = dict(rows=False, unpack=unpack, columns=columns, targets=lambda e: [x for x in e["labels"][1:] if x != -100])
    return [Collator(fn=fn, examples=rows, **packed), Collator(fn=lambda e: fn(e, multiple=4), examples=rows[:3], **packed),
            numbers(rows, 8), numbers([rows[0], rows[2]], 8), numbers(rows[:4], 16), numbers(rows[:4], 8)]


@declare("n/r11")
def n11(m, fn):
    rows, capacity = m.make(0)["rows"], 16
    def stage(examples, capacity=16):
        bins = fn(examples, capacity=capacity)
        wide = max(len(b["ids"]) for b in bins)
        return {"ids": torch.tensor([b["ids"] + [-1] * (wide - len(b["ids"])) for b in bins]),
                "pieces": torch.tensor([(i, *p) for i, b in enumerate(bins) for p in b["pieces"]]),
                "order": torch.tensor([e["doc"] for e in examples])}
    def unpack(batch):
        at, parts = {}, {}
        for row, doc, offset, length in batch["pieces"].tolist():
            start = at.get(row, 0); at[row] = start + length
            parts.setdefault(doc, []).append((offset, length, batch["ids"][row, start:start + length]))
        out = []
        for doc in batch["order"].tolist():
            mine = sorted(parts.get(doc, []), key=lambda p: p[:2])
            out.append({"ids": torch.cat([p[2] for p in mine]) if mine else torch.zeros(0, dtype=torch.long),
                        "offsets": torch.tensor([p[0] for p in mine]), "lengths": torch.tensor([p[1] for p in mine])})
        return out
    def columns(c):
        return {"ids": lambda e: list(e["ids"]), "offsets": lambda e: list(range(0, len(e["ids"]), c)),
                "lengths": lambda e: [min(c, len(e["ids"]) - o) for o in range(0, len(e["ids"]), c)]}
    def fits(c):
        bins = fn(copy.deepcopy(rows), capacity=c)
        return Census(wanted=[f"row {i}" for i in range(len(bins))],
                      found=[f"row {i}" for i, b in enumerate(bins) if 0 < len(b["ids"]) <= c and len(b["ids"]) == sum(p[2] for p in b["pieces"])],
                      what="rows within the capacity whose pieces are their ids", once=True)
    def whole():
        bins = fn(copy.deepcopy(rows), capacity=capacity)
        return Census(wanted=[f"doc {r['doc']} token {k}" for r in rows for k in range(len(r["ids"]))],
                      found=[f"doc {d} token {o + k}" for b in bins for d, o, n in b["pieces"] for k in range(n)], what="tokens of the documents", once=True)
    return [Collator(fn=stage, examples=rows, rows=False, unpack=unpack, columns=columns(16)),
            Collator(fn=lambda e: stage(e, 8), examples=rows, rows=False, unpack=unpack, columns=columns(8)), fits(16), fits(8), whole()]


@declare("n/r12")
def n12(m, fn):
    model, batch = more(m, ("ids", "doc", "position_ids", "loss_mask"))
    def alone(model, b, power):
        keys = ("ids", "position_ids", "loss_mask")
        docs = [{k: b[k][i][row == d] for k in keys} for i, row in enumerate(b["doc"]) for d in row.unique()]
        wide = max(len(d["ids"]) for d in docs)
        out = {k: torch.stack([nn.functional.pad(d[k], (0, wide - len(d[k]))) for d in docs]) for k in keys}
        out["doc"] = torch.stack([(torch.arange(wide) >= len(d["ids"])).long() for d in docs])
        return fn(model, out, power=power)
    return Step(model=model, loss=fn, batch=batch, roles={"ids": "ids", "documents": "doc", "positions": "position_ids", "mask": "loss_mask"},
                settings={"power": Setting(0.5, "setting")}, family="sft", reduction="mean", value_is_loss=True,
                paths={"each document in a row of its own": alone}, wide=("ids", "doc", "position_ids", "loss_mask"))


@declare("n/r13")
def n13(m, fn):
    documents = m.make(0)["documents"]
    make = lambda: fn(copy.deepcopy(documents))
    store = {}
    def keep(x, folder): store[str(folder)] = x.state_dict()
    def take(x, folder): x.load_state_dict(store[str(folder)])
    def write(x, folder): (folder / "stream.json").write_text(json.dumps(x.state_dict()))
    def read(x, folder): x.load_state_dict(json.loads((folder / "stream.json").read_text()))
    def run(x, n): return [(tuple(b["inputs"]), tuple(b["targets"])) for b in itertools.islice(x, n)]
    def state(x):
        s = x.state_dict()
        return torch.tensor([float(s["next_document"]), float(s["epoch"])] + [float(t) for t in s["buffer"]])
    def ahead(x):
        x = copy.deepcopy(x)
        return torch.tensor([[*i, *t] for i, t in run(x, 14)] + [[float(x.epoch)] * 16])
    def perturb(x): run(x, 5)
    made = [Resume(make=make, run=run, save=s, load=l, state=state, steps=n) for s, l in ((keep, take), (write, read)) for n in (3, 9)]
    made += [RoundTrip(make=make, perturb=perturb, save=s, load=l, outputs=ahead) for s, l in ((keep, take), (write, read))]
    text = [t for d in documents for t in d + [0]] * 3
    stream, seen = make(), []
    for k in range(20):
        b = next(stream); seen += [(9 * k + i, t) for i, t in enumerate(b["inputs"])] + [(9 * k + 1 + i, t) for i, t in enumerate(b["targets"])]
    wanted = [f"place {i}: {text[i % (len(text) // 3)]}" for i in range(180)]
    return made + [Census(wanted=wanted, found=sorted({f"place {i}: {t}" for i, t in seen}), what="tokens of the stream")]


@declare("n/r14")
def n14(m, fn):
    model = m.make(0)["model"]
    g = torch.Generator().manual_seed(5)
    sizes = ((5, 8, 7), (7, 6, 7), (4, 4, 12), (6, 7, 7), (5, 6, 9))
    P, T = len(sizes), 16
    batch = {k: torch.zeros(P, T, dtype=torch.long) for k in ("chosen", "rejected")} | {k: torch.zeros(P, T) for k in ("chosen_mask", "rejected_mask")}
    for b, (p, c, r) in enumerate(sizes):
        prompt = torch.randint(0, 40, (p,), generator=g)
        for side, n in (("chosen", c), ("rejected", r)):
            batch[side][b, :p + n] = torch.cat([prompt, torch.randint(0, 40, (n,), generator=g)])
            batch[side + "_mask"][b, p:p + n] = 1
    def logprobs(model, b):
        out = []
        for side in ("chosen", "rejected"):
            ids = b[side]
            lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            out.append((lp * b[side + "_mask"][:, 1:]).sum(1))
        return tuple(out)
    with torch.no_grad(): now = logprobs(model, batch)
    for side, lp in zip(("chosen", "rejected"), now): batch["ref_" + side] = lp + 1.5 * torch.randn(P, generator=g)
    def loss(model, b, beta):
        """prompt + chosen + rejected in one row; rows of one length go together."""
        rows = {}
        for i in range(len(b["chosen"])):
            cm, rm = b["chosen_mask"][i] > 0, b["rejected_mask"][i] > 0
            start = int(cm.long().argmax())
            prompt, c, r = b["chosen"][i, :start], b["chosen"][i][cm], b["rejected"][i][rm]
            seg = torch.tensor([0] * len(prompt) + [1] * len(c) + [2] * len(r))
            rows.setdefault(len(seg), []).append((i, torch.cat([prompt, c, r]), seg))
        total, right = 0.0, 0.0
        for group in rows.values():
            at = [i for i, *_ in group]
            value, metrics = fn(model, {"ids": torch.stack([x[1] for x in group]), "segment": torch.stack([x[2] for x in group]),
                                        "ref_chosen": b["ref_chosen"][at], "ref_rejected": b["ref_rejected"][at]}, beta=beta)
            share = len(at) / len(b["chosen"])
            total, right = total + share * value, right + share * metrics["accuracy"]
        return total, {"accuracy": right}
    return Step(model=model, loss=loss, batch=batch,
                roles={"chosen": "chosen", "rejected": "rejected", "chosen_mask": "chosen_mask", "rejected_mask": "rejected_mask",
                       "reference_chosen": "ref_chosen", "reference_rejected": "ref_rejected"},
                settings={"beta": Setting(0.1, "setting")}, metrics={"accuracy": Metric(low=0.0, high=1.0, moves=False)}, logprobs=logprobs,
                family="preference", reduction="mean", value_is_loss=True, empty_rows=False, wide=("chosen", "rejected", "chosen_mask", "rejected_mask"))


@declare("n/r15")
def n15(m, fn):
    def rates(total, ranks, **s):
        if "add" in s and s["add"] <= 0: raise ValueError("a ramp without an end")
        if "decay_tokens" in s: s["total"] = s.pop("decay_tokens")
        return [float(fn(k, **s)) for k in range(total)]
    # 10 steps of 4 rows, 5 of 8, 4 of 12, then 16: 10240 tokens = 80 rows at step 15, 102400 tokens = 800 rows at step 61
    return Schedule(rates=rates, peak=1e-3, final=1e-4, total=80, warmup=15, ends=61,
                    settings={"floor": 1e-4, "row": 128, "rows_from": 4, "rows_to": 16, "add": 4, "stage_rows": 40, "warm": 10240, "decay_tokens": 102400})


@declare("n/r16")
def n16(m, fn):
    given, second = m.make(0), m.make(1)
    model = fn(given["conv"])
    g = torch.Generator().manual_seed(4)
    batch = {"x": torch.cat([given["x"], second["x"]]), "seq_idx": torch.cat([given["seq_idx"], second["seq_idx"].flip(0)]), "y": torch.randn(4, 14, 6, generator=g)}
    def loss(model, b): return (model(b["x"], b["seq_idx"]) - b["y"]).square().mean()
    def causal(conv, x): return conv(nn.functional.pad(x.transpose(1, 2), (conv.kernel_size[0] - 1, 0))).transpose(1, 2)
    def alone(model, b):
        conv = next(c for c in model.modules() if isinstance(c, nn.Conv1d))
        total = 0.0
        for x, y, doc in zip(b["x"], b["y"], b["seq_idx"]):
            for d in doc.unique(): total = total + (causal(conv, x[doc == d][None])[0] - y[doc == d]).square().sum()
        return total / b["y"].numel()
    def through(model, b):
        total = 0.0
        for x, y, doc in zip(b["x"], b["y"], b["seq_idx"]):
            for d in doc.unique():
                mine = doc == d
                total = total + (model(x[mine][None], torch.zeros(1, int(mine.sum()), dtype=torch.long))[0] - y[mine]).square().sum()
        return total / b["y"].numel()
    step = Step(model=model, loss=loss, batch=batch, roles={"documents": "seq_idx"}, reduction="mean", value_is_loss=True, all_supervised=True,
                paths={"the plain convolution of each document": alone, "each document in a row of its own": through}, wide=("x", "seq_idx", "y"))
    plain = nn.Conv1d(6, 6, 4, groups=6)
    with torch.no_grad():       # whole numbers, so that no sum is rounded
        for p in plain.parameters(): p.copy_(torch.randint(-4, 5, p.shape, generator=g))
    x = torch.randint(-4, 5, (2, 14, 6), generator=g).float()
    def outputs(mod):
        with torch.no_grad():
            return causal(mod, x) if isinstance(mod, nn.Conv1d) else mod(x, torch.zeros(2, 14, dtype=torch.long))
    conv = m.make(2)["conv"]
    names = {id(p): n for n, p in conv.named_parameters()}
    found = [names.get(id(p), f"new {n}") for n, p in fn(conv).named_parameters()]
    return [step, AdapterStart(model=plain, attach=fn, outputs=outputs),
            Census(wanted=["weight", "bias"], found=found, what="parameters of the wrapper", once=True)]


@declare("n/r17")
def n17(m, fn):
    model, batch = more(m, ("ids", "loss_mask"))
    return Step(model=model, loss=fn, batch=batch, roles={"ids": "ids", "mask": "loss_mask"}, settings={"ranks": Setting(4, "inert", modes=(1, 2, 3, 5))},
                family="sft", reduction="mean", value_is_loss=True, wide=("ids", "loss_mask"))


def captured(params, optimizer, call):
    """Runs an update and gives the gradients that the optimizer received."""
    seen = {}
    hook = optimizer.register_step_pre_hook(lambda *a: seen.update({i: None if p.grad is None else p.grad.clone() for i, p in enumerate(params)}))
    try: call()
    finally: hook.remove()
    return [seen.get(i) for i in range(len(params))]


@declare("n/r18")
def n18(m, fn):
    given = m.make(0); model = given["model"]
    batch = {k: torch.cat([b[k] for b in given["batches"]]) for k in ("ids", "loss_mask")}
    def accumulate(model, batches):
        params = list(model.parameters())
        values = [p.detach().clone() for p in params]
        got = captured(params, opt := torch.optim.SGD(params, lr=0.5), lambda: fn(model, opt, list(batches)))
        with torch.no_grad():
            for p, v, gr in zip(params, values, got): p.copy_(v); p.grad = gr
    def loss(model, b):
        ce = nn.functional.cross_entropy(model(b["ids"])[:, :-1].transpose(1, 2), b["ids"][:, 1:], reduction="none")
        return (ce * b["loss_mask"][:, 1:]).sum() / b["loss_mask"][:, 1:].sum()
    def backward(settings):
        for p in model.parameters(): p.grad = None
        accumulate(model, [{k: v.clone() for k, v in b.items()} for b in given["batches"]])
    return [Accumulation(model, accumulate, batch, split=(2, 3, 2, 1), what="ranks"), Accumulation(model, accumulate, batch, split=(1, 5, 2), what="ranks"),
            Step(model=model, loss=loss, batch=batch, roles={"ids": "ids", "mask": "loss_mask"}, family="sft", reduction="mean", value_is_loss=True,
                 backward=backward, wide=("ids", "loss_mask"))]


@declare("n/r19")
def n19(m, fn):
    def deal(rows, world):
        n = len(rows); per = -(-n // world)
        order = [i % n for i in range(per * world)]
        return [{"predicted": [int(rows[i][0]) for i in order[r::world]], "gold": [int(rows[i][1]) for i in order[r::world]], "size": n} for r in range(world)]
    def metric(shards): return float(fn(deal(torch.cat([s for s in shards if len(s)]).tolist(), len(shards))))
    def single(shards):
        rows = torch.cat([s for s in shards if len(s)]).tolist()
        tp = sum(p and g for p, g in rows); wrong = sum(p != g for p, g in rows)
        return float(2 * tp / (2 * tp + wrong) if tp else 0.0)
    own = torch.tensor([[1, 1], [0, 1], [1, 1], [0, 0], [1, 0], [1, 1], [0, 0], [0, 1], [1, 1], [0, 0], [1, 0], [0, 0], [1, 1]])
    made = [Ranks(metric=metric, rows=own, single=single)]
    made += [Ranks(metric=lambda shards, w=w: float(fn(deal(torch.cat(list(shards)).tolist(), w))), rows=own, single=single) for w in (4, 5)]
    return made + [Ranks(metric=metric, rows=torch.tensor(list(zip(*m.data(0)))), single=single)]


@declare("n/r20")
def n20(m, fn):
    seen = lambda rank, steps, **s: [int(fn(rank, k, **s)) for k in steps]
    epochs = {f"epoch {e}": [seen(2 * r, range(5 * e, 5 * e + 5)) for r in range(4)] for e in range(4)}
    return [Ranks(draw=lambda rank: torch.tensor(seen(2 * rank, range(10)))), Ranks(draw=lambda rank: torch.tensor(seen(2 * rank, [0]))),
            Ranks(draw=lambda epoch: torch.tensor([seen(2 * r, range(5 * epoch, 5 * epoch + 5)) for r in range(4)])),
            Ranks(draw=lambda seed: torch.tensor(seen(0, range(5), seed=100 + seed))),
            Census(wanted={k: 20.0 for k in epochs}, found={k: float(len({i for r in v for i in r if 0 <= i < 23})) for k, v in epochs.items()}, what="samples of an epoch"),
            Census(wanted=[f"data rank {r} step {k}: {fn(2 * r, k)}" for r in range(4) for k in range(12)],
                   found=[f"data rank {r} step {k}: {fn(2 * r + 1, k)}" for r in range(4) for k in range(12)], what="samples of tensor-parallel ranks", once=True),
            Census(wanted=[f"rank {r} step {k}: {fn(r, k, seed=1235)}" for r in range(8) for k in range(5)],
                   found=[f"rank {r} step {k}: {fn(r, 5 + k, seed=1234)}" for r in range(8) for k in range(5)], what="samples by seed + epoch", once=True)]


class One(nn.Module):
    def __init__(self, gain, weight):
        super().__init__(); self.gain, self.weight = nn.Parameter(gain.clone()), nn.Parameter(weight.clone())
    def forward(self, x): return (x * self.gain) @ self.weight.T


@declare("n/r21")
def n21(m, fn):
    def of(replica):
        given = m.make(0); two = given["model"]
        batch = {k: torch.cat([b[k] for b in given["batches"]]) for k in ("x", "y")}
        one = One(two.gain[0].detach(), torch.cat([w.detach() for w in two.weight]))
        outer, inner = torch.optim.SGD(one.parameters(), lr=0.5), given["optimizer"]
        def update(batches, max_grad_norm):
            whole = {k: torch.cat([b[k] for b in batches]) for k in ("x", "y")}
            with torch.no_grad():
                for p in two.gain: p.copy_(one.gain)
                for p, w in zip(two.weight, one.weight.chunk(2)): p.copy_(w)
            params = list(two.gain) + list(two.weight)
            got = captured(params, inner, lambda: fn(two, inner, [whole], max_norm=1e30 if max_grad_norm is None else max_grad_norm))
            one.gain.grad, one.weight.grad = got[replica], torch.cat(got[2:])
            outer.step(); outer.zero_grad()
        def loss(model, b): return (model(b["x"]) - b["y"]).square().mean()
        return Update(model=one, optimizer=outer, update=update, loss=loss, batch=batch)
    return [of(0), of(1)]


@declare("n/r22")
def n22(m, fn):
    model, batch = more(m, ("ids", "loss_mask"))
    def loss(model, b, world):
        fill = -b["ids"].shape[1] % (2 * world)
        return fn(model, {k: nn.functional.pad(b[k], (0, fill)) for k in ("ids", "loss_mask")} if fill else b, world=world)
    return Step(model=model, loss=loss, batch=batch, roles={"ids": "ids", "mask": "loss_mask"}, settings={"world": Setting(4, "inert", modes=(1, 2, 3, 6))},
                family="sft", reduction="mean", value_is_loss=True, wide=("ids", "loss_mask"))


class Run:
    def __init__(self, model, optimizer): self.model, self.optimizer, self.at = model, optimizer, 0


@declare("n/r23")
def n23(m, fn):
    def fresh(world):
        model = m.make(0)["model"]
        return Run(model, fn(model, world))
    def run(x, n):
        ids = []
        for _ in range(n):
            g = torch.Generator().manual_seed(100 + x.at)
            data, y = torch.randn(6, 5, generator=g), torch.randn(6, 3, generator=g)
            x.model.zero_grad()
            (x.model(data) - y).square().mean().backward()
            x.optimizer.step()
            ids.append(x.at); x.at += 1
        x.model.zero_grad()
        return ids
    weights = lambda x: torch.cat([p.detach().flatten().clone() for p in x.model.parameters()])
    def state(x):
        s, n = x.optimizer.state_dict(), weights(x).numel()
        return torch.cat([weights(x)] + [torch.cat([r[k] for r in s])[:n] for k in ("m", "v")] + [torch.tensor([float(r["t"]) for r in s])])
    store = {}
    def keep(x, folder): store[str(folder)] = (copy.deepcopy(x.model.state_dict()), x.optimizer.state_dict(), x.at)
    def take(x, folder):
        weights_, shards, x.at = store[str(folder)]
        x.model.load_state_dict(weights_); x.optimizer.load_state_dict(shards)
        return x
    def write(x, folder): torch.save((x.model.state_dict(), x.optimizer.state_dict(), x.at), folder / "state.pt")
    def read(x, folder):
        weights_, shards, x.at = torch.load(folder / "state.pt")
        x.model.load_state_dict(weights_); x.optimizer.load_state_dict(shards)
        return x
    def ahead(x):
        x = copy.deepcopy(x); run(x, 3)
        return weights(x)
    def adam(x, folder):
        """torch's Adam, from the same moments."""
        weights_, shards, at = store[str(folder)]
        model = m.make(0)["model"]; model.load_state_dict(weights_)
        opt = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.99), eps=1e-8)
        flat, start = {k: torch.cat([s[k] for s in shards]) for k in ("m", "v")}, 0
        for p in model.parameters():
            cut = {k: v[start:start + p.numel()].view_as(p).clone() for k, v in flat.items()}; start += p.numel()
            opt.state[p] = {"step": torch.tensor(float(shards[0]["t"])), "exp_avg": cut["m"], "exp_avg_sq": cut["v"]}
        out = Run(model, opt); out.at = at
        return out
    made = [Resume(make=lambda w=w: fresh(w), run=run, save=s, load=l, state=state, steps=4) for w, s, l in ((4, keep, take), (4, write, read), (1, keep, take))]
    def perturb(x): run(x, 4)
    def trip(load, tolerance, world=4): return RoundTrip(make=lambda: fresh(world), perturb=perturb, save=keep, load=load, outputs=ahead, tolerance=tolerance)
    return made + [trip(take, 0.0), trip(lambda x, f: take(fresh(3), f), 1e-5), trip(lambda x, f: take(fresh(5), f), 1e-5), trip(lambda x, f: take(fresh(4), f), 1e-5, world=5),
                   trip(adam, 1e-5), trip(adam, 1e-5, world=1)]


@declare("n/r24")
def n24(m, fn):
    spread = lambda rewards, groups: fn(rewards, groups, torch.arange(len(rewards)) % 3)
    uneven = lambda rewards, groups: fn(rewards, groups, (torch.arange(len(rewards)) >= 5).long() + 2 * (torch.arange(len(rewards)) >= 7).long())
    alone = lambda rewards, groups: fn(rewards, groups, torch.zeros(len(rewards), dtype=torch.long))
    given = m.make(0)
    rows = torch.stack([given["rewards"].double() - 100, given["groups"].double()], 1)
    rows = torch.cat([rows, torch.tensor([[0.5, 4.0], [2.0, 5.0], [2.0, 5.0]], dtype=torch.double)])       # one answer; equal rewards
    weight = lambda n: torch.arange(1, n + 1, dtype=torch.double).sqrt()
    def metric(shards):
        at = torch.cat([torch.full((len(s),), r) for r, s in enumerate(shards)])
        all_ = torch.cat(list(shards))
        return float((fn(all_[:, 0], all_[:, 1].long(), at).double() * weight(len(all_))).sum())
    def single(shards):
        all_ = torch.cat(list(shards)); x, g = all_[:, 0], all_[:, 1]
        out = torch.zeros_like(x)
        for k in g.unique():
            at = g == k
            if at.sum() > 1: out[at] = (x[at] - x[at].mean()) / (x[at].std() + 1e-6)
        return float((out * weight(len(x))).sum())
    return [AdvantageEstimator(fn=f, scale="free") for f in (spread, uneven, alone)] + [Ranks(metric=metric, rows=rows, single=single)]


@declare("n/r25")
def n25(m, fn):
    given = m.make(0); model, prompt, settings = given["model"], given["prompt_ids"], given["settings"]
    def syncs(ranks):
        mine = {**settings, "ranks": ranks, "seed": 3}
        @torch.no_grad()
        def trainer():
            ids = fn(model, prompt, mine)[0]
            lp = (model(ids[None])[0, :-1] / mine["temperature"]).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            return lp[len(prompt) - 1:]
        perturb, undo = perturbation(model)
        return WeightSync(perturb=perturb, push=lambda: None, trainer=trainer, sampler=lambda: fn(model, prompt, mine)[1], undo=undo)
    out = [fn(model, prompt, {**settings, "seed": s})[0].tolist() for s in range(5)]
    return [Ranks(draw=lambda rank: fn(model, prompt, {**settings, "seed": rank})[0]), syncs(4), syncs(1), syncs(2),
            Unbiased(fn=thinning(fn, {"ranks": 4, "new": 1}, prompt), settings=(0.7, 1.5)), Unbiased(fn=thinning(fn, {"ranks": 2, "new": 1}, prompt), settings=(0.8,)),
            Census(wanted=[f"seed {s} place {i}: {t}" for s in range(5) for i, t in enumerate(prompt.tolist())] + [f"seed {s}: length {len(prompt) + 6}" for s in range(5)],
                   found=[f"seed {s} place {i}: {t}" for s in range(5) for i, t in enumerate(out[s][:len(prompt)])] + [f"seed {s}: length {len(out[s])}" for s in range(5)],
                   what="the prompt and the length of a sample", once=True)]
