import copy
import itertools
import json
import math

import torch
import torch.nn.functional as F

from earnest_audit import (
    Accumulation,
    AdapterStart,
    Census,
    Collator,
    Grader,
    Merge,
    MergedLayer,
    Metric,
    Ranks,
    RoundTrip,
    Schedule,
    Setting,
    Step,
    Unbiased,
)
from tests.audit.reading2026j.reading import declare, no_subject  # noqa: F401


def joined(batches):
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


def whole(value, usual):
    """A changed whole-number setting as a whole number, on the same side of the usual value."""
    return max(1, math.ceil(value) if value >= usual else math.floor(value))


def still(model, kind=torch.optim.SGD):
    """An optimizer of the trainable parameters that does not move them."""
    opt = kind([p for p in model.parameters() if p.requires_grad], lr=0.0)
    for g in opt.param_groups:
        g["base_lr"] = 0.0
    return opt


# ---------------------------------------------------------------------------------------------- m076 ReLoRA


@declare("z/r24")
def relora(m, fn):
    def trained():
        given = m.make(0)
        model = given["model"]
        g = torch.Generator().manual_seed(3)
        with torch.no_grad():  # as after some steps: B is not 0, so that A has a gradient too
            for layer in model.modules():
                if isinstance(layer, m.ReLora):
                    layer.B.copy_(0.3 * torch.randn(layer.B.shape, generator=g))
        return given

    given = trained()
    model, batches = given["model"], given["batches"]
    batch = {"ids": torch.cat([batches[0]["ids"], batches[1]["ids"]])}

    def loss(model, batch):
        logits = model(batch["ids"])[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())

    def backward(settings):  # an earlier batch first: nothing of it may be left
        fn(model, still(model, torch.optim.Adam), [batches[2], batch])

    step = Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids"},
        optimizer=given["optimizer"],
        backward=backward,
        reduction="mean",
        value_is_loss=True,
        all_supervised=True,
        name="one step between resets",
    )

    other = trained()

    def accumulate(model, parts):
        fn(model, still(model, torch.optim.Adam), [joined(parts)])

    accumulation = Accumulation(other["model"], accumulate, {"ids": batch["ids"].clone()}, what="steps of the whole batch")

    third = trained()
    text = third["batches"][0]["ids"]

    def outputs():
        with torch.no_grad():
            return third["model"](text)

    def reset():  # five steps at rate 0: one reset, which does not change the function
        fn(third["model"], still(third["model"], torch.optim.Adam), third["batches"][:5], cycle=4)

    def rates(total, ranks=1, cycle=4, warmup=2):
        given = m.make(0)
        seen = []
        given["optimizer"].register_step_pre_hook(
            lambda opt, args, kwargs: seen.append(opt.param_groups[0]["lr"])
        )
        given_batches = [given["batches"][k % len(given["batches"])] for k in range(total)]
        fn(given["model"], given["optimizer"], given_batches, cycle=whole(cycle, 4), warmup=whole(warmup, 2))
        return seen

    schedule = Schedule(
        rates, peak=0.01, final=0.01, total=40, warmup=2, restarts=True, settings={"cycle": 4, "warmup": 2}
    )
    return [step, accumulation, MergedLayer(outputs=outputs, merge=reset), schedule]


# ---------------------------------------------------------------------------------------------- m077 DoRA


@declare("z/r21")
def dora(m, fn):
    given = m.make(0)
    x, y = given["x"], given["y"]

    def trained(magnitude_only=False):
        base = m.make(0)["base"]
        torch.manual_seed(1)
        model = fn(base, 4, 8)
        g = torch.Generator().manual_seed(5)
        with torch.no_grad():  # as after some steps: B is not 0
            for p in model.parameters():
                if p.requires_grad:
                    p.add_(0.1 * torch.randn(p.shape, generator=g))
        if magnitude_only:
            model.A.requires_grad_(False)
            model.B.requires_grad_(False)
        return model

    fresh_base = m.make(0)["base"]
    untouched = copy.deepcopy(fresh_base)
    start = AdapterStart(
        model=fresh_base,
        attach=lambda model: fn(model, 4, 8),
        outputs=lambda model: model(x).detach(),
    )

    def loss(model, batch, alpha):
        built = fn(copy.deepcopy(untouched), 4, alpha)
        out = torch.func.functional_call(built, dict(model.named_parameters()), (batch["x"],))
        return F.mse_loss(out, batch["y"])

    batch = {"x": x, "y": y}
    settings = {"alpha": Setting(8.0, "setting")}
    step = Step(
        model=trained(),
        loss=loss,
        batch=batch,
        settings=settings,
        reduction="mean",
        value_is_loss=False,  # the norm is a constant in backward
        name="all of the adapter",
    )
    magnitude = Step(
        model=trained(True),
        loss=loss,
        batch=dict(batch),
        settings=dict(settings),
        reduction="mean",
        value_is_loss=True,
        name="the magnitude alone",
    )

    merged_model = trained()
    eye = torch.eye(12)

    def weighed(w):
        model = trained()
        model.s = model.s * w
        return model

    def delta(w):
        model = weighed(w)
        with torch.no_grad():
            return model.merge()(eye) - m.make(0)["base"](eye)

    def applied(w):
        model = weighed(w)
        with torch.no_grad():
            return model(eye) - m.make(0)["base"](eye)

    now = [merged_model]

    def outputs():
        with torch.no_grad():
            return now[0](x)

    def merge():
        now[0] = merged_model.merge()

    def unmerge():
        now[0] = merged_model

    return [
        start,
        step,
        magnitude,
        Merge(delta, applied, linear=False),
        MergedLayer(outputs=outputs, merge=merge, unmerge=unmerge),
    ]


