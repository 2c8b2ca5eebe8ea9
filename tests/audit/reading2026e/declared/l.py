import math

import torch
import torch.nn.functional as F

from earnest_audit import Metric, Setting, Step
from tests.audit.reading2026e.reading import declare, no_subject  # noqa: F401


def given(m, seed=0):
    g = m.make(seed)
    return g.pop("model"), g


def lm_logps(model, batch):
    """log-probs of ids[:, 1:] [B, T - 1] of a causal model that gives logits."""
    ids = batch["ids"]
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def seq_mean(model, ids, mask):
    return (lm_logps(model, {"ids": ids}) * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1)


def seq_sum(model, ids, mask):
    return (lm_logps(model, {"ids": ids}) * mask[:, 1:]).sum(1)


@declare("l/r01")
def capped_weight(m, fn):
    model, b = given(m)
    return Step(model=model, loss=fn, batch=b, name="l01", family="policy gradient",
                roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logps", "advantages": "advantages"},
                settings={"eps_high": Setting(0.3, "clip high")}, logprobs=lm_logps,
                wide=("ids", "loss_mask", "old_logps"), value_is_loss=False, reduction="mean")


@declare("l/r02")
def gspo_token(m, fn):
    model, b = given(m)
    with torch.no_grad():  # a sampler that is farther away, so that some rows are outside the clip on either side
        now = lm_logps(model, b)
        b["old_logps"] = now + 5.0 * (b["old_logps"] - now)
    return Step(model=model, loss=fn, batch=b, name="l02", family="policy gradient",
                roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logps", "advantages": "advantages"},
                settings={"clip_low": Setting(0.003, "clip"), "clip_high": Setting(0.004, "clip high")},
                logprobs=lm_logps, wide=("ids", "loss_mask", "old_logps", "advantages"),
                value_is_loss=False, reduction="mean")


@declare("l/r03")
def vtrace(m, fn):
    model, b = given(m)

    def logprobs(model, batch):
        lp = model(batch["obs"])[0][:, :-1].log_softmax(-1)
        return lp.gather(-1, batch["actions"][..., None]).squeeze(-1)

    return Step(model=model, loss=fn, batch=b, name="l03", family="policy gradient",
                roles={"behaviour": "behaviour_logps", "rewards": "rewards"},
                settings={"rho_bar": Setting(1.0, "bound"), "c_bar": Setting(1.0, "bound"),
                          "value_coef": Setting(0.5, "weight"), "entropy_coef": Setting(0.01, "weight")},
                logprobs=logprobs, value_is_loss=False, reduction="mean", all_supervised=True)


@declare("l/r04")
def simpo(m, fn):
    model, b = given(m)

    def logprobs(model, batch):
        return (seq_mean(model, batch["chosen_ids"], batch["chosen_mask"]),
                seq_mean(model, batch["rejected_ids"], batch["rejected_mask"]))

    return Step(model=model, loss=fn, batch=b, name="l04", family="preference",
                roles={"chosen": "chosen_ids", "chosen_mask": "chosen_mask",
                       "rejected": "rejected_ids", "rejected_mask": "rejected_mask"},
                settings={"beta": Setting(2.0, "setting"), "gamma": Setting(1.0, "target")},
                metrics={"accuracy": Metric(low=0.0, high=1.0)}, logprobs=logprobs,
                wide=("chosen_ids", "chosen_mask", "rejected_ids", "rejected_mask"),
                value_is_loss=True, reduction="mean", empty_rows=False)


