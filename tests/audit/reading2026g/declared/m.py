import copy
import json
import math

import torch
from torch import nn

from earnest_audit import (GAE, Accumulation, AdvantageEstimator, Census, ChatTemplate, Collator, Grader, Metric, OuterStep, Ranks, Resume,
                           RoundTrip, Setting, Step, Update, WeightSync)
from tests.audit.reading2026g.reading import declare, no_subject


def token_logprobs(model, batch):  # aligned with ids: entry t is that of ids[:, t], 0 for token 0
    ids = batch["ids"]
    lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return nn.functional.pad(lp, (1, 0))


def more(m, keys, seeds=(0, 1)):
    made = [m.make(s) for s in seeds]
    return made[0]["model"], {k: torch.cat([x[k] for x in made]) for k in keys}


def padded(lists, value, dtype=None):
    n = max([len(x) for x in lists] + [1])
    return torch.tensor([list(x) + [value] * (n - len(x)) for x in lists], dtype=dtype)


@declare("m/r01")
def turns(m, fn):
    model, given = more(m, ("ids", "turn_ids", "old_logprobs", "advantages"))
    given["mask"] = (given["turn_ids"] > 0).float()
    with torch.no_grad():  # the second half was sampled by another model: as in make, but of this one
        noise = 0.01 * torch.randn(given["ids"].shape, generator=torch.Generator().manual_seed(5))
        given["old_logprobs"][4:] = ((token_logprobs(model, given) + noise) * given["mask"])[4:]

    def loss(model, batch, clip_low, clip_high):
        b = {k: v for k, v in batch.items() if k != "mask"}
        b["turn_ids"] = batch["turn_ids"] * (batch["mask"] > 0).long()
        return fn(model, b, clip_low=clip_low, clip_high=clip_high)

    return Step(model=model, loss=loss, batch=given,
                roles={"ids": "ids", "mask": "mask", "behaviour": "old_logprobs", "advantages": "advantages"},
                settings={"clip_low": Setting(0.003, "clip"), "clip_high": Setting(0.004, "clip high")},
                logprobs=token_logprobs, reduction="mean", value_is_loss=True, family="policy gradient",
                wide=("ids", "mask", "turn_ids", "old_logprobs", "advantages"))


@declare("m/r02")
def turn_gae(m, fn):
    def single(rewards, values, mask, gamma, lam):  # every token is a turn
        row, t = mask.bool().nonzero(as_tuple=True)
        r, v = rewards[row, t], values[row, t]
        a = fn(r, row, t, v, gamma_turn=gamma, lam_turn=lam)
        out = torch.zeros_like(rewards)
        out[row, t] = a
        for flat, given in ((r, rewards), (v, values)):
            if not torch.equal(flat, given[row, t]):
                given[row, t] = flat  # what the code wrote into its input is seen in the caller's
        return out

    def double(rewards, values, mask, gamma, lam):  # every token is a turn of two: inside it γ = λ = 1, so the first has the turn's GAE
        row, t = mask.bool().nonzero(as_tuple=True)
        r, v = rewards[row, t], values[row, t]
        two = lambda a, b: torch.stack([a, b], 1).flatten()
        a = fn(two(torch.zeros_like(r), r), two(row, row), two(t, t), two(v, 0.5 - v), gamma_turn=gamma, lam_turn=lam)
        out = torch.zeros_like(rewards)
        out[row, t] = a[::2]
        return out

    return [GAE(fn=single, gamma=0.9, lam=0.8, holes=True), GAE(fn=double, gamma=0.9, lam=0.8, holes=True)]


@declare("m/r03")
def template(m, fn):
    messages = m.make(0)["messages"]
    head = [m.IM_START] + m.enc("assistant\n")
    return ChatTemplate(tokens=lambda ms: fn(ms), prompt=lambda ms: list(fn(ms)[0]) + head, messages=messages, end=m.IM_END, trained=[4, 7])


@declare("m/r04")
def grader(m, fn):
    given = m.make(0)
    row, comp = given["row"], given["completion"]
    before, left = dict(row["db"]), row["db"]["ann"] - 500
    t = lambda **k: "<tool_call>" + json.dumps(k) + "</tool_call>"
    move = lambda c, src="ann", dst="bob": t(name="transfer", args={"src": src, "dst": dst, "cents": c})
    close = t(name="close", args={"who": "cy"})
    said = f" Ann has {left} cents now."
    right = [
        comp,
        move(500) + close + said,
        close + move(500) + f" {left:,}",
        move(500) + "<tool_call>{not json</tool_call>" + close + said,
        move(500) + "<tool_call>[1, 2]</tool_call><tool_call>3</tool_call>" + close + said,
        move(500) + t(name="transfer") + t(name="transfer", args=None) + t(name="close", args={}) + close + said,
        move(500) + move(-100) + move(0) + move(300, "bob", "bob") + move(300, "ann", "zoe") + t(name="close", args={"who": "bob"}) + close + said,
        move(700) + move(200, "bob", "ann") + close + said,
    ]
    wrong = [
        said,
        move(500) + said,
        close + said,
        move(500) + close,
        move(500) + close + f" Ann has {left + 1} cents now.",
        move(500) + close + f" Ann has 1{left} cents now.",
        move(500) + close + f" Ann has {left}0 cents now.",
        move(400) + close + said,
        move(500) + move(500) + close + said,
        move(500.0) + close + said,
        move("500") + close + said,
        move(10 ** 9) + close + said,
        move(500, "bob", "ann") + close + said,
        move(500) + close + t(name="read", args={"who": str(left)}) + " Done.",
        move(500) + close + f"<tool_call>{left}</tool_call> Done.",
    ]
    kept = copy.deepcopy(m.make(0)["row"])
    fn(kept, comp)
    return [Grader(grade=lambda answer: fn(row, answer), right=right, wrong=wrong),
            Census(wanted=before, found=dict(kept["db"]), what="accounts of the row after grading"),
            Census(wanted=[json.dumps(c) for c in row["gold_calls"]] + list(row["outputs"]),
                   found=[json.dumps(c) for c in kept["gold_calls"]] + list(kept["outputs"]), what="gold calls and outputs of the row after grading")]


