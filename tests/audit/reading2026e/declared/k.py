import torch, torch.nn.functional as F
from tests.audit.reading2026e.reading import declare, no_subject
from earnest_audit import Metric, Setting, Step


def start(m):
    given = m.make(0)
    return given.pop("model"), given


def narrow(fn, key="loss_mask", **totals):
    """the mask in the form of the log-probs, [rows, time-1]: its first column is 0 in every row and is put back here.
    totals: input of the case -> key of the token log-probs whose masked sum it is"""
    def loss(model, batch, **settings):
        given = dict(batch)
        for name, tokens in totals.items():
            given[name] = (given.pop(tokens) * batch[key]).sum(1)
        given[key] = F.pad(batch[key], (1, 0))
        return fn(model, given, **settings)
    return loss


def token_lp(m):
    return lambda model, batch: m.token_logps(model, batch["ids"])


def policy(m, fn, settings, empty_rows, value_is_loss=True, **more):
    model, b = start(m)
    b["loss_mask"] = b["loss_mask"][:, 1:].clone()
    wide = ["ids", "loss_mask", "old_logps"] + (["advantages"] if b["advantages"].dim() == 2 else [])
    return Step(model=model, loss=narrow(fn), batch=b, family="policy gradient",
                roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logps", "advantages": "advantages"},
                settings=settings, logprobs=token_lp(m), wide=wide, empty_rows=empty_rows, value_is_loss=value_is_loss, **more)


@declare("k/r01")
def cispo(m, fn):
    return policy(m, fn, {"eps_high": Setting(0.28, "clip high")}, True, value_is_loss=False, reduction="mean")


@declare("k/r02")
def gspo_token(m, fn):
    return policy(m, fn, {"eps_low": Setting(0.0003, "clip"), "eps_high": Setting(0.0004, "clip high")}, False, reduction="mean")


@declare("k/r03")
def dual_clip(m, fn):
    return policy(m, fn, {"clip": Setting(0.2, "clip"), "c": Setting(3.0, "bound")}, True, reduction="mean",
                  metrics={"dual_clip_fraction": Metric(low=0.0, high=1.0, neutral=0.0)})


def spread_tokens(m, model, b, total):
    """token log-probs whose sum over the completion is the given number"""
    mask = b["loss_mask"][:, 1:]
    lp = m.token_logps(model, b["ids"]).detach()
    return lp + ((total - (lp * mask).sum(1)) / mask.sum(1))[:, None]


@declare("k/r04")
def topr(m, fn):
    model, b = start(m)
    b["mu_tokens"] = spread_tokens(m, model, b, b.pop("mu_logps"))
    b["loss_mask"] = b["loss_mask"][:, 1:].clone()
    return Step(model=model, loss=narrow(fn, mu_logps="mu_tokens"), batch=b, family="policy gradient",
                roles={"ids": "ids", "mask": "loss_mask", "behaviour": "mu_tokens", "advantages": "rewards"},
                logprobs=token_lp(m), wide=["ids", "loss_mask", "mu_tokens"], value_is_loss=False, reduction="mean")


@declare("k/r05")
def opmd(m, fn):
    model, b = start(m)
    b["loss_mask"] = b["loss_mask"][:, 1:].clone()
    return Step(model=model, loss=narrow(fn), batch=b, family="policy gradient",
                roles={"ids": "ids", "mask": "loss_mask", "reference": "old_logps", "rewards": "rewards", "group": "groups"},
                settings={"tau": Setting(0.5, "setting")}, logprobs=token_lp(m), wide=["ids", "loss_mask", "old_logps"],
                value_is_loss=True, reduction="mean", rows_interact=True, empty_rows=False)


@declare("k/r06")
def gmpo(m, fn):
    # the clip is of the log-ratio; as a range below 1 of the ratio it is 1 - exp(-eps)
    def by_range(model, batch, clip):
        return fn(model, batch, eps=-float(torch.log(torch.tensor(max(1.0 - clip, 1e-6), dtype=torch.float64))))
    return policy(m, by_range, {"clip": Setting(1 - 2.718281828459045 ** -0.4, "clip")}, False, reduction="mean")