# ---------------------------------------------------------------------------------------------- m078 vocabulary in parts


@declare("bb/r03")
def vocabulary_parallel(m, fn):
    given = m.make(0)
    model = given.pop("model")

    def plain(model, batch, tp_ranks=4):
        logp = model(batch["ids"]).log_softmax(-1)
        nll = -logp.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
        return (nll * batch["loss_mask"]).sum() / batch["loss_mask"].sum().clamp(min=1)

    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles={"ids": "ids", "labels": "labels", "mask": "loss_mask"},
        settings={"tp_ranks": Setting(4, "inert", modes=(1, 2, 8))},
        paths={"one rank": plain},
        family="sft",
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "labels", "loss_mask"),
    )


# ---------------------------------------------------------------------------------------------- m079 generalised JSD


@declare("y/r18")
def jsd(m, fn):
    given = m.make(0)
    model = given["model"]
    batch = {
        "ids": given["ids"],
        "mask": (given["labels"][:, 1:] != -100).float(),  # of ids[:, 1:], and so of the logits before them
        "teacher_logits": given["teacher_logits"][:, :-1].clone(),
    }

    def loss(model, batch, beta, temperature):
        ids, teacher = batch["ids"], batch["teacher_logits"]
        nowhere = torch.full_like(ids[:, :1], -100)  # nothing predicts the first token
        labels = torch.cat([nowhere, ids[:, 1:].masked_fill(batch["mask"] == 0, -100)], 1)
        teacher = torch.cat([teacher, torch.zeros_like(teacher[:, :1])], 1)  # after the last token nothing is predicted
        return fn(model, {"ids": ids, "labels": labels, "teacher_logits": teacher}, beta=beta, temperature=temperature)

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "teacher": "teacher_logits"},
        student=lambda model, batch: model(batch["ids"])[:, :-1],
        settings={"beta": Setting(0.3, "mixture"), "temperature": Setting(0.9, "setting")},
        family="divergence",
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "mask", "teacher_logits"),
    )


# ---------------------------------------------------------------------------------------------- m080 tool calls


@declare("aa/r04")
def tool_calls(m, fn):
    def text(calls, think="<think>hm</think>\n"):
        return think + "<tool_call>\n" + "\n".join(json.dumps(c) for c in calls) + "\n</tool_call>"

    def call(name, **parameters):
        return {"name": name, "parameters": parameters}

    two = [call("find", a=1, b=2), call("find", a=3, c=0)]
    row = {"calls": two}
    exact = Grader(
        grade=lambda answer: fn(row, answer),
        right=[
            text(two),
            text(two[::-1]),  # the order of the calls is free
            text([call("find", b=2, a=1), call("find", c=0, a=3)]),
            "  " + text(two, "<think>first this,\nthen that</think> ") + "\n",
        ],
        wrong=[
            text([call("find", a=1, b=2)]),  # one is missing
            text([*two, call("open")]),  # one too many
            text([two[0], two[0], two[1]]),
            text([two[0], two[0]]),
            text([call("find", a=1, b=2), call("open", a=3, c=0)]),  # another name
            text([call("find", a=1, b=2), call("find", a=3, c=1)]),  # another value
            text([call("find", a=1, b=2), call("find", a=3)]),  # a parameter is missing
            text([call("find", a=1, b=2), call("find", a=3, c=0, d=1)]),  # one too many
            text([call("find", a=True, b=2), call("find", a=3, c=0)]),  # 1 and true differ
            text([call("find", a="1", b=2), call("find", a=3, c=0)]),  # and 1 and "1"
            text(two, ""),  # without a thought
            "<think>hm</think>\n<tool_call>\n{broken\n</tool_call>",
            text([two[0]] * 9),
            "no call",
        ],
        question="Find a 1 with b 2, and a 3 with c 0.",
    )
    partly = Grader(
        grade=lambda answer: fn(row, answer),
        right=[
            text([call("find", a=1, b=2), call("find", a=3, c=1)]),
            text([call("find", a=3, c=1), call("find", a=1, b=2)]),
            text([call("find", a=1, b=2), call("open", a=3, c=0)]),
        ],
        wrong=[
            text([call("open", a=1, b=2), call("open", a=3, c=0)]),  # no name is right
            "<think>hm</think>\n<tool_call>\n{broken\n</tool_call>",
            "no call",
        ],
        question="Find a 1 with b 2, and a 3 with c 0.",
    )
    truths = [call("set", on=True, how="1", many=[1, {"x": 2, "y": None}]), call("stop")]
    other = {"calls": truths}
    values = Grader(
        grade=lambda answer: fn(other, answer),
        right=[text(truths), text([call("stop"), call("set", many=[1, {"y": None, "x": 2}], how="1", on=True)])],
        wrong=[
            text([call("set", on=1, how="1", many=[1, {"x": 2, "y": None}]), call("stop")]),
            text([call("set", on=True, how=1, many=[1, {"x": 2, "y": None}]), call("stop")]),
            text([call("set", on=True, how="1", many=[{"x": 2, "y": None}, 1]), call("stop")]),
            text([call("set", on=True, how="1", many=[1, {"x": 2, "y": None}])]),
            text([call("stop")]),
            "no call",
        ],
        question="Switch it on, then stop.",
    )
    return [exact, partly, values]


