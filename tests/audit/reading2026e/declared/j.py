import torch
import torch.nn.functional as F
from tests.audit.reading2026e.reading import declare, no_subject
from earnest_audit import Metric, Setting, Step


def start(m, seed=0):
    given = m.make(seed)
    return given.pop("model"), given


def padded(m):
    """log-probs like the stored ones: [rows, time], column 0 unused"""
    return lambda model, batch: F.pad(m.token_logps(model, batch["ids"]), (1, 0))


@declare("j/r01")
def gspo_token(m, fn):
    model, b = start(m)
    return Step(model=model, loss=fn, batch=b, logprobs=padded(m), family="policy gradient",
                roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logps", "advantages": "advantages"},
                settings={"eps_low": Setting(0.03, "clip"), "eps_high": Setting(0.04, "clip high")},
                reduction="mean", empty_rows=False, value_is_loss=False,
                wide=("ids", "loss_mask", "old_logps", "advantages"))


@declare("j/r02")
def topr(m, fn):
    model, b = start(m)

    def sequence(model, batch):
        return (m.token_logps(model, batch["ids"]) * batch["loss_mask"][:, 1:]).sum(1)
    return Step(model=model, loss=fn, batch=b, logprobs=sequence, family="policy gradient",
                roles={"ids": "ids", "mask": "loss_mask", "behaviour": "behaviour_logps", "advantages": "rewards"},
                reduction="mean", value_is_loss=False, wide=("ids", "loss_mask"))


@declare("j/r03")
def dual_clip(m, fn):
    model, b = start(m)
    return Step(model=model, loss=fn, batch=b, logprobs=padded(m), family="policy gradient",
                roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logps", "advantages": "advantages"},
                settings={"clip": Setting(0.2, "clip"), "c": Setting(3.0, "bound")},
                metrics={"lower_clip_frac": Metric(low=0.0, high=1.0, neutral=0.0)},
                reduction="mean", value_is_loss=True, wide=("ids", "loss_mask", "old_logps", "advantages"))


@declare("j/r04")
def reinforce_kl(m, fn):
    model, b = start(m)
    return Step(model=model, loss=fn, batch=b, logprobs=padded(m), family="policy gradient",
                roles={"ids": "ids", "mask": "loss_mask", "reference": "ref_logps", "advantages": "advantages"},
                settings={"beta": Setting(0.1, "weight")},
                metrics={"kl": Metric(low=0.0, weight="beta")},
                reduction="mean", value_is_loss=False, wide=("ids", "loss_mask", "ref_logps"))


@declare("j/r05")
def truncated_importance(m, fn):
    model, b = start(m)
    return Step(model=model, loss=fn, batch=b, logprobs=padded(m), family="policy gradient",
                roles={"ids": "ids", "mask": "loss_mask", "proximal": "old_logps", "behaviour": "rollout_logps",
                       "advantages": "advantages"},
                settings={"clip": Setting(0.2, "clip"), "cap": Setting(2.0, "bound")},
                reduction="mean", value_is_loss=True, wide=("ids", "loss_mask", "old_logps", "rollout_logps"))


@declare("j/r06")
def turns(m, fn):
    model, b = start(m)
    b["mask"] = (b["turn"] > 0).float()

    def of_turns(model, batch, max_turns=3):
        a = batch["turn_advantages"]
        a = F.pad(a, (0, max_turns - a.shape[1]))  # columns of turns that do not occur
        return fn(model, {"ids": batch["ids"], "turn": batch["turn"] * (batch["mask"] > 0), "turn_advantages": a}, max_turns=max_turns)

    def one_turn_rows(model, batch, max_turns=3):
        """every turn as a row of its own, as its first turn: the mean is over all turns of all rows"""
        turn = batch["turn"] * (batch["mask"] > 0)
        ids, one, adv = [], [], []
        for i in range(len(turn)):
            for k in range(1, int(batch["turn_advantages"].shape[1]) + 1):
                if (turn[i] == k).any():
                    ids.append(batch["ids"][i])
                    one.append((turn[i] == k).long())
                    adv.append(F.pad(batch["turn_advantages"][i, k - 1:k], (0, max_turns - 1)))
        return fn(model, {"ids": torch.stack(ids), "turn": torch.stack(one), "turn_advantages": torch.stack(adv)}, max_turns=max_turns)

    first = Step(model=model, loss=of_turns, batch=b, roles={"ids": "ids", "mask": "mask"}, family="policy gradient",
                 settings={"max_turns": Setting(3, "inert", modes=(4, 5))}, paths={"a row per turn": one_turn_rows},
                 reduction="mean", value_is_loss=True, wide=("ids", "turn", "mask"), name="turns")
    model2, b2 = start(m)
    b2["mask"] = (b2["turn"] > 0).float()
    del b2["turn_advantages"]
    b2["advantages"] = torch.tensor([1.0, -0.7, 0.5])

    def of_rows(model, batch):
        return fn(model, {"ids": batch["ids"], "turn": batch["turn"] * (batch["mask"] > 0),
                          "turn_advantages": batch["advantages"][:, None].expand(-1, 3)})
    second = Step(model=model2, loss=of_rows, batch=b2, family="policy gradient", logprobs=padded(m),
                  roles={"ids": "ids", "mask": "mask", "advantages": "advantages"},
                  reduction="mean", value_is_loss=True, wide=("ids", "turn", "mask"), name="one advantage per row")
    return [first, second]


