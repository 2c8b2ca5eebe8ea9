import random

import torch
import torch.nn.functional as F

from tests.audit.reading2026l.reading import declare, parts
from earnest_audit import Census, ChatTemplate, Collator, Grader, Ranks, Step, Unbiased, WeightSync


# ---------------------------------------------------------------- helpers

def padded(rows, value):
    n = max([len(r) for r in rows] + [1])
    return torch.tensor([list(r) + [value] * (n - len(r)) for r in rows])


def numbers(n, seed=0):
    """Seeds, far from each other."""
    r = random.Random(seed)
    return [r.getrandbits(31) for _ in range(n)]


def fresh():
    """An endless stream of seeds."""
    r = random.Random(12345)
    return lambda: r.getrandbits(31)


# ---------------------------------------------------------------- samplers

SEEDS = numbers(4)


def sync(model, sampler, trainer):
    """sampler() are the log-probs that are returned, trainer() those of the same ids by definition."""
    saved = {}

    @torch.no_grad()
    def perturb():
        saved.update({k: v.clone() for k, v in model.state_dict().items()})
        g = torch.Generator().manual_seed(5)
        for p in model.parameters():
            p.add_(3e-4 * torch.randn(p.shape, generator=g))

    return WeightSync(perturb=perturb, push=lambda: None, trainer=trainer, sampler=sampler,
                      undo=lambda: model.load_state_dict(saved))


def fixed(v, n, value=0.0):
    """Up to n entries, the missing ones are `value`."""
    v = v.flatten()
    return torch.cat([v, v.new_full((max(n - len(v), 0),), value)])


def ranks(make, fn, n):
    """Other seeds draw other ids, the same seed the same."""
    def draw(rank, step):
        case = make(0)
        out = []
        for seed in numbers(4, 1000 * step + rank):
            ids, _ = fn(case["model"], case["prompt_ids"], {**case["settings"], "seed": seed})
            out.append(fixed(ids, n, -1))
        return torch.cat(out)
    return Ranks(draw=draw)


@torch.no_grad()
def conditional(model, prompt_ids, ids, temperature, process=None):
    """log-probs [n, vocabulary] at each of ids [n], given the prompt and the ids before."""
    if len(ids) == 0:
        return torch.zeros(0, 1)
    logits = model(torch.cat([prompt_ids, ids[None]], 1))[0, prompt_ids.shape[1] - 1:-1] / temperature
    return (process(logits) if process else logits).log_softmax(-1)


def of_ids(lp, ids):
    return lp.gather(-1, ids[:, None])[:, 0] if len(ids) else torch.zeros(0)


def sampled_right(case, fn, places, process=None, first_row=False, temperatures=(0.8, 1.2), draws=400, **settings):
    """E[1[the most likely token is drawn] / its probability] is 1, at each place given the ids before."""
    model, prompt = case["model"], case["prompt_ids"]
    seed = fresh()

    @torch.no_grad()
    def thin(x, temperature):
        now = {**case["settings"], **settings, "seed": seed()}
        if "temperature" in now:
            now["temperature"] = temperature
        else:
            temperature = 1.0
        ids, _ = fn(model, prompt, now)
        ids = (ids[0] if first_row else ids)[:places]
        lp = conditional(model, prompt, ids, temperature, process)
        p, best = lp.exp().max(-1)
        factor = torch.where((p < 0.95), (ids == best) / p, torch.ones_like(p))
        return x * factor[torch.arange(x.numel()) % places].view(x.shape).to(x.dtype)

    return Unbiased(thin, settings=temperatures, draws=draws)


@declare("hh/d10")
def _(module, fn):
    case = module.make(0)
    model, prompt, s = case["model"], case["prompt_ids"], case["settings"]
    n = s["max_new_tokens"]

    def run():
        return [fn(model, prompt, {**s, "seed": seed, "temperature": t}) for seed in SEEDS for t in (1.0, 0.7)]

    def sampler():
        return torch.cat([fixed(lps, n) for _, lps in run()])

    def trainer():
        temperatures = [t for _ in SEEDS for t in (1.0, 0.7)]
        return torch.cat([fixed(of_ids(conditional(model, prompt, ids, t), ids), n) for (ids, _), t in zip(run(), temperatures)])

    wanted, found = {}, {}
    for limit in (3, n):
        for seed in numbers(10, 3):
            ids, lps = fn(model, prompt, {**s, "seed": seed, "max_new_tokens": limit})
            ids = ids.tolist()
            name = f"limit {limit}, seed {seed}: "
            wanted |= {name + "log-probs": len(ids), name + "tokens above the limit": 0, name + "EOS before the end": 0, name + "ends without EOS below the limit": 0}
            found |= {name + "log-probs": lps.numel(), name + "tokens above the limit": max(len(ids) - limit, 0),
                      name + "EOS before the end": ids[:-1].count(s["eos_id"]),
                      name + "ends without EOS below the limit": int(len(ids) < limit and ids[-1:] != [s["eos_id"]])}
    return [sync(model, sampler, trainer), ranks(module.make, fn, n), Census(wanted, found, what="draws"),
            sampled_right(module.make(0), fn, 1, max_new_tokens=1)]


def nucleus(logits, top_p):
    """The smallest set of most likely tokens whose mass reaches top_p."""
    out = torch.full_like(logits, float("-inf"))
    for row, (z, p) in enumerate(zip(logits, logits.softmax(-1))):
        mass = 0.0
        for i in p.argsort(descending=True).tolist():
            out[row, i] = z[i]
            mass += float(p[i])
            if mass >= top_p:
                break
    return out