@declare("l/r05")
def kto(m, fn):
    def settings():
        return {"beta": Setting(0.1, "setting"), "w_good": Setting(1.0, "weight"), "w_bad": Setting(1.33, "weight")}

    model, b = given(m)
    rows = Step(model=model, loss=fn, batch=b, name="l05 rows", family="preference", pairwise=False,
                roles={"ids": "ids", "mask": "mask", "reference": "ref_logps", "correct": "desirable"},
                settings=settings(), wide=("ids", "mask", "kl_ids", "kl_mask"),
                rows_interact=True, value_is_loss=False, reduction="mean")

    # the same loss, with the good answers as chosen and as many bad ones as rejected
    model2, b = given(m)
    half = len(b["ids"]) // 2
    pairs = {"chosen": b["ids"][:half], "chosen_mask": b["mask"][:half], "reference_chosen": b["ref_logps"][:half],
             "rejected": b["ids"][half:], "rejected_mask": b["mask"][half:], "reference_rejected": b["ref_logps"][half:],
             "kl_ids": b["kl_ids"].reshape(half, 2, -1), "kl_mask": b["kl_mask"].reshape(half, 2, -1),
             "kl_ref_logps": b["kl_ref_logps"].reshape(half, 2)}

    def loss(model, p, **kw):
        n = len(p["chosen"])
        width = max(p["chosen"].shape[1], p["rejected"].shape[1])
        two = lambda a, c: torch.cat([F.pad(x, (0, width - x.shape[1])) for x in (a, c)])
        return fn(model, {
            "ids": two(p["chosen"], p["rejected"]), "mask": two(p["chosen_mask"], p["rejected_mask"]),
            "ref_logps": torch.cat([p["reference_chosen"], p["reference_rejected"]]),
            "kl_ids": p["kl_ids"].flatten(0, 1), "kl_mask": p["kl_mask"].flatten(0, 1),
            "kl_ref_logps": p["kl_ref_logps"].flatten(),
            "desirable": torch.cat([torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)])}, **kw)

    def logprobs(model, p):
        return (seq_sum(model, p["chosen"], p["chosen_mask"]), seq_sum(model, p["rejected"], p["rejected_mask"]))

    paired = Step(model=model2, loss=loss, batch=pairs, name="l05 pairs", family="preference", pairwise=False,
                  roles={k: k for k in ("chosen", "chosen_mask", "rejected", "rejected_mask",
                                        "reference_chosen", "reference_rejected")},
                  settings=settings(), logprobs=logprobs,
                  wide=("chosen", "chosen_mask", "rejected", "rejected_mask"),
                  rows_interact=True, value_is_loss=False, reduction="mean")
    return [rows, paired]


@declare("l/r06")
def hl_gauss(m, fn):
    model, b = given(m)
    return Step(model=model, loss=fn, batch=b, name="l06",
                roles={"ids": "ids", "mask": "value_mask", "returns": "returns"},
                settings={"v_min": Setting(-4.0, "setting"), "v_max": Setting(4.0, "setting"),
                          "sigma_bins": Setting(0.75, "setting")},
                wide=("ids", "value_mask", "returns"), value_is_loss=True, reduction="mean")


@declare("l/r07")
def expectile(m, fn):
    def one(q):
        model, b = given(m)
        return Step(model=model, loss=fn, batch=b, name=f"l07 {q}",
                    roles={"ids": "ids", "mask": "action_mask", "returns": q},
                    settings={"tau": Setting(0.8, "setting")},
                    wide=("ids", "action_mask", "q1", "q2"), value_is_loss=True, reduction="mean")

    return [one("q1"), one("q2")]


@declare("l/r08")
def packed(m, fn):
    def logprobs(model, batch):
        ids, seg = batch["ids"], batch["segment"]
        n, t = ids.shape
        index = torch.arange(t).expand(n, t)
        fresh = torch.ones(n, t, dtype=torch.bool)
        fresh[:, 1:] = seg[:, 1:] != seg[:, :-1]
        start = torch.where(fresh, index, torch.zeros_like(index)).cummax(1).values
        allowed = (seg[:, :, None] == seg[:, None, :]) & torch.ones(t, t, dtype=torch.bool).tril()
        lp = model(ids, index - start, allowed)[:, :-1].log_softmax(-1)
        return lp.gather(-1, ids[:, 1:, None]).squeeze(-1)

    def one(clean):
        model, b = given(m)
        if clean:  # no document's first token is marked as trained
            seg = b["segment"]
            fresh = torch.ones_like(seg, dtype=torch.bool)
            fresh[:, 1:] = seg[:, 1:] != seg[:, :-1]
            b["loss_mask"] = b["loss_mask"].masked_fill(fresh, 0.0)
        return Step(model=model, loss=fn, batch=b, name="l08 clean" if clean else "l08", family="sft",
                    roles={"ids": "ids", "mask": "loss_mask", "documents": "segment"},
                    settings={"power": Setting(0.5, "setting")}, logprobs=logprobs,
                    wide=("ids", "segment", "loss_mask"), drops_tokens=not clean,
                    value_is_loss=True, reduction="mean")

    return [one(False), one(True)]