@declare("j/r07")
def orpo(m, fn):
    model, b = start(m)
    n = len(b["ids"]) // 2
    pairs = {"chosen": b["ids"][:n], "rejected": b["ids"][n:], "chosen_mask": b["loss_mask"][:n], "rejected_mask": b["loss_mask"][n:]}

    def rows(batch):
        return {"ids": torch.cat([batch["chosen"], batch["rejected"]]), "loss_mask": torch.cat([batch["chosen_mask"], batch["rejected_mask"]])}

    def means(model, batch):
        out = []
        for side in ("chosen", "rejected"):
            k = batch[side + "_mask"][:, 1:]
            out.append((m.token_logps(model, batch[side]) * k).sum(1) / k.sum(1))
        return tuple(out)

    def odds(model, batch, lam):  # the odds term alone
        return fn(model, rows(batch), lam=lam) - fn(model, rows(batch), lam=0.0)

    def sft(model, batch):  # the likelihood term alone
        return fn(model, {"ids": torch.cat([batch["ids"], batch["other"]]), "loss_mask": torch.cat([batch["mask"], batch["other_mask"]])}, lam=0.0)
    model2, _ = start(m)
    model3, _ = start(m)
    roles = {k: k for k in pairs}
    return [
        Step(model=model, loss=fn, batch=b, roles={"ids": "ids", "mask": "loss_mask"}, settings={"lam": Setting(0.1, "weight")},
             rows_interact=True, empty_rows=False, value_is_loss=True, wide=("ids", "loss_mask"), family="preference", name="whole loss"),
        Step(model=model2, loss=odds, batch=pairs, roles=roles, settings={"lam": Setting(0.1, "weight")}, logprobs=means, family="preference",
             reduction="mean", empty_rows=False, value_is_loss=True, wide=tuple(pairs), name="odds term"),
        Step(model=model3, loss=sft, batch={"ids": pairs["chosen"], "mask": pairs["chosen_mask"], "other": pairs["rejected"], "other_mask": torch.ones_like(pairs["rejected_mask"])},
             roles={"ids": "ids", "mask": "mask"}, family="sft", reduction="mean", empty_rows=False, value_is_loss=True,
             wide=("ids", "mask", "other", "other_mask"), name="likelihood term"),
    ]


@declare("j/r08")
def kto(m, fn):
    model, b = start(m)
    return Step(model=model, loss=fn, batch=b, family="preference", pairwise=False, rows_interact=True,
                roles={"ids": "ids", "mask": "loss_mask", "reference": "ref_logps", "correct": "desirable"},
                settings={"beta": Setting(0.1, "setting"), "w_good": Setting(1.0, "weight"), "w_bad": Setting(1.33, "weight")},
                metrics={"kl": Metric(low=0.0)}, reduction="mean", value_is_loss=False,
                wide=("ids", "loss_mask", "kl_ids", "kl_mask"))


def pair_sums(m):
    def sums(model, batch):
        return tuple((m.token_logps(model, batch[s]) * batch[s + "_mask"][:, 1:]).sum(1) for s in ("chosen", "rejected"))
    return sums


@declare("j/r09")
def robust_dpo(m, fn):
    model, b = start(m)
    return Step(model=model, loss=fn, batch=b, logprobs=pair_sums(m), family="preference",
                roles={"chosen": "chosen", "rejected": "rejected", "chosen_mask": "chosen_mask", "rejected_mask": "rejected_mask",
                       "reference_chosen": "ref_chosen", "reference_rejected": "ref_rejected"},
                settings={"beta": Setting(0.1, "setting"), "eps": Setting(0.1, "smoothing")},
                reduction="mean", value_is_loss=True, wide=("chosen", "rejected", "chosen_mask", "rejected_mask"))


