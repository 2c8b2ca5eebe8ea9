import math

import torch
from tests.audit.reading2026e.reading import declare, no_subject
from earnest_audit import Step, Setting, Metric


def lp(m):
    return lambda model, batch: m.logps(model, batch["ids"])


def sums(m, ids, mask):
    return lambda model, batch: (m.logps(model, batch[ids]) * batch[mask]).sum(1)


def take(m, seed=0):
    given = m.make(seed)
    return given.pop("model"), given


PG = {"ids": "ids", "mask": "loss_mask", "behaviour": "old_logps", "advantages": "advantages"}
PGW = ("ids", "loss_mask", "old_logps")
PAIR = {"chosen": "chosen_ids", "rejected": "rejected_ids", "chosen_mask": "chosen_mask", "rejected_mask": "rejected_mask"}
REFS = {"reference_chosen": "ref_chosen", "reference_rejected": "ref_rejected"}
PAIRW = ("chosen_ids", "chosen_mask", "rejected_ids", "rejected_mask")


def pair_sums(m):
    return lambda model, b: (
        (m.logps(model, b["chosen_ids"]) * b["chosen_mask"]).sum(1),
        (m.logps(model, b["rejected_ids"]) * b["rejected_mask"]).sum(1),
    )


@declare("i/r01")
def gspo(m, fn):
    model, b = take(m)
    g = torch.Generator().manual_seed(1)  # more rows, so that both clips bind
    b["ids"], b["loss_mask"] = m.fake_rows(g, 16)
    with torch.no_grad():
        old = m.logps(model, b["ids"])
    b["old_logps"] = (old + 0.001 * torch.randn(old.shape, generator=g)) * b["loss_mask"]
    b["advantages"] = torch.randn(16, generator=g)
    return Step(model=model, loss=fn, batch=b, roles=PG, wide=PGW, logprobs=lp(m),
                settings={"clip_low": Setting(0.0003, "clip"), "clip_high": Setting(0.0004, "clip high")},
                metrics={"clipped": Metric(low=0.0, high=1.0, neutral=0.0)},
                reduction="mean", value_is_loss=True)


@declare("i/r02")
def truncated_reinforce(m, fn):
    model, b = take(m)
    return Step(model=model, loss=fn, batch=b, roles=PG, wide=PGW, logprobs=lp(m),
                settings={"weight_max": Setting(3.0, "bound")}, reduction="mean", value_is_loss=False)


@declare("i/r03")
def dr_grpo(m, fn):
    model, b = take(m)
    return Step(model=model, loss=fn, batch=b, wide=("ids", "loss_mask"), logprobs=lp(m),
                roles={"ids": "ids", "mask": "loss_mask", "rewards": "rewards", "group": "groups"},
                settings={"budget": Setting(16, "setting")}, reduction="mean", value_is_loss=False)


@declare("i/r04")
def dual_clip(m, fn):
    model, b = take(m)
    return Step(model=model, loss=fn, batch=b, roles=PG, wide=PGW + ("advantages",), logprobs=lp(m),
                settings={"clip": Setting(0.2, "clip"), "c": Setting(3.0, "bound")},
                reduction="mean", value_is_loss=True)


@declare("i/r05")
def gmpo(m, fn):
    model, b = take(m)
    return Step(model=model, loss=fn, batch=b, roles=PG, wide=PGW, logprobs=lp(m),
                settings={"log_clip": Setting(0.4, "bound")}, reduction="mean", value_is_loss=True)


@declare("i/r06")
def topr(m, fn):
    model, b = take(m)
    return Step(model=model, loss=fn, batch=b, wide=PGW, logprobs=lp(m),
                roles={**PG, "advantages": "rewards"}, reduction="mean", value_is_loss=False)


@declare("i/r07")
def engine_weight(m, fn):
    model, b = take(m)
    return Step(model=model, loss=fn, batch=b, wide=PGW + ("engine_logps",), logprobs=lp(m),
                roles={"ids": "ids", "mask": "loss_mask", "proximal": "old_logps", "behaviour": "engine_logps",
                       "advantages": "advantages"},
                settings={"clip": Setting(0.2, "clip"), "cap": Setting(2.0, "bound")},
                reduction="mean", value_is_loss=True)


