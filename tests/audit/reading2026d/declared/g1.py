import torch
from torch import nn
from tests.audit.reading2026d.reading import declare, no_subject
from earnest_audit import AdvantageEstimator, Metric, Setting, Step


def lps(m):
    return lambda model, b: m.token_logps(model, b["ids"])


class Table(nn.Module):
    """Logits that are parameters: the gradient at a sampled token shows its advantage."""

    def __init__(self, rows, time, V):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(rows, time, V))

    def forward(self, ids):
        return self.logits


def shown_advantages(m, loss, rows):
    """The advantage of each row of two tokens (one trained), where loss(model, ids) is the mean over rows."""
    table, ids = Table(rows, 2, m.V), torch.ones(rows, 2, dtype=torch.long)
    (g,) = torch.autograd.grad(loss(table, ids), [table.logits])
    return -g[:, 0, 1] * rows / (1 - 1 / m.V)


@declare("g/r01")
def cispo(m, fn):
    b = m.make(0); model = b.pop("model")
    return Step(model=model, loss=fn, batch=b, name="g01",
                roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logps", "advantages": "advantages"},
                settings={"clip_high": Setting(0.28, "clip high")}, logprobs=lps(m), reduction="mean",
                value_is_loss=False, family="policy gradient", wide=("ids", "loss_mask", "old_logps"))


@declare("g/r02")
def gspo_token(m, fn):
    b = m.make(0); model = b.pop("model")
    return Step(model=model, loss=fn, batch=b, name="g02",
                roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logps", "advantages": "advantages"},
                settings={"eps_low": Setting(0.05, "clip"), "eps_high": Setting(0.08, "clip high")}, logprobs=lps(m),
                reduction="mean", value_is_loss=False, empty_rows=False, family="policy gradient",
                wide=("ids", "loss_mask", "old_logps", "advantages"))


@declare("g/r03")
def dual_clip(m, fn):
    b = m.make(0); model = b.pop("model")
    return Step(model=model, loss=fn, batch=b, name="g03",
                roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logps", "advantages": "advantages"},
                settings={"clip": Setting(0.2, "clip"), "c": Setting(3.0, "bound")},
                metrics={"dual_clip_fraction": Metric(low=0.0, high=1.0, neutral=0.0)}, logprobs=lps(m),
                reduction="mean", value_is_loss=True, family="policy gradient",
                wide=("ids", "loss_mask", "old_logps", "advantages"))


@declare("g/r04")
def topr(m, fn):
    b = m.make(0); model = b.pop("model")
    return Step(model=model, loss=fn, batch=b, name="g04",
                roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logps", "advantages": "reward"},
                logprobs=lps(m), reduction="mean", value_is_loss=False, family="policy gradient",
                wide=("ids", "loss_mask", "old_logps"))


@declare("g/r05")
def on_policy_groups(m, fn):
    b = m.make(0); model = b.pop("model")

    def advantages(rewards, groups):
        def loss(table, ids):
            return fn(table, {"ids": ids, "loss_mask": torch.tensor([0.0, 1.0]).repeat(len(ids), 1), "rewards": rewards})
        return shown_advantages(m, loss, len(rewards))

    return [
        Step(model=model, loss=fn, batch=b, name="g05", roles={"ids": "ids", "mask": "loss_mask", "rewards": "rewards"},
             settings={"group": Setting(3, "setting", modes=(2, 6))}, logprobs=lps(m), reduction="mean",
             value_is_loss=False, rows_interact=True, empty_rows=False, family="policy gradient",
             wide=("ids", "loss_mask")),
        AdvantageEstimator(advantages, scale="equal", over="group", groups=3, size=3, interleaved=False),
    ]


@declare("g/r06")
def reinforce_kl(m, fn):
    b = m.make(0); model = b.pop("model")
    return Step(model=model, loss=fn, batch=b, name="g06",
                roles={"ids": "ids", "mask": "loss_mask", "reference": "ref_logps", "advantages": "advantages"},
                settings={"beta": Setting(0.1, "weight")}, logprobs=lps(m), reduction="mean", value_is_loss=False,
                family="policy gradient", wide=("ids", "loss_mask", "ref_logps"))


@declare("g/r07")
def mismatch(m, fn):
    b = m.make(0); model = b.pop("model")
    return Step(model=model, loss=fn, batch=b, name="g07",
                roles={"ids": "ids", "mask": "loss_mask", "proximal": "old_logps", "behaviour": "rollout_logps",
                       "advantages": "advantages"},
                settings={"clip": Setting(0.2, "clip"), "cap": Setting(2.0, "bound")},
                metrics={"mismatch_mean": Metric(low=0.0, neutral=1.0)}, logprobs=lps(m), reduction="mean",
                value_is_loss=True, family="policy gradient",
                wide=("ids", "loss_mask", "old_logps", "rollout_logps"))