@declare("m/r05")
def trajectories(m, fn):
    examples = m.make(0)["rows"] + [dict(r, id=r["id"] + 10) for r in m.make(1)["rows"]]
    code = lambda x: list(json.dumps(x).encode())
    turns = lambda e: [j for j, x in enumerate(e["messages"]) if x["role"] == "assistant"]

    def context(e, keep):
        out = []
        for j in turns(e):
            past = e["messages"][:j]
            tools = [i for i, x in enumerate(past) if x["role"] == "tool"]
            full = tools[len(tools) - keep:] if keep and keep <= len(tools) else (tools if keep else [])
            out.append([[x["role"], "[omitted]" if x["role"] == "tool" and i not in full else x["content"]] for i, x in enumerate(past)])
        return out

    def stage(keep):
        def collate(rows):
            out, at, cut = fn(rows, keep_tools=keep), 0, []
            for e in rows:
                n = len(turns(e))
                cut.append(out[at:at + n])
                at += n
            cut[-1] = cut[-1] + out[at:]  # more rows than assistant turns would stand here
            return {
                "id": padded([[r["id"] for r in c] for c in cut], -1),
                "turn": padded([[r["turn"] for r in c] for c in cut], -1),
                "weight": padded([[r["weight"] for r in c] for c in cut], -1.0, torch.float64),
                "target": padded([code([r["target"] for r in c]) for c in cut], -1),
                "context": padded([code([[sorted(x.items()) for x in r["context"]] for r in c]) for c in cut], -1),
            }

        return Collator(
            fn=collate, examples=copy.deepcopy(examples), pads={"id": -1, "turn": -1, "weight": -1.0, "target": -1, "context": -1},
            columns={
                "id": lambda e: torch.tensor([e["id"]] * len(turns(e)), dtype=torch.long),
                "turn": lambda e: torch.arange(len(turns(e))),
                "weight": lambda e: torch.tensor([1.0 / len(turns(e)) for _ in turns(e)], dtype=torch.float64),
                "target": lambda e: torch.tensor(code([f"<think>{e['messages'][j]['thought']}</think>{e['messages'][j]['content']}" for j in turns(e)])),
                "context": lambda e: torch.tensor(code([[[["content", c], ["role", r]] for r, c in x] for x in context(e, keep)])),
            })

    return [stage(1), stage(2), stage(0)]