@declare("i/r08")
def vtrace(m, fn):
    model, b = take(m)

    def logprobs(model, batch):
        logits, _ = model(batch["obs"])
        return logits[:, :-1].log_softmax(-1).gather(-1, batch["actions"][..., None]).squeeze(-1)

    return Step(model=model, loss=fn, batch=b, wide=(), logprobs=logprobs, family="policy gradient",
                roles={"behaviour": "behaviour_logps", "rewards": "rewards"},
                settings={"rho_bar": Setting(1.0, "bound"), "c_bar": Setting(1.0, "bound"),
                          "value_cost": Setting(0.5, "weight"), "entropy_cost": Setting(0.01, "weight")},
                metrics={"pg": Metric(), "critic": Metric(low=0.0, weight="value_cost")},
                reduction="mean", value_is_loss=False)


@declare("i/r09")
def spo(m, fn):
    model, b = take(m)
    return Step(model=model, loss=fn, batch=b, roles=PG, wide=PGW, logprobs=lp(m),
                settings={"eps": Setting(0.2, "setting")}, reduction="mean", value_is_loss=True)


@declare("i/r10")
def sapo(m, fn):
    model, b = take(m)
    return Step(model=model, loss=fn, batch=b, roles=PG, wide=PGW, logprobs=lp(m),
                settings={"tau_pos": Setting(1.0, "setting"), "tau_neg": Setting(1.05, "setting")},
                reduction="mean", value_is_loss=True)


@declare("i/r11")
def group_squares(m, fn):
    model, b = take(m)
    return Step(model=model, loss=fn, batch=b, wide=("ids", "loss_mask", "ref_logps"), logprobs=lp(m),
                family="policy gradient",
                roles={"ids": "ids", "mask": "loss_mask", "reference": "ref_logps", "rewards": "rewards", "group": "groups"},
                settings={"beta": Setting(0.5, "setting")}, reduction="mean", value_is_loss=True)


@declare("i/r12")
def mixed_rows(m, fn):
    model, b = take(m)
    return Step(model=model, loss=fn, batch=b, roles=PG, wide=PGW, logprobs=lp(m),
                settings={"clip": Setting(0.2, "clip"), "gamma": Setting(0.1, "setting")},
                reduction="mean", value_is_loss=True)


@declare("i/r13")
def weighted_kl(m, fn):
    model, b = take(m)
    return Step(model=model, loss=fn, batch=b, roles={**PG, "reference": "ref_logps"}, wide=PGW + ("ref_logps",),
                logprobs=lp(m), settings={"clip": Setting(0.2, "clip"), "beta": Setting(0.05, "weight")},
                metrics={"kl": Metric(low=0.0, weight="beta")}, reduction="mean", value_is_loss=True)


@declare("i/r14")
def value_clip(m, fn):
    model, b = take(m)
    return Step(model=model, loss=fn, batch=b, wide=("ids", "loss_mask", "old_values", "returns"),
                roles={"ids": "ids", "mask": "loss_mask", "values": "old_values", "returns": "returns"},
                settings={"clip_value": Setting(0.2, "setting")}, reduction="mean", value_is_loss=True)


@declare("i/r15")
def discrete_sac(m, fn):
    model, b = take(m)
    return Step(model=model, loss=fn, batch=b, wide=(),
                settings={"gamma": Setting(0.99, "setting"), "entropy_share": Setting(0.98, "setting")},
                metrics={"entropy": Metric(low=0.0, high=math.log(4) + 1e-6)},
                reduction="mean", value_is_loss=False)


@declare("i/r16")
def ipo(m, fn):
    model, b = take(m)

    def logprobs(model, b):
        return (m.row_mean(model, b["chosen_ids"], b["chosen_mask"]), m.row_mean(model, b["rejected_ids"], b["rejected_mask"]))

    return Step(model=model, loss=fn, batch=b, roles={**PAIR, **REFS}, wide=PAIRW, logprobs=logprobs,
                settings={"beta": Setting(0.5, "setting")}, metrics={"margin": Metric()},
                reduction="mean", value_is_loss=True)