def padded_by_attention(fn):
    """padding is id 0: where attention is 0"""
    def loss(model, batch, **kw):
        rest = {k: v for k, v in batch.items() if k != "attention"}
        rest["ids"] = torch.where(batch["attention"] > 0, batch["ids"], torch.zeros_like(batch["ids"]))
        return fn(model, rest, **kw)
    return loss


@declare("l/r09")
def mlm(m, fn):
    model, b = given(m)
    b["attention"] = (b["ids"] != 0).long()
    return Step(model=model, loss=padded_by_attention(fn), batch=b, name="l09",
                roles={"ids": "ids", "mask": "selected", "attention": "attention"},
                settings={"mask_id": Setting(23, "setting", modes=(22,)),
                          "p_mask": Setting(0.8, "setting", modes=(0.3,)),
                          "p_random": Setting(0.1, "setting", modes=(0.2, 0.0))},
                wide=("ids", "selected", "draw", "random_ids", "attention"),
                value_is_loss=True, reduction="mean")


@declare("l/r10")
def masked_diffusion(m, fn):
    def one(full):
        model, b = given(m)
        b["attention"] = (b["ids"] != 0).long()
        if full:  # every answer token is masked
            b["u"] = torch.zeros_like(b["u"])
        return Step(model=model, loss=padded_by_attention(fn), batch=b, name="l10 all masked" if full else "l10",
                    roles={"ids": "ids", "mask": "answer_mask", "attention": "attention"},
                    settings={"mask_id": Setting(23, "setting", modes=(22,))},
                    wide=("ids", "answer_mask", "u", "attention"), drops_tokens=not full,
                    value_is_loss=True, reduction="mean")

    return [one(False), one(True)]


@declare("l/r11")
def two_tasks(m, fn):
    def one(full):
        model, b = given(m)
        more = {}
        if full:  # every row has a value: one divisor for both terms, so rows can be cut
            b["has_value"] = torch.ones_like(b["has_value"])
        else:  # two means over different sets of rows: not a mean of the rows' own losses
            more = {"masks": ("has_value",), "rows_interact": True}
        return Step(model=model, loss=fn, batch=b, name="l11 all values" if full else "l11",
                    roles={"returns": "value"}, metrics={"ce": Metric(low=0.0), "mse": Metric(low=0.0)},
                    value_is_loss=True, reduction="mean", all_supervised=True, **more)

    return [one(False), one(True)]


@declare("l/r12")
def smoothed_kl(m, fn):
    model, b = given(m)
    unused = min(range(1, 24), key=lambda i: int((b["ids"] == i).sum()))
    return Step(model=model, loss=fn, batch=b, name="l12", family="sft",
                roles={"ids": "ids", "mask": "loss_mask"},
                settings={"smoothing": Setting(0.1, "smoothing"), "pad_id": Setting(0, "setting", modes=(unused,))},
                logprobs=lm_logps, wide=("ids", "loss_mask"), value_is_loss=True, reduction="mean")


@declare("l/r13")
def chunked(m, fn):
    model, b = given(m)
    return Step(model=model, loss=fn, batch=b, name="l13", family="sft",
                roles={"ids": "ids", "mask": "loss_mask"},
                settings={"chunk": Setting(5, "inert", modes=(1, 4, 23, 64)), "z": Setting(1e-4, "weight")},
                logprobs=lm_logps, wide=("ids", "loss_mask"), value_is_loss=True, reduction="mean")


