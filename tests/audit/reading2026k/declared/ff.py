import copy
import json

import torch
from earnest_audit import Accumulation, AdvantageEstimator, Census, Collator, Resume, RoundTrip, Schedule, Setting
from tests.audit.reading2026k.reading import declare, no_subject, step_of


def next_token_logprobs(model, batch):
    """Log-probs of ids[:, 1:], with a zero for column 0: as wide as ids."""
    ids = batch["ids"]
    lp = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(lp, (1, 0))


# ---------------------------------------------------------------------------------------------- schedules, updates, state


@declare("ff/d01")
def _(module, fn):
    def rates(total, ranks=1, **settings):
        return [fn(step, epochs=4, steps_per_epoch=total // 4, **settings) for step in range(total)]

    return Schedule(rates, peak=1e-3, final=1e-5, total=200, warmup=10, ends=200, settings={"min_lr": 1e-5, "warmup_frac": 0.05})


no_subject("ff/d02", "Update compares what the optimizer receives with the clipped gradient of the loss; here it rightly receives an "
                  "orthogonalized momentum plus weight decay, there is no clip, and 'no class checks an optimizer's own' settings")


@declare("ff/d03")
def _(module, fn):
    def make():
        case = module.make(0)
        trainer = fn(case["model"])
        return {"trainer": trainer, "batches": case["batches"], "val": case["val"]}

    def run(x, n):
        seen = []
        for _ in range(n):
            x["trainer"].train_epoch(x["batches"])
            seen += list(range(len(x["batches"])))
            x["trainer"].validate(x["val"])
        return seen

    def save(x, folder):
        torch.save(x["trainer"].state_dict(), folder / "checkpoint.pt")

    def load(x, folder):
        x["trainer"].load_state_dict(torch.load(folder / "checkpoint.pt", weights_only=False))

    def state(x):
        s = x["trainer"].state_dict()
        return torch.cat([t.flatten() for t in list(s["model"].values()) + list(s["shadow"]) + list(s["collected"])])

    return Resume(make, run, save, load, state)


class Consumer:
    """A run that is fed by a stateful source of ids; its weight depends on every id and on their order."""

    def __init__(self, fresh):
        self.fresh, self.source, self.weight = fresh, fresh(), 0.0

    def batch(self):
        try:
            return list(self.source.next_batch())
        except StopIteration:  # the next epoch
            self.source = self.fresh()
            return list(self.source.next_batch())

    def train(self, n):
        seen = []
        for _ in range(n):
            for i in self.batch():
                self.weight = 0.9 * self.weight + i
                seen.append(i)
        return seen

    def save(self, folder):
        (folder / "state.json").write_text(json.dumps({"source": self.source.state_dict(), "weight": self.weight}))

    def load(self, folder):
        state = json.loads((folder / "state.json").read_text())
        self.source.load_state_dict(state["source"])
        self.weight = state["weight"]


def stream_subjects(fresh):
    def coming(source):
        source = copy.deepcopy(source)
        return torch.tensor([i for _ in range(4) for i in source.next_batch()])

    def save(source, folder):
        (folder / "state.json").write_text(json.dumps(source.state_dict()))

    def load(source, folder):
        source.load_state_dict(json.loads((folder / "state.json").read_text()))

    return [
        Resume(lambda: Consumer(fresh), lambda x, n: x.train(n), lambda x, folder: x.save(folder), lambda x, folder: x.load(folder),
               lambda x: torch.tensor([x.weight], dtype=torch.float64)),
        RoundTrip(fresh, lambda source: source.next_batch(), save, load, coming),
    ]


@declare("ff/d04")
def _(module, fn):
    prompts = module.make(0)["prompts"]
    return stream_subjects(lambda: fn(prompts))


@declare("ff/r03")
def _(module, fn):
    n = module.make(0)["n"]
    return stream_subjects(lambda: fn(n))


@declare("ff/r01")
def _(module, fn):
    def rates(total, ranks=1, **settings):
        return [fn(step, ends=(total // 3, 2 * total // 3, total), **settings) for step in range(total)]

    return Schedule(rates, peak=2e-3, final=2e-4, total=240, warmup=20, ends=240, restarts=True, settings={"min_lr": 2e-4, "decay_frac": 0.1})


@declare("ff/r02")
def _(module, fn):
    case = module.make(0)
    micro = [mb for rank in case["batches"][0] for mb in rank]
    batch = {key: torch.cat([mb[key] for mb in micro]) for key in ("ids", "loss_mask")}

    def still(model):
        return torch.optim.SGD(model.parameters(), lr=0.0)  # leaves the gradients, moves nothing

    def ranks(model, batches):
        fn(model, still(model), [[[mb] for mb in batches]])

    def micro_batches(model, batches):
        fn(model, still(model), [[list(batches)]])

    return [Accumulation(case["model"], ranks, batch, what="ranks"), Accumulation(case["model"], micro_batches, batch)]


# ------------------------------------------------------------------------------------------------------- policy gradient


@declare("ff/d05")
def _(module, fn):
    rows = module.make(0)["rows"]

    def batch_of(examples):
        out = fn(examples)
        return {
            "key": torch.tensor([int(r["key"][1:]) for r in out]),
            "response": torch.tensor([r["response"] for r in out]),
            "logprobs": torch.tensor([r["logprobs"] for r in out]),
            "score": torch.tensor([r["score"] for r in out]),
            "advantages": torch.tensor([r["advantages"] for r in out]),
        }

    def name(row):
        return json.dumps([row[k] for k in ("key", "response", "logprobs", "score", "advantages")])

    # every field of an output row comes from one and the same input row
    out = fn(copy.deepcopy(rows))
    drawn = {r["key"] for r in out}
    return [
        Collator(batch_of, rows, rows=False),
        Census({name(r) for r in rows if r["key"] in drawn}, {name(r) for r in out}, what="resampled rows"),
    ]


@declare("ff/d06")
def _(module, fn):
    def by_the_words(model, batch, kl_coef):
        lp, mask = next_token_logprobs(model, batch), batch["loss_mask"]
        weight = -batch["advantages"][:, None] + kl_coef * (lp - batch["ref_logp"]).detach()
        return (weight * lp * mask).sum() / mask.sum()

    return step_of(
        module, fn,
        roles={"ids": "ids", "mask": "loss_mask", "advantages": "advantages", "reference": "ref_logp"},
        settings={"kl_coef": Setting(0.1, "weight")},
        logprobs=next_token_logprobs,
        paths={"the gradient that is stated": by_the_words},
        family="policy gradient", value_is_loss=False, reduction="mean",
        wide=("ids", "loss_mask", "ref_logp"),
    )


@declare("ff/d07")
def _(module, fn):
    def logprobs(model, batch):
        return model(batch["obs"])[0].log_softmax(-1).gather(-1, batch["actions"][:, None]).squeeze(-1)

    return step_of(
        module, fn,
        roles={"advantages": "advantages", "behaviour": "old_logp", "returns": "returns"},
        settings={"clip": Setting(0.2, "clip"), "vf_coef": Setting(0.5, "weight"), "ent_coef": Setting(0.01, "weight")},
        logprobs=logprobs, value_is_loss=True, reduction="mean",
    )


@declare("ff/r04")
def _(module, fn):
    # rows of equal length: the audit's rows have no lengths that could move with them
    def advantages(rewards, groups):
        return fn(rewards, groups, torch.full_like(groups, 7))

    return AdvantageEstimator(advantages, scale="free", over="group", scaled_over="batch")


@declare("ff/r05")
def _(module, fn):
    return step_of(
        module, fn,
        roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logp", "advantages": "advantages"},
        settings={"clip_low": Setting(3e-4, "clip"), "clip_high": Setting(4e-4, "clip high")},
        logprobs=next_token_logprobs, value_is_loss=False, reduction="mean", empty_rows=False,
        wide=("ids", "loss_mask", "old_logp", "advantages"),
    )


@declare("ff/r06")
def _(module, fn):
    return step_of(
        module, fn,
        roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logp", "rewards": "rewards", "group": "groups"},
        settings={"tau": Setting(0.2, "weight")},
        logprobs=next_token_logprobs, value_is_loss=True, reduction="mean", rows_interact=True,
        wide=("ids", "loss_mask", "old_logp"),
    )


@declare("ff/r07")
def _(module, fn):
    return step_of(
        module, fn,
        roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logp", "advantages": "advantages"},
        settings={"clip": Setting(0.2, "clip"), "top": Setting(0.2, "setting")},
        logprobs=next_token_logprobs, drops_tokens=True, rows_interact=True,
        wide=("ids", "loss_mask", "old_logp"),
    )


# ------------------------------------------------------------------------------------ multimodal, multi-token, drafters


@declare("ff/d08")
def _(module, fn):
    return step_of(
        module, fn,
        roles={"ids": "ids", "mask": "loss_mask"},
        settings={"mtp_weight": Setting(0.3, "weight"), "depths": Setting(2, "setting", modes=(1,))},
        family="sft", value_is_loss=True, reduction="mean",
        wide=("ids", "loss_mask", "image_feats"),
    )


@declare("ff/d09")
def _(module, fn):
    def student(model, batch):
        # beside target_logits[q] stands what the draft says from token q and aux[q - 1]
        out = model(batch["ids"][:, 1:], batch["aux"][:, :-1])
        return torch.nn.functional.pad(out, (0, 0, 1, 0))

    return step_of(
        module, fn,
        roles={"ids": "ids", "mask": "loss_mask", "teacher": "target_logits"},
        student=student, value_is_loss=True, reduction="mean",
        wide=("ids", "loss_mask", "aux", "target_logits"),
    )


@declare("ff/d10")
def _(module, fn):
    def collate(rows):
        out = fn(rows)
        t, h, w = out["position_ids"]
        return {"input_ids": out["input_ids"], "attention_mask": out["attention_mask"], "loss_mask": out["loss_mask"], "time": t, "height": h, "width": w}

    def positions(axis):
        def expected(row):
            first = 1 + max(max(p) for p in row["prompt_positions"])
            return list(row["prompt_positions"][axis]) + [first + j for j in range(len(row["response_ids"]))]
        return expected

    names = ("input_ids", "attention_mask", "loss_mask", "time", "height", "width")
    return Collator(
        collate, module.make(0)["rows"],
        pads={name: 0 for name in names},
        columns={
            "input_ids": lambda row: row["prompt_ids"] + row["response_ids"],
            "attention_mask": lambda row: [1] * (len(row["prompt_ids"]) + len(row["response_ids"])),
            "loss_mask": lambda row: [0] * len(row["prompt_ids"]) + [1] * len(row["response_ids"]),
            "time": positions(0), "height": positions(1), "width": positions(2),
        },
    )


@declare("ff/r08")
def _(module, fn):
    return step_of(
        module, fn,
        roles={"ids": "ids", "mask": "loss_mask"},
        settings={"mtp_weight": Setting(0.2, "weight")},
        family="sft", value_is_loss=False, reduction="mean",
        wide=("ids", "loss_mask"),
    )


@declare("ff/r09")
def _(module, fn):
    # no family: a label is predicted from its block's anchor, not from the token before it; answers outside all blocks are left out;
    # "block" is the shape of the model and has no other legal value
    return step_of(
        module, fn,
        roles={"ids": "ids", "mask": "loss_mask"},
        settings={"gamma": Setting(2.0, "setting")},
        value_is_loss=True, reduction="mean", drops_tokens=True,
        wide=("ids", "loss_mask", "hidden"),
    )


@declare("ff/r10")
def _(module, fn):
    return step_of(
        module, fn,
        roles={"ids": "ids", "attention": "text_mask"},
        rows_interact=True, value_is_loss=True,
        wide=("ids", "text_mask"),
    )