@declare("m/r06")
def void(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(model=model, loss=fn, batch=given,
                roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logprobs", "advantages": "advantages"},
                settings={"clip_low": Setting(0.2, "clip"), "clip_high": Setting(0.28, "clip high"), "budget": Setting(16, "setting")},
                metrics={"void_fraction": Metric(low=0.0, high=1.0, moves=False)},
                logprobs=token_logprobs, reduction="mean", value_is_loss=True, drops_tokens=True, family="policy gradient",
                wide=("ids", "loss_mask", "old_logprobs"))


@declare("m/r07")
def gigpo(m, fn):
    def expand(rewards, groups, steps, states):  # row = trajectory; its reward sits on its last step
        R, G, J, S, last, first = [], [], [], [], [], []
        for i in range(len(rewards)):
            n = steps(i)
            first.append(len(J))
            R += [torch.zeros_like(rewards[i])] * (n - 1) + [rewards[i]]
            G += [groups[i]] * n
            J += [i] * n
            S += states(i, n)
            last.append(len(J) - 1)
        return torch.stack(R), torch.stack(G), torch.tensor(J), torch.tensor(S), first, last

    def alone(rewards, groups):
        n = len(rewards)
        return fn(rewards, groups, torch.arange(n), torch.arange(n))

    def together(rewards, groups):
        n = len(rewards)
        return fn(rewards, groups, torch.arange(n), torch.zeros(n, dtype=torch.long))

    def long(rewards, groups):  # 1, 2 or 3 steps, all states distinct: the episode level only
        r, g, j, s, first, last = expand(rewards, groups, lambda i: 1 + i % 3, lambda i, n: [10 * i + k for k in range(n)])
        return fn(r, g, j, s)[last]

    def anchored(rewards, groups):  # the first state is common to the task
        r, g, j, s, first, last = expand(rewards, groups, lambda i: 2, lambda i, n: [0, 10 + i])
        return fn(r, g, j, s)[first]

    def task(seed, number):
        g = torch.Generator().manual_seed(seed)
        out = []
        for _ in range(1 if seed == 3 else 4):
            n = int(torch.randint(2, 6, (1,), generator=g))
            out.append(([0.0] * (n - 1) + [10 * float(torch.rand(1, generator=g) < 0.5)], [0] + torch.randint(0, 4, (n - 1,), generator=g).tolist()))
        out[0][0][0] = 1.0  # a reward on the way
        return {"task": number, "trajectories": out}

    def stage(gamma, omega):
        def collate(tasks):
            R, G, J, S, j = [], [], [], [], 0
            for e in tasks:
                for r, s in e["trajectories"]:
                    R, G, J, S, j = R + r, G + [e["task"]] * len(r), J + [j] * len(r), S + s, j + 1
            a = fn(torch.tensor(R, dtype=torch.float64), torch.tensor(G), torch.tensor(J), torch.tensor(S), gamma=gamma, omega=omega).tolist()
            out, at = [], 0
            for e in tasks:
                n = sum(len(r) for r, _ in e["trajectories"])
                out.append([round(x * 9973.137) for x in a[at:at + n]])
                at += n
            return {"advantages": padded(out, -10 ** 9)}

        def definition(e):
            totals = [sum(r) for r, _ in e["trajectories"]]
            mean = sum(totals) / len(totals)
            rows = []
            for (r, s), total in zip(e["trajectories"], totals):
                for k in range(len(r)):
                    rows.append((total - mean, sum(gamma ** i * x for i, x in enumerate(r[k:])), s[k]))
            out = []
            for episode, ret, state in rows:
                same = [x for _, x, y in rows if y == state]
                out.append(round((episode + omega * (ret - sum(same) / len(same) if len(same) > 1 else 0.0)) * 9973.137))
            return torch.tensor(out)

        return Collator(fn=collate, examples=[task(s, 5 + s) for s in range(5)], pads={"advantages": -10 ** 9}, columns={"advantages": definition})

    return [AdvantageEstimator(fn=f, scale="equal", over="group") for f in (alone, together, long, anchored)] + [stage(0.95, 1.0), stage(0.5, 0.3)]


@declare("m/r08")
def observations(m, fn):
    model, given = more(m, ("ids", "roles"))
    roles = given.pop("roles")
    given |= {"mask": (roles == 1).float(), "observation_mask": (roles == 2).float()}

    def loss(model, batch, obs_weight):
        kinds = torch.where(batch["mask"] > 0, 1, torch.where(batch["observation_mask"] > 0, 2, 0))
        return fn(model, {"ids": batch["ids"], "roles": kinds}, obs_weight=obs_weight)

    return Step(model=model, loss=loss, batch=given, roles={"ids": "ids", "mask": "mask"}, masks=("observation_mask",), family="sft",
                settings={"obs_weight": Setting(0.1, "weight")},
                metrics={"action": Metric(low=0.0, weight=1.0), "observation": Metric(low=0.0, weight="obs_weight")},
                reduction="mean", value_is_loss=True, wide=("ids", "mask", "observation_mask"))


@declare("m/r09")
def tool_sampler(m, fn):
    given = m.make(0)
    model, settings = given["model"], given["settings"]
    rows = torch.tensor([[1, 2, m.CALL, 3], [4, m.CALL, 5, 6], [7, 8, 9, m.CALL], [m.CALL, 2, 2, 9], [3, 1, 4, 1], [0, m.CALL, 9, 9]])
    sample = lambda p, s=settings: fn(model, list(p), dict(s))

    def walk(prompt, ids):
        """What the definition says of these tokens: log-probs, the environment's tokens, the number of sampled ones."""
        seen, lps, env, i, n = list(prompt), [], 0.0, 0, 0
        with torch.no_grad():
            while i < len(ids):
                logits = model(torch.tensor([seen]))[0, -1] / settings["temperature"]
                logits[[m.OBS, m.END_OBS, m.ERR]] = float("-inf")
                t, history, n = ids[i], seen[:], n + 1
                lps.append(float(logits.log_softmax(-1)[t]))
                seen, i = seen + [t], i + 1
                if t == m.EOS:
                    break
                if t == m.END:
                    obs = m.tool(history)
                    env += sum((k + 1) * x for k, x in enumerate(obs))
                    seen, i, lps = seen + obs, i + len(obs), lps + [0.0] * len(obs)
        return lps, env, n

    def inserted(ids):
        out, i = 0.0, 0
        while i < len(ids):
            if ids[i] == m.OBS:
                k = 0
                while i < len(ids):
                    out += (k + 1) * ids[i]
                    i, k = i + 1, k + 1
                    if ids[i - 1] == m.END_OBS:
                        break
            else:
                i += 1
        return out

    def counted(ids):
        n, inside = 0, False
        for t in ids:
            inside = inside or t == m.OBS
            n += not inside
            inside = inside and t != m.END_OBS
        return n

    def touched(shards):
        before = torch.get_rng_state()
        for s in shards:
            for p in s.tolist():
                sample(p)
        return float(not torch.equal(before, torch.get_rng_state()))

    prompts = lambda shards: [[int(x) for x in p] for s in shards for p in s.tolist()]
    runs = lambda shards: [(p, *sample(p)) for p in prompts(shards)]
    weighed = lambda lps: sum(x * (1 + k % 5) for k, x in enumerate(lps))

    def text(seed):
        ids = sample(rows[0].tolist(), dict(settings, seed=seed, max_new=40))[0]
        return torch.tensor((ids + [-1] * 40)[:40])

    return [
        Ranks(draw=text),
        Ranks(rows=rows, metric=lambda s: sum(weighed(lp) for _, _, lp in runs(s)), single=lambda s: sum(weighed(walk(p, ids)[0]) for p, ids, _ in runs(s))),
        Ranks(rows=rows, metric=lambda s: float(sum(inserted(ids) for _, ids, _ in runs(s))), single=lambda s: float(sum(walk(p, ids)[1] for p, ids, _ in runs(s)))),
        Ranks(rows=rows, metric=lambda s: float(sum(counted(ids) for _, ids, _ in runs(s))),
              single=lambda s: float(sum(counted(ids) if m.EOS in ids else settings["max_new"] for _, ids, _ in runs(s)))),
        Ranks(rows=rows, metric=lambda s: float(sum(len(ids) - len(lp) for _, ids, lp in runs(s))), single=lambda s: 0.0),
        Ranks(rows=rows, metric=touched, single=lambda s: 0.0),
    ]


@declare("m/r10")
def packed_sqrt(m, fn):
    model, given = more(m, ("ids", "seg", "loss_mask"))
    clean = dict(given)
    first = nn.functional.pad(given["seg"][:, 1:] != given["seg"][:, :-1], (1, 0), value=True)
    clean["loss_mask"] = given["loss_mask"] * (~first).long()
    common = dict(model=model, loss=fn, roles={"ids": "ids", "documents": "seg", "mask": "loss_mask"}, family="sft", reduction="mean",
                  value_is_loss=True, wide=("ids", "seg", "loss_mask"))
    return [Step(batch=clean, **common), Step(batch=given, drops_tokens=True, name="with loss_mask on first tokens", **common)]


@declare("m/r11")
def flat_collator(m, fn):
    examples = m.make(0)["rows"] + [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9], "labels": [9]}, {"input_ids": [3, 4, 3], "labels": [3, 4, -100]}]

    def unpack(batch):
        cu = batch["cu_seqlens"].tolist()
        docs = [{k: batch[k][0, a:b] for k in ("input_ids", "labels", "position_ids")} for a, b in zip(cu, cu[1:])]
        if cu[-1] != batch["input_ids"].shape[1]:
            docs.append({k: batch[k][0, cu[-1]:] for k in ("input_ids", "labels", "position_ids")})
        return docs

    labels = lambda e: [-100] + list(e.get("labels", e["input_ids"]))[1:]
    made = fn(copy.deepcopy(examples))
    length = sum(len(e["input_ids"]) for e in examples)
    return [
        Collator(fn=fn, examples=examples, rows=False, unpack=unpack, targets=lambda e: [x for x in labels(e) if x != -100],
                 columns={"input_ids": lambda e: torch.tensor(e["input_ids"]), "position_ids": lambda e: torch.arange(len(e["input_ids"])),
                          "labels": lambda e: torch.tensor(labels(e))}),
        Census(wanted={"rows": 1, "length": length, "labels": length, "positions": length, "entries of cu_seqlens": len(examples) + 1, "first": 0,
                       "last": length, "int32": 1, "max_length": max(len(e["input_ids"]) for e in examples)},
               found={"rows": made["input_ids"].shape[0], "length": made["input_ids"].shape[1], "labels": made["labels"].numel(),
                      "positions": made["position_ids"].numel(), "entries of cu_seqlens": len(made["cu_seqlens"]), "first": int(made["cu_seqlens"][0]),
                      "last": int(made["cu_seqlens"][-1]), "int32": int(made["cu_seqlens"].dtype == torch.int32), "max_length": int(made["max_length"])},
               what="numbers of the packed batch"),
    ]