@declare("l/r14")
def context_parallel(m, fn):
    model, b = given(m)

    def logprobs(model, batch):
        ids = batch["ids"]
        n, t = ids.shape
        allowed = torch.ones(t, t, dtype=torch.bool).tril().expand(n, t, t)
        lp = model(ids, torch.arange(t).expand(n, t), allowed)[:, :-1].log_softmax(-1)
        return lp.gather(-1, ids[:, 1:, None]).squeeze(-1)

    return Step(model=model, loss=fn, batch=b, name="l14", family="sft",
                roles={"ids": "ids", "mask": "loss_mask"},
                settings={"ranks": Setting(3, "inert", modes=(1, 2, 4))},
                logprobs=logprobs, wide=("ids", "loss_mask"), value_is_loss=True, reduction="mean")


@declare("l/r15")
def top_k_distillation(m, fn):
    model, b = given(m)

    def student(model, batch):
        return model(batch["ids"][:, :-1]).log_softmax(-1).gather(-1, batch["top_ids"])

    return Step(model=model, loss=fn, batch=b, name="l15", family="divergence",
                roles={"ids": "ids", "mask": "loss_mask", "teacher": "top_logps"}, student=student,
                wide=("ids", "loss_mask", "top_ids", "top_logps"), value_is_loss=True, reduction="mean")


@declare("l/r16")
def several_heads(m, fn):
    def one(even):
        model, b = given(m)
        if even:  # every head has the same targets, so one divisor: rows can be cut
            b["loss_mask"] = b["loss_mask"].clone()
            b["loss_mask"][:, :3] = 0.0
        return Step(model=model, loss=fn, batch=b, name="l16 even" if even else "l16", family="sft",
                    roles={"ids": "ids", "mask": "loss_mask"}, settings={"decay": Setting(0.8, "setting")},
                    wide=("ids", "loss_mask"), rows_interact=not even, value_is_loss=True, reduction="mean")

    return [one(False), one(True)]


@declare("l/r17")
def moe(m, fn):
    model, b = given(m)
    both = Step(model=model, loss=fn, batch=b, name="l17",
                roles={"ids": "ids", "attention": "attention_mask"},
                settings={"balance": Setting(0.05, "weight")},
                metrics={"aux": Metric(low=0.0, high=4.0, weight="balance")},
                wide=("ids", "attention_mask"), may_idle=("experts.*", "*.experts.*"),
                rows_interact=True, value_is_loss=True, reduction="mean", all_supervised=True)

    model2, b2 = given(m)
    plain = Step(model=model2, loss=lambda model, batch: fn(model, batch, balance=0.0)[0], batch=b2,
                 name="l17 cross-entropy", family="sft", roles={"ids": "ids", "mask": "attention_mask"},
                 logprobs=lambda model, batch: model(batch["ids"])[0][:, :-1].log_softmax(-1)
                 .gather(-1, batch["ids"][:, 1:, None]).squeeze(-1),
                 wide=("ids", "attention_mask"), may_idle=("experts.*", "*.experts.*"),
                 value_is_loss=True, reduction="mean", all_supervised=True)
    return [both, plain]


@declare("l/r18")
def unlikelihood(m, fn):
    model, b = given(m)
    return Step(model=model, loss=fn, batch=b, name="l18", family="sft",
                roles={"ids": "ids", "mask": "loss_mask"}, settings={"alpha": Setting(1.0, "weight")},
                logprobs=lm_logps, wide=("ids", "loss_mask"), value_is_loss=True, reduction="mean")


@declare("l/r19")
def weighted_by_probability(m, fn):
    model, b = given(m)
    return Step(model=model, loss=fn, batch=b, name="l19", family="sft",
                roles={"ids": "ids", "mask": "loss_mask"}, logprobs=lm_logps,
                wide=("ids", "loss_mask"), value_is_loss=False, reduction="mean")