# ---------------------------------------------------------------------------------------------- policy gradients


def token_form(m, given):
    """ids [B, T]; the mask of ids[:, 1:] beside the log-probs, [B, T - 1]."""
    return {
        "ids": given["ids"],
        "mask": given["completion_mask"][:, 1:].clone(),
        "old_logps": given["old_logps"],
        "advantages": given["advantages"],
    }


def token_loss(fn):
    def loss(model, batch, **settings):
        mask = batch["mask"]
        given = {
            "ids": batch["ids"],
            "completion_mask": torch.cat([torch.zeros_like(mask[:, :1]), mask], 1),
            "old_logps": batch["old_logps"],
            "advantages": batch["advantages"],
        }
        return fn(model, given, **settings)

    return loss


def next_logps(model, batch):
    ids = batch["ids"]
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


TOKEN_ROLES = {"ids": "ids", "mask": "mask", "behaviour": "old_logps", "advantages": "advantages"}


@declare("y/r06")
def high_entropy(m, fn):
    given = m.make(0)
    return Step(
        model=given["model"],
        loss=token_loss(fn),
        batch=token_form(m, given),
        roles=TOKEN_ROLES,
        logprobs=next_logps,
        settings={
            "clip_low": Setting(0.2, "clip"),
            "clip_high": Setting(0.28, "clip high"),
            "top_entropy": Setting(0.2, "setting"),
        },
        metrics={"selected": Metric(low=0.0, high=1.0, moves=False)},  # a share that is given by top_entropy
        reduction="mean",
        value_is_loss=True,
        rows_interact=True,  # the threshold is a quantile over the batch
        drops_tokens=True,
        wide=("ids", "mask", "old_logps"),
    )


@declare("y/r02")
def sequence_ratio(m, fn):
    given = m.make(0)
    return Step(
        model=given["model"],
        loss=token_loss(fn),
        batch=token_form(m, given),
        roles=TOKEN_ROLES,
        logprobs=next_logps,
        settings={"clip_low": Setting(0.0003, "clip"), "clip_high": Setting(0.0004, "clip high")},
        metrics={"clipped_rows": Metric(low=0.0, high=1.0, neutral=0.0, moves=False)},
        reduction="mean",
        empty_rows=False,
        wide=("ids", "mask", "old_logps"),
    )


@declare("y/r05")
def dual_clip(m, fn):
    given = m.make(0)
    model, prompts = given["model"], given["prompt_ids"].shape[1]
    ids = torch.cat([given["prompt_ids"], given["response_ids"]], 1)
    attention = given["attention_mask"]
    before = torch.zeros(len(ids), prompts - 1)  # the transitions inside the prompt: no loss there
    batch = {
        "ids": ids,
        "attention": attention,
        "mask": torch.cat([before, attention[:, prompts:].float()], 1),  # of ids[:, 1:]
        "old_logps": torch.cat([before, given["old_logps"]], 1),
        "advantages": torch.cat([before, given["advantages"]], 1),
    }

    def start(batch):  # where the responses begin: one column for all rows
        any_row = (batch["mask"] != 0).any(0).nonzero()
        return int(any_row[0]) + 1 if len(any_row) else prompts

    def loss(model, batch, **settings):
        at = start(batch)
        attention = batch["attention"]
        answer = attention[:, at:] * (batch["mask"][:, at - 1 :] != 0).to(attention.dtype)
        return fn(
            model,
            {
                "prompt_ids": batch["ids"][:, :at],
                "response_ids": batch["ids"][:, at:],
                "attention_mask": torch.cat([attention[:, :at], answer], 1),
                "old_logps": batch["old_logps"][:, at - 1 :],
                "advantages": batch["advantages"][:, at - 1 :],
            },
            **settings,
        )

    def logprobs(model, batch):
        ids, att = batch["ids"], batch["attention"].bool()
        positions = (att.long().cumsum(1) - 1).clamp(min=0)
        logits = model(ids, att.unsqueeze(1).expand(-1, ids.shape[1], -1), positions)
        return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={
            "ids": "ids",
            "attention": "attention",
            "mask": "mask",
            "behaviour": "old_logps",
            "advantages": "advantages",
        },
        logprobs=logprobs,
        settings={
            "clip_low": Setting(0.2, "clip"),
            "clip_high": Setting(0.28, "clip high"),
            "clip_c": Setting(3.0, "bound"),
        },
        metrics={"dual_clipped": Metric(low=0.0, neutral=0.0, moves=False)},
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "attention", "mask", "old_logps", "advantages"),
    )


# ---------------------------------------------------------------------------------------------- m082 PiSSA as a LoRA


class OnOriginal(torch.nn.Module):
    def __init__(self, original, state):
        super().__init__()
        self.original = original.requires_grad_(False)
        self.lora_A = torch.nn.Parameter(state["lora_A"])
        self.lora_B = torch.nn.Parameter(state["lora_B"])
        self.scaling = float(state["scaling"])

    def forward(self, x):
        return self.original(x) + self.scaling * (x @ self.lora_A.T @ self.lora_B.T)