@declare("m/r12")
def bins(m, fn):
    g = torch.Generator().manual_seed(0)
    examples = []
    for i, r in enumerate(m.make(0)["rows"] + m.make(1)["rows"][:3]):  # the first token names the example
        ids = [100 + i] + r["input_ids"][1:]
        examples.append({"input_ids": ids, "labels": [x if float(torch.rand(1, generator=g)) < 0.8 else -100 for x in ids]})
    names = ("input_ids", "labels", "position_ids")

    def stage(bin_len):
        def collate(rows):
            return {**fn(rows, bin_len=bin_len), "order": torch.tensor([r["input_ids"][0] for r in rows])}

        def unpack(batch):
            docs = {}
            extra = []
            for i in range(batch["attention_mask"].shape[0]):
                number = batch["attention_mask"][i]
                for k in range(1, int(number.max()) + 1):
                    doc = {c: batch[c][i][number == k] for c in names}
                    name = int(doc["input_ids"][0]) if len(doc["input_ids"]) else None
                    if name is None or name in docs:
                        extra.append(doc)
                    else:
                        docs[name] = doc
                rest = {c: batch[c][i][number == 0] for c in names}
                if bool((rest["labels"] != -100).any()) or bool((rest["input_ids"] != 0).any()):
                    extra.append(rest)  # padding that is not padding
            order = batch["order"].tolist()
            return [docs[n] for n in order if n in docs] + [d for n, d in docs.items() if n not in order] + extra

        return Collator(fn=collate, examples=copy.deepcopy(examples), rows=False, unpack=unpack, targets=lambda e: [x for x in e["labels"][1:] if x != -100],
                        columns={"input_ids": lambda e: torch.tensor(e["input_ids"]), "position_ids": lambda e: torch.arange(len(e["input_ids"])),
                                 "labels": lambda e: torch.tensor([-100] + e["labels"][1:])})

    def raises():
        try:
            fn([{"input_ids": [1] * 17, "labels": [1] * 17}])
        except Exception:
            return ["raises"]
        return []

    equal = [{"input_ids": [50 + i, 1, 2, 3, 4], "labels": [50 + i, 1, 2, 3, 4]} for i in range(3)]
    flat = fn(copy.deepcopy(equal))["input_ids"].flatten().tolist()
    shapes = fn(copy.deepcopy(examples), bin_len=16)
    return [stage(16), stage(24), Census(wanted=["raises"], found=raises(), what="samples longer than the bin"),
            Census(wanted={"50": 0, "51": 5, "52": 10}, found={str(n): flat.index(n) for n in (50, 51, 52) if n in flat}, what="places of samples of equal length"),
            Census(wanted={k: 16 for k in names + ("attention_mask",)}, found={k: shapes[k].shape[1] for k in names + ("attention_mask",)}, what="widths")]


