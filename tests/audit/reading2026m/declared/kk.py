"""Declarations of k01 … k25, from their INPUTS, SETTINGS, NOTES and signatures."""
import torch
import torch.nn.functional as F

from tests.audit.reading2026m.reading import declare, parts, step_of
from earnest_audit import GAE, AdvantageEstimator, ChatTemplate, Collator, Grader, Metric, Sampler, Setting, Step


def token_logprobs(model, batch):
    """Entry t: log-probability of ids[:, t], from the logits at t-1; 0 in the first column."""
    ids = batch["ids"]
    lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return F.pad(lp, (1, 0))


def spans(documents):
    """(row, columns) of every document of packed rows; 0 is padding."""
    for row, numbers in enumerate(documents):
        for number in numbers.unique().tolist():
            if number:
                yield row, (numbers == number).nonzero()[:, 0]


def nll_alone(logits, ids, mask):
    """Summed negative log-likelihood of the trained tokens of one document [1, n]."""
    lp = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return -(lp * mask[:, 1:]).sum()


def padded(rows, value=0):
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


# --- k01: packed rows, rotary positions ---
@declare("kk/r08")
def k01(module, fn):
    def alone(model, batch):  # "documents are independent, as if each were alone in its row"
        ids, mask = batch["ids"], batch["loss_mask"]
        total = 0.0
        for row, cols in spans(batch["doc_ids"]):
            one = ids[row, cols][None]
            logits = model(one, batch["doc_ids"][row, cols][None], cols[None])  # positions: the column numbers
            total = total + nll_alone(logits, one, mask[row, cols][None])
        return total / mask.sum()

    return step_of(
        module, fn,
        roles={"ids": "ids", "documents": "doc_ids", "mask": "loss_mask"},
        family="sft", reduction="mean", value_is_loss=True, all_supervised=True,
        wide=("ids", "doc_ids", "loss_mask"), paths={"each document alone": alone},
    )


# --- k02: categorical critic ---
@declare("kk/r03")
def k02(module, fn):
    return step_of(
        module, fn,
        roles={"ids": "ids", "mask": "loss_mask", "returns": "returns"},
        settings={"v_min": Setting(-2.0), "v_max": Setting(2.0), "sigma_ratio": Setting(0.75)},
        reduction="mean", value_is_loss=True, wide=("ids", "loss_mask", "returns"),
    )


# --- k03: pass@k weights ---
@declare("kk/r05")
def k03(module, fn):
    # "baseline": leave-one-out of the subset, not the mean; at least k + 1 = 4 rows per prompt; binary rewards
    return AdvantageEstimator(lambda rewards, groups: fn(rewards, groups), scale="equal", over="group",
                              baseline="other", values=(0.0, 1.0), size=5)


# --- k04: Gumbel-max sampling ---
@declare("kk/r14")
def k04(module, fn):
    model, batch = parts(module)
    prompts = batch["prompt_ids"].tolist()

    def settings(seeds):
        return {"temperature": 0.8, "max_new": 10, "seeds": list(seeds)}

    def draw(prompt, n, seed):
        ids, lps = fn(model, torch.tensor([prompt] * n), settings(100_000 * seed + r for r in range(n)))
        return list(zip(ids.tolist(), lps.tolist()))

    def score(prompt, ids):
        with torch.no_grad():
            return model(torch.tensor([[*prompt, *ids][:-1]]))[0, len(prompt) - 1 :]

    def rows(examples):  # "not on the other rows or their order"
        ids, lps = fn(model, torch.tensor([p for p, _ in examples]), settings(s for _, s in examples))
        return {"ids": ids, "logprobs": lps}

    return [
        Sampler(draw, score, prompts, temperature=0.8, max_tokens=10),
        Collator(rows, [(p, 7 + 3 * r) for r, p in enumerate(prompts)]),
    ]