@declare("z/r22")
def pissa_state(m, fn):
    x = m.make(0)["x"]

    def perturb(module):
        g = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in module.parameters():
                if p.requires_grad:
                    p.add_(0.1 * torch.randn(p.shape, generator=g))

    def outputs(module):
        with torch.no_grad():
            return module(x)

    def save(module, folder):
        torch.save(fn(module), folder / "lora.pt")

    kept = {}

    def keep(module, folder):  # the state itself, in memory: it may not change with the module
        kept[str(folder)] = fn(module)

    def load(_, folder):
        return OnOriginal(m.make(0)["original"], torch.load(folder / "lora.pt"))

    def recall(_, folder):
        state = {k: v.clone() if torch.is_tensor(v) else v for k, v in kept[str(folder)].items()}
        return OnOriginal(m.make(0)["original"], state)

    def subject(save, load):
        return RoundTrip(
            make=lambda: m.make(0)["module"],
            perturb=perturb,
            save=save,
            load=load,
            outputs=outputs,
            tolerance=1e-4,  # another sum of the same matrices
            for_training=False,  # another module, of twice the rank
        )

    module = m.make(0)["module"]
    state = fn(module)
    sizes = Census(
        wanted={"lora_A rows": 6, "lora_A columns": 14, "lora_B rows": 11, "lora_B columns": 6},
        found={
            "lora_A rows": state["lora_A"].shape[0],
            "lora_A columns": state["lora_A"].shape[1],
            "lora_B rows": state["lora_B"].shape[0],
            "lora_B columns": state["lora_B"].shape[1],
        },
        what="sizes of the saved LoRA",
    )
    return [subject(save, load), subject(keep, recall), sizes]


# ---------------------------------------------------------------------------------------------- m083 multi-token prediction


@declare("z/r07")
def multi_token(m, fn):
    given = m.make(0)
    model, batches = given["model"], given["batches"]
    batch = joined(batches)

    def loss(model, batch):
        ids, total = batch["ids"], 0.0
        for k, logits in enumerate(model(ids)):
            n = ids.shape[1] - 1 - k
            total = total + F.cross_entropy(logits[:, :n].flatten(0, 1), ids[:, 1 + k :].flatten())
        return total

    def backward(settings):  # an earlier batch first: nothing of it may be left
        fn(model, still(model), [m.make(1)["batches"][0], batch])

    step = Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids"},
        optimizer=given["optimizer"],
        backward=backward,
        reduction="mean",
        value_is_loss=True,
        all_supervised=True,
    )

    def accumulate(model, parts):
        fn(model, still(model), [joined(parts)])

    accumulation = Accumulation(
        m.make(0)["model"], accumulate, {"ids": batch["ids"].clone()}, what="steps of the whole batch"
    )
    return [step, accumulation]


# ---------------------------------------------------------------------------------------------- m084 SPPO


@declare("y/r10")
def sppo(m, fn):
    given = m.make(0)
    model = given["model"]
    batch = {}
    for key, name in (
        ("ids", ""),
        ("completion_mask", "_mask"),
        ("ref_logps", "_reference"),
        ("win_prob", "_win"),
    ):
        first, second = given[key].chunk(2)
        batch["chosen" + name], batch["rejected" + name] = first.clone(), second.clone()

    def loss(model, batch, beta):
        def both(name):
            return torch.cat([batch["chosen" + name], batch["rejected" + name]])

        return fn(
            model,
            {
                "ids": both(""),
                "completion_mask": both("_mask"),
                "ref_logps": both("_reference"),
                "win_prob": both("_win"),
            },
            beta=beta,
        )

    def logprobs(model, batch):
        return tuple(
            (next_logps(model, {"ids": batch[side]}) * batch[side + "_mask"][:, 1:]).sum(1)
            for side in ("chosen", "rejected")
        )

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={
            "chosen": "chosen",
            "rejected": "rejected",
            "chosen_mask": "chosen_mask",
            "rejected_mask": "rejected_mask",
            "reference_chosen": "chosen_reference",
            "reference_rejected": "rejected_reference",
        },
        logprobs=logprobs,
        settings={"beta": Setting(0.05, "setting")},  # it divides the target: no weight of a term
        metrics={"chosen_ratio": Metric(), "rejected_ratio": Metric()},
        family="preference",
        reduction="mean",
        value_is_loss=True,
        pairwise=False,
        wide=("chosen", "rejected", "chosen_mask", "rejected_mask"),
    )


# ---------------------------------------------------------------------------------------------- m085 packing


@declare("z/r17")
def packing(m, fn):
    rows = m.make(0)["rows"]

    def unpack(batch):
        documents = []
        for i in range(len(batch["input_ids"])):
            for k in range(1, int(batch["segment_ids"][i].max()) + 1):
                own = batch["segment_ids"][i] == k
                documents.append(
                    {
                        key: batch[key][i][own]
                        for key in ("input_ids", "labels", "loss_weight", "position_ids")
                    }
                )
        return documents

    def labels(row):
        p = row["prompt_len"]
        return torch.tensor([-100] * p + row["input_ids"][p:])

    def weights(row):
        p, n = row["prompt_len"], len(row["input_ids"]) - row["prompt_len"]
        return torch.tensor([0.0] * p + [n**-0.5 if n else 0.0] * n)

    return Collator(
        fn=lambda rows: fn(rows, max_len=16, pad_id=0),
        examples=rows,
        rows=False,
        unpack=unpack,
        targets=lambda row: row["input_ids"][row["prompt_len"] :],
        columns={
            "input_ids": lambda row: torch.tensor(row["input_ids"]),
            "labels": labels,
            "loss_weight": weights,
            "position_ids": lambda row: torch.arange(len(row["input_ids"])),
        },
    )


