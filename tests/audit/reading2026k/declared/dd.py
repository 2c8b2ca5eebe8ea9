import torch
import torch.nn.functional as F

from earnest_audit import Accumulation, Collator, Metric, Setting, Step
from tests.audit.reading2026k.reading import declare, parts, step_of


def token_logps(model, ids, position_ids=None):
    """Entry t is the log-prob of token t, from the logits at t-1; 0 at the first token. [rows, time]"""
    logits = model(ids) if position_ids is None else model(ids, position_ids)
    logps = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([torch.zeros_like(logps[:, :1]), logps], 1)


# ---------------------------------------------------------------- packing and positions
@declare("dd/d01")
def _(module, fn):
    def stage(rows):  # the output rows, read in order, are the tokens of the input rows in order
        out = fn(rows, seq_length=8, batch_size=4)
        return {"input_ids": torch.tensor([t for row in out for t in row["input_ids"]]),
                "lengths": torch.tensor([len(row["input_ids"]) for row in rows])}

    def unpack(batch):
        return [{"input_ids": part} for part in batch["input_ids"].split(batch["lengths"].tolist())]

    return Collator(stage, module.make(0)["rows"], rows=False, unpack=unpack,
                    columns={"input_ids": lambda row: row["input_ids"]})


@declare("dd/d02")
def _(module, fn):
    return step_of(module, fn, roles={"ids": "ids", "positions": "position_ids"},
                   settings={"temperature": Setting(0.1, "setting")},
                   rows_interact=True, value_is_loss=True)


@declare("dd/d03")
def _(module, fn):
    names = ("input_ids", "position_ids", "loss_mask")

    def stage(rows):
        ranks = fn(rows, cp_size=2)
        out = {name: torch.tensor([v for rank in ranks for v in rank[name]]) for name in names}
        out["lengths"] = torch.tensor([len(rank["input_ids"]) for rank in ranks])
        out["cu_seqlens"] = torch.tensor([list(rank["cu_seqlens"]) for rank in ranks])
        return out

    def unpack(batch):  # a document is its part 0, part 1, … without the padding
        starts = [0, *batch["lengths"].cumsum(0).tolist()][:-1]
        documents = []
        for i in range(batch["cu_seqlens"].shape[1] - 1):
            at = torch.cat([torch.arange(int(cu[i]), int(cu[i + 1])) + start for start, cu in zip(starts, batch["cu_seqlens"])])
            at = at[at < len(batch["input_ids"])]
            at = at[batch["loss_mask"][at] == 1]
            documents.append({name: batch[name][at] for name in ("input_ids", "position_ids")})
        return documents

    return Collator(stage, module.make(0)["rows"], rows=False, unpack=unpack,
                    columns={"input_ids": lambda row: row["input_ids"],
                             "position_ids": lambda row: list(range(len(row["input_ids"])))})


@declare("dd/r01")
def _(module, fn):
    def unpack(batch):
        cu = batch["cu_seq_lens"].tolist()
        return [{k: batch[k][0, a:b] for k in ("input_ids", "position_ids", "labels")} for a, b in zip(cu[:-1], cu[1:])]

    return Collator(fn, module.make(0)["rows"], rows=False, unpack=unpack,
                    targets=lambda row: [label for label in row["labels"][1:] if label != -100],
                    columns={"input_ids": lambda row: row["input_ids"],
                             "position_ids": lambda row: list(range(len(row["input_ids"]))),
                             "labels": lambda row: [-100, *row["labels"][1:]]})


@declare("dd/r02")
def _(module, fn):
    return step_of(module, fn, roles={"ids": "ids", "positions": "position_ids", "mask": "loss_mask"},
                   family="sft", reduction="mean", value_is_loss=True)


@declare("dd/r03")
def _(module, fn):
    def collate(rows):
        batch = dict(fn(rows, target=64))
        step = batch["position_ids"].diff(dim=1)
        batch["as declared"] = torch.stack([batch["position_ids"][:, 0] == 0, (step >= 1).all(1), (step > 1).sum(1) <= 1,
                                            batch["position_ids"].amax(1) < 64], 1).long()
        return batch

    return Collator(collate, module.make(0)["rows"],
                    columns={"input_ids": lambda row: row["input_ids"], "labels": lambda row: row["input_ids"],
                             "as declared": lambda row: [1, 1, 1, 1]},
                    targets=lambda row: row["input_ids"])