@declare("i/r17")
def orpo(m, fn):
    model, b = take(m)

    def logprobs(model, b):
        mean = lambda ids, k: (m.logps(model, ids) * k).sum(1) / k.sum(1).clamp(min=1)
        return mean(b["chosen_ids"], b["chosen_mask"]), mean(b["rejected_ids"], b["rejected_mask"])

    return Step(model=model, loss=fn, batch=b, roles=PAIR, wide=PAIRW + ("chosen_attention",), logprobs=logprobs,
                masks=("chosen_attention",), settings={"lam": Setting(0.1, "weight")},
                metrics={"log_odds": Metric(weight="lam", raises=True)},
                empty_rows=False,  # a mean of 0 gives log(1 - exp(0))
                all_supervised=True, reduction="mean", value_is_loss=True)


@declare("i/r18")
def kto(m, fn):
    model, b = take(m, 1)  # z0 is above 0 here
    return Step(model=model, loss=fn, batch=b, family="preference", pairwise=False, rows_interact=True,
                roles={"ids": "ids", "mask": "loss_mask", "reference": "ref_logps", "correct": "label"},
                wide=("ids", "loss_mask", "kl_ids", "kl_mask"),
                settings={"beta": Setting(0.1, "setting"), "w_pos": Setting(1.0, "weight"), "w_neg": Setting(1.33, "weight")},
                metrics={"z0": Metric(low=0.0, moves=False)}, reduction="mean", value_is_loss=False)


@declare("i/r19")
def robust_dpo(m, fn):
    model, b = take(m)
    gap = b.pop("ref_margin")
    b["ref_chosen"], b["ref_rejected"] = -15 + gap / 2, -15 - gap / 2  # only their difference is read

    def loss(model, batch, beta, eps):
        batch = dict(batch)
        batch["ref_margin"] = batch.pop("ref_chosen") - batch.pop("ref_rejected")
        return fn(model, batch, beta=beta, eps=eps)

    return Step(model=model, loss=loss, batch=b, roles={**PAIR, **REFS}, wide=PAIRW, logprobs=pair_sums(m),
                settings={"beta": Setting(0.1, "setting"), "eps": Setting(0.2, "smoothing")},
                reduction="mean", value_is_loss=True)


@declare("i/r20")
def dpop(m, fn):
    model, b = take(m)
    return Step(model=model, loss=fn, batch=b, roles={**PAIR, **REFS}, wide=PAIRW, logprobs=pair_sums(m),
                settings={"beta": Setting(0.3, "setting"), "lam": Setting(5.0, "setting", pure=0.0)},
                reduction="mean", value_is_loss=True)


@declare("i/r21")
def plackett_luce(m, fn):
    model, b = take(m)
    # two answers: ordinary DPO. Places (0, 1) and (2, 3) of every prompt are pairs, better first
    pairs = {}
    for side, at in (("chosen", slice(0, None, 2)), ("rejected", slice(1, None, 2))):
        pairs[f"{side}_ids"] = b["ids"][:, at].reshape(-1, b["ids"].shape[-1]).clone()
        pairs[f"{side}_mask"] = b["loss_mask"][:, at].reshape(-1, b["loss_mask"].shape[-1]).clone()
        pairs[f"ref_{side}"] = b["ref_logps"][:, at].reshape(-1).clone()

    def dpo(model, c, beta):
        both = lambda k: torch.stack([c[k.format("chosen")], c[k.format("rejected")]], 1)
        return fn(model, {"ids": both("{}_ids"), "loss_mask": both("{}_mask"), "ref_logps": both("ref_{}")}, beta=beta)

    # four answers, one row each
    k = b["ids"].shape[1]
    flat = {"ids": b["ids"].flatten(0, 1).clone(), "loss_mask": b["loss_mask"].flatten(0, 1).clone(),
            "ref_logps": b["ref_logps"].flatten().clone()}

    def rows(model, c, beta):
        return fn(model, {key: v.reshape(-1, k, *v.shape[1:]) for key, v in c.items()}, beta=beta)

    other, _ = take(m)
    third, _ = take(m)
    return [
        Step(model=model, loss=dpo, batch=pairs, roles={**PAIR, **REFS}, wide=PAIRW, logprobs=pair_sums(m),
             settings={"beta": Setting(0.2, "setting")}, reduction="mean", value_is_loss=True, name="two answers"),
        Step(model=other, loss=rows, batch=flat, family="preference", rows_interact=True, pairwise=False,
             roles={"ids": "ids", "mask": "loss_mask", "reference": "ref_logps"}, wide=("ids", "loss_mask"),
             settings={"beta": Setting(0.2, "setting")}, reduction="mean", value_is_loss=True, name="answers as rows"),
        Step(model=third, loss=fn, batch=b, roles={"reference": "ref_logps"}, wide=(), family="preference", pairwise=False,
             settings={"beta": Setting(0.2, "setting")}, reduction="mean", value_is_loss=True, name="prompts as rows"),
    ]