# ---------------------------------------------------------------------------------------------- m086 bits per byte


@declare("bb/r17")
def bits_per_byte(m, fn):
    ranks = m.make(0)["ranks"] + m.make(1)["ranks"]
    rows = torch.cat([torch.stack([r["nll"], r["token_bytes"].float()], 1) for r in ranks])

    def table(shard):
        if torch.is_tensor(shard):
            return shard.reshape(-1, 2)
        return torch.stack(list(shard)).reshape(-1, 2) if len(shard) else torch.zeros(0, 2)

    def rank(shard):
        t = table(shard)
        return {"nll": t[:, 0], "token_bytes": t[:, 1].long()}

    def metric(shards):
        return fn([rank(s) for s in shards])

    def with_an_idle_rank(shards):
        return fn([rank(shards[0]), rank(rows[:0]), *[rank(s) for s in shards[1:]]])

    def single(shards):
        t = torch.cat([table(s) for s in shards]).double()
        real = t[:, 1] > 0
        return float(t[real, 0].sum() / (math.log(2) * t[:, 1].sum()))

    return [
        Ranks(metric=metric, rows=rows, single=single),
        Ranks(metric=with_an_idle_rank, rows=rows, single=single),
    ]


# ---------------------------------------------------------------------------------------------- m087 lanes of a stream


@declare("aa/r17")
def lanes(m, fn):
    count, time = 3, 5
    source = [t for row in m.make(0)["rows"] + m.make(1)["rows"] for t in row["ids"]]
    # with its end, each document has a number of tokens that the lanes divide: nothing is dropped, also of one alone
    examples, at = [], 0
    for n in (5, 8, 14, 5, 11):
        examples.append({"ids": source[at : at + n]})
        at += n
    assert at <= len(source)

    def stage(rows):
        out = fn(rows, lanes=count, time=time)
        width = max(max(len(r["ids"]), len(r["targets"])) for r in out)
        made = {
            key: torch.tensor([list(r[key]) + [-1] * (width - len(r[key])) for r in out])
            for key in ("ids", "targets")
        }
        return {
            **made,
            "lane": torch.tensor([r["lane"] for r in out]),
            "window": torch.tensor([r["window"] for r in out]),
        }

    def unpack(batch):
        read, predicted = [], []
        for lane in range(count):
            ids = [t for row in batch["ids"][lane::count].tolist() for t in row if t >= 0]
            targets = [t for row in batch["targets"][lane::count].tolist() for t in row if t >= 0]
            read += ids + targets[-1:]  # the last token of a lane is a target only
            predicted += ids[:1] + targets  # the first is never one
        predicted += [-1] * (len(read) - len(predicted))
        documents, a = [], 0
        for b, token in enumerate(read):
            if token == 0:
                documents.append({"ids": torch.tensor(read[a : b + 1]), "targets": torch.tensor(predicted[a : b + 1])})
                a = b + 1
        if a < len(read):
            documents.append({"ids": torch.tensor(read[a:]), "targets": torch.tensor(predicted[a:])})
        return documents

    collator = Collator(
        fn=stage,
        examples=examples,
        rows=False,
        unpack=unpack,
        columns={
            "ids": lambda row: torch.tensor([*row["ids"], 0]),
            "targets": lambda row: torch.tensor([*row["ids"], 0]),  # of the whole stream, the next tokens put together
        },
    )
    out = fn(m.make(0)["rows"], lanes=count, time=time)
    length = (sum(len(r["ids"]) + 1 for r in m.make(0)["rows"])) // count
    windows = -(-(length - 1) // time)
    wanted = {
        f"row {i}: lane {i % count}, window {i // count}": min(time, length - 1 - (i // count) * time)
        for i in range(count * windows)
    }
    found = {f"row {i}: lane {r['lane']}, window {r['window']}": len(r["ids"]) for i, r in enumerate(out)}
    return [collator, Census(wanted=wanted, found=found, what="windows and their tokens")]


# ---------------------------------------------------------------------------------------------- m088 tied weights


@declare("bb/r24")
def tied(m, fn):
    ids = torch.randint(0, 17, (3, 6), generator=torch.Generator().manual_seed(2))
    saved = {}

    def perturb(model):
        g = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=g))

    def save(model, folder):  # right saves and loads: what it gives is kept
        saved[str(folder)] = fn(model)

    def load(_, folder):
        return copy.deepcopy(saved[str(folder)])

    def outputs(model):
        with torch.no_grad():
            return model(ids)

    trip = RoundTrip(make=lambda: m.make(0)["model"], perturb=perturb, save=save, load=load, outputs=outputs)
    model = m.make(0)["model"]
    parameters = Census(
        wanted={n: p.numel() for n, p in model.named_parameters()},
        found={n: p.numel() for n, p in fn(model).named_parameters()},
        what="parameters",
    )
    return [trip, parameters]


# ---------------------------------------------------------------------------------------------- m089 buckets of a teacher


@declare("y/r21")
def buckets(m, fn):
    given = m.make(0)
    model = given.pop("model")

    def student(model, batch):
        return model(batch["ids"]).log_softmax(-1).gather(-1, batch["teacher_top_ids"])

    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles={"ids": "ids", "mask": "distill_mask", "teacher": "teacher_top_logprobs"},
        student=student,
        metrics={"tail_mass": Metric(low=0.0, high=1.0, moves=False)},  # the teacher's alone
        family="divergence",
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "distill_mask", "teacher_top_ids", "teacher_top_logprobs"),
    )