@declare("g/r08")
def lagged(m, fn):
    b = m.make(0); model = b.pop("model")
    return Step(model=model, loss=fn, batch=b, name="g08",
                roles={"ids": "ids", "mask": "loss_mask", "behaviour": "behav_logps", "advantages": "advantages"},
                settings={"clip": Setting(0.2, "clip")}, logprobs=lps(m), reduction="mean", value_is_loss=False,
                family="policy gradient", wide=("ids", "loss_mask", "behav_logps"))


@declare("g/r09")
def covariance(m, fn):
    b = m.make(0); model = b.pop("model")
    n = int(b["loss_mask"][:, 1:].sum())
    even = int(2 * n * 0.1) == 2 * int(n * 0.1)  # only then do doubled rows have twice the selected tokens
    return Step(model=model, loss=fn, batch=b, name="g09",
                roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logps", "advantages": "advantages"},
                settings={"k_ratio": Setting(0.1, "setting", modes=(0.3, 0.6)), "coef": Setting(1.0, "weight")},
                logprobs=lps(m), reduction="mean" if even else None, value_is_loss=True, rows_interact=True,
                family="policy gradient", wide=("ids", "loss_mask", "old_logps", "advantages"))


@declare("g/r10")
def kto(m, fn):
    b = m.make(0); model = b.pop("model")
    return Step(model=model, loss=fn, batch=b, name="g10",
                roles={"ids": "ids", "mask": "loss_mask", "reference": "ref_logps", "correct": "label"},
                settings={"beta": Setting(0.1, "setting"), "w_good": Setting(1.0, "weight"),
                          "w_bad": Setting(1.33, "weight")},
                metrics={"kl_point": Metric(low=0.0)}, reduction="mean", value_is_loss=False, rows_interact=True,
                pairwise=False, family="preference", wide=("ids", "loss_mask", "kl_ids", "kl_mask"))


@declare("g/r11")
def ipo(m, fn):
    b = m.make(0); model = b.pop("model")
    batch = {}
    for key, name in (("ids", ""), ("loss_mask", "_mask"), ("ref_avg_logps", "_ref")):
        batch["chosen" + name], batch["rejected" + name] = (x.clone() for x in b[key].chunk(2))

    def loss(model, x, **settings):
        both = lambda name: torch.cat([x["chosen" + name], x["rejected" + name]])
        return fn(model, {"ids": both(""), "loss_mask": both("_mask"), "ref_avg_logps": both("_ref")}, **settings)

    def averages(model, x):
        one = lambda k: (m.token_logps(model, x[k]) * x[k + "_mask"][:, 1:]).sum(1) / x[k + "_mask"][:, 1:].sum(1)
        return one("chosen"), one("rejected")

    return Step(model=model, loss=loss, batch=batch, name="g11",
                roles={"chosen": "chosen", "rejected": "rejected", "chosen_mask": "chosen_mask",
                       "rejected_mask": "rejected_mask", "reference_chosen": "chosen_ref",
                       "reference_rejected": "rejected_ref"},
                settings={"beta": Setting(0.5, "setting")}, logprobs=averages, reduction="mean", value_is_loss=True,
                empty_rows=False, family="preference", wide=("chosen", "rejected", "chosen_mask", "rejected_mask"))


@declare("g/r12")
def robust_dpo(m, fn):
    b = m.make(0); model = b.pop("model")

    def sums(model, x):
        one = lambda k: (m.token_logps(model, x[k + "_ids"]) * x[k + "_mask"][:, 1:]).sum(1)
        return one("chosen"), one("rejected")

    return Step(model=model, loss=fn, batch=b, name="g12",
                roles={"chosen": "chosen_ids", "rejected": "rejected_ids", "chosen_mask": "chosen_mask",
                       "rejected_mask": "rejected_mask", "reference_chosen": "ref_chosen",
                       "reference_rejected": "ref_rejected"},
                settings={"beta": Setting(0.1, "setting"), "eps": Setting(0.1, "smoothing")}, logprobs=sums,
                reduction="mean", value_is_loss=True, family="preference",
                wide=("chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask"))


@declare("g/r13")
def npo(m, fn):
    b = m.make(0); model = b.pop("model")
    b["keep"] = ~b.pop("forget")

    def loss(model, x, **settings):
        return fn(model, {**{k: v for k, v in x.items() if k != "keep"}, "forget": ~x["keep"].bool()}, **settings)

    return Step(model=model, loss=loss, batch=b, name="g13",
                roles={"ids": "ids", "mask": "loss_mask", "reference": "ref_logps", "correct": "keep"},
                settings={"beta": Setting(0.1, "setting"), "retain": Setting(1.0, "weight")},
                metrics={"npo": Metric(low=0.0, weight=1.0), "retain_ce": Metric(low=0.0, weight="retain")},
                reduction="mean", value_is_loss=True, rows_interact=True, pairwise=False, family="preference",
                wide=("ids", "loss_mask"))