@declare("m/r13")
def stream(m, fn):
    made = m.make(0)["rows"]
    filler = 999

    def stage(examples, seq_len, eos):
        def collate(rows):  # a long last document pushes everything out of the tail that is dropped
            out = fn(rows + [{"ids": [filler] * 40}], seq_len=seq_len, eos=eos)
            return {k: torch.tensor([r[k] for r in out]) for k in ("tokens", "labels")}

        def unpack(batch):
            t, l = batch["tokens"].flatten().tolist(), batch["labels"].flatten().tolist()
            docs, a, wrong = [], 0, []
            for i, x in enumerate(t):
                if x == filler:
                    break
                if i + 1 < len(t) and l[i] != t[i + 1]:
                    wrong.append({"tokens": torch.tensor([x]), "labels": torch.tensor([l[i]])})
                if x == eos:
                    docs.append({"tokens": torch.tensor(t[a:i + 1]), "labels": torch.tensor(l[a:i], dtype=torch.long)})
                    a = i + 1
            if a != i:
                docs.append({"tokens": torch.tensor(t[a:i]), "labels": torch.tensor(l[a:i])})
            return docs + wrong

        return Collator(fn=collate, examples=copy.deepcopy(examples), rows=False, unpack=unpack, targets=lambda e: (e["ids"] + [eos])[1:],
                        columns={"tokens": lambda e: torch.tensor(e["ids"] + [eos]), "labels": lambda e: torch.tensor((e["ids"] + [eos])[1:], dtype=torch.long)})

    def count(n, seq_len):
        return fn([{"ids": list(range(1, n))}], seq_len=seq_len)

    sizes = [(n, s) for s in (8, 5) for n in (s, s + 1, 2 * s, 2 * s + 1, 2 * s + 2, 3 * s + 3)]
    rows = {(n, s): count(n, s) for n, s in sizes}
    empty = fn([{"ids": [1, 2]}, {"ids": []}, {"ids": [3, 4, 5, 6, 7]}], seq_len=8, eos=0)
    return [stage(made, 8, 0), stage(made, 5, 0), stage(made, 8, 63),
            Census(wanted={f"{n} tokens in rows of {s}": (n - 1) // s for n, s in sizes}, found={f"{n} tokens in rows of {s}": len(r) for (n, s), r in rows.items()}, what="rows"),
            Census(wanted={f"{n} tokens in rows of {s}": s * ((n - 1) // s) for n, s in sizes},
                   found={f"{n} tokens in rows of {s}": sum(len(x["tokens"]) for x in r) for (n, s), r in rows.items()}, what="tokens in rows"),
            Census(wanted={f"token {i}": x for i, x in enumerate([1, 2, 0, 0, 3, 4, 5, 6])},
                   found={f"token {i}": x for i, x in enumerate(empty[0]["tokens"] if empty else [])}, what="an empty document's eos")]


@declare("m/r14")
def shared_prompt(m, fn):
    model, given = more(m, ("ids", "part", "ref_chosen", "ref_rejected"))
    ids, part = given["ids"], given["part"]
    sides = {}
    for name, k in (("chosen", 1), ("rejected", 2)):
        rows = [torch.cat([i[p == 0], i[p == k]]).tolist() for i, p in zip(ids, part)]
        masks = [[0] * int((p == 0).sum()) + [1] * int((p == k).sum()) for p in part]
        n = 16
        sides[name] = torch.tensor([r + [0] * (n - len(r)) for r in rows])
        sides[name + "_mask"] = torch.tensor([r + [0] * (n - len(r)) for r in masks]).float()
    batch = {**sides, "ref_chosen": given["ref_chosen"], "ref_rejected": given["ref_rejected"]}

    def loss(model, b, beta):
        rows, parts = [], []
        for c, cm, r, rm in zip(b["chosen"], b["chosen_mask"] > 0, b["rejected"], b["rejected_mask"] > 0):
            start = int(cm.nonzero()[0]) if cm.any() else 1
            rows.append(torch.cat([c[:start], c[cm], r[rm]]))
            parts.append(torch.tensor([0] * start + [1] * int(cm.sum()) + [2] * int(rm.sum())))
        n = max(len(r) for r in rows) + 1
        pad = lambda xs, v: torch.stack([nn.functional.pad(x, (0, n - len(x)), value=v) for x in xs])
        return fn(model, {"ids": pad(rows, 0), "part": pad(parts, -1), "ref_chosen": b["ref_chosen"], "ref_rejected": b["ref_rejected"]}, beta=beta)

    def logprobs(model, b):  # summed over the answer's tokens
        return tuple((token_logprobs(model, {"ids": b[k]}) * b[k + "_mask"]).sum(1) for k in ("chosen", "rejected"))

    return Step(model=model, loss=loss, batch=batch,
                roles={"chosen": "chosen", "rejected": "rejected", "chosen_mask": "chosen_mask", "rejected_mask": "rejected_mask",
                       "reference_chosen": "ref_chosen", "reference_rejected": "ref_rejected"},
                settings={"beta": Setting(0.1, "setting")}, metrics={"accuracy": Metric(low=0.0, high=1.0, moves=False)}, logprobs=logprobs,
                family="preference", reduction="mean", value_is_loss=True, wide=("chosen", "chosen_mask", "rejected", "rejected_mask"))


def packed(m, fn, key):
    model, given = more(m, ("ids", key))
    given["attention"] = (given[key] >= 0).long()

    def loss(model, batch):
        return fn(model, {"ids": batch["ids"], key: torch.where(batch["attention"] > 0, batch[key], -1)})

    return Step(model=model, loss=loss, batch=given, roles={"ids": "ids", "documents": key, "attention": "attention"}, family="sft", all_supervised=True,
                reduction="mean", value_is_loss=True, wide=("ids", key, "attention"))


@declare("m/r15")
def rope(m, fn):
    return packed(m, fn, "doc")


@declare("m/r17")
def ssm(m, fn):
    return packed(m, fn, "seq_idx")


@declare("m/r16")
def packed_stream(m, fn):
    docs, seq_len = m.make(0)["docs"], m.make(0)["seq_len"]
    make = lambda: fn([list(d) for d in docs], seq_len, 3)
    run = lambda x, n: [tuple(next(x)) for _ in range(n)]

    def peek(x):
        y = copy.deepcopy(x)
        return torch.tensor([next(y) for _ in range(20)], dtype=torch.float64)

    def save(x, folder):
        (folder / "stream.json").write_text(json.dumps(x.state_dict()))

    def load(x, folder):
        x.load_state_dict(json.loads((folder / "stream.json").read_text()))

    def memory(used):
        kept = {}

        def keep(x, folder):
            kept[str(folder)] = x.state_dict()

        def take(x, folder):
            for _ in range(used):
                next(x)
            x.load_state_dict(kept[str(folder)])

        return keep, take

    keep, take = memory(0)
    keep2, take2 = memory(13)
    return [Resume(make=make, run=run, save=save, load=load, state=peek, steps=11), Resume(make=make, run=run, save=save, load=load, state=peek, steps=4),
            Resume(make=make, run=run, save=keep, load=take, state=peek, steps=5), Resume(make=make, run=run, save=keep2, load=take2, state=peek, steps=4),
            Resume(make=make, run=run, save=keep2, load=take2, state=peek, steps=11),
            RoundTrip(make=make, perturb=lambda x: [next(x) for _ in range(3)] and None, save=keep2, load=take2, outputs=peek),
            Ranks(draw=lambda rank: torch.tensor(run(fn([list(d) for d in docs], seq_len, rank), 8)))]


@declare("m/r18")
def perplexity(m, fn):
    import random
    r = random.Random(0)
    rows = torch.tensor([(n * r.uniform(1, 4), n) for n in (r.randint(1, 20) for _ in range(11))], dtype=torch.float64)
    samples = lambda shards: [(float(s), int(n)) for x in shards for s, n in x.tolist()]

    def metric(shards):
        s = samples(shards)
        return fn(m.shard(s, len(shards)), len(s))

    def four(shards):
        s = samples(shards)
        return fn(m.shard(s, 4 * len(shards)), len(s))

    single = lambda shards: m.twin(samples(shards))
    return [Ranks(metric=metric, rows=rows, single=single), Ranks(metric=four, rows=rows, single=single)]


class Catch(torch.optim.SGD):
    """Keeps the gradients that it receives, and moves nothing."""

    def step(self, closure=None):
        self.caught = [None if p.grad is None else p.grad.clone() for g in self.param_groups for p in g["params"]]


@declare("m/r19")
def token_mean_update(m, fn):
    given = m.make(0)
    model, optimizer = given["model"], given["optimizer"]
    micro = [mb for rank in given["batches"] for mb in rank]
    batch = {k: torch.cat([mb[k] for mb in micro]) for k in ("ids", "labels")}
    batch["ids"] = torch.cat([batch["ids"], batch["ids"][:1].flip(1)])
    batch["labels"] = torch.cat([batch["labels"], torch.full((1, 10), -100)])  # a row without a trained token
    loss = lambda model, b: nn.functional.cross_entropy(model(b["ids"])[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum") / max(int((b["labels"][:, 1:] != -100).sum()), 1)
    ranks = lambda bs: [[b] for b in bs]
    one = lambda bs: [list(bs)]
    uneven = lambda bs: [list(bs[:-1]), [bs[-1]]] if len(bs) > 1 else [list(bs)]

    def accumulate(form):
        def run(model, batches):
            catch = Catch(model.parameters(), lr=0.5)
            fn(model, catch, form([dict(b) for b in batches]), max_norm=1e9)
            for p, g in zip(model.parameters(), catch.caught):
                p.grad = g
        return run

    forms = {"ranks": ranks, "micro-batches": one, "ranks with unequal numbers of micro-batches": uneven}
    return ([Accumulation(model, accumulate(f), batch, split=(3, 1, 8, 1), what=k) for k, f in forms.items()]
            + [Update(model=model, optimizer=optimizer, update=lambda bs, norm, f=f: fn(model, optimizer, f([dict(b) for b in bs]), max_norm=norm), loss=loss,
                      batch=batch, split=(3, 1, 8, 1)) for f in forms.values()])


def masked_step(m, fn, modes, whole, world, **kw):
    model, given = more(m, ("ids", "loss_mask"))
    clean = dict(given, loss_mask=given["loss_mask"].clone())
    clean["loss_mask"][:, 0] = 0
    first = dict(given, loss_mask=given["loss_mask"].clone())
    first["loss_mask"][:, 0] = 1
    common = dict(model=model, loss=fn, roles={"ids": "ids", "mask": "loss_mask"}, family="sft", settings={"world": Setting(world, "inert", modes=modes)},
                  paths={"one process": whole}, reduction="mean", value_is_loss=True, wide=("ids", "loss_mask"))
    return [Step(batch=clean, **common), Step(batch=first, drops_tokens=True, name="with loss_mask on token 0", **common)]


def whole_nll(model, batch, world=1):
    mask = batch["loss_mask"][:, 1:]
    return -(token_logprobs(model, batch)[:, 1:] * mask).sum() / mask.sum().clamp(min=1)


@declare("m/r20")
def vocab_parallel(m, fn):
    return masked_step(m, fn, (1, 2, 3, 7), whole_nll, 4)


@declare("m/r22")
def context_parallel(m, fn):
    return masked_step(m, fn, (1, 3, 4), whole_nll, 2)


@declare("m/r21")
def shard_seeds(m, fn):
    call = lambda rank, step, **k: [int(x) for x in fn(rank, step, **k)]
    tp = {i: [f"step {s}, data rank {d}, place {p}: {x}" for s in range(9) for d in range(4) for p, x in enumerate(call(2 * d + i, s))] for i in (0, 1)}
    out = [Ranks(draw=lambda rank: torch.tensor(call(2 * rank, 3))), Ranks(draw=lambda rank: torch.tensor(call(2 * rank + 1, 6))),
           Ranks(draw=lambda epoch: torch.tensor([call(2 * d, 4 * epoch + s) for s in range(4) for d in range(4)])),
           Ranks(draw=lambda step: torch.tensor(call(2, step))), Ranks(draw=lambda seed: torch.tensor(call(0, 0, seed=seed))),
           Census(wanted=tp[0], found=tp[1], what="samples inside tensor-parallel groups")]
    for epoch in range(3):
        seen = [x for s in range(4) for d in range(4) for x in call(2 * d, 4 * epoch + s)]
        out.append(Census(wanted={"draws": 64, "different samples": 64, "outside of the dataset": 0},
                          found={"draws": len(seen), "different samples": len(set(seen)), "outside of the dataset": sum(not 0 <= x < 70 for x in seen)}, what=f"samples of epoch {epoch}"))
    other = [x for s in range(3) for d in range(2) for x in call(4 * d + 3, s, tp=4, batch=10)]
    out.append(Census(wanted={"draws": 60, "different samples": 60}, found={"draws": len(other), "different samples": len(set(other))}, what="samples at tp 4, batch 10"))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    a = call(2, 5)
    same = torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    out.append(Census(wanted=["the global state is untouched", "it does not depend on it"], found=["the global state is untouched"] * same + ["it does not depend on it"] * (a == call(2, 5)), what="purity"))
    return out


@declare("m/r23")
def siglip(m, fn):
    given = m.make(0)
    model = given.pop("model")

    def whole(model, batch, world=1):
        zi, zt = model(batch["images"], batch["texts"])
        logits = zi @ zt.T * model.t.exp() + model.b
        return -nn.functional.logsigmoid((2 * torch.eye(len(zi)).to(logits) - 1) * logits).sum() / len(zi)

    return Step(model=model, loss=fn, batch=given, rows_interact=True, settings={"world": Setting(4, "inert", modes=(1, 2, 3))}, paths={"one process": whole},
                value_is_loss=True, wide=())


def flat_of(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def shards_of(model, world):
    flat = flat_of(model)
    flat = nn.functional.pad(flat, (0, -len(flat) % world))
    return [nn.Parameter(s.clone()) for s in flat.chunk(world)]


class Bridge(torch.optim.SGD):
    """The optimizer over the shards: hands their gradients to an optimizer of the whole model (or only keeps them)."""

    def __init__(self, model, shards, whole=None):
        super().__init__(shards, lr=0.1)
        self.model_, self.whole, self.caught = model, whole, None

    def step(self, closure=None):
        shards = self.param_groups[0]["params"]
        flat, at, self.caught = torch.cat([s.grad for s in shards]), 0, []
        for p in self.model_.parameters():
            self.caught.append(flat[at:at + p.numel()].view_as(p).clone())
            at += p.numel()
        if self.whole is None:
            return
        for p, g in zip(self.model_.parameters(), self.caught):
            p.grad = g.clone()
        self.whole.step()
        self.whole.zero_grad(set_to_none=True)
        with torch.no_grad():
            for s, new in zip(shards, shards_of(self.model_, len(shards))):
                s.copy_(new)


@declare("m/r24")
def zero_shards(m, fn):
    given = m.make(0)
    model = given["model"]
    batch = {"ids": torch.cat([b["ids"] for b in given["batches"]])}
    whole = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

    def accumulate(model, batches):
        catch = Bridge(model, shards_of(model, len(batches)))
        fn(model, catch, [dict(b) for b in batches], max_norm=1e9)
        for p, g in zip(model.parameters(), catch.caught):
            p.grad = g

    def update(batches, norm):
        fn(model, Bridge(model, shards_of(model, len(batches)), whole), [dict(b) for b in batches], max_norm=norm)

    loss = lambda model, b: nn.functional.cross_entropy(model(b["ids"])[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten())
    other = m.make(0)
    for group in other["optimizer"].param_groups:
        group["lr"] = 0.0  # so that an update only copies the shards into the model
    shards = other["optimizer"].param_groups[0]["params"]
    size = len(flat_of(other["model"]))

    def perturb():
        g = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for s in shards:
                s.add_(0.1 * torch.randn(s.shape, generator=g))

    return [Accumulation(model, accumulate, batch, split=(2, 2, 2, 2), what="ranks"),
            Update(model=model, optimizer=whole, update=update, loss=loss, batch=batch, split=(2, 2, 2, 2)),
            WeightSync(perturb=perturb, push=lambda: fn(other["model"], other["optimizer"], other["batches"]),
                       trainer=lambda: torch.cat([s.detach() for s in shards])[:size].clone(), sampler=lambda: flat_of(other["model"]).clone())]


class Vector(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(n))

    def forward(self, ids):
        return self.w.expand(*ids.shape, len(self.w))


class Round:
    """A round of the code: the workers' inner optimizers go to the given local weights."""

    def __init__(self, fn):
        self.fn, self.model, self.optimizer = fn, None, None

    def __call__(self, start, locals, lr=0.7, momentum=0.9):
        if self.model is None:
            self.model = Vector(len(start))
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.7)
        for g in self.optimizer.param_groups:
            g.update(lr=lr, momentum=momentum, nesterov=momentum > 0)
        with torch.no_grad():
            self.model.w.copy_(start)
        goals = iter(list(locals))

        class Inner(torch.optim.SGD):
            def __init__(self, params, lr=0.01, **kw):
                super().__init__(params, lr=lr)
                self.goal = next(goals)

            def step(self, closure=None):
                with torch.no_grad():
                    self.param_groups[0]["params"][0].copy_(self.goal)

        real, torch.optim.AdamW = torch.optim.AdamW, Inner
        try:
            self.fn(self.model, self.optimizer, [[[{"ids": torch.tensor([[0, 1, 2]])}] for _ in locals]])
        finally:
            torch.optim.AdamW = real
        return self.model.w.detach().clone()


@declare("m/r25")
def diloco(m, fn):
    given = m.make(0)
    start = given["model"]
    rounds = [[r[0]] for r in given["batches"]]  # one worker
    text = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(9))
    ends = {}

    def push():  # one worker and outer SGD(lr=1): plain AdamW
        plain, local = copy.deepcopy(start), copy.deepcopy(start)
        opt = torch.optim.AdamW(plain.parameters(), lr=0.01)
        for r in rounds:
            for b in r[0]:
                opt.zero_grad()
                nn.functional.cross_entropy(plain(b["ids"])[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten()).backward()
                opt.step()
        fn(local, torch.optim.SGD(local.parameters(), lr=1.0), rounds, inner_lr=0.01)
        ends.update(plain=plain, local=local)

    def perturb():
        g = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in start.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=g))

    def logprobs(name):
        if not ends:
            push()
        with torch.no_grad():
            return token_logprobs(ends[name], {"ids": text})[:, 1:].clone()

    return [OuterStep(step=Round(fn), knobs={"lr": 0.7, "momentum": 0.9}),
            WeightSync(perturb=perturb, push=push, trainer=lambda: logprobs("plain"), sampler=lambda: logprobs("local"))]