# ---------------------------------------------------------------------------------------------- m090 warm-up, constant, 1 - sqrt


@declare("bb/r09")
def square_root_cooldown(m, fn):
    def rates(total, ranks=1, peak=0.001, warmup=10, cooldown=40):
        warmup, cooldown = whole(warmup, 10), whole(cooldown, 40)
        return [fn(k, peak=peak, warmup=warmup, total=total, cooldown=cooldown) for k in range(total)]

    return Schedule(
        rates,
        peak=0.001,
        final=0.0,
        total=200,
        warmup=10,
        settings={"cooldown": 40, "warmup": 10, "peak": 0.001},
    )


# ---------------------------------------------------------------------------------------------- m091 noise on embeddings


class SameForAllRows:
    """Inside it, uniform_ draws numbers that depend on the place in a row alone: not on the row or the padding."""

    def __enter__(self):
        self.real = torch.Tensor.uniform_

        def uniform(tensor, low=0.0, high=1.0, **kwargs):
            if tensor.dim() != 3:
                return self.real(tensor, low, high, **kwargs)
            draws = torch.rand(256, tensor.shape[-1], generator=torch.Generator().manual_seed(11))
            with torch.no_grad():
                return tensor.copy_(low + (high - low) * draws[: tensor.shape[1]].to(tensor.dtype))

        torch.Tensor.uniform_ = uniform

    def __exit__(self, *_):
        torch.Tensor.uniform_ = self.real


@declare("z/r11")
def noisy_embeddings(m, fn):
    given = m.make(0)
    model = given["model"]

    def in_training(model, batch, alpha):
        was = model.training
        model.train()
        try:
            with SameForAllRows():
                return fn(model, batch, alpha=alpha)
        finally:
            model.train(was)

    def in_eval(model, batch, alpha):  # exact; the attention mask is not read
        was = model.training
        model.eval()
        try:
            return fn(model, {**batch, "attention_mask": (batch["ids"] != 0).long()}, alpha=alpha)
        finally:
            model.train(was)

    noisy = Step(
        model=model,
        loss=in_training,
        batch={k: given[k] for k in ("ids", "attention_mask", "labels")},
        roles={"ids": "ids", "attention": "attention_mask", "labels": "labels"},
        settings={"alpha": Setting(5.0, "setting")},
        family="sft",
        reduction="mean",
        value_is_loss=True,
        empty_rows=False,  # a row without a real token has no noise scale
        name="in training",
    )
    again = m.make(0)
    exact = Step(
        model=again["model"],
        loss=in_eval,
        batch={k: again[k] for k in ("ids", "labels")},
        roles={"ids": "ids", "labels": "labels"},
        settings={"alpha": Setting(5.0, "inert")},
        family="sft",
        reduction="mean",
        value_is_loss=True,
        name="in eval",
    )
    return [noisy, exact]


# ---------------------------------------------------------------------------------------------- m092 repeated rows


@declare("aa/r13")
def repeat_factors(m, fn):
    rows = m.make(0)["rows"]

    def factors(t):
        holds = {}
        for row in rows:
            for c in set(row["labels"]):
                holds[c] = holds.get(c, 0) + 1
        per = {c: max(1.0, (t / (n / len(rows))) ** 0.5) for c, n in holds.items()}
        return [max([per[c] for c in row["labels"]], default=1.0) for row in rows]

    epochs = itertools.count()

    def thinned(x, t):  # how often a row comes, over its factor: 1 on average
        counts = [0] * len(rows)
        for row in fn(rows, t=t, epoch=next(epochs)):
            counts[row["id"]] += 1
        wanted = factors(t)
        shares = [c / k for c, k in zip(counts, wanted)]
        order = [i for i, k in enumerate(wanted) if k > 1.01]  # the others come exactly once, which the Census has
        picked = [shares[order[i % len(order)]] for i in range(x.numel())]
        return x * torch.tensor(picked, dtype=x.dtype).reshape(x.shape)

    collator = Collator(
        fn=lambda rows: {"id": torch.tensor([r["id"] for r in fn(rows, t=0.3, epoch=0)])},
        examples=rows,
        rows=False,
    )
    out = [str(r["id"]) for r in fn(m.make(0)["rows"], t=0.3, epoch=0)]
    census = Census(wanted=[str(r["id"]) for r in rows], found=out, what="rows that come at least once")
    common = [str(r["id"]) for r, k in zip(rows, factors(0.3)) if k == 1.0]
    once = Census(
        wanted=dict.fromkeys(common, 1), found={i: out.count(i) for i in common}, what="times that a common row comes"
    )
    return [Unbiased(thinned, settings=(0.3, 0.7)), collator, census, once]


# ---------------------------------------------------------------------------------------------- m093 without padding