@declare("l/r20")
def listwise(m, fn):
    model, b = given(m)
    lists = Step(model=model, loss=fn, batch=b, name="l20 lists", roles={"mask": "valid"},
                 wide=("ids", "last", "valid"), drops_tokens=True,  # the last answer of a list is no place of its own
                 value_is_loss=True, reduction="mean")

    model2, b = given(m)  # lists of two answers: the better one is chosen
    t = b["ids"].shape[-1]
    there = (torch.arange(t) <= b["last"][..., None]).long()
    pairs = {"chosen": b["ids"][:, 0], "chosen_attention": there[:, 0],
             "rejected": b["ids"][:, 1], "rejected_attention": there[:, 1]}

    def end(attention):
        return (attention.long() * torch.arange(attention.shape[1])).amax(1)

    def loss(model, p):
        width = max(p["chosen"].shape[1], p["rejected"].shape[1])
        ids = torch.stack([F.pad(p[k], (0, width - p[k].shape[1])) for k in ("chosen", "rejected")], 1)
        last = torch.stack([end(p["chosen_attention"]), end(p["rejected_attention"])], 1)
        return fn(model, {"ids": ids, "last": last, "valid": torch.ones(last.shape)})

    def scores(model, p):
        return (model(p["chosen"], end(p["chosen_attention"])), model(p["rejected"], end(p["rejected_attention"])))

    paired = Step(model=model2, loss=loss, batch=pairs, name="l20 pairs", family="preference",
                  roles={k: k for k in pairs}, logprobs=scores, wide=tuple(pairs),
                  value_is_loss=True, reduction="mean")
    return [lists, paired]


@declare("l/r21")
def discrete_sac(m, fn):
    model, b = given(m)
    top = math.log(4)
    return Step(model=model, loss=fn, batch=b, name="l21",
                settings={"target_share": Setting(0.7, "setting")},
                metrics={"entropy_gap": Metric(low=-0.7 * top - 1e-5, high=top + 1e-5)},
                value_is_loss=False, reduction="mean", all_supervised=True)


@declare("l/r22")
def quantiles(m, fn):
    model, b = given(m)
    return Step(model=model, loss=fn, batch=b, name="l22", roles={"returns": "targets"},
                settings={"kappa": Setting(1.0, "setting")},
                value_is_loss=True, reduction="mean", all_supervised=True)


@declare("l/r23")
def drift_mask(m, fn):
    model, b = given(m)
    return Step(model=model, loss=fn, batch=b, name="l23", family="policy gradient",
                roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logps", "reference": "ref_logps",
                       "advantages": "advantages"},
                settings={"clip": Setting(0.2, "clip"), "beta": Setting(0.05, "weight"),
                          "drift": Setting(0.1, "setting", modes=(0.01,))},
                logprobs=lm_logps, wide=("ids", "loss_mask", "old_logps", "ref_logps"),
                drops_tokens=True, value_is_loss=True, reduction="mean")


@declare("l/r24")
def long_context_weight(m, fn):
    model, b = given(m)
    return Step(model=model, loss=fn, batch=b, name="l24", family="sft",
                roles={"ids": "ids", "mask": "loss_mask"},
                settings={"window": Setting(4, "setting", modes=(2, 6)), "cap": Setting(5.0, "setting", modes=(1.0,))},
                logprobs=lm_logps, wide=("ids", "loss_mask"), value_is_loss=False, reduction="mean")


@declare("l/r25")
def squared_policy(m, fn):
    model, b = given(m)
    rows = Step(model=model, loss=fn, batch=b, name="l25", family="policy gradient",
                roles={"ids": "ids", "mask": "loss_mask", "reference": "ref_logps", "rewards": "rewards",
                       "group": "group"},
                settings={"beta": Setting(0.5, "setting")},
                logprobs=lambda model, batch: seq_sum(model, batch["ids"], batch["loss_mask"]),
                wide=("ids", "loss_mask"), rows_interact=True, empty_rows=False,
                value_is_loss=True, reduction="mean")

    model2, b = given(m)  # one prompt a row, two answers each: prompts are independent
    b.pop("group")
    prompts = {k: v.reshape(4, 2, *v.shape[1:]) for k, v in b.items()}

    def loss(model, p, **kw):
        flat = {k: v.flatten(0, 1) for k, v in p.items()}
        flat["group"] = torch.arange(len(p["ids"])).repeat_interleave(2)
        return fn(model, flat, **kw)

    by_prompt = Step(model=model2, loss=loss, batch=prompts, name="l25 prompts",
                     settings={"beta": Setting(0.5, "setting")}, value_is_loss=True, reduction="mean")
    return [rows, by_prompt]