@declare("k/r07")
def sapo(m, fn):
    return policy(m, fn, {"tau_pos": Setting(1.0, "setting"), "tau_neg": Setting(1.05, "setting")}, False, reduction="mean")


@declare("k/r08")
def spo(m, fn):
    return policy(m, fn, {"eps": Setting(0.2, "setting")}, True, reduction="mean")


@declare("k/r09")
def kl_cov(m, fn):
    return policy(m, fn, {"k_ratio": Setting(0.1, "setting"), "kl_coef": Setting(1.0, "weight")}, True, rows_interact=True)


@declare("k/r10")
def vtrace(m, fn):
    model, b = start(m)

    def logprobs(model, batch):
        return F.log_softmax(model(batch["ids"])[0][:, :-1], -1).gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)
    return Step(model=model, loss=fn, batch=b, family="policy gradient",
                roles={"ids": "ids", "behaviour": "behaviour_logps", "rewards": "rewards"},
                settings={"rho_bar": Setting(1.0, "bound"), "c_bar": Setting(0.9, "setting"),
                          "value_coef": Setting(0.5, "weight"), "entropy_coef": Setting(0.01, "weight")},
                logprobs=logprobs, value_is_loss=False, reduction="mean", all_supervised=True)


@declare("k/r11")
def trajectory_balance(m, fn):
    model, b = start(m)
    b["ref_tokens"] = spread_tokens(m, model, b, b.pop("ref_logps"))
    b["loss_mask"] = b["loss_mask"][:, 1:].clone()
    return Step(model=model, loss=narrow(fn, ref_logps="ref_tokens"), batch=b, family="policy gradient",
                roles={"ids": "ids", "mask": "loss_mask", "reference": "ref_tokens", "rewards": "rewards"},
                settings={"beta": Setting(0.5, "setting")}, logprobs=token_lp(m), wide=["ids", "loss_mask", "ref_tokens"],
                value_is_loss=True, reduction="mean", empty_rows=False)


@declare("k/r12")
def entropy_share(m, fn):
    return policy(m, fn, {"rho": Setting(0.2, "setting"), "clip_low": Setting(0.2, "clip"), "clip_high": Setting(0.28, "clip high")},
                  True, rows_interact=True, drops_tokens=True)


@declare("k/r13")
def vmpo(m, fn):
    model, b = start(m)
    b = {k: v[:4].clone() for k, v in b.items()}  # an even number of actions: half of twice as many is twice the half
    return Step(model=model, loss=fn, batch=b, family="policy gradient",
                roles={"ids": "ids", "advantages": "advantages", "reference_distribution": "old_logprobs"},
                settings={"eps_eta": Setting(0.1, "setting"), "eps_alpha": Setting(0.01, "setting")},
                value_is_loss=False, reduction="mean", rows_interact=True, drops_tokens=True, all_supervised=True)


@declare("k/r14")
def ppg_aux(m, fn):
    model, b = start(m)
    return Step(model=model, loss=fn, batch=b,
                roles={"ids": "ids", "mask": "state_mask", "reference": "old_logits", "returns": "returns"},
                settings={"beta_clone": Setting(1.0, "weight")},
                logprobs=lambda model, batch: F.log_softmax(model(batch["ids"])[0], -1),
                wide=["ids", "state_mask", "old_logits", "returns"], value_is_loss=True, reduction="mean", all_supervised=True)


@declare("k/r15")
def kto(m, fn):
    model, b = start(m)
    return Step(model=model, loss=fn, batch=b, family="preference",
                roles={"ids": "ids", "mask": "loss_mask", "correct": "desirable", "reference": "ref_logps"},
                settings={"beta": Setting(0.5, "setting"), "w_good": Setting(1.0, "weight"), "w_bad": Setting(1.2, "weight")},
                metrics={"kl": Metric(low=0.0, moves=False)}, wide=["ids", "loss_mask", "kl_ids", "kl_mask"],
                value_is_loss=False, reduction="mean", rows_interact=True, empty_rows=False, pairwise=False)