# --- k05: GSPO in its token form ---
@declare("kk/r01")
def k05(module, fn):
    def sequence_level(model, batch, clip_low, clip_high):
        m, a = batch["loss_mask"], batch["advantages"]
        s = (((token_logprobs(model, batch) - batch["old_logp"]) * m).sum(1) / m.sum(1)).exp()
        return torch.maximum(-a * s, -a * s.clamp(1 - clip_low, 1 + clip_high)).mean()

    return step_of(
        module, fn,
        roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logp", "advantages": "advantages"},
        settings={"clip_low": Setting(0.03, "clip"), "clip_high": Setting(0.04, "clip high")},
        logprobs=token_logprobs, reduction="mean", empty_rows=False, value_is_loss=True,
        wide=("ids", "loss_mask", "old_logp"), paths={"sequence-level GSPO": sequence_level},
    )


# --- k06: GAE over several turns ---
@declare("kk/r07")
def k06(module, fn):
    return GAE(lambda rewards, values, mask, gamma, lam: fn(rewards, values, mask, gamma=gamma, lam=lam),
               gamma=0.98, lam=0.9, holes=True)


# --- k07: REINFORCE++ with group baseline ---
@declare("kk/r04")
def k07(module, fn):
    def equal_lengths(rewards, groups):  # every answer has 5 tokens, so no row counts more than another
        mask = torch.zeros(len(rewards), 9)
        mask[:, 2:7] = 1
        return fn(rewards, groups, mask).sum(1) / mask.sum(1)

    return AdvantageEstimator(equal_lengths, scale="free", over="group", scaled_over="batch")


# --- k08: GAE over windows ---
@declare("kk/d03")
def k08(module, fn):
    def ended(rewards, values, mask, gamma, lam):  # an answer is an episode; what follows it is another
        mask = mask.to(rewards.dtype)
        dones = mask * (1 - F.pad(mask[:, 1:], (0, 1)))
        bootstrap = 1.0 + torch.arange(len(rewards), dtype=rewards.dtype)  # no effect on an episode that has ended
        return fn(rewards, values, dones, bootstrap, gamma=gamma, lam=lam) * mask

    def cut(rewards, values, mask, gamma, lam):  # a window that ends with an answer's last token, no episode ends:
        out = torch.zeros_like(rewards)  # γ·bootstrap is added to the last reward, from which it is taken here
        for i, m in enumerate(mask):
            at = m.nonzero()[:, 0]
            if len(at):
                a, b = int(at[0]), int(at[-1]) + 1
                ahead = torch.full((1,), 0.5 + i, dtype=rewards.dtype)
                r, v = rewards[i : i + 1, a:b].clone(), values[i : i + 1, a:b]
                r[:, -1] -= gamma * ahead
                out[i, a:b] = fn(r, v, torch.zeros_like(r), ahead, gamma=gamma, lam=lam)[0]
        return out

    return [GAE(ended, gamma=0.99, lam=0.95), GAE(cut, gamma=0.99, lam=0.95)]


# --- k09: chat template with think blocks ---
@declare("kk/d07")
def k09(module, fn):
    special = module.SPECIAL

    def word(w):  # the tokenizer
        return 10 + sum(ord(c) * (i + 1) for i, c in enumerate(w)) % 400

    def prompt(messages):  # earlier assistant messages without their think block, then <assistant>
        ids = []
        for m in messages:
            ids += [special["<%s>" % m["role"]], *map(word, m["content"].split()), special["<end>"]]
        return [*ids, special["<assistant>"]]

    return ChatTemplate(fn, prompt, module.make(0)["messages"], end=special["<end>"])


# --- k10: dual-clip PPO ---
@declare("kk/d01")
def k10(module, fn):
    return step_of(
        module, fn,
        roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logp", "advantages": "advantages"},
        settings={"eps_clip": Setting(0.2, "clip"), "eps_clip_high": Setting(0.28, "clip high"),
                  "eps_clip_c": Setting(3.0, "bound")},
        logprobs=token_logprobs, reduction="mean", value_is_loss=True,
        wide=("ids", "loss_mask", "old_logp", "advantages"),
    )