@declare("i/r22")
def reward_model(m, fn):
    model, b = take(m)
    return Step(model=model, loss=fn, batch=b, wide=("chosen_ids", "rejected_ids"),
                roles={"chosen": "chosen_ids", "rejected": "rejected_ids", "margin": "margin"},
                logprobs=lambda model, b: (model(b["chosen_ids"]), model(b["rejected_ids"])),
                settings={"center": Setting(0.01, "weight", pure=0.0)}, metrics={"accuracy": Metric(low=0.0, high=1.0)},
                empty_rows=False, reduction="mean", value_is_loss=True)


@declare("i/r23")
def tdpo(m, fn):
    made = []
    for side in ("ref_chosen", "ref_rejected"):
        model, b = take(m)
        made.append(Step(model=model, loss=fn, batch=b, roles={**PAIR, "reference_distribution": side}, family="preference",
                         wide=PAIRW + ("ref_chosen", "ref_rejected"), logprobs=pair_sums(m),
                         settings={"beta": Setting(0.1, "setting"), "alpha": Setting(0.5, "setting", pure=0.0)},
                         reduction="mean", value_is_loss=False, name=side))
    return made


@declare("i/r24")
def npo(m, fn):
    model, b = take(m)
    return Step(model=model, loss=fn, batch=b, pairwise=False,
                roles={"chosen": "retain_ids", "chosen_mask": "retain_mask", "rejected": "forget_ids",
                       "rejected_mask": "forget_mask", "reference_rejected": "forget_ref_logps"},
                wide=("forget_ids", "forget_mask", "retain_ids", "retain_mask"),
                logprobs=lambda model, b: (sums(m, "retain_ids", "retain_mask")(model, b), sums(m, "forget_ids", "forget_mask")(model, b)),
                settings={"beta": Setting(0.1, "setting"), "retain_weight": Setting(1.0, "weight")},
                metrics={"forget": Metric(low=0.0, weight=1.0), "retain": Metric(low=0.0, weight="retain_weight")},
                reduction="mean", value_is_loss=True)


@declare("i/r25")
def rebel(m, fn):
    model, b = take(m)
    # as pairs: the first answer of each has the reward 1.5, the second -1.5
    pairs = {}
    for side, at in (("chosen", 0), ("rejected", 1)):
        pairs[f"{side}_ids"], pairs[f"{side}_mask"] = b["ids"][at::2].clone(), b["loss_mask"][at::2].clone()
        pairs[f"ref_{side}"] = b["old_logps"][at::2].clone()

    def paired(model, c, eta):
        both = lambda k: torch.stack([c[k.format("chosen")], c[k.format("rejected")]], 1).flatten(0, 1)
        old = both("ref_{}")
        rewards = torch.tensor([1.5, -1.5], dtype=old.dtype).repeat(len(old) // 2)
        return fn(model, {"ids": both("{}_ids"), "loss_mask": both("{}_mask"), "old_logps": old, "rewards": rewards}, eta=eta)

    other, _ = take(m)
    return [
        Step(model=model, loss=fn, batch=b, rows_interact=True, wide=("ids", "loss_mask"), logprobs=sums(m, "ids", "loss_mask"),
             roles={"ids": "ids", "mask": "loss_mask", "reference": "old_logps", "rewards": "rewards"},
             settings={"eta": Setting(1.0, "setting")}, reduction="mean", value_is_loss=True, name="rows"),
        Step(model=other, loss=paired, batch=pairs, roles={**PAIR, **REFS}, wide=PAIRW, logprobs=pair_sums(m),
             settings={"eta": Setting(1.0, "setting")}, reduction="mean", value_is_loss=True, name="pairs"),
    ]