@declare("j/r10")
def plackett_luce(m, fn):
    model, b = start(m)
    k = b["ids"].shape[1]
    flat = {name: t.flatten(0, 1) for name, t in b.items()}

    def of_rows(model, batch, beta):
        return fn(model, {name: t.reshape(-1, k, *t.shape[1:]) for name, t in batch.items()}, beta=beta)
    pairs = {"chosen": b["ids"][:, 0::2].flatten(0, 1), "rejected": b["ids"][:, 1::2].flatten(0, 1),
             "chosen_mask": b["loss_mask"][:, 0::2].flatten(0, 1), "rejected_mask": b["loss_mask"][:, 1::2].flatten(0, 1),
             "ref_chosen": b["ref_logps"][:, 0::2].flatten(), "ref_rejected": b["ref_logps"][:, 1::2].flatten()}

    def of_pairs(model, batch, beta):  # rankings of two answers
        return fn(model, {"ids": torch.stack([batch["chosen"], batch["rejected"]], 1),
                          "loss_mask": torch.stack([batch["chosen_mask"], batch["rejected_mask"]], 1),
                          "ref_logps": torch.stack([batch["ref_chosen"], batch["ref_rejected"]], 1)}, beta=beta)
    settings = {"beta": Setting(0.1, "setting")}
    return [
        Step(model=model, loss=fn, batch=b, roles={"reference": "ref_logps"}, settings=settings, family="preference",
             reduction="mean", value_is_loss=True, wide=(), name="prompts"),
        Step(model=start(m)[0], loss=of_rows, batch=flat, roles={"ids": "ids", "mask": "loss_mask", "reference": "ref_logps"}, settings=settings,
             family="preference", rows_interact=True, value_is_loss=True, wide=("ids", "loss_mask"), name="answers"),
        Step(model=start(m)[0], loss=of_pairs, batch=pairs, logprobs=pair_sums(m), settings=settings, family="preference",
             roles={"chosen": "chosen", "rejected": "rejected", "chosen_mask": "chosen_mask", "rejected_mask": "rejected_mask",
                    "reference_chosen": "ref_chosen", "reference_rejected": "ref_rejected"},
             reduction="mean", value_is_loss=True, wide=("chosen", "rejected", "chosen_mask", "rejected_mask"), name="rankings of two"),
    ]


@declare("j/r11")
def top_k_distillation(m, fn):
    model, b = start(m)

    def student(model, batch):
        return model(batch["ids"]).log_softmax(-1).gather(-1, batch["top_idx"])
    return Step(model=model, loss=fn, batch=b, student=student, family="divergence",
                roles={"ids": "ids", "mask": "loss_mask", "teacher": "top_logps"},
                reduction="mean", value_is_loss=True, wide=("ids", "loss_mask", "top_idx", "top_logps"))


@declare("j/r12")
def hl_gauss(m, fn):
    model, b = start(m)
    return Step(model=model, loss=fn, batch=b, roles={"ids": "ids", "mask": "loss_mask", "returns": "returns"},
                settings={"lo": Setting(-1.5, "setting"), "hi": Setting(1.5, "setting"), "sigma": Setting(0.15, "setting")},
                metrics={"value_mean": Metric(low=-1.5, high=1.5)},
                reduction="mean", value_is_loss=True, wide=("ids", "loss_mask", "returns"))


@declare("j/r13")
def clipped_value(m, fn):
    model, b = start(m)
    model2, b2 = start(m)

    def unclipped(model, batch):  # a range that no value leaves: every trained token has a gradient
        return fn(model, batch, clip_value=100.0)
    return [
        Step(model=model, loss=fn, batch=b, roles={"ids": "ids", "mask": "loss_mask", "values": "old_values", "returns": "returns"},
             settings={"clip_value": Setting(0.2, "setting")}, drops_tokens=True, reduction="mean", value_is_loss=True,
             wide=("ids", "loss_mask", "old_values", "returns"), name="clipped"),
        Step(model=model2, loss=unclipped, batch=b2, roles={"ids": "ids", "mask": "loss_mask", "returns": "returns"},
             reduction="mean", value_is_loss=True, wide=("ids", "loss_mask", "old_values", "returns"), name="a wide range"),
    ]


@declare("j/r14")
def quantiles(m, fn):
    model, b = start(m)
    return Step(model=model, loss=fn, batch=b, roles={"ids": "ids", "returns": "targets"},
                settings={"kappa": Setting(1.0, "setting")}, reduction="mean", value_is_loss=True, wide=("ids",))