# --- k11: GiGPO ---
@declare("kk/r06")
def k11(module, fn):
    def build(rewards, groups, shared):
        """Trajectory i has i % 3 steps, then one in the state 0 (if shared), then one that has its reward; all other
        states occur once. Returns the arguments and the places of the last two steps of each trajectory."""
        r, g, t, s, at, fresh = [], [], [], [], [], 1
        for i in range(len(rewards)):
            for k in range(i % 3 + 2):
                here = shared and k == i % 3
                r.append(rewards[i] if k == i % 3 + 1 else torch.zeros_like(rewards[i]))
                g.append(groups[i])
                t.append(i)
                s.append(0 if here else fresh)
                fresh += not here
            at.append(len(r) - 1)
        at = torch.tensor(at)
        return (torch.stack(r), torch.stack(g), torch.tensor(t), torch.tensor(s)), at - 1, at

    def episode(rewards, groups):  # no state occurs twice: the step part is 0
        args, _, last = build(rewards, groups, False)
        return fn(*args)[last]

    def step(rewards, groups):  # omega · step part of the state that all trajectories visit, undiscounted
        args, before, last = build(rewards, groups, True)
        out = fn(*args, gamma=1.0)
        return out[before] - out[last]

    return [AdvantageEstimator(episode, scale="free", over="group"), AdvantageEstimator(step, scale="free", over="group")]


# --- k12: Dr. GRPO ---
@declare("kk/r02")
def k12(module, fn):
    return step_of(
        module, fn,
        roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logp", "rewards": "rewards", "group": "groups"},
        settings={"clip": Setting(0.2, "clip"), "max_len": Setting(24)},
        logprobs=token_logprobs, reduction="mean", value_is_loss=True, rows_interact=True,
        wide=("ids", "loss_mask", "old_logp"),
    )


# --- k13: soft overlong punishment over turns, group mean ---
@declare("kk/d04")
def k13(module, fn):
    def rollouts(lengths):
        """Two turns of `length` generated tokens together, with tool output of another length in every row between."""
        mask = torch.zeros(len(lengths), 40, dtype=torch.long)
        for i, n in enumerate(lengths):
            first, gap = n // 2, 1 + 3 * (i % 4)
            mask[i, 4 : 4 + first] = 1
            mask[i, 4 + first + gap : 4 + n + gap] = 1
        return mask

    def same_length(rewards, groups):  # 12 tokens each: the same punishment for all, which the mean takes away
        return fn(rewards, groups, rollouts([12] * len(rewards)))

    def by_length(rewards, groups):  # no task reward; a rollout of 16 - v tokens has the shaped reward v/6 - 1
        return fn(torch.zeros_like(rewards), groups, rollouts([16 - int(v) for v in rewards]))

    return [
        AdvantageEstimator(same_length, scale="equal", over="group"),
        AdvantageEstimator(by_length, scale="equal", over="group", values=tuple(float(v) for v in range(7))),
    ]


# --- preferences: the two answers of a pair as two tensors ---
def both(a, b):
    """Two tensors [P, T] in one width (0 on the right)."""
    width = max(a.shape[1], b.shape[1])
    return F.pad(a, (0, width - a.shape[1])), F.pad(b, (0, width - b.shape[1]))


PAIR_ROLES = {name: name for name in
              ("chosen", "rejected", "chosen_mask", "rejected_mask", "reference_chosen", "reference_rejected")}
PAIR_WIDE = ("chosen", "rejected", "chosen_mask", "rejected_mask")


def pairs_of(module, chosen, rejected):
    model, batch = parts(module)
    made = {}
    for side, rows in (("chosen", chosen), ("rejected", rejected)):
        made[side], made[side + "_mask"] = batch["ids"][rows], batch["loss_mask"][rows]
        made["reference_" + side] = batch["ref_logps"][rows]
    return model, made


def joined(batch, join):
    ids, mask = (join(*both(batch["chosen" + s], batch["rejected" + s])) for s in ("", "_mask"))
    return {"ids": ids, "loss_mask": mask, "ref_logps": join(batch["reference_chosen"], batch["reference_rejected"])}


def pair_logprobs(model, batch):
    return tuple(
        (token_logprobs(model, {"ids": batch[side]}) * batch[side + "_mask"]).sum(1) for side in ("chosen", "rejected")
    )