PAIR = {"chosen": "chosen_ids", "rejected": "rejected_ids", "chosen_mask": "chosen_mask", "rejected_mask": "rejected_mask"}
WIDE = list(PAIR.values())


def pair_sums(m, mean=False):
    def logprobs(model, batch):
        out = []
        for side in ("chosen", "rejected"):
            mask = batch[side + "_mask"][:, 1:]
            total = (m.token_logps(model, batch[side + "_ids"]) * mask).sum(1)
            out.append(total / mask.sum(1) if mean else total)
        return tuple(out)
    return logprobs


@declare("k/r16")
def orpo(m, fn):
    model, b = start(m)
    return Step(model=model, loss=fn, batch=b, roles=PAIR, settings={"lam": Setting(0.1, "weight")}, logprobs=pair_sums(m, mean=True),
                wide=WIDE, value_is_loss=True, reduction="mean", rows_interact=True, empty_rows=False)


def tokenwise(m, fn, refs, settings, **more):
    """the case as it is: the reference of each token (or its logits)"""
    model, b = start(m)
    names = {f"reference_{s}": f"ref_{s}_{refs}" for s in ("chosen", "rejected")}
    return Step(model=model, loss=fn, batch=b, roles={**PAIR, **names}, settings=settings, wide=WIDE + list(names.values()),
                reduction="mean", **more)


def summed(m, fn, settings, **more):
    """the reference as one number per answer; the code receives it in equal parts on the answer's tokens"""
    model, b = start(m)
    for s in ("chosen", "rejected"):
        b[f"ref_{s}"] = (b.pop(f"ref_{s}_logps") * b[s + "_mask"][:, 1:]).sum(1)

    def loss(model, batch, **settings):
        given = dict(batch)
        for s in ("chosen", "rejected"):
            mask = batch[s + "_mask"][:, 1:]
            given[f"ref_{s}_logps"] = given.pop(f"ref_{s}")[:, None] * mask / mask.sum(1, keepdim=True).clamp(min=1)
        return fn(model, given, **settings)
    return Step(model=model, loss=loss, batch=b, roles={**PAIR, "reference_chosen": "ref_chosen", "reference_rejected": "ref_rejected"},
                settings=settings, logprobs=pair_sums(m), wide=WIDE, reduction="mean", **more)


@declare("k/r17")
def aot_unpaired(m, fn):
    settings = {"beta": Setting(0.2, "setting"), "smoothing": Setting(0.1, "smoothing")}
    more = dict(value_is_loss=True, rows_interact=True, pairwise=False)
    return [tokenwise(m, fn, "logps", settings, **more), summed(m, fn, settings, **more)]


@declare("k/r18")
def plackett_luce(m, fn):
    model, b = start(m)
    whole = Step(model=model, loss=fn, batch=b, family="preference", roles={"reference": "ref_logps"},
                 settings={"beta": Setting(0.3, "setting")}, value_is_loss=True, reduction="mean")
    model, b = start(m)
    best, worst = [0, 1], [3, 2]  # rankings of two answers: plain DPO

    def take(key, places):
        return torch.cat([b[key][:, p] for p in places]).clone()
    pairs = {"chosen_ids": take("ids", best), "rejected_ids": take("ids", worst), "chosen_mask": take("loss_mask", best),
             "rejected_mask": take("loss_mask", worst), "ref_chosen": take("ref_logps", best), "ref_rejected": take("ref_logps", worst)}

    def loss(model, batch, **settings):
        def both(c, r): return torch.stack([batch[c], batch[r]], 1)
        return fn(model, {"ids": both("chosen_ids", "rejected_ids"), "loss_mask": both("chosen_mask", "rejected_mask"),
                          "ref_logps": both("ref_chosen", "ref_rejected")}, **settings)
    two = Step(model=model, loss=loss, batch=pairs, roles={**PAIR, "reference_chosen": "ref_chosen", "reference_rejected": "ref_rejected"},
               settings={"beta": Setting(0.3, "setting")}, logprobs=pair_sums(m), wide=WIDE, value_is_loss=True, reduction="mean")
    return [two, whole]