@declare("j/r15")
def z_loss(m, fn):
    model, b = start(m)
    return Step(model=model, loss=fn, batch=b, roles={"ids": "ids", "labels": "labels"}, family="sft",
                settings={"z": Setting(0.01, "weight")}, metrics={"ce": Metric(low=0.0)},
                reduction="mean", value_is_loss=True, wide=("ids", "labels"))


@declare("j/r16")
def packed(m, fn):
    model, b = start(m)
    _, more = start(m, 1)
    b = {k: torch.cat([b[k], more[k].flip(0) if k == "segment" else more[k]]) for k in b}
    b["attention"] = (b["segment"] > 0).long()

    def loss(model, batch):
        return fn(model, {"ids": batch["ids"], "segment": batch["segment"] * (batch["attention"] > 0)})

    def unpacked(model, batch):
        """the documents, one per row, in one padded batch"""
        seg = batch["segment"] * (batch["attention"] > 0)
        docs = [batch["ids"][i][seg[i] == s] for i in range(len(seg)) for s in seg[i].unique().tolist() if s > 0]
        ids = torch.nn.utils.rnn.pad_sequence(docs, batch_first=True)
        one = torch.nn.utils.rnn.pad_sequence([torch.ones_like(d) for d in docs], batch_first=True)
        return fn(model, {"ids": ids, "segment": one})
    return Step(model=model, loss=loss, batch=b, roles={"ids": "ids", "documents": "segment", "attention": "attention"},
                paths={"unpacked documents": unpacked}, all_supervised=True, reduction="mean", value_is_loss=True,
                wide=("ids", "segment", "attention"))


@declare("j/r17")
def weighted_documents(m, fn):
    model, b = start(m)
    _, more = start(m, 1)
    more["doc"] = more["doc"] + 5
    b = {k: torch.cat([b[k], more[k]]) for k in b}

    def loss(model, batch, power):  # numbers that stay unique in the batch where a row is repeated
        doc = batch["doc"]
        doc = doc + torch.arange(len(doc))[:, None] * (int(doc.max()) + 1)
        return fn(model, {**batch, "doc": doc}, power=power)
    return Step(model=model, loss=loss, batch=b, roles={"ids": "ids", "mask": "loss_mask"}, family="sft",
                settings={"power": Setting(0.5, "setting")}, reduction="mean", value_is_loss=True, all_supervised=None,
                wide=("ids", "doc", "loss_mask"))


@declare("j/r18")
def two_tasks(m, fn):
    model, b = start(m)
    (model2, b2), (model3, b3) = start(m), start(m)
    lm = {k: b2[k] for k in ("ids", "loss_mask")}
    fixed = b3.pop("loss_mask")[0]

    def language(model, batch):  # a batch in which no row has a score
        none = torch.zeros(len(batch["ids"]))
        return fn(model, {**batch, "score": none, "has_score": none})[0]

    def score(model, batch):  # what the scores add to the loss
        mask = fixed.expand(len(batch["ids"]), -1)
        whole = {**batch, "loss_mask": mask}
        return fn(model, whole)[0] - fn(model, {**whole, "has_score": torch.zeros_like(batch["has_score"])})[0]
    return [
        Step(model=model, loss=fn, batch=b, roles={"ids": "ids", "mask": "loss_mask"},
             metrics={"lm": Metric(low=0.0), "mse": Metric(low=0.0)}, rows_interact=True, reduction="mean", value_is_loss=True,
             wide=(), name="both tasks"),
        Step(model=model2, loss=language, batch=lm, roles={"ids": "ids", "mask": "loss_mask"}, family="sft", may_idle=("score.*",),
             reduction="mean", value_is_loss=True, wide=("ids", "loss_mask"), name="language task"),
        Step(model=model3, loss=score, batch=b3, roles={"ids": "ids", "returns": "score", "weights": "has_score"}, may_idle=("lm.head.*",),
             reduction="mean", value_is_loss=True, wide=(), name="score task"),
    ]


@declare("j/r19")
def masked_diffusion(m, fn):
    model, b = start(m)
    b["w"] = 1 / b.pop("t")

    def loss(model, batch, mask_id):  # the weight of a row is 1 / t; answer tokens alone may be masked
        noisy = torch.where(batch["answer_mask"] > 0, batch["noisy"], batch["ids"])
        return fn(model, {"ids": batch["ids"], "noisy": noisy, "answer_mask": batch["answer_mask"], "t": 1 / batch["w"]}, mask_id=mask_id)
    return Step(model=model, loss=loss, batch=b, roles={"ids": "noisy", "mask": "answer_mask", "weights": "w"},
                settings={"mask_id": Setting(30, "setting")}, drops_tokens=True, reduction="mean", value_is_loss=True, wide=())