# --- k14: robust DPO ---
@declare("kk/r15")
def k14(module, fn):
    model, batch = pairs_of(module, slice(0, None, 2), slice(1, None, 2))

    def loss(model, batch, beta, flip):
        return fn(model, joined(batch, lambda a, b: torch.stack([a, b], 1).flatten(0, 1)), beta=beta, flip=flip)

    return Step(
        model=model, loss=loss, batch=batch, roles=PAIR_ROLES,
        settings={"beta": Setting(0.3), "flip": Setting(0.2, "smoothing")},
        logprobs=pair_logprobs, reduction="mean", value_is_loss=True, wide=PAIR_WIDE,
    )


# --- k15: clipped value loss ---
@declare("kk/d02")
def k15(module, fn):
    return step_of(
        module, fn,
        roles={"ids": "ids", "mask": "loss_mask", "values": "prev_values", "returns": "returns"},
        settings={"value_clip": Setting(0.2)},
        metrics={"critic/value_clip_ratio": Metric(kind="share"),
                 "critic/value_loss": Metric(low=0.0, weight=1.0, average=True)},
        reduction="mean", value_is_loss=True, wide=("ids", "loss_mask", "prev_values", "returns"),
    )


# --- k16: both answers of a pair in one row ---
@declare("kk/r09")
def k16(module, fn):
    def collate(rows):
        batch = dict(fn(rows))
        see = batch.pop("attention_mask")[:, 0].long()
        bit = 2 ** torch.arange(see.shape[-1])  # which keys a query sees, as one number; 0 for a padding token,
        batch["sees"] = (see * bit).sum(-1) - torch.where(batch["input_ids"] == 0, bit, 0)  # which sees itself only
        return batch

    def lengths(row):
        return len(row["prompt"]), len(row["chosen"]), len(row["rejected"])

    def positions(row):
        p, c, j = lengths(row)
        return torch.tensor([*range(p + c), *range(p, p + j)])

    def branch(row):
        p, c, j = lengths(row)
        return torch.tensor([0] * p + [1] * c + [2] * j)

    def source(row):
        p, c, j = lengths(row)
        return torch.tensor([0] * p + [p - 1, *range(p, p + c - 1)] + [p - 1, *range(p + c, p + c + j - 1)])

    def sees(row):
        b = branch(row).tolist()
        return torch.tensor([sum(2**k for k in range(q + 1) if b[k] in (0, b[q])) for q in range(len(b))])

    columns = {
        "input_ids": lambda row: torch.tensor(row["prompt"] + row["chosen"] + row["rejected"]),
        "position_ids": positions, "branch": branch, "source_index": source, "sees": sees,
    }
    rows = module.make(0)["rows"] + [{"prompt": [5], "chosen": [7], "rejected": [9, 4]}]
    return Collator(collate, rows, pads=dict.fromkeys(columns, 0), columns=columns)


# --- k17: fill in the middle ---
@declare("kk/r11")
def k17(module, fn):
    def restored(text):  # "no character is lost or added but the sentinels": prefix, middle, suffix
        if "<PRE>" not in text:
            return text
        prefix, rest = text.split("<PRE>", 1)[1].split("<SUF>", 1)
        suffix, middle = rest.split("<MID>", 1)
        return prefix + middle + suffix

    def codes(text):
        return [ord(c) for c in text]

    def stage(**settings):
        def run(rows):
            out = fn(rows, **settings)
            return {
                "id": torch.tensor([row["id"] for row in out]),
                "text": padded([codes(row["text"]) for row in out]),
                "restored": padded([codes(restored(row["text"])) for row in out]),
                "spm": torch.tensor([int(row["text"].startswith("<PRE><SUF>")) for row in out]),
            }

        return run

    rows, pads = module.make(0)["rows"], {"text": 0, "restored": 0}
    same = {"id": lambda row: torch.tensor(row["id"]), "restored": lambda row: torch.tensor(codes(row["text"]))}
    return [
        Collator(stage(), rows, pads=pads, columns=same),
        Collator(stage(fim_rate=0.0), rows, pads=pads,
                 columns={**same, "text": lambda row: torch.tensor(codes(row["text"]))}),
        Collator(stage(fim_rate=1.0, spm_rate=1.0), rows, pads=pads,
                 columns={**same, "spm": lambda row: torch.tensor(1)}),
        Collator(stage(fim_rate=1.0, spm_rate=0.0), rows, pads=pads, columns=same),
    ]