@declare("hh/d09")
def _(module, fn):
    case = module.make(0)
    model, prompt, s = case["model"], case["prompt_ids"], case["settings"]
    process = lambda z: nucleus(z, s["top_p"])

    def run():
        return [fn(model, prompt, {**s, "seed": seed}) for seed in SEEDS]

    def trainer():
        return torch.cat([of_ids(conditional(model, prompt, ids, s["temperature"], process), ids) for ids, _ in run()])

    n = s["max_new_tokens"]
    outs = run()
    return [sync(model, lambda: torch.cat([lps for _, lps in run()]), trainer), ranks(module.make, fn, n),
            Census({f"{k} {i}": n for i in range(len(outs)) for k in ("ids", "log-probs")},
                   {f"{k} {i}": v.numel() for i, o in enumerate(outs) for k, v in zip(("ids", "log-probs"), o)}, what="draws"),
            sampled_right(module.make(0), fn, 2, process, temperatures=(0.6, 1.0), max_new_tokens=2)]


@declare("hh/r13")
def _(module, fn):
    case = module.make(0)
    model, prompt, s = case["model"], case["prompt_ids"], case["settings"]

    def run():
        return [fn(model, prompt, {**s, "seed": seed}) for seed in SEEDS]

    def trainer():
        return torch.cat([of_ids(conditional(model, prompt, ids, s["temperature"]), ids) for ids, _ in run()])

    n = s["max_new_tokens"]
    outs = run()
    return [sync(model, lambda: torch.cat([lps for _, lps in run()]), trainer), ranks(module.make, fn, n),
            Census({f"{k} {i}": n for i in range(len(outs)) for k in ("ids", "log-probs")},
                   {f"{k} {i}": v.numel() for i, o in enumerate(outs) for k, v in zip(("ids", "log-probs"), o)}, what="draws"),
            sampled_right(module.make(0), fn, 3, max_new_tokens=3)]


@declare("hh/r14")
def _(module, fn):
    case = module.make(0)
    model, prompt, s = case["model"], case["prompt_ids"], case["settings"]

    def run():
        return [fn(model, prompt, {**s, "seed": seed}) for seed in SEEDS]

    def trainer():
        return torch.cat([of_ids(conditional(model, prompt, row, 1.0), row) for ids, _ in run() for row in ids])

    wanted, found = {}, {}
    for i, (ids, lps) in enumerate(run()):
        wanted |= {f"sequences {i}": s["k"], f"different sequences {i}": s["k"], f"tokens {i}": s["k"] * s["length"], f"log-probs {i}": s["k"] * s["length"]}
        found |= {f"sequences {i}": len(ids), f"different sequences {i}": len({tuple(r) for r in ids.tolist()}), f"tokens {i}": ids.numel(), f"log-probs {i}": lps.numel()}
    return [sync(model, lambda: torch.cat([lps.flatten() for _, lps in run()]), trainer),
            ranks(module.make, fn, s["k"] * s["length"]), Census(wanted, found, what="sequences"),
            sampled_right(module.make(0), fn, 3, first_row=True, temperatures=(1.0,), draws=1000)]