@declare("g/r14")
def jsd(m, fn):
    b = m.make(0); model = b.pop("model")
    # in the form of log-probs: mask and teacher of ids[:, 1:]
    batch = {"ids": b["ids"], "mask": b["loss_mask"][:, 1:].clone(), "teacher": b["teacher_logits"][:, :-1].clone()}

    def loss(model, x, **settings):
        mask, teacher = x["mask"], x["teacher"]
        return fn(model, {"ids": x["ids"], "loss_mask": torch.cat([torch.zeros_like(mask[:, :1]), mask], 1),
                          "teacher_logits": torch.cat([teacher, torch.zeros_like(teacher[:, :1])], 1)}, **settings)

    return Step(model=model, loss=loss, batch=batch, name="g14",
                roles={"ids": "ids", "mask": "mask", "teacher": "teacher"},
                settings={"beta": Setting(0.3, "mixture"), "temperature": Setting(0.9, "setting")},
                student=lambda model, x: model(x["ids"])[:, :-1], reduction="mean", value_is_loss=True,
                family="divergence", wide=("ids", "mask", "teacher"))


@declare("g/r15")
def top_k(m, fn):
    b = m.make(0); model = b.pop("model")
    return Step(model=model, loss=fn, batch=b, name="g15",
                roles={"ids": "ids", "mask": "loss_mask", "teacher": "top_logps"},
                student=lambda model, x: model(x["ids"])[:, :-1].log_softmax(-1).gather(-1, x["top_ids"]),
                reduction="mean", value_is_loss=True, family="divergence",
                wide=("ids", "loss_mask", "top_ids", "top_logps"))


@declare("g/r16")
def on_policy_distillation(m, fn):
    b = m.make(0); model = b.pop("model")
    return Step(model=model, loss=fn, batch=b, name="g16",
                roles={"ids": "ids", "mask": "loss_mask", "behaviour": "sampler_logps", "teacher": "teacher_logps"},
                settings={"coef": Setting(1.0, "weight")}, logprobs=lps(m), reduction="mean", value_is_loss=True,
                family="policy gradient", wide=("ids", "loss_mask", "sampler_logps", "teacher_logps"))


@declare("g/r17")
def hl_gauss(m, fn):
    b = m.make(0); model = b.pop("model")
    return Step(model=model, loss=fn, batch=b, name="g17",
                roles={"ids": "ids", "mask": "loss_mask", "returns": "returns"},
                settings={"low": Setting(-3.0, "setting", modes=(-4.0,)), "high": Setting(3.0, "setting", modes=(4.0,)),
                          "sigma": Setting(0.75, "setting", modes=(1.5,))},
                reduction="mean", value_is_loss=True, wide=("ids", "loss_mask", "returns"))


@declare("g/r18")
def expectile(m, fn):
    b = m.make(0); model = b.pop("model")
    return Step(model=model, loss=fn, batch=b, name="g18",
                roles={"ids": "ids", "mask": "loss_mask", "returns": "q"},
                settings={"tau": Setting(0.8, "setting", modes=(0.5, 0.9))},
                reduction="mean", value_is_loss=True, wide=("ids", "loss_mask", "q"))


def first_head(model, x):
    return model(x["ids"])[0][:, :-1].log_softmax(-1).gather(-1, x["ids"][:, 1:, None])[..., 0]


@declare("g/r19")
def moe(m, fn):
    b = m.make(0); model = b.pop("model")
    return Step(model=model, loss=fn, batch=b, name="g19",
                roles={"ids": "ids", "mask": "loss_mask", "attention": "attention_mask"},
                settings={"alpha": Setting(0.01, "weight"), "top_k": Setting(2, "setting", modes=(1, 3))},
                metrics={"aux": Metric(low=0.0, high=float(m.E), weight="alpha")}, logprobs=first_head,
                reduction="mean", rows_interact=True, family="sft", wide=("ids", "loss_mask", "attention_mask"))


@declare("g/r20")
def mtp(m, fn):
    b = m.make(0); model = b.pop("model")
    return Step(model=model, loss=fn, batch=b, name="g20", roles={"ids": "ids", "mask": "loss_mask"},
                settings={"lam": Setting(0.3, "weight")}, logprobs=first_head, reduction="mean", value_is_loss=True,
                family="sft", wide=("ids", "loss_mask"))