# --- k18: packed samples with square averaging ---
@declare("kk/r10")
def k18(module, fn):
    def alone(model, batch):  # each sample in a row of its own
        ids, mask = batch["ids"], batch["loss_mask"]
        total, weight = 0.0, 0.0
        for row, cols in spans(batch["sample_ids"]):
            one, m = ids[row, cols][None], mask[row, cols][None]
            if m.sum():
                logits = model(one, batch["sample_ids"][row, cols][None], batch["position_ids"][row, cols][None])
                total = total + nll_alone(logits, one, m) / m.sum() ** 0.5
                weight = weight + m.sum() ** 0.5
        return total / weight

    return step_of(
        module, fn,
        roles={"ids": "ids", "documents": "sample_ids", "positions": "position_ids", "mask": "loss_mask"},
        family="sft", reduction="mean", value_is_loss=True,
        wide=("ids", "sample_ids", "position_ids", "loss_mask"), paths={"each sample alone": alone},
    )


# --- k19: packed rows, recurrent model ---
@declare("kk/d05")
def k19(module, fn):
    def alone(model, batch):  # "the loss of a sample is the same as if it were alone in its row"
        ids, mask = batch["ids"], batch["loss_mask"]
        total = 0.0
        for row, cols in spans(batch["doc_ids"]):
            one = ids[row, cols][None]
            total = total + nll_alone(model(one, batch["doc_ids"][row, cols][None]), one, mask[row, cols][None])
        return total / mask.sum()

    return step_of(
        module, fn,
        roles={"ids": "ids", "documents": "doc_ids", "mask": "loss_mask"},
        family="sft", reduction="mean", value_is_loss=True, all_supervised=True,
        wide=("ids", "doc_ids", "loss_mask"), paths={"each sample alone": alone},
    )


# --- k20: boxed answers ---
@declare("kk/d08")
def k20(module, fn):
    made = module.make(0)
    row = made["prompt_row"]
    gold, box = row["answer"], lambda text: "\\boxed{%s}" % text
    spaced = gold.replace("}{", "} {").replace("{", "{ ").replace("}", " }")
    return Grader(
        lambda answer: fn(row, answer),
        right=[
            made["completion"],
            "The answer is %s." % box(gold),
            "First I thought %s, but it is %s." % (box("1"), box(gold)),
            "It is %s." % box(spaced),
            "It is %s. In other words \\boxed{\\frac{1" % box(gold),  # the last one is not balanced
        ],
        wrong=[
            "It is %s." % gold,  # no box
            "It is %s, no, it is %s." % (box(gold), box("1")),
            "It is %s." % box(gold + "+1"),
            "It is %s." % box("{%s}" % gold),
            "It is %s." % box(gold[:-1].replace("{", "").replace("}", "")),
            "It is %s." % box(""),
        ],
        question=row["question"],
    )


# --- k21: BOS and EOS ---
@declare("kk/d06")
def k21(module, fn):
    def encode(text):  # the tokenizer
        return [10 + sum(ord(c) * (i + 1) for i, c in enumerate(w)) % 190 for w in text.split()]

    def subject(bos, eos):
        def stage(rows):
            out = fn(rows, enforce_bos=bos, enforce_eos=eos)
            return {"id": torch.tensor([row["id"] for row in out]), "input_ids": padded([row["input_ids"] for row in out])}

        columns = {
            "id": lambda row: torch.tensor(row["id"]),
            "input_ids": lambda row: torch.tensor([1] * bos + encode(row["text"]) + [2] * eos),
        }
        return Collator(stage, module.make(0)["rows"], pads={"input_ids": 0}, columns=columns)

    return [subject(bos, eos) for bos in (True, False) for eos in (True, False)]