# ---------------------------------------------------------------- preferences and reward models
@declare("dd/d04")
def _(module, fn):
    def averages(model, batch):
        logps = token_logps(model, batch["ids"], batch["position_ids"])[0]
        mask = batch["loss_mask"][0]
        starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist() + [len(mask)]
        means = [(logps[a:b] * mask[a:b]).sum() / mask[a:b].sum().clamp(min=1) for a, b in zip(starts[:-1], starts[1:])]
        half = len(means) // 2
        return torch.stack(means[:half]), torch.stack(means[half:])

    return step_of(module, fn, roles={"ids": "ids", "positions": "position_ids", "mask": "loss_mask", "reference": "ref_logps"},
                   settings={"beta": Setting(0.1, "setting")}, logprobs=averages, family="preference",
                   rows_interact=True, value_is_loss=True)


@declare("dd/d05")
def _(module, fn):
    def sums(model, batch):
        first, second = (token_logps(model, batch["ids"]) * batch["completion_mask"]).sum(1).chunk(2)
        a, b = batch["scores"].chunk(2)
        return torch.where(a >= b, first, second), torch.where(a >= b, second, first)

    return step_of(module, fn, roles={"ids": "ids", "mask": "completion_mask", "reference": "ref_logps"},
                   settings={"beta": Setting(0.1, "setting")}, logprobs=sums, family="preference",
                   metrics={"objective/kl": Metric(), "objective/entropy": Metric(low=0.0),
                            "objective/non_score_reward": Metric(), "objective/rlhf_reward": Metric()},
                   rows_interact=True, value_is_loss=True)


@declare("dd/d06")
def _(module, fn):
    """Rows are queries: the documents of a query are brought to one row, and the loss gets them back one after the other."""
    model, batch = parts(module)
    counts = batch["docs_per_query"]
    ids = batch["ids"].new_zeros(len(counts), int(counts.max()), batch["ids"].shape[1])
    labels = batch["labels"].new_zeros(len(counts), int(counts.max()))
    for q, (some, some_labels) in enumerate(zip(batch["ids"].split(counts.tolist()), batch["labels"].split(counts.tolist()))):
        ids[q, :len(some)], labels[q, :len(some)] = some, some_labels

    def loss(model, batch):
        there = torch.arange(batch["labels"].shape[1]) < batch["docs_per_query"][:, None]
        return fn(model, {"ids": batch["ids"][there], "labels": batch["labels"][there], "docs_per_query": batch["docs_per_query"]})

    return Step(model=model, loss=loss, batch={"ids": ids, "labels": labels, "docs_per_query": counts},
                reduction="mean", value_is_loss=True, empty_rows=False)


@declare("dd/r04")
def _(module, fn):
    return step_of(module, fn, roles={"chosen": "chosen_ids", "rejected": "rejected_ids"}, family="preference",
                   reduction="mean", value_is_loss=True)


@declare("dd/r05")
def _(module, fn):
    """Rows are pairs: the first half of the rows are the chosen answers, the second half the rejected ones."""
    model, batch = parts(module)
    pairs = {}
    for name, key in (("ids", ""), ("completion_mask", "_mask")):
        pairs["chosen" + key], pairs["rejected" + key] = batch[name].chunk(2)
    pairs["reference_chosen"], pairs["reference_rejected"] = batch["ref_logps"].chunk(2)

    def loss(model, batch, beta, eps):
        return fn(model, {"ids": torch.cat([batch["chosen"], batch["rejected"]]),
                          "completion_mask": torch.cat([batch["chosen_mask"], batch["rejected_mask"]]),
                          "ref_logps": torch.cat([batch["reference_chosen"], batch["reference_rejected"]])}, beta=beta, eps=eps)

    def sums(model, batch):
        return tuple((token_logps(model, batch[side]) * batch[side + "_mask"]).sum(1) for side in ("chosen", "rejected"))

    return Step(model=model, loss=loss, batch=pairs, roles={name: name for name in pairs}, logprobs=sums,
                settings={"beta": Setting(0.5, "setting"), "eps": Setting(0.2, "smoothing")}, reduction="mean", value_is_loss=True)


@declare("dd/r06")
def _(module, fn):
    return step_of(module, fn, roles={"ids": "ids", "mask": "completion_mask", "reference": "ref_logps", "correct": "desirable"},
                   settings={"beta": Setting(0.3, "setting"), "desirable_weight": Setting(1.0, "weight"),
                             "undesirable_weight": Setting(1.5, "weight")},
                   family="preference", pairwise=False, rows_interact=True, value_is_loss=False)


# ---------------------------------------------------------------- embeddings
class NoStep:
    """In the optimizer's place, so that the gradients that it would receive stay in .grad."""

    def step(self):
        pass

    def zero_grad(self, *args, **kwargs):
        pass


def one_batch_infonce(model, batch, temperature):
    """Mean over all anchors of the cross-entropy against all positives."""
    logits = model(batch["anchor"]) @ model(batch["positive"]).T / temperature
    return -logits.log_softmax(1).diagonal().mean()