@declare("g/r21")
def dft(m, fn):
    b = m.make(0); model = b.pop("model")
    return Step(model=model, loss=fn, batch=b, name="g21", roles={"ids": "ids", "mask": "loss_mask"},
                logprobs=lps(m), reduction="mean", value_is_loss=False, family="sft", wide=("ids", "loss_mask"))


@declare("g/r22")
def turns(m, fn):
    b = m.make(0); model = b.pop("model")
    turn = b["turn"]
    # the numbers of turns as a mask (written by the model) and the turn that a token stands in or after
    batch = {"ids": b["ids"], "mask": (turn > 0).float(), "turn_number": turn.cummax(1).values.clamp(min=1),
             "turn_rewards": b["turn_rewards"]}

    def loss(model, x, **settings):
        turn = x["turn_number"] * (x["mask"] > 0).long()
        return fn(model, {"ids": x["ids"], "turn": turn, "turn_rewards": x["turn_rewards"]}, **settings)

    def advantages(rewards, groups):
        def one_turn(table, ids):
            return fn(table, {"ids": ids, "turn": torch.tensor([0, 1]).repeat(len(ids), 1), "turn_rewards": rewards[:, None]})
        return shown_advantages(m, one_turn, len(rewards))

    return [
        Step(model=model, loss=loss, batch=batch, name="g22",
             roles={"ids": "ids", "mask": "mask", "rewards": "turn_rewards"},
             settings={"gamma": Setting(0.9, "setting")}, logprobs=lps(m), reduction="mean", value_is_loss=True,
             rows_interact=True, family="policy gradient", wide=("ids", "mask", "turn_number")),
        AdvantageEstimator(advantages, scale="equal", over="batch"),
    ]


@declare("g/r23")
def trajectories(m, fn):
    b = m.make(0); model = b.pop("model")
    batch = {"ids": b["ids"], "loss_mask": b["loss_mask"], "traj": b["traj"], "advantages": b["advantages"][b["traj"]]}

    def loss(model, x):
        names, place = x["traj"].unique(return_inverse=True)  # a trajectory's advantage, from those of its rows
        a, n = torch.zeros(len(names)), torch.zeros(len(names))
        a = a.index_add(0, place, x["advantages"]) / n.index_add(0, place, torch.ones(len(place)))
        return fn(model, {"ids": x["ids"], "loss_mask": x["loss_mask"], "traj": place, "advantages": a})

    return Step(model=model, loss=loss, batch=batch, name="g23",
                roles={"ids": "ids", "mask": "loss_mask", "advantages": "advantages", "group": "traj"},
                logprobs=lps(m), reduction="mean", value_is_loss=True, rows_interact=True, family="policy gradient",
                wide=("ids", "loss_mask"))


@declare("g/r24")
def branches(m, fn):
    b = m.make(0); model = b.pop("model")

    def unpacked(model, x):
        """Each answer in a row of its own, behind its prompt."""
        rows = []
        for ids, branch in zip(x["ids"], x["branch"]):
            start = int((branch != 0).float().argmax())
            for k in branch[branch > 0].unique().tolist():
                answer = ids[branch == k]
                rows.append((torch.cat([ids[:start], answer]), start))
        width = max(len(ids) for ids, _ in rows)
        out = {k: torch.zeros(len(rows), width, dtype=torch.long) for k in ("ids", "branch", "parent", "position_ids")}
        out["branch"] -= 1
        for i, (ids, start) in enumerate(rows):
            n = len(ids)
            out["ids"][i, :n] = ids
            out["branch"][i, :start], out["branch"][i, start:n] = 0, 1
            out["parent"][i, :n] = (torch.arange(n) - 1).clamp(min=0)
            out["position_ids"][i, :n] = torch.arange(n)
        return fn(model, out)

    return Step(model=model, loss=fn, batch=b, name="g24", roles={"ids": "ids", "positions": "position_ids"},
                paths={"each answer in its own row": unpacked}, reduction="mean", value_is_loss=True,
                wide=("ids", "branch", "parent", "position_ids"))


@declare("g/r25")
def documents(m, fn):
    b = m.make(0); model = b.pop("model")

    def unpacked(model, x):
        """Each document in a row of its own."""
        docs = [ids[doc == k] for ids, doc in zip(x["ids"], x["doc"]) for k in doc[doc > 0].unique().tolist()]
        ids = torch.zeros(len(docs), max(map(len, docs)), dtype=torch.long)
        doc = torch.zeros_like(ids)
        for i, d in enumerate(docs):
            ids[i, : len(d)], doc[i, : len(d)] = d, 1
        return fn(model, {"ids": ids, "doc": doc})

    return Step(model=model, loss=fn, batch=b, name="g25", roles={"ids": "ids", "documents": "doc"},
                paths={"each document in its own row": unpacked}, reduction="mean", value_is_loss=True, family="sft",
                all_supervised=True, wide=("ids", "doc"))