@declare("j/r20")
def electra(m, fn):
    model, b = start(m)
    seen = b["masked"][(b["attention"] > 0) & (b["masked"] != 0)]
    other = int(seen.mode().values)
    wide = ("ids", "masked", "attention", "gumbel")

    def clean(batch, mask_id=0):  # no MASK on padding
        off = (batch["attention"] == 0) & (batch["masked"] == mask_id)
        return {**batch, "masked": batch["masked"].masked_fill(off, (mask_id + 1) % 31)}

    def whole(model, batch, weight, mask_id):
        return fn(model, clean(batch, mask_id), weight=weight, mask_id=mask_id)

    def mlm(model, batch):
        return fn(model, clean(batch), weight=0.0)[0]

    def rtd(model, batch, weight):
        return fn(model, clean(batch), weight=weight)[0] - fn(model, clean(batch), weight=0.0)[0]
    roles = {"ids": "ids", "attention": "attention"}
    return [
        Step(model=model, loss=whole, batch=b, roles=roles, rows_interact=True, reduction="mean", value_is_loss=True, wide=wide,
             settings={"weight": Setting(50.0, "weight"), "mask_id": Setting(0, "setting", modes=(other,))},
             metrics={"mlm": Metric(low=0.0, weight=1.0), "rtd": Metric(low=0.0, weight="weight")}, name="both terms"),
        Step(model=start(m)[0], loss=mlm, batch=start(m)[1], roles=roles, may_idle=("dis.*", "dis_head.*"), reduction="mean", value_is_loss=True,
             wide=wide, name="generator"),
        Step(model=start(m)[0], loss=rtd, batch=start(m)[1], roles=roles, may_idle=("gen.*", "gen_head.*"), reduction="mean", value_is_loss=True,
             settings={"weight": Setting(50.0, "weight")}, wide=wide, name="discriminator"),
    ]


@declare("j/r21")
def long_ce(m, fn):
    model, b = start(m)
    return Step(model=model, loss=fn, batch=b, roles={"ids": "ids", "mask": "loss_mask"}, family="sft",
                settings={"window": Setting(4, "setting"), "gamma": Setting(5.0, "setting")},
                metrics={"weight_mean": Metric(low=0.0, high=5.0)}, reduction="mean", value_is_loss=False, all_supervised=True,
                wide=("ids", "loss_mask"))


@declare("j/r22")
def truncated_backprop(m, fn):
    model, b = start(m)
    b["loss_mask"][:, 0] = 0  # nothing predicts the first token
    return Step(model=model, loss=fn, batch=b, roles={"ids": "ids", "mask": "loss_mask"}, family="sft",
                settings={"segment": Setting(5, "setting", modes=(3, 7))}, reduction="mean", value_is_loss=False, all_supervised=True,
                wide=("ids", "loss_mask"))


@declare("j/r23")
def dynamic_finetuning(m, fn):
    model, b = start(m)

    def minus_mean_p(model, batch):  # NOTES: the gradient equals that of -mean p
        y = batch["labels"][:, 1:]
        keep = y != -100
        p = model(batch["ids"])[:, :-1].softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0]
        return -(p * keep).sum() / keep.sum()
    return Step(model=model, loss=fn, batch=b, roles={"ids": "ids", "labels": "labels"}, family="sft", paths={"-mean p": minus_mean_p},
                reduction="mean", value_is_loss=False, wide=("ids", "labels"))


@declare("j/r24")
def unlikelihood(m, fn):
    model, b = start(m)
    return Step(model=model, loss=fn, batch=b, roles={"ids": "ids", "mask": "loss_mask"}, family="sft",
                settings={"alpha": Setting(1.0, "weight")}, reduction="mean", value_is_loss=True, all_supervised=True,
                wide=("ids", "loss_mask"))


@declare("j/r25")
def multi_token(m, fn):
    model, b = start(m)
    model2, b2 = start(m)
    b2["loss_mask"][:, :3] = 0  # every head has the same trained targets
    common = dict(loss=fn, roles={"ids": "ids", "mask": "loss_mask"}, family="sft", settings={"lam": Setting(0.3, "weight")},
                  metrics={f"head{d}": Metric(low=0.0) for d in range(3)}, reduction="mean", value_is_loss=True, wide=("ids", "loss_mask"))
    return [Step(model=model, batch=b, rows_interact=True, name="heads with their own targets", **common),
            Step(model=model2, batch=b2, name="heads with the same targets", **common)]