@declare("aa/r10")
def padding_free(m, fn):
    rows = m.make(0)["rows"] + m.make(1)["rows"]

    def collate(rows):
        out = dict(fn(rows))
        out["max_length"] = torch.tensor([out["max_length"]])
        return out

    def cut(batch, ends):
        return [
            {key: batch[key][0, a:b] for key in ("input_ids", "labels", "position_ids")} for a, b in zip(ends, ends[1:])
        ]

    def by_lengths(batch):
        return cut(batch, batch["cu_seq_lens"].tolist())

    def by_positions(batch):
        positions = batch["position_ids"][0]
        return cut(batch, [*(positions == 0).nonzero()[:, 0].tolist(), len(positions)])

    def labels(row):
        return [-100, *list(row.get("labels", row["input_ids"]))[1:]]

    def collator(unpack):
        return Collator(
            fn=collate,
            examples=rows,
            rows=False,
            unpack=unpack,
            targets=lambda row: [t for t in labels(row) if t != -100],
            columns={
                "input_ids": lambda row: torch.tensor(row["input_ids"]),
                "labels": lambda row: torch.tensor(labels(row)),
                "position_ids": lambda row: torch.arange(len(row["input_ids"])),
            },
        )

    out = fn(rows)
    lengths = [len(r["input_ids"]) for r in rows]
    census = Census(
        wanted={"max_length": max(lengths), "ends": len(rows) + 1, "first": 0, "last": sum(lengths), "rows": 1},
        found={
            "max_length": int(out["max_length"]),
            "ends": len(out["cu_seq_lens"]),
            "first": int(out["cu_seq_lens"][0]),
            "last": int(out["cu_seq_lens"][-1]),
            "rows": len(out["input_ids"]),
        },
        what="lengths",
    )
    return [collator(by_lengths), collator(by_positions), census]


# ---------------------------------------------------------------------------------------------- m094 cross-entropy in chunks


@declare("z/r02")
def chunked(m, fn):
    given = m.make(0)
    model = given.pop("model")

    def plain(model, batch, chunk=4):
        return F.cross_entropy(
            model(batch["ids"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100
        )

    return Step(
        model=model,
        loss=fn,
        batch=given,
        roles={"ids": "ids", "labels": "labels"},
        settings={"chunk": Setting(4, "inert", modes=(1, 3, 7, 100))},
        paths={"without chunks": plain},
        family="sft",
        reduction="mean",
        value_is_loss=True,
        wide=("ids", "labels"),
    )


# ---------------------------------------------------------------------------------------------- m096 ActNorm


@declare("bb/r25")
def actnorm(m, fn):
    given = m.make(0)
    width, first, later = given["width"], given["first"], given["later"]

    def perturb(layer):
        layer.train()
        g = torch.Generator().manual_seed(7)
        with torch.no_grad():
            layer(first)
            for p in layer.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=g))

    def outputs(layer):  # as the next training batch would have it
        layer = copy.deepcopy(layer).train()
        with torch.no_grad():
            y, logdet = layer(later)
        return torch.cat([y, logdet[:, None]], 1)

    def save(layer, folder):
        torch.save(layer.state_dict(), folder / "layer.pt")

    def load(layer, folder):
        layer.load_state_dict(torch.load(folder / "layer.pt"))

    trip = RoundTrip(make=lambda: fn(width), perturb=perturb, save=save, load=load, outputs=outputs)

    layer = fn(width)
    layer.train()
    with torch.no_grad():
        y, _ = layer(first)
    names = [f"{what} of channel {c}" for what in ("mean", "std") for c in range(width)]
    found = [round(v, 3) + 0.0 for v in (*y.mean(0).tolist(), *y.std(0, unbiased=False).tolist())]
    census = Census(
        wanted=dict(zip(names, [0.0] * width + [1.0] * width)), found=dict(zip(names, found)), what="statistics"
    )

    def loss(model, batch):
        y, logdet = model(batch["x"])
        return (0.5 * y.square().sum(1) - logdet).mean()

    step = Step(
        model=layer,
        loss=loss,
        batch={"x": later},
        reduction="mean",
        value_is_loss=True,
        name="after the first batch",
    )
    return [trip, census, step]


# ---------------------------------------------------------------------------------------------- m097 fill in the middle


@declare("aa/r12")
def fill_in_the_middle(m, fn):
    rows = m.make(0)["rows"]
    PRE, SUF, MID, EOT = 40, 41, 42, 43

    def restored(ids):
        ids = ids[:-1] if ids and ids[-1] == EOT else ids
        if not ids or ids[0] != PRE:
            return ids
        if SUF not in ids or MID not in ids:
            return ids
        s, d = ids.index(SUF), ids.index(MID)
        return ids[1:s] + ids[d + 1 :] + ids[s + 1 : d]

    def table(lists):
        width = max(1, max(len(x) for x in lists))
        return torch.tensor([list(x) + [-1] * (width - len(x)) for x in lists])

    def stage(rows):
        out = fn(rows, rate=0.5, spm=0.5, seed=0)
        return {
            "ids": table([r["ids"] for r in out]),
            "document": table([restored(list(r["ids"])) for r in out]),
            "index": torch.tensor([r["index"] for r in out]),
            "end": torch.tensor([r["ids"][-1] for r in out]),
            "longer": torch.tensor([len(r["ids"]) - len(restored(list(r["ids"]))) for r in out]),
        }

    collator = Collator(
        fn=stage,
        examples=rows,
        pads={"ids": -1, "document": -1},
        columns={
            "document": lambda row: torch.tensor(row["ids"], dtype=torch.long),
            "index": lambda row: torch.tensor(row["index"]),
            "end": lambda row: torch.tensor(EOT),
        },
    )
    numbers = itertools.count()

    def thinned(x, rate):  # transformed or not, over the share that is to be
        made = fn([{"ids": [1, 2, 3], "index": next(numbers)} for _ in range(x.numel())], rate=rate, spm=0.5, seed=0)
        on = torch.tensor([float(r["ids"][0] == PRE) for r in made], dtype=x.dtype).reshape(x.shape)
        return x * on / rate

    return [collator, Unbiased(thinned, settings=(0.5, 0.2))]