# --- k22: arithmetic expressions ---
@declare("kk/r13")
def k22(module, fn):
    def tag(text):
        return "<answer>%s</answer>" % text

    made = module.make(0)
    row = made["prompt_row"]
    good = row["solution"]
    first = Grader(
        lambda answer: fn(row, answer),
        right=[made["completion"], tag(good), tag(" ( %s ) " % good), "I try %s, no: %s" % (tag("1"), tag(good))],
        wrong=[good, "", tag(good + " = %d" % row["target"]), tag(good + "+0"), tag(row["target"]), tag("no idea"),
               "%s, no: %s" % (tag(good), tag("1")), tag("(%s)*1" % good), tag("%s/0" % good)],
    )
    hard = {"numbers": [3, 8, 3, 8], "target": 24, "solution": "8/(3-8/3)"}  # not even on the way
    second = Grader(
        lambda answer: fn(hard, answer),
        right=[tag("8/(3-8/3)"), tag(" 8 / (3 - (8 / 3)) ")],
        wrong=[tag("3*8"), tag("3*8+3-3"), tag("3*8+8-8"), tag("3*8*(8-3)"), tag("8/(3-3)+8"), tag("8/(3-8/3) = 24"),
               tag("24"), tag("8/(3-8/3"), "8/(3-8/3)"],
    )
    return [first, second]


# --- k23: harmony ---
@declare("kk/r12")
def k23(module, fn):
    special = module.SPECIAL

    def prompt(messages):
        ids = []
        for m in messages:
            ids += [special["<|start|>"], *map(ord, m["role"])]
            if m["role"] == "assistant":
                ids += [special["<|channel|>"], *map(ord, "final")]
            ids += [special["<|message|>"], *map(ord, m["content"]), special["<|end|>"]]
        return [*ids, special["<|start|>"], *map(ord, "assistant")]

    messages = module.make(0)["messages"]
    return ChatTemplate(fn, prompt, messages, end=special["<|return|>"], trained=(len(messages) - 1,))


# --- k24: f-DPO and apo_down ---
@declare("kk/d10")
def k24(module, fn):
    half = len(parts(module)[1]["ids"]) // 2
    model, batch = pairs_of(module, slice(0, half), slice(half, None))

    def loss(model, batch, beta, f_divergence, sigmoid, apo_down):
        return fn(model, joined(batch, lambda a, b: torch.cat([a, b])), beta=beta, f_divergence=f_divergence,
                  weights=(sigmoid, apo_down))

    return Step(
        model=model, loss=loss, batch=batch, roles=PAIR_ROLES,
        settings={
            "beta": Setting(0.5),
            "f_divergence": Setting("js_divergence", modes=("reverse_kl",)),
            "sigmoid": Setting(1.0, "weight"),
            "apo_down": Setting(1.0, "weight", pure=0.0),  # without it the loss is the preference alone
        },
        weighed={"sigmoid loss": "sigmoid", "apo_down loss": "apo_down"},
        logprobs=pair_logprobs, reduction="mean", value_is_loss=True, wide=PAIR_WIDE,
    )


# --- k25: temperature, top-k and top-p ---
@declare("kk/d09")
def k25(module, fn):
    model, batch = parts(module)
    prompts = batch["prompt_ids"].tolist()

    def draw(top_k, top_p):
        def run(prompt, n, seed):
            settings = {"temperature": 1.6, "top_k": top_k, "top_p": top_p, "max_new": 12, "seed": seed}
            ids, lps = fn(model, torch.tensor([prompt] * n), settings)
            return list(zip(ids.tolist(), lps.tolist()))

        return run

    def score(prompt, ids):
        with torch.no_grad():
            return model(torch.tensor([[*prompt, *ids][:-1]]))[0, len(prompt) - 1 :]

    def kept(prompt, ids):  # "both limits are measured on the full p, and a token must be in both sets"
        z = score(prompt, ids)
        top, order = (z / 1.6).softmax(-1).sort(-1, descending=True)
        inside = (top.cumsum(-1) - top < 0.7) & (torch.arange(z.shape[-1]) < 8)
        return z.masked_fill(~torch.zeros_like(inside).scatter(-1, order, inside), -1e4)

    return [
        Sampler(draw(8, 1.0), score, prompts, temperature=1.6, top_k=8, max_tokens=12),
        Sampler(draw(0, 0.7), score, prompts, temperature=1.6, top_p=0.7, max_tokens=12),
        Sampler(draw(8, 0.7), kept, prompts, temperature=1.6, max_tokens=12),
    ]