def infonce_update(module, fn, split, what):
    model = module.make(0)["model"]
    chunks = module.make(0)["batches"]
    whole = {k: torch.cat([chunk[k] for chunk in chunks]) for k in ("anchor", "positive")}

    def backward(settings):
        value = settings.get("temperature", 0.2)
        fn(model, NoStep(), chunks, temperature=getattr(value, "value", value))

    return [Accumulation(module.make(0)["model"], lambda model, batches: fn(model, NoStep(), batches, temperature=0.2), whole,
                         split=split, what=what),
            Step(model=model, loss=one_batch_infonce, batch=whole, settings={"temperature": Setting(0.2, "setting")},
                 backward=backward, rows_interact=True, value_is_loss=True)]


@declare("dd/d07")
def _(module, fn):
    return infonce_update(module, fn, (3, 3), "ranks")


@declare("dd/d08")
def _(module, fn):
    def stage(rows):
        out = fn(rows, hard_negatives=4)
        return {"anchor": torch.tensor([row["anchor"] for row in out]),
                "positive": torch.tensor([row["positive"] for row in out]),
                "seed": torch.tensor([row["seed"] for row in out]),
                "negatives": torch.tensor([row["negatives"] for row in out]),
                "first": torch.tensor([row["negatives"][0] for row in out]),
                "others than its own": torch.tensor([sum(n not in old["negatives"] for n in new["negatives"]) for old, new in zip(rows, out)]),
                "kept": torch.tensor([new["negatives"][:len(old["negatives"])] == old["negatives"][:4] for old, new in zip(rows, out)]).long(),
                "how many": torch.tensor([len(row["negatives"]) for row in out])}

    return Collator(stage, module.make(0)["rows"],
                    columns={"anchor": lambda row: row["anchor"], "positive": lambda row: row["positive"],
                             "seed": lambda row: row["seed"], "first": lambda row: row["negatives"][0],
                             "others than its own": lambda row: 0, "kept": lambda row: 1, "how many": lambda row: 4})


@declare("dd/r07")
def _(module, fn):
    return infonce_update(module, fn, (3, 2, 3), "chunks")


@declare("dd/r08")
def _(module, fn):
    return step_of(module, fn, roles={"ids": "text"}, rows_interact=True, value_is_loss=True)


# ---------------------------------------------------------------- distillation
@declare("dd/d09")
def _(module, fn):
    def student(model, batch):  # P(all tokens of the group but the last) * distribution at the last one
        p = model(batch["ids"]).softmax(-1)
        rows = []
        for r in range(len(batch["ids"])):
            groups = []
            for start, length in zip(batch["group_start"][r].tolist(), batch["group_length"][r].tolist()):
                group = p[r, start + length - 2]  # token t is predicted at t-1
                for t in range(start, start + length - 1):
                    group = group * p[r, t - 1, batch["ids"][r, t]]
                groups.append(group)
            rows.append(torch.stack(groups))
        return torch.stack(rows)

    return step_of(module, fn, roles={"ids": "ids", "teacher": "teacher_probs"}, student=student, family="divergence",
                   reduction="mean", value_is_loss=True)


@declare("dd/d10")
def _(module, fn):
    return step_of(module, fn, roles={"ids": "ids", "mask": "loss_mask", "behaviour": "rollout_logp", "teacher": "teacher_scores"},
                   logprobs=lambda model, batch: token_logps(model, batch["ids"]), reduction="mean", value_is_loss=True,
                   wide=("ids", "loss_mask", "rollout_logp"))


@declare("dd/r09")
def _(module, fn):
    def student(model, batch):
        log_p = model(batch["ids"]).log_softmax(-1)
        log_p = torch.cat([torch.zeros_like(log_p[:, :1]), log_p[:, :-1]], 1)  # entry t is about token t
        return log_p.gather(-1, batch["teacher_ids"])

    def reverse_kl(model, batch):
        log_p = student(model, batch)[:, 1:].log_softmax(-1)
        log_q = batch["teacher_logps"][:, 1:].log_softmax(-1)
        kl = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
        return (kl * batch["loss_mask"][:, 1:]).sum() / batch["loss_mask"][:, 1:].sum()

    return step_of(module, fn, roles={"ids": "ids", "mask": "loss_mask", "teacher": "teacher_logps"}, student=student,
                   paths={"reverse KL without stopped gradients": reverse_kl}, family="divergence", reduction="mean",
                   value_is_loss=True)


@declare("dd/r10")
def _(module, fn):
    return step_of(module, fn, roles={"ids": "ids", "mask": "loss_mask", "teacher": "teacher_logits"},
                   settings={"alpha": Setting(0.1, "mixture")}, student=lambda model, batch: model(batch["ids"]),
                   family="divergence", reduction="mean", value_is_loss=True)