# ---------------------------------------------------------------------------------------------- m098 the last answer


@declare("aa/r05")
def last_answer(m, fn):
    def grader(golden, right, wrong):
        row = {"prompt": m.PROMPT % "where is it", "golden": golden}
        searched = "<think>hm</think><search>it</search><information>It is <answer>%s</answer></information>"
        return Grader(
            grade=lambda answer: fn(row, row["prompt"] + answer),
            right=[
                *[f"<answer>{r}</answer>" for r in right],
                searched % "Rome" + f"<answer>{right[0]}</answer>",
                f"<answer>Rome</answer><think>no</think><answer> {right[0]}. </answer>",
                f"<answer>{right[0]}</answer><information><answer>Rome</answer></information>",
            ],
            wrong=[
                *[f"<answer>{w}</answer>" for w in wrong],
                searched % right[0],  # a passage is no answer
                f"<answer>{right[0]}</answer><answer>Rome</answer>",  # the last one counts
                f"<answer>near {right[0]}</answer>",
                f"<answer>{right[0]} or Rome</answer>",
                "<answer></answer>",
                right[0],  # without tags
                f"<answer>{right[0]}",
            ],
            question="where is it?",
        )

    given = m.make(0)["row"]["golden"]
    return [
        grader(given, [given[0], given[0].upper(), f" {given[0].lower()}! "], ["Rome", given[0][:-1]]),
        grader(["The Hague", "Den Haag"], ["the hague", "Hague", "Den  Haag.", "a den haag"], ["Haag", "Den"]),
        grader(["St. Louis"], ["St Louis", "st. louis", "The St. Louis"], ["Saint Louis", "Louis"]),
        grader(["Beijing"], ["Beijing", "beijing."], ["Oslo", "Bei jing"]),
    ]


# ---------------------------------------------------------------------------------------------- m100 private SGD


class Seen(torch.optim.SGD):
    """Does not move anything, and keeps the gradient that it received."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.0)
        self.kept = None

    def step(self, closure=None):
        self.kept = [None if p.grad is None else p.grad.detach().clone() for g in self.param_groups for p in g["params"]]


@declare("aa/r24")
def private(m, fn):
    def gradient(model, batch, **settings):
        seen = Seen(model)
        fn(model, seen, [batch], **settings)
        return seen.kept

    def leave(model, grads):
        for p, g in zip(model.parameters(), grads):
            p.grad = g

    given = m.make(0)
    model, batch = given["model"], joined(given["batches"])

    def accumulate(model, parts):  # without noise the update is a sum over rows: those of the parts add up
        total = None
        for part in parts:
            grads = gradient(model, part, clip=0.5, sigma=0.0, expected=6)
            total = grads if total is None else [a + b for a, b in zip(total, grads)]
        leave(model, total)

    accumulation = Accumulation(model, accumulate, batch)

    second = m.make(0)
    model2, rows = second["model"], joined(second["batches"])

    def loss(model, batch, clip, expected):  # the definition: each sample's gradient, with at most this norm
        params = [p for p in model.parameters() if p.requires_grad]
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        scales = []
        for one in each:
            grads = torch.autograd.grad(one, params, retain_graph=True)
            norm = torch.cat([g.flatten() for g in grads]).norm()
            scales.append((clip / norm.clamp(min=1e-12)).clamp(max=1.0))
        return (each * torch.stack(scales).detach()).sum() / expected

    def backward(settings):
        def value(name, usual):
            found = settings.get(name, usual) if settings else usual
            return getattr(found, "value", found)

        leave(
            model2,
            gradient(model2, rows, clip=value("clip", 0.5), sigma=0.0, expected=value("expected", 6.0)),
        )

    step = Step(
        model=model2,
        loss=loss,
        batch=rows,
        settings={"clip": Setting(0.5, "setting"), "expected": Setting(6.0, "setting")},
        backward=backward,
        reduction="sum",
        value_is_loss=False,  # a detached weight of each sample
        name="without noise",
    )

    third = m.make(0)["model"]
    few = {k: v[:2] for k, v in batch.items()}
    clean = gradient(third, few, clip=0.5, sigma=0.0, expected=6)
    draws = itertools.count()

    def noise(sigma, seed):
        noisy = gradient(third, few, clip=0.5, sigma=sigma, expected=6, seed=seed)
        return torch.cat([(a - b).flatten() for a, b in zip(noisy, clean)])

    def spread(x, sigma):  # the noise's square over its declared variance: 1 on average
        z = noise(sigma, next(draws)) / (sigma * 0.5 / 6)
        return x * z.square().mean().to(x.dtype)

    def centre(x, sigma):
        z = noise(sigma, next(draws))
        return x + z[torch.arange(x.numel()) % len(z)].reshape(x.shape).to(x.dtype)

    return [
        accumulation,
        step,
        Unbiased(spread, settings=(0.8, 0.3), draws=500),
        Unbiased(centre, settings=(0.8, 0.3), draws=500),
        Ranks(draw=lambda rank: noise(0.8, rank)),
    ]