@declare("hh/r15")
def _(module, fn):
    case = module.make(0)
    model, prompt, s = case["model"], case["prompt_ids"], case["settings"]
    n, mask_id, start = s["gen_length"], s["mask_id"], prompt.shape[1]

    class Seen(torch.nn.Module):
        """Notes the sequences that the model sees."""
        def __init__(self):
            super().__init__()
            self.model, self.seen = model, []

        def forward(self, ids):
            self.seen.append(ids.clone())
            return self.model(ids)

    runs = [{**s, "seed": seed, "steps": steps, "temperature": t} for seed in SEEDS[:2] for steps in (1, 4, 5) for t in (1.0, 0.7)]

    def run():
        return [fn(model, prompt, r) for r in runs]

    @torch.no_grad()
    def trainer():
        out = []
        for r in runs:
            seen = Seen()
            ids, _ = fn(seen, prompt, r)
            states = [x[0, start:] for x in seen.seen] + [ids]
            lp = torch.zeros(n)
            for x, before, after in zip(seen.seen, states, states[1:]):
                logits = model(x)[0, start:].clone()
                logits[:, mask_id] = float("-inf")
                now = (before == mask_id) & (after != mask_id)
                lp = torch.where(now, (logits / r["temperature"]).log_softmax(-1).gather(-1, after[:, None])[:, 0], lp)
            out.append(lp)
        return torch.cat(out)

    # the tokens that each step commits, and that committed ones stay
    wanted, found = {}, {}
    for i, r in enumerate(runs):
        seen = Seen()
        ids, lps = fn(seen, prompt, r)
        states = [x[0, start:] for x in seen.seen] + [ids]
        wanted |= {f"run {i}: ids": n, f"run {i}: log-probs": n, f"run {i}: masks left": 0}
        found |= {f"run {i}: ids": ids.numel(), f"run {i}: log-probs": lps.numel(), f"run {i}: masks left": int((ids == mask_id).sum())}
        for k in range(r["steps"]):
            wanted |= {f"run {i}, step {k}: committed": n // r["steps"] + int(k < n % r["steps"]), f"run {i}, step {k}: changed": 0}
        for k, (a, b) in enumerate(zip(states, states[1:])):
            found |= {f"run {i}, step {k}: committed": int(((a == mask_id) & (b != mask_id)).sum()), f"run {i}, step {k}: changed": int(((a != mask_id) & (a != b)).sum())}
    return [sync(model, lambda: torch.cat([lps for _, lps in run()]), trainer), ranks(module.make, fn, n), Census(wanted, found, what="committed tokens")]


# ---------------------------------------------------------------- graders

@declare("hh/d07")
def _(module, fn):
    row = {"question": "700+534?", "ground_truth": "1234"}
    tail = " and the reasoning above confirms that this result is consistent." * 8
    right = ["700+534=1234\n#### 1,234", "#### 1234", "It costs $1,234.\n#### $1,234", "#### 1,234\n" + tail, "#### 1234\n" + 5 * tail,
             tail + "\n#### 1234", "#### 99\nNo, wait.\n#### 1234", "#### 99\n" + tail + "\n#### 1,234\n" + tail]
    wrong = ["#### 1235", "#### 1,235\n" + tail, "#### 12345", "#### 234", "1234", "The answer is 1234", "#### 1234\nNo, wait.\n#### 99",
             "#### 1234\n" + tail + "\n#### 99\n" + tail, "#### -1234", "I do not know."]
    row2 = {"question": "2-30?", "ground_truth": "-28"}
    return [Grader(lambda t: fn(row, t), right, wrong, question=row["question"]),
            Grader(lambda t: fn(row, t, score=2.0, format_score=0.1), right, wrong, question=row["question"]),
            # the format alone is worth something
            Grader(lambda t: fn(row, t, score=2.0, format_score=0.1), ["#### 1235", "#### 1,235\n" + tail], ["1234", "I do not know.", "The answer is 1,235."], question=row["question"]),
            Grader(lambda t: fn(row2, t), ["#### -28", "#### -28\n" + tail], ["#### 28", "#### -2", "-28"], question=row2["question"])]


@declare("hh/r05")
def _(module, fn):
    row = {"answer": "42"}
    text = lambda n, answer="42": " ".join(["so"] * (n - 2)) + f"\nAnswer: {answer}"     # n words
    grade = lambda t: fn(row, t)
    return [Grader(grade, [text(5), text(30), text(35), text(40), text(41), text(90), "Answer: 41\nno\nAnswer:  42 ", "Answer: 42\nand that is all"],
                   [text(5, "41"), text(30, "43"), "42", "I do not know.", "Answer: 42\nno\nAnswer: 41", "Answer: 42 or 43"]),
            # the punishment of length: fewer tokens are better, of right answers
            Grader(grade, [text(5), text(30)], [text(31), text(35), text(40), text(41), text(90)]),
            Grader(grade, [text(31), text(33)], [text(35), text(39)]),
            Grader(grade, [text(35), text(39)], [text(40), text(41), text(90)]),
            Grader(lambda t: fn(row, t, max_len=20, cache=5), [text(5), text(15)], [text(16), text(20), text(21)])]


@declare("hh/r08")
def _(module, fn):
    text = lambda r="so so", a="4", tail="": f"<reasoning>\n{r}\n</reasoning>\n<answer>\n{a}\n</answer>\n{tail}"
    good = text()
    grade = lambda t: fn({}, t)
    right = [good, text("a long thought " * 9, "5"), text("x", "no idea")]
    wrong = ["so so", good.replace("<reasoning>\n", ""), good.replace("</reasoning>\n", ""), good.replace("<answer>\n", ""), good.replace("\n</answer>", ""),
             good.replace("\n", " "), good.replace("<reasoning>\n", "<reasoning>"), good.replace("<reasoning>\n", "<reasoning>\n<reasoning>\n"), good + good, text(tail="z"), text(tail="z" * 30)]
    return [Grader(grade, right, wrong),
            # text behind the answer is charged by both terms
            Grader(grade, [text(tail="z" * 10)], [text(tail="z" * 11), text(tail="z" * 100), good.replace("<reasoning>\n", ""), "so so"]),
            Grader(grade, [good.replace("<reasoning>\n", "")], [text(tail="z" * 70), good.replace("<reasoning>\n", "").replace("</reasoning>\n", "")])]


@declare("hh/r07")
def _(module, fn):
    a = lambda s: f"I think so. <answer>{s}</answer>"
    one, two, three = {"golds": ["The Eiffel Tower", "Tour Eiffel, Paris"]}, {"golds": ["U.S."]}, {"golds": ["no", "On the second floor of the house"]}
    return [Grader(lambda t: fn(one, t), [a("eiffel tower"), a("The Eiffel Tower"), a(" an  EIFFEL\ntower! "), a("tower eiffel"), a("Paris: Tour Eiffel"), a("a tower") + a("Eiffel Tower")],
                   [a("eiffel"), a("a tower"), a("eiffel eiffel tower"), a("eiffel tower in Paris"), a("no"), a(""), "Eiffel Tower", a("Eiffel Tower") + a("Rome"), a("theeiffel tower")]),
            Grader(lambda t: fn(one, t), [a("eiffel tower in Paris")], [a("a high tower in Paris"), a("no"), a("Rome"), "The Eiffel Tower in Paris"]),
            Grader(lambda t: fn(two, t), [a("US"), a("the u.s")], [a("U S"), a("USA"), "US"]),
            # an answer beside the closed "no" shares a word with it, and gets nothing for it
            Grader(lambda t: fn(three, t), [a("No."), a("second floor"), a("floor")], [a("no floor"), a("no way"), a("yes"), a("noanswer")])]


@declare("hh/r06")
def _(module, fn):
    row = {"answer": "17"}
    def text(n, answer="17"):
        end = f"<answer>{answer}</answer>"
        return "h" * (n - len(end)) + end                     # n characters
    grade = lambda t: fn(row, t)
    lengths = (30, 80, 120, 199, 200, 400)
    return [Grader(grade, [text(n) for n in lengths] + ["<answer>18</answer>" + text(60)],
                   [text(n, "18") for n in lengths] + ["17", "h" * 150, text(60) + "<answer>18</answer>"]),
            # right answers are worth less with their length, wrong ones more
            Grader(grade, [text(30), text(50)], [text(80), text(120), text(200), text(300)]),
            Grader(grade, [text(80), text(120)], [text(150), text(200), text(300)]),
            Grader(grade, [text(150, "18"), text(200, "18"), text(300, "18"), "h" * 250], [text(30, "18"), text(80, "18"), text(120, "18"), "h" * 60]),
            Grader(lambda t: fn(row, t, max_len=100), [text(30), text(50)], [text(70), text(100), text(300)])]


@declare("hh/d08")
def _(module, fn):
    one = module.make(0)["row"]
    ref = one["answer"].split("####")[1].strip()              # such as -1,234
    plain = ref.replace(",", "")
    two = {"question": "Sums?", "answer": "-5 is what remains, since 3 is smaller than 8."}
    three = {"question": "How much?", "answer": "One pays 7 and gets 4.\n#### +2,002.50"}
    four = {"question": "How many?", "answer": "First 10, then 1,234.\n#### 1,234"}
    five = {"question": "How many?", "answer": "It is 12 apples, or 3 boxes."}
    return [Grader(lambda t: fn(one, t), [f"The temperature is {ref}", plain, f"{plain}.0", f"Not 3 but {ref} degrees."],
                   [plain[1:], f"It is {ref[1:]}", f"{ref} or 3", "3", f"{plain}.5", plain + "1", "cold"], question=one["question"]),
            Grader(lambda t: fn(two, t), ["-5", "It is -5.0"], ["5", "3", "8", "-3", "none"]),
            Grader(lambda t: fn(three, t), ["2002.5", "It is 2,002.50", "+2002.50"], ["-2002.5", "2002", "2", "7", "4", "2,002.51"]),
            Grader(lambda t: fn(four, t), ["1234", "1,234", "12,34", "10 and then 1234.00"], ["-1234", "1", "234", "10", "1234 or 10", "no number"]),
            Grader(lambda t: fn(five, t), ["12", "12.0"], ["3", "-12", "1"])]


# ---------------------------------------------------------------- losses

@declare("hh/r12")
def _(module, fn):
    model, raw = parts(module)
    raw2 = module.make(1)
    raw2.pop("model")

    def encode(raw):
        """source as a distance and a mask, branches from 1 on: so every tensor may be padded with 0."""
        t = torch.arange(raw["ids"].shape[1])[None]
        mask = raw["source"] >= 0
        return {"ids": raw["ids"], "position_ids": raw["position_ids"], "branch": raw["branch_ids"] + 1, "back": torch.where(mask, t - raw["source"], 1), "mask": mask.float()}

    def decode(b):
        t = torch.arange(b["ids"].shape[1])[None]
        return {"ids": b["ids"], "position_ids": b["position_ids"], "branch_ids": b["branch"] - 1, "source": torch.where(b["mask"] > 0, t - b["back"], -1)}

    def own_rows(model, b):
        """Each prompt + response as a row of its own."""
        total, count = 0.0, 0
        for ids, pos, br in zip(b["ids"], b["position_ids"], b["branch"] - 1):
            for k in range(1, int(br.max()) + 1):
                at = (br == 0) | (br == k)
                x, n = ids[at][None], int((br == k).sum())
                if not n:
                    continue
                m = x.shape[1]
                lp = model(x, pos[at][None], torch.ones(1, m, m, dtype=torch.bool).tril())[0].log_softmax(-1)
                total = total - lp[:-1].gather(-1, x[0, 1:, None])[-n:].sum()
                count += n
        return total / count

    def first_only(raw):
        keep = raw["branch_ids"] <= 1
        rows = [{k: v[i][keep[i] & (raw["branch_ids"][i] >= 0)] for k, v in raw.items()} for i in range(len(keep))]
        n = max(len(r["ids"]) for r in rows) + 1
        value = {"ids": 0, "position_ids": 0, "branch_ids": -1, "source": -1}
        return {k: torch.stack([F.pad(r[k], (0, n - len(r[k])), value=value[k]) for r in rows]) for k in raw}

    loss = lambda model, b: fn(model, decode(b))
    common = dict(model=model, loss=loss, value_is_loss=True, reduction="mean", wide=("ids", "position_ids", "branch", "back", "mask"))
    roles = {"ids": "ids", "positions": "position_ids", "mask": "mask"}
    return [Step(batch=encode(raw), roles=roles, paths={"each prompt + response a row of its own": own_rows}, name="three responses", **common),
            # with one response a row is an ordinary one
            Step(batch=encode(first_only(raw2)), roles=roles, family="sft", paths={"each prompt + response a row of its own": own_rows}, name="one response", **common)]


@declare("hh/r09")
def _(module, fn):
    model, batch = parts(module)

    def own_rows(model, b):
        """One document at a time."""
        total = weights = 0.0
        for ids, pos, seg, labels in zip(b["ids"], b["position_ids"], b["segment_ids"], b["labels"]):
            for s in range(1, int(seg.max()) + 1):
                at = seg == s
                n = int((labels[at] != -100).sum())
                if n:
                    logits = model(ids[at][None], pos[at][None], seg[at][None])[0]
                    total = total + F.cross_entropy(logits, labels[at], ignore_index=-100, reduction="sum") / n ** 0.5
                    weights = weights + n ** 0.5
        return total / weights

    return Step(model=model, loss=fn, batch=batch, roles={"ids": "ids", "labels": "labels", "positions": "position_ids", "documents": "segment_ids"},
                value_is_loss=True, reduction="mean", wide=("ids", "labels", "position_ids", "segment_ids"), paths={"one document at a time": own_rows})


# ---------------------------------------------------------------- collators and data stages

@declare("hh/r10")
def _(module, fn):
    rows = module.make(0)["rows"] + module.make(1)["rows"]

    def whole(cp):
        def collate(rows):
            out = fn(rows, cp_size=cp)
            full = {}
            for name, v in out.items():                       # [cp, rows, local]
                c = v.shape[2] // 2
                chunks = [None] * (2 * cp)
                for r in range(cp):
                    chunks[r], chunks[2 * cp - 1 - r] = v[r, :, :c], v[r, :, c:]
                full[name] = torch.cat(chunks, 1)
            # with another number where the padding is, so that a leading -100 of a row is compared
            full["row_labels"] = full["labels"].masked_fill((full["attention_mask"] == 0) & (full["labels"] == -100), -101)
            full["position_ids"] = full["position_ids"].masked_fill(full["attention_mask"] == 0, -1)
            return full
        return collate

    def labels(e):
        k = len(e["ids"])
        return torch.tensor([e["ids"][t + 1] if t + 1 < k and e["loss_mask"][t + 1] else -100 for t in range(k)])

    def one(cp):
        return Collator(whole(cp), rows, pads={"input_ids": 0, "labels": -100, "attention_mask": 0, "position_ids": -1, "row_labels": -101},
                        targets=lambda e: [t for t, m in list(zip(e["ids"], e["loss_mask"]))[1:] if m],
                        columns={"input_ids": lambda e: torch.tensor(e["ids"]), "row_labels": labels, "attention_mask": lambda e: torch.ones(len(e["ids"]), dtype=torch.long),
                                 "position_ids": lambda e: torch.arange(len(e["ids"]))})

    def tokens(cp):
        out = fn(rows, cp_size=cp)
        n = -(-max(len(r["ids"]) for r in rows) // (2 * cp)) * 2 * cp
        found = [f"row {i} position {p}" for r in range(cp) for i in range(len(rows)) for p in out["position_ids"][r, i].tolist()]
        return Census([f"row {i} position {p}" for i in range(len(rows)) for p in range(n)], found, what="tokens on ranks", once=True)

    return [one(2), one(3), tokens(2), tokens(3)]


@declare("hh/r04")
def _(module, fn):
    rows = module.make(0)["rows"] + module.make(1)["rows"]

    def batches(size):
        return [rows[i:i + size] for i in range(0, len(rows) // size * size, size)]

    names = ("prompt_ids", "completion_ids", "input_ids", "completion_mask", "KL_input_ids", "KL_completion_mask")

    def one(size):
        def stage(examples):                                 # an example is a whole KL batch
            out = fn([r for e in examples for r in e], batch_size=size)
            groups = [out[i:i + size] for i in range(0, len(out), size)]
            got = {k: padded([[t for r in g for t in list(r[k]) + [-1]] for g in groups], -2) for k in names}
            return {**got, "label": padded([[int(r["label"]) for r in g] for g in groups], -2)}

        def expected(row):
            return lambda e: torch.tensor([t for i in range(size) for t in row(e[i], e[i - 1]) + [-1]])

        columns = {"prompt_ids": expected(lambda r, before: r["prompt_ids"]), "completion_ids": expected(lambda r, before: r["completion_ids"]),
                   "input_ids": expected(lambda r, before: r["prompt_ids"] + r["completion_ids"]),
                   "completion_mask": expected(lambda r, before: [0] * len(r["prompt_ids"]) + [1] * len(r["completion_ids"])),
                   "KL_input_ids": expected(lambda r, before: r["prompt_ids"] + before["completion_ids"]),
                   "KL_completion_mask": expected(lambda r, before: [0] * len(r["prompt_ids"]) + [1] * len(before["completion_ids"])),
                   "label": lambda e: torch.tensor([int(r["label"]) for r in e])}
        return Collator(stage, batches(size), pads={**{k: -2 for k in names}, "label": -2}, columns=columns)

    return [one(4), one(2)]


@declare("hh/d05")
def _(module, fn):
    rows = module.make(0)["rows"]

    def stage(examples):
        packs = fn(examples)
        return {"ids": padded([p["ids"] for p in packs], -1), "sample_ids": padded([p["sample_ids"] for p in packs], -1), "lengths": padded([p["lengths"] for p in packs], 0),
                "order": torch.tensor([e["id"] for e in examples])}

    def unpack(batch):
        docs = []
        for ids, samples, lengths in zip(batch["ids"].tolist(), batch["sample_ids"].tolist(), batch["lengths"].tolist()):
            at = 0
            for s, n in zip(samples, lengths):
                if s >= 0:
                    docs.append({"id": torch.tensor([s]), "ids": torch.tensor(ids[at:at + n])})
                    at += n
        order = {s: i for i, s in enumerate(batch["order"].tolist())}
        return sorted(docs, key=lambda d: order.get(int(d["id"]), len(order)))       # rows are not kept in order

    def census(rows):
        packs = fn(rows)
        return [Census([f"row {r['id']}" for r in rows], [f"row {s}" for p in packs for s in p["sample_ids"]], what="rows in packs", once=True),
                Census({"tokens": sum(len(r["ids"]) for r in rows), "tokens by lengths": sum(len(r["ids"]) for r in rows), "packs above the limit": 0, "packs without a row": 0},
                       {"tokens": sum(len(p["ids"]) for p in packs), "tokens by lengths": sum(n for p in packs for n in p["lengths"]),
                        "packs above the limit": sum(len(p["ids"]) > 10 for p in packs), "packs without a row": sum(not p["sample_ids"] for p in packs)}, what="packed tokens")]

    return [Collator(stage, rows, pads={"ids": -1, "sample_ids": -1, "lengths": 0}, rows=False, unpack=unpack,
                     columns={"id": lambda e: torch.tensor([e["id"]]), "ids": lambda e: torch.tensor(e["ids"])}), *census(rows), *census(module.make(1)["rows"])]


@declare("hh/d04")
def _(module, fn):
    rows = [{"id": i, "ids": ids} for i, ids in enumerate([r["ids"] for s in range(3) for r in module.make(s)["rows"]])]
    size, epochs = 12, 5

    def stage(examples):
        out = fn(examples, subsample_size=4)
        return {"id": torch.tensor([r["id"] for r in out]), "ids": padded([r["ids"] for r in out], -1)}

    out = fn(rows, subsample_size=size, num_epochs=epochs)
    passes = [[r["id"] for r in out[i:i + size]] for i in range(0, len(out), size)]
    subset = passes[0]
    source = {r["id"]: str(r) for r in rows}

    def draw(rank):
        return torch.tensor([r["id"] for r in fn(rows, subsample_size=size, num_epochs=epochs, seed=numbers(64, 9)[rank])])

    return [Collator(stage, rows, pads={"ids": -1}, rows=False),
            Census([f"pass {e}, row {i}" for e in range(epochs) for i in subset], [f"pass {e}, row {i}" for e, p in enumerate(passes) for i in p], what="rows in passes", once=True),
            Census({"rows": size * epochs, "different rows": size, "different orders": epochs},
                   {"rows": len(out), "different rows": len({r["id"] for r in out}), "different orders": len({tuple(p) for p in passes})}, what="rows of the output"),
            Census({source[i] for i in subset}, {str(r) for r in out}, what="unchanged rows"),
            Ranks(draw=draw)]


@declare("hh/d03")
def _(module, fn):
    rows = module.make(0)["rows"] + module.make(1)["rows"]

    def one(seq_length=16, pad=0):
        fill = 2 if pad is None else pad
        content = lambda e: (e["prompt_ids"] + e["answer_ids"])[:seq_length]

        def labels(e):
            x, p = content(e), len(e["prompt_ids"])
            return torch.tensor([x[t + 1] if p <= t + 1 < len(x) else -100 for t in range(seq_length)])

        # rows have one width, so there is no padding that depends on the others
        return Collator(lambda rows: fn(rows, seq_length=seq_length, pad_token_id=pad), rows,
                        targets=lambda e: content(e)[len(e["prompt_ids"]):],
                        columns={"input_ids": lambda e: torch.tensor(content(e) + [fill] * (seq_length - len(content(e)))), "labels": labels,
                                 "attention_mask": lambda e: torch.tensor([1] * len(content(e)) + [0] * (seq_length - len(content(e))))})

    return [one(), one(pad=None), one(seq_length=8), one(seq_length=8, pad=None), one(pad=45)]


@declare("hh/r11")
def _(module, fn):
    tok = random.Random(7)
    doc = lambda n: {"ids": [1] + [tok.randint(2, 40) for _ in range(n - 1)]}
    T = 15

    def stack(rows):
        return {k: padded([r[k] for r in rows], -1) for k in ("input", "labels")}

    def columns(row):
        return {"input": lambda e: torch.tensor(row(e)[:-1]), "labels": lambda e: torch.tensor(row(e)[1:])}

    # a document of T + 1 tokens fills a row
    full = Collator(lambda rows: stack(fn(rows)), [doc(T + 1) for _ in range(8)], columns=columns(lambda e: e["ids"]))
    # with a buffer of one document, a longer one is cut, and its rest is dropped
    cut = Collator(lambda rows: stack(fn(rows, buffer_size=1)), [doc(n) for n in (16, 20, 33, 17, 48, 16)], columns=columns(lambda e: e["ids"][:T + 1]))
    # an example is a pair that fills a row: the longer one is taken first, the other one fits
    pairs = [[doc(6), doc(10)] if i % 2 else [doc(10), doc(6)] for i in range(6)]
    pair = Collator(lambda examples: stack(fn([d for e in examples for d in e])), pairs,
                    columns=columns(lambda e: [t for d in sorted(e, key=lambda d: -len(d["ids"])) for t in d["ids"]]))
    mixed = Collator(lambda rows: stack(fn(rows)), module.make(0)["rows"], rows=False)

    # no document occurs twice or begins in its middle: each has a second token of its own
    docs = [[1, 100 + i] + d["ids"][2:] for i, d in enumerate(module.make(0)["rows"] + module.make(1)["rows"]) if len(d["ids"]) > 1]
    packed = fn([{"ids": list(d)} for d in docs])
    found, stubs, bad = [], 0, {"rows that are not full": 0, "rows that do not begin with BOS": 0, "labels that are not shifted by one": 0, "pieces of no document": 0}
    for r in packed:
        row = r["input"] + r["labels"][-1:]
        bad["rows that are not full"] += len(row) != T + 1 or len(r["labels"]) != T
        bad["rows that do not begin with BOS"] += row[0] != 1
        bad["labels that are not shifted by one"] += r["labels"] != row[1:]
        starts = [i for i, t in enumerate(row) if t == 1] + [len(row)]
        for a, b in zip(starts, starts[1:]):
            piece = row[a:b]
            if len(piece) == 1:
                stubs += 1
                continue
            i = piece[1] - 100
            whole = 0 <= i < len(docs) and (piece == docs[i] or b == len(row) and piece == docs[i][:len(piece)])
            bad["pieces of no document"] += not whole
            found.append(f"document {i}")
    return [full, cut, pair, mixed, Census(set(found), found, what="packed documents (dropped ones aside)", once=True),
            Census({k: 0 for k in bad}, {k: int(v) for k, v in bad.items()}, what="defects of packed rows")]


@declare("hh/r02")
def _(module, fn):
    rows = module.make(0)["rows"]
    MASK = 3

    def restored(p):
        def stage(rows):
            out = fn(rows, mlm_probability=p)
            labels, n = out["labels"], [len(r["input_ids"]) for r in rows]
            return {"original": torch.where(labels == -100, out["input_ids"], labels), "attention_mask": out["attention_mask"],
                    "special_labels": torch.stack([labels[i, [0, k - 1]] for i, k in enumerate(n)]),
                    "labels_in_padding": torch.stack([(labels[i, k:] != -100).sum()[None] for i, k in enumerate(n)])}
        return Collator(stage, rows, pads={"original": 0, "attention_mask": 0},
                        columns={"original": lambda e: torch.tensor(e["input_ids"]), "attention_mask": lambda e: torch.ones(len(e["input_ids"]), dtype=torch.long),
                                 "special_labels": lambda e: torch.tensor([-100, -100]), "labels_in_padding": lambda e: torch.tensor([0])})

    def share(of, chance):
        """of: what is counted; chance: its probability for a chosen token"""
        seed = fresh()

        def thin(x, p):
            ids = [1] + [4 + i % 40 for i in range(x.numel())] + [2]
            out = fn([{"input_ids": ids}], mlm_probability=p, seed=seed())
            chosen = out["labels"][0] != -100
            hit = (chosen & of(out["input_ids"][0], torch.tensor(ids)))[1:-1].view(x.shape)
            return x * hit.to(x.dtype) / (p * chance)
        return Unbiased(thin, settings=(0.15, 0.5))

    return [restored(0.15), restored(0.6), Collator(fn, rows, pads={"input_ids": 0, "attention_mask": 0, "labels": -100}, rows=False),
            share(lambda x, ids: torch.ones_like(x, dtype=torch.bool), 1.0),
            share(lambda x, ids: x == MASK, 0.8 + 0.1 / 50),
            share(lambda x, ids: x == ids, 0.1 + 0.1 / 50),
            share(lambda x, ids: (x != ids) & (x != MASK), 0.1 * 48 / 50)]


@declare("hh/r01")
def _(module, fn):
    rows = module.make(0)["rows"] + module.make(1)["rows"]
    PRE, MID, SUF, EOT = 0, 1, 2, 3

    def document(row):
        """The document, from its form; [-9] where the form is another."""
        x = list(row["ids"])
        if not x or x[-1] != EOT:
            return [-9]
        x = x[:-1]
        special = [t for t in x if t < 4]
        if row["form"] == "plain":
            return x if not special else [-9]
        if special != [PRE, SUF, MID] or x[0] != PRE:
            return [-9]
        s, m = x.index(SUF), x.index(MID)
        pre, suf, rest = x[1:s], x[s + 1:m], x[m + 1:]
        if row["form"] == "spm" and pre:
            return [-9]
        return pre + rest + suf                               # in the SPM form `rest` begins with the prefix

    def stage(**settings):
        def run(rows):
            return {"document": padded([document(r) for r in fn(rows, **settings)], -1)}
        return Collator(run, rows, pads={"document": -1}, columns={"document": lambda e: torch.tensor(e["ids"])})

    def raw(rows):
        out = fn(rows)
        return {"ids": padded([r["ids"] for r in out], -1), "form": torch.tensor([["plain", "psm", "spm"].index(r["form"]) for r in out])}

    def share(settings, count, values=(0.3, 0.7)):
        seed = fresh()

        def thin(x, v):
            docs = [{"ids": [4, 5, 6, 7, 8, 9]} for _ in range(x.numel())]
            out = fn(docs, seed=seed(), **settings(v))
            return x * torch.tensor([count(r, v) for r in out], dtype=x.dtype).view(x.shape)
        return Unbiased(thin, settings=values)

    # of two places out of 0 … 6 the distance is 48/21 on average, and so the suffix has (6 - 48/21) / 2 tokens
    suffix = (6 - 48 / 21) / 2
    return [stage(), stage(fim_rate=1.0, spm_rate=0.0), stage(fim_rate=1.0, spm_rate=1.0), stage(fim_rate=0.0), Collator(raw, rows, pads={"ids": -1}, rows=False),
            share(lambda v: {"fim_rate": v}, lambda r, v: (r["form"] != "plain") / v),
            share(lambda v: {"fim_rate": 1.0, "spm_rate": v}, lambda r, v: (r["form"] == "spm") / v),
            share(lambda v: {"fim_rate": 1.0, "spm_rate": v}, lambda r, v: (r["ids"].index(MID) - r["ids"].index(SUF) - 1) / suffix, (0.0, 1.0))]


@declare("hh/d06")
def _(module, fn):
    n = 12                                                    # a piece has seq_len + 1 tokens
    tok = random.Random(3)
    doc = lambda k: {"ids": [tok.randint(3, 40) for _ in range(k)]}
    # an example is a group of documents that fills two pieces
    groups = [[doc(k) for k in lengths] for lengths in ([24], [5, 15, 4], [3, 21], [12, 12], [11, 2, 11], [9, 3, 12], [1, 22, 1], [20, 2, 2])]

    def stage(examples):
        out = fn([d for e in examples for d in e])
        return {k: padded([[t for c in out[i:i + 2] for t in c[k]] for i in range(0, len(out), 2)], -1) for k in ("input", "labels", "positions")}

    def pieces(e):
        x = [t for d in e for t in d["ids"]]
        return [x[:n], x[n:]]

    def positions(e):
        starts = {sum(len(d["ids"]) for d in e[:i]) for i in range(len(e))} | {0, n}
        out, p = [], 0
        for t in range(2 * n):
            p = 0 if t in starts else p + 1
            out.append(p)
        return torch.tensor(out[:n - 1] + out[n:-1])

    rows = module.make(0)["rows"]
    total = sum(len(r["ids"]) for r in rows)
    out = fn(rows)
    return [Collator(stage, groups, columns={"input": lambda e: torch.tensor([t for x in pieces(e) for t in x[:-1]]), "labels": lambda e: torch.tensor([t for x in pieces(e) for t in x[1:]]), "positions": positions}),
            Collator(lambda rows: {k: torch.tensor([c[k] for c in fn(rows)]) for k in ("input", "labels", "positions")}, rows, rows=False),
            Census({"chunks": total // n, "positions of seq_len or more": 0, "chunks that do not begin at 0": 0},
                   {"chunks": len(out), "positions of seq_len or more": sum(p >= n - 1 for c in out for p in c["positions"]), "chunks that do not begin at 0": sum(c["positions"][0] != 0 for c in out)}, what="chunks")]


# ---------------------------------------------------------------- chat templates

def say(*contents, system=None, **more):
    ms = [] if system is None else [{"role": "system", "content": system}]
    return ms + [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


@declare("hh/r03")
def _(module, fn):
    chars = lambda s: [5 + ord(c) for c in s]

    def prompt(messages):
        system = "".join(m["content"] + "\n\n" for m in messages if m["role"] == "system")
        turns = [m for m in messages if m["role"] != "system"]
        last = max(i for i, m in enumerate(turns) if m["role"] == "user")
        ids = [1]
        for i, m in enumerate(turns):
            ids += [3] + chars((system if i == last else "") + m["content"]) + [4] if m["role"] == "user" else chars(m["content"]) + [2]
        return ids

    # the system prompt moves to the last user message: with one, earlier prompts are no prefix
    return [ChatTemplate(fn, prompt, module.make(0)["messages"], end=2, prefix=False),
            ChatTemplate(fn, prompt, say("What is it", "a cat", "And now", "a dog", "And then", "two birds"), end=2),
            ChatTemplate(fn, prompt, say("What is it", "a cat", system="be short"), end=2)]


@declare("hh/d01")
def _(module, fn):
    chars = lambda s: [5 + ord(c) for c in s]

    def prompt(messages):
        # a prompt ends with a user: no assistant comes after the last user, so no reasoning is rendered
        ids = []
        for m in messages:
            ids += [0] + chars(m["role"] + "\n" + m["content"]) + [1] + chars("\n")
        return ids + [0] + chars("assistant\n")

    return [ChatTemplate(fn, prompt, module.make(0)["messages"], end=1), ChatTemplate(fn, prompt, module.make(1)["messages"][:2], end=1),
            ChatTemplate(fn, prompt, [{**m, **({"reasoning": ""} if m["role"] == "assistant" else {})} for m in say("What is it", "a cat", "And now", "a dog")], end=1)]


@declare("hh/d02")
def _(module, fn):
    chars = lambda s: [3 + ord(c) for c in s]

    def prompt(messages):
        ids = [0]
        for m in messages:
            ids += [1] + chars(m["role"] + "\n" + m["content"]) + [2]
        return ids + [1] + chars("assistant\n")

    def one(messages):
        return ChatTemplate(fn, prompt, messages, end=2, trained=[len(messages) - 1])

    return [one(say("What is it", "a cat", "And now", "a dog", system="be short")), one(say("What is it", "a cat", "And now", "a dog", "And then", "two birds")),
            one(say("What is it", "a cat", system="be short"))]