def no_reference(m, fn, settings, refs, **more):
    """directions of the pairs; the references stay in the batch without a role"""
    model, b = start(m)
    return Step(model=model, loss=fn, batch=b, roles=PAIR, settings=settings, logprobs=pair_sums(m),
                wide=WIDE + [f"ref_{s}_{refs}" for s in ("chosen", "rejected")], reduction="mean", **more)


@declare("k/r19")
def tdpo2(m, fn):
    settings = {"beta": Setting(0.1, "setting"), "alpha": Setting(0.5, "setting", pure=0.0)}
    return [tokenwise(m, fn, "logits", settings, value_is_loss=False), no_reference(m, fn, settings, "logits", value_is_loss=False)]


@declare("k/r20")
def robust_dpo(m, fn):
    settings = {"beta": Setting(0.5, "setting"), "eps": Setting(0.2, "smoothing")}
    return [tokenwise(m, fn, "logps", settings, value_is_loss=True), summed(m, fn, settings, value_is_loss=True)]


@declare("k/r21")
def divergent_span(m, fn):
    model, b = start(m)
    for s in ("chosen", "rejected"):
        b[s + "_attention"] = (b[s + "_ids"] != 0).long()

    def ids(batch):  # padding is the id 0
        return [batch[s + "_ids"] * (batch[s + "_attention"] != 0) for s in ("chosen", "rejected")]

    def loss(model, batch, **settings):
        c, r = ids(batch)
        return fn(model, {"chosen_ids": c, "rejected_ids": r}, **settings)

    def scores(model, batch):
        c, r = ids(batch)
        pos = torch.arange(c.shape[1])[None]
        begin = (c != r).float().argmax(1, keepdim=True)
        end = torch.maximum((c != 0).sum(1, keepdim=True), (r != 0).sum(1, keepdim=True))
        span = ((pos >= begin) & (pos < end)).float()
        return tuple((model(x) * span).sum(1) / span.sum(1) for x in (c, r))
    return Step(model=model, loss=loss, batch=b,
                roles={"chosen": "chosen_ids", "rejected": "rejected_ids", "chosen_attention": "chosen_attention",
                       "rejected_attention": "rejected_attention"},
                logprobs=scores, wide=list(b), value_is_loss=True, reduction="mean", empty_rows=False)


@declare("k/r22")
def wpo(m, fn):
    settings = {"beta": Setting(0.3, "setting")}
    more = dict(value_is_loss=False, empty_rows=False, metrics={"weight": Metric(low=0.0, high=1.0)})
    return [tokenwise(m, fn, "logps", settings, **more), no_reference(m, fn, settings, "logps", **more)]


def distil(m, fn, settings, teacher, student, further=()):
    model, b = start(m)
    b["loss_mask"] = b["loss_mask"][:, 1:].clone()
    return Step(model=model, loss=narrow(fn), batch=b, roles={"ids": "ids", "mask": "loss_mask", "teacher": teacher}, settings=settings,
                student=student, wide=["ids", "loss_mask", teacher, *further], value_is_loss=True, reduction="mean", family="divergence")


def logits(model, batch):
    return model(batch["ids"][:, :-1])


@declare("k/r23")
def jsd(m, fn):
    return distil(m, fn, {"beta": Setting(0.3, "mixture"), "temperature": Setting(0.9, "setting")}, "teacher_logits", logits)


@declare("k/r24")
def skew_kl(m, fn):
    return distil(m, fn, {"alpha": Setting(0.1, "mixture")}, "teacher_logits", logits)


@declare("k/r25")
def top_k_kl(m, fn):
    def student(model, batch):
        return F.log_softmax(logits(model, batch), -1).gather(-1, batch["top_ids"])
    return distil(m, fn, {}, "top_logps", student, further=["top_ids"])
