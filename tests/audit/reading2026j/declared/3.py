"""Declarations of m051 to m075."""
import copy

import torch
import torch.nn.functional as F
from tests.audit.reading2026j.reading import declare, no_subject  # noqa: F401
from torch import nn

from earnest_audit import (
    GAE,
    Accumulation,
    Census,
    Collator,
    Merge,
    Metric,
    Ranks,
    Schedule,
    Setting,
    Step,
    WeightSync,
)


class Recorder(torch.optim.SGD):
    """Keeps the gradients that it is given at each step, and leaves the weights alone."""

    def __init__(self, params):
        super().__init__(list(params), lr=0.1)
        self.seen = None

    def step(self, closure=None):
        self.seen = [(p, None if p.grad is None else p.grad.detach().clone()) for g in self.param_groups for p in g["params"]]

    def leave(self):
        for p, grad in self.seen or ():
            p.grad = grad


def flat_rows(shard):
    return shard if torch.is_tensor(shard) else torch.stack(list(shard))


def rows_of(batch):
    n = len(next(iter(batch.values())))
    return [{k: v[i : i + 1] for k, v in batch.items()} for i in range(n)]


def widen(x, width):
    return F.pad(x, (0, width - x.shape[1]))


def aligned_logps(model, ids):
    """[B, T]: entry t is the log-prob of ids[:, t], entry 0 a 0."""
    logp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return F.pad(logp, (1, 0))


@declare("z/r18")
def skip_positions(m, fn):
    number = lambda row: int(row["uid"][1:].replace("-", "0000"))
    texts = [r for seed in (0, 1, 2) for r in m.make(seed)["rows"][:6]]
    texts.append({"uid": "d3-0", "input_ids": list(range(32)) + list(range(32))})  # exactly as long as the context

    def stage(**settings):
        target, chunks = settings.get("target_len", 64), settings.get("chunks", 2)

        def run(examples):
            rows = fn(examples, **settings)
            wide = max(len(r["position_ids"]) for r in rows)
            wide = max(wide, *(len(r["input_ids"]) for r in rows), 1)
            pad = lambda x: list(x) + [-1] * (wide - len(x))
            ok = []
            for r in rows:
                p = list(r["position_ids"])
                jumps = sum(b - a != 1 for a, b in zip(p, p[1:]))
                short = len(r["input_ids"]) < chunks
                ok.append([len(p), p[0], int(all(a < b for a, b in zip(p, p[1:]))), int(p[-1] < target), int(jumps <= (0 if short else chunks - 1))])
            return {
                "uid": torch.tensor([[number(r)] for r in rows]),
                "input_ids": torch.tensor([pad(r["input_ids"]) for r in rows]),
                "position_ids": torch.tensor([pad(r["position_ids"]) for r in rows]),
                "promised": torch.tensor(ok),
            }

        return Collator(
            fn=run,
            examples=copy.deepcopy(texts),
            pads={"input_ids": -1, "position_ids": -1},
            columns={
                "uid": lambda e: [number(e)],
                "input_ids": lambda e: e["input_ids"],
                # length, first position 0, strictly rising, below target_len, at most chunks - 1 gaps
                "promised": lambda e: [len(e["input_ids"]), 0, 1, 1, 1],
            },
        )

    def drawn(rows, **settings):
        return torch.tensor([p for r in fn(rows, **settings) for p in r["position_ids"]])

    same = lambda k: [{"uid": f"rank{k}-{i}", "input_ids": list(range(12))} for i in range(6)]
    return [
        stage(),
        stage(chunks=3, target_len=96, epoch=1),
        Ranks(draw=lambda epoch: drawn(m.make(0)["rows"], epoch=epoch)),  # every epoch has its own gaps
        Ranks(draw=lambda k: drawn(same(k))),  # and so has every uid
    ]


@declare("bb/r14")
def batch_ramp(m, fn):
    def legal(v, given, up, down):
        return given if v == given else up if v > given else down

    def rates(total, ranks=1, start=16, increment=8, samples=1000, final=64):
        more = {}
        start, final = legal(start, 16, 24, 8), legal(final, 64, 72, 56)  # the next legal sizes
        if increment < 8:
            more = {"unit": 4}
        increment = legal(increment, 8, 16, 4)
        return [fn(step=k, start=start, increment=increment, samples=samples, final=final, **more) for k in range(total)]

    # the words: stairs of 1000 / 6 samples each, full size once the ramp's samples are consumed
    consumed, full = 0, 0
    while consumed < 1000:
        consumed += 16 + 8 * int(consumed / (1000 / 6))
        full += 1
    return Schedule(
        rates=rates, peak=64.0, final=64.0, total=80, warmup=full, ends=full,
        settings={"start": 16, "increment": 8, "samples": 1000, "final": 64},
    )


@declare("bb/r18")
def std_over_ranks(m, fn):
    rows = torch.cat(m.make(0)["ranks"])
    empty = rows[:0]

    def single(shards):
        x = torch.cat([flat_rows(s) for s in shards])
        return float(((x - x.mean()) ** 2).sum().div(len(x) - 1).sqrt())

    ranks = lambda shards: [flat_rows(s) for s in shards]

    def few(shards):
        try:
            return float(fn(shards))
        except (ArithmeticError, IndexError, RuntimeError, ValueError):
            return float("nan")  # no number, where 0.0 is promised

    return [
        Ranks(metric=lambda s: float(fn(ranks(s))), rows=rows, single=single),
        Ranks(metric=lambda s: float(fn([empty, *ranks(s), empty])), rows=rows, single=single),  # an empty rank is neutral
        Ranks(metric=lambda s: float(fn(ranks(s)[::-1])), rows=rows, single=single),  # in any order
        Census(
            wanted={"no reward": 0.0, "one reward": 0.0},
            found={"no reward": few([empty, empty]), "one reward": few([empty, rows[:1]])},
            what="stds of fewer than two rewards",
        ),
    ]


@declare("z/r25")
def ties_merge(m, fn):
    given = m.make(0)
    base, tuned = given["base"], given["tuned"]
    keys = [k for k, v in base.items() if v.is_floating_point() and k != "out.weight"]  # the tied tensor once
    flat = lambda s: torch.cat([s[k].reshape(-1) for k in keys])
    b = flat(base)

    def trimmed(t, density):
        v = flat(t) - b
        keep = max(1, int(density * v.numel()))
        out = torch.zeros_like(v)
        top = v.abs().topk(keep).indices
        out[top] = v[top]
        return out

    def elected(models, density):
        T = torch.stack([trimmed(t, density) for t in models])
        total = T.sum(0)
        sign = total.sign()
        sign = torch.where(sign == 0, sign.sum().sign(), sign)
        agree = (T.sign() == sign) & (T != 0)
        return (T * agree).sum(0) / agree.sum(0).clamp(min=1)

    def merge(models, density):
        effect = elected(models, density)
        return Merge(delta=lambda w: flat(fn(base, models, density=density, lam=w)) - b, applied=lambda w: w * effect)

    merged = fn(base, tuned)
    tied = all(k in merged for k in ("emb.weight", "out.weight")) and merged["emb.weight"].data_ptr() == merged["out.weight"].data_ptr()
    size = {k: float(merged[k].numel()) for k in keys if k in merged}
    return [
        merge(tuned, 0.2),
        merge(tuned, 0.6),
        merge(tuned[:1], 1.0),  # one model, nothing trimmed: the task vector itself
        merge([tuned[1]] * 3, 0.2),
        Census(wanted=list(base), found=list(merged), what="keys"),
        Census(
            wanted={"steps": float(base["steps"]), "tied": 1.0, **{k: float(base[k].numel()) for k in keys}},
            found={"steps": float(merged.get("steps", -1)), "tied": float(tied), **size},
            what="buffers of the base, ties and sizes",
        ),
        Collator(fn=lambda models: {"merged": flat(fn(base, list(models)))[None]}, examples=tuned, rows=False),
    ]


@declare("y/r24")
def quantile_value(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given,
        roles={"ids": "ids", "returns": "reward"},
        settings={"gamma": Setting(0.95, "setting"), "kappa": Setting(1.0, "setting")},
        reduction="mean", value_is_loss=True, wide=("ids",),
    )


@declare("z/r10")
def router_bias(m, fn):
    given = m.make(0)
    ids = torch.cat([b["ids"] for step in given["batches"] for b in step])[:12]

    def equal(batches):
        """Micro-batches of one size, which the code asks for."""
        if len({len(b["ids"]) for b in batches}) == 1:
            return list(batches)
        return [r for b in batches for r in rows_of(b)]

    def run(model, batches, steps, u):
        taken = [p for n, p in model.named_parameters() if n != "moved"]
        opt, before, mode = Recorder(taken), model.bias.clone(), model.training
        fn(model, opt, [equal(batches)] * steps, u=u)
        moved = model.bias - before
        with torch.no_grad():
            model.bias.copy_(before)
        model.train(mode)
        opt.leave()
        return moved

    def with_bias(model, batches):
        moved = run(model, batches, 2, 0.05)
        model.moved.grad = moved.clone()  # what the two steps did to the bias

    plain, other, third = m.make(0)["model"], m.make(0)["model"], m.make(0)["model"]
    other.register_parameter("moved", nn.Parameter(torch.zeros(len(other.bias))))
    cross = lambda model, batch: F.cross_entropy(model(batch["ids"])[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())
    return [
        Accumulation(model=plain, accumulate=lambda model, batches: run(model, batches, 1, 0.5), batch={"ids": ids}, split=(4, 4, 4)),
        Accumulation(model=plain, accumulate=lambda model, batches: run(model, batches, 1, 0.01), batch={"ids": ids}),
        Accumulation(model=other, accumulate=with_bias, batch={"ids": ids}, what="micro-batches, and the router's bias"),
        Step(
            model=third, loss=cross, batch={"ids": ids}, roles={"ids": "ids"}, family="sft", all_supervised=True, reduction="mean",
            backward=lambda settings: run(third, [{"ids": x} for x in ids.split(4)], 2, 0.0),
        ),
    ]


@declare("y/r20")
def decoupled_distillation(m, fn):
    wide = ("ids", "targets", "teacher_logits")

    def part():
        given = m.make(0)
        return given.pop("model"), given

    def likelihood(model, batch):
        return fn(model, batch, alpha=0.0, beta=0.0)

    def distillation(model, batch, alpha, beta, temperature):
        return fn(model, batch, alpha=alpha, beta=beta, temperature=temperature) - fn(model, batch, alpha=0.0, beta=0.0, temperature=temperature)

    model, batch = part()
    again, same = part()
    return [
        Step(
            model=model, loss=likelihood, batch=batch, roles={"ids": "ids", "labels": "targets"},
            family="sft", reduction="mean", value_is_loss=True, wide=wide, name="the cross-entropy",
        ),
        Step(
            model=again, loss=distillation, batch=same, roles={"ids": "ids", "labels": "targets", "teacher": "teacher_logits"},
            settings={"alpha": Setting(1.0, "weight"), "beta": Setting(8.0, "weight"), "temperature": Setting(4.0, "setting")},
            student=lambda model, batch: model(batch["ids"]),
            family="divergence", reduction="mean", value_is_loss=True, wide=wide, name="the distillation",
        ),
    ]


@declare("y/r13")
def robust_dpo(m, fn):
    given = m.make(0)
    model = given.pop("model")
    ids, mask, ref = given["ids"], given["completion_mask"], given["ref_logps"]
    batch = {
        "chosen": ids[0::2].clone(), "rejected": ids[1::2].clone(),
        "chosen_mask": mask[0::2].clone(), "rejected_mask": mask[1::2].clone(),
        "ref_chosen": ref[0::2].clone(), "ref_rejected": ref[1::2].clone(),
    }

    def pair(a, b):
        if a.ndim > 1:
            width = max(a.shape[1], b.shape[1])
            a, b = widen(a, width), widen(b, width)
        return torch.stack([a, b], 1).flatten(0, 1)

    def loss(model, batch, beta, eps):
        rows = {
            "ids": pair(batch["chosen"], batch["rejected"]),
            "completion_mask": pair(batch["chosen_mask"], batch["rejected_mask"]),
            "ref_logps": pair(batch["ref_chosen"], batch["ref_rejected"]),
        }
        return fn(model, rows, beta=beta, eps=eps)

    def logprobs(model, batch):
        return tuple((aligned_logps(model, batch[s])[:, 1:] * batch[s + "_mask"][:, 1:]).sum(1) for s in ("chosen", "rejected"))

    return Step(
        model=model, loss=loss, batch=batch,
        roles={
            "chosen": "chosen", "rejected": "rejected", "chosen_mask": "chosen_mask", "rejected_mask": "rejected_mask",
            "reference_chosen": "ref_chosen", "reference_rejected": "ref_rejected",
        },
        settings={"beta": Setting(0.1, "setting"), "eps": Setting(0.2, "smoothing")},
        logprobs=logprobs, reduction="mean", value_is_loss=True, family="preference",
        wide=("chosen", "rejected", "chosen_mask", "rejected_mask"),
    )


@declare("y/r09")
def mirror_descent(m, fn):
    given = m.make(0)
    model = given["model"]
    ids, mask = given["ids"].flatten(0, 1), given["completion_mask"].flatten(0, 1)
    old_seq = given["old_seq_logp"].flatten()
    prompts, samples = given["ids"].shape[:2]
    # the log-prob of an answer as that of its tokens, which the loss sums
    with torch.no_grad():
        now = aligned_logps(model, ids) * mask
        old = now + ((old_seq - now.sum(1)) / mask.sum(1))[:, None] * mask
    batch = {
        "ids": ids, "mask": mask, "old_logps": old, "rewards": given["rewards"].flatten(),
        "group": torch.arange(prompts).repeat_interleave(samples),
    }

    def loss(model, batch, tau):
        order = torch.argsort(batch["group"], stable=True)
        number = len(torch.unique(batch["group"]))
        cut = lambda x: x[order].reshape(number, -1, *x.shape[1:])
        return fn(model, {
            "ids": cut(batch["ids"]), "completion_mask": cut(batch["mask"]),
            "old_seq_logp": cut((batch["old_logps"] * batch["mask"]).sum(1)), "rewards": cut(batch["rewards"]),
        }, tau=tau)

    return Step(
        model=model, loss=loss, batch=batch,
        roles={"ids": "ids", "mask": "mask", "reference": "old_logps", "rewards": "rewards", "group": "group"},
        settings={"tau": Setting(0.5, "setting")},
        logprobs=lambda model, batch: aligned_logps(model, batch["ids"]),
        family="policy gradient", reduction="mean", rows_interact=True, value_is_loss=True,
        wide=("ids", "mask", "old_logps"),
    )


@declare("y/r16")
def token_dpo(m, fn):
    given = m.make(0)
    model = given.pop("model")
    (cw, cl), (mw, ml) = given["ids"].chunk(2), given["completion_mask"].chunk(2)
    rw, rl = given["ref_logprobs"].chunk(2)
    batch = {
        "chosen": cw.clone(), "rejected": cl.clone(), "chosen_mask": mw.clone(), "rejected_mask": ml.clone(),
        "ref": torch.stack([rw, rl], 2),  # [P, T, 2, V]
    }

    def loss(model, batch, beta, alpha):
        ref = batch["ref"]
        width = max(batch[k].shape[1] for k in ("chosen", "rejected", "chosen_mask", "rejected_mask", "ref"))
        if ref.shape[1] < width:
            ref = F.pad(ref, (0, 0, 0, 0, 0, width - ref.shape[1]))
        both = lambda a, b: torch.cat([widen(batch[a], width), widen(batch[b], width)])
        rows = {
            "ids": both("chosen", "rejected"), "completion_mask": both("chosen_mask", "rejected_mask"),
            "ref_logprobs": torch.cat([ref[:, :, 0], ref[:, :, 1]]),
        }
        return fn(model, rows, beta=beta, alpha=alpha)

    def logprobs(model, batch):
        return tuple((aligned_logps(model, batch[s])[:, 1:] * batch[s + "_mask"][:, 1:]).sum(1) for s in ("chosen", "rejected"))

    return Step(
        model=model, loss=loss, batch=batch,
        roles={
            "chosen": "chosen", "rejected": "rejected", "chosen_mask": "chosen_mask", "rejected_mask": "rejected_mask",
            "reference_distribution": "ref",
        },
        settings={"beta": Setting(0.1, "setting"), "alpha": Setting(0.5, "setting", pure=0.0)},
        metrics={"kl_chosen": Metric(low=0.0), "kl_rejected": Metric(low=0.0)},
        logprobs=logprobs, reduction="mean", value_is_loss=False, family="preference",
        wide=("chosen", "rejected", "chosen_mask", "rejected_mask", "ref"),
    )


@declare("y/r01")
def one_update_ppo(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given,
        roles={"ids": "ids", "mask": "completion_mask", "advantages": "advantages"},
        settings={"clip": Setting(0.2, "inert", modes=(0.05, 0.1, 0.4))},
        metrics={"ratio_mean": Metric(low=1.0, high=1.0, moves=False, neutral=1.0)},
        logprobs=lambda model, batch: aligned_logps(model, batch["ids"]),
        family="policy gradient", reduction="mean", value_is_loss=False, wide=("ids", "completion_mask"),
    )


@declare("z/r13")
def ewc(m, fn):
    given = m.make(0)
    model = given.pop("model")
    given["loss_mask"][:, 0] = 0  # nothing predicts a row's first token
    again = m.make(0)
    other = again.pop("model")
    again["loss_mask"][:, 0] = 0
    return [
        Step(
            model=model, loss=fn, batch=given,
            roles={"ids": "ids", "mask": "loss_mask"},
            settings={"lam": Setting(50.0, "weight")},
            # "penalty" is reported with its weight
            metrics={"ce": Metric(low=0.0, weight=1.0), "penalty": Metric(low=0.0, moves=False, weight=1.0)},
            reduction="mean", value_is_loss=True,
        ),
        Step(  # the penalty is most of the gradient: the likelihood by itself
            model=other, loss=lambda model, batch: fn(model, batch, lam=0.0)[0], batch=again,
            roles={"ids": "ids", "mask": "loss_mask"}, family="sft", reduction="mean", value_is_loss=True, name="the cross-entropy",
        ),
    ]


@declare("y/r03")
def packed_cispo(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given,
        roles={
            "ids": "ids", "documents": "segment", "positions": "position_ids", "mask": "loss_mask",
            "behaviour": "old_logps", "advantages": "token_advantages",
        },
        settings={"max_weight": Setting(5.0, "bound")},
        metrics={"at_bound": Metric(low=0.0, high=1.0, moves=False, neutral=0.0)},
        logprobs=m._logps, family="policy gradient", reduction="mean", value_is_loss=False,
        wide=("ids", "segment", "position_ids", "loss_mask", "old_logps", "token_advantages"),
    )


@declare("bb/r01")
def token_mean_over_ranks(m, fn):
    def whole():
        given = m.make(0)
        micro = [b for rank in given["batches"] for b in rank]
        batch = {k: torch.cat([b[k] for b in micro]) for k in ("ids", "labels")}
        batch["labels"][-1] = -100  # a row, and below a micro-batch, without a trained token is legal
        return given["model"], batch

    def run(model, ranks):
        opt = Recorder(model.parameters())
        fn(model, opt, ranks)
        opt.leave()

    model, batch = whole()
    other, same = whole()
    n = len(batch["ids"])
    split = (4, n - 5, 1)
    loss = lambda model, b: F.cross_entropy(model(b["ids"]).flatten(0, 1), b["labels"].flatten(), ignore_index=-100)

    def backward(settings):
        a, b, c = ({k: v[i:j] for k, v in same.items()} for i, j in ((0, 2), (2, 7), (7, n)))
        run(other, [[a, b], [c]])

    return [
        Accumulation(model=model, accumulate=lambda model, bs: run(model, [[b] for b in bs]), batch=batch, split=split, what="ranks"),
        Accumulation(model=model, accumulate=lambda model, bs: run(model, [list(bs)]), batch=batch, split=split, what="micro-batches"),
        Accumulation(
            model=model, batch=batch, split=split, what="ranks with micro-batches of their own",
            accumulate=lambda model, bs: run(model, [[bs[0]], list(bs[1:])] if len(bs) > 1 else [list(bs)]),
        ),
        Step(
            model=other, loss=loss, batch=same, roles={"ids": "ids", "labels": "labels"}, family="sft", reduction="mean",
            all_supervised=None, backward=backward,
        ),
    ]


@declare("aa/r07")
def gae_over_turns(m, fn):
    def every_token_a_turn(rewards, values, mask, gamma, lam):
        on = mask > 0
        groups = torch.where(on, on.long().cumsum(1) - 1, -1)
        return fn(rewards, groups, values, gamma=gamma, lam=lam)

    def one_turn(rewards, values, mask, gamma, lam):  # inside a turn nothing is discounted
        assert gamma == 1.0
        return fn(rewards, torch.where(mask > 0, 0, -1), values, gamma=0.6, lam=lam)

    def example(i, given):
        return {k: v[i].double() if v.is_floating_point() else v[i] for k, v in given.items()}

    def stage(examples):
        rows = {k: torch.stack([e[k] for e in examples]) for k in ("rewards", "groups", "values")}
        return {"advantages": (fn(rows["rewards"], rows["groups"], rows["values"]) * 1e6).round().long()}

    def defined(e, gamma=0.9, lam=0.95):
        at = [t for t, k in enumerate(e["groups"].tolist()) if k >= 0]
        out, value, adv, turn = [0.0] * len(e["groups"]), 0.0, 0.0, None
        for t in reversed(at):
            k = int(e["groups"][t])
            g = 1.0 if k == turn else gamma  # from turn to turn
            adv = float(e["rewards"][t]) + g * value - float(e["values"][t]) + g * lam * adv
            value, turn, out[t] = float(e["values"][t]), k, adv
        return (torch.tensor(out, dtype=torch.float64) * 1e6).round().long()

    given, more = m.make(0), m.make(1)
    return [
        GAE(fn=every_token_a_turn, gamma=0.9, lam=0.95, holes=True),
        GAE(fn=one_turn, gamma=1.0, lam=0.95, holes=True),
        Collator(fn=stage, examples=[example(i, g) for g in (given, more) for i in range(4)], columns={"advantages": defined}),
    ]


@declare("z/r06")
def goldfish(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given, roles={"ids": "ids"},
        settings={"k": Setting(4, "setting", modes=(2, 8)), "h": Setting(3, "setting", modes=(2, 5))},
        family="sft", all_supervised=True, drops_tokens=True, reduction="mean", value_is_loss=True,
    )


@declare("aa/r22")
def adaptive_clip(m, fn):
    def whole():
        given = m.make(0)
        micro = [b for step in given["batches"] for b in step]
        return given["model"], {k: torch.cat([b[k] for b in micro]) for k in ("x", "y")}

    def run(model, micro, **settings):
        opt = Recorder(model.parameters())
        fn(model, opt, [list(micro)] * 2, **settings)  # two steps of one batch: nothing of the first is left in the second
        opt.leave()

    def mean(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"])

    def clipped(model, batch, clip=0.01, eps=1e-3):
        """A number whose gradient is the clipped one, by the words: per row of a matrix, a vector as one, not the head."""
        names, params = zip(*model.named_parameters())
        total = 0.0
        for name, p, g in zip(names, params, torch.autograd.grad(mean(model, batch), params)):
            with torch.no_grad():
                if not name.startswith("head."):
                    norm = lambda x: x.norm(dim=1, keepdim=True) if x.ndim == 2 else x.norm()
                    g = g * (clip * norm(p).clamp(min=eps) / norm(g).clamp(min=1e-6)).clamp(max=1.0)
            total = total + (p * g).sum()
        return total

    def step(loss, name, settings, **more):
        model, batch = whole()

        def backward(_):
            parts = [{k: v[i:j] for k, v in batch.items()} for i, j in ((0, 1), (1, 8), (8, len(batch["y"])))]
            run(model, parts, **settings)

        return Step(model=model, loss=loss, batch=batch, backward=backward, name=name, **more)

    model, batch = whole()
    return [
        Accumulation(model=model, accumulate=lambda model, bs: run(model, bs), batch=batch),
        Accumulation(model=model, accumulate=lambda model, bs: run(model, bs, clip=1e9), batch=batch),
        step(mean, "without a clip", {"clip": 1e9}, reduction="mean", value_is_loss=True),
        step(clipped, "with the clip", {}, rows_interact=True, value_is_loss=False),
    ]


@declare("bb/r04")
def parallel_seeds(m, fn):
    def numbers(seed):
        return torch.rand(16, generator=torch.Generator().manual_seed(int(seed)))

    def streams():
        found = []
        for pp in range(2):
            found.append(fn(rank=6 * pp, step=0)["default"])
            found += [fn(rank=6 * pp + tp, step=0)["sharded"] for tp in range(2)]
        return found

    shared, wanted = {}, {}
    for pp in range(2):
        first = fn(rank=6 * pp, step=0)
        for rank in range(6):
            here = fn(rank=6 * pp + rank, step=7)  # the step is not used
            shared[f"default pp{pp} rank{rank}"], wanted[f"default pp{pp} rank{rank}"] = here["default"], first["default"]
            alike = fn(rank=6 * pp + rank % 2, step=0)["sharded"]
            shared[f"sharded pp{pp} rank{rank}"], wanted[f"sharded pp{pp} rank{rank}"] = here["sharded"], alike
    return [
        Ranks(draw=lambda r: numbers(fn(rank=r, step=0, tp=16)["sharded"])),  # over tp
        Ranks(draw=lambda r: numbers(fn(rank=6 * r, step=0, pp=16)["default"])),  # over pp
        Ranks(draw=lambda r: numbers(fn(rank=6 * r, step=0, pp=16)["sharded"])),
        Ranks(draw=lambda r: numbers(streams()[r % 6])),  # no stream collides with another
        Ranks(draw=lambda r: numbers(streams()[(r + 2) % 6])),
        Ranks(draw=lambda r: numbers(fn(rank=0, step=0, seed=1234 + 5000 * r)["default"])),
        Census(wanted=wanted, found=shared, what="seeds that are equal over dp (the default ones over tp, too)"),
    ]


@declare("bb/r07")
def global_balance(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given, roles={"ids": "ids"},
        settings={"ranks": Setting(2, "inert", modes=(1, 3, 6)), "aux": Setting(0.01, "weight")},
        metrics={"max_expert_share": Metric(low=0.25, high=0.5, moves=False)},
        family="sft", all_supervised=True, rows_interact=True, may_idle=("experts.*",), reduction="mean", value_is_loss=True,
    )


@declare("z/r14")
def unlikelihood(m, fn):
    given = m.make(0)
    model = given.pop("model")
    batch = {"ids": given["ids"], "attention": (given["ids"] != 0).long()}

    def loss(model, batch, alpha):
        return fn(model, {"ids": batch["ids"] * batch["attention"]}, alpha=alpha)  # padding is the id 0

    return Step(
        model=model, loss=loss, batch=batch, roles={"ids": "ids", "attention": "attention"},
        settings={"alpha": Setting(1.0, "weight")},
        metrics={"nll": Metric(low=0.0, weight=1.0), "ul": Metric(low=0.0, weight="alpha")},
        family="sft", all_supervised=True, reduction="mean", value_is_loss=True,
    )


@declare("y/r23")
def gaussian_histogram(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given, roles={"ids": "ids", "mask": "value_mask", "returns": "returns"},
        settings={"low": Setting(-1.0, "setting"), "high": Setting(1.0, "setting"), "sigma_ratio": Setting(0.75, "setting")},
        metrics={"value_mean": Metric(low=-1.0, high=1.0)},
        reduction="mean", value_is_loss=True, wide=("ids", "value_mask", "returns"),
    )


@declare("aa/r09")
def tool_sampler(m, fn):
    given = m.make(0)
    model, prompt = given["model"], given["prompt_ids"]
    T, LONG = 1.3, 24
    prompts = [prompt, *(m.make(i)["prompt_ids"] for i in range(1, 5))]

    def sampled(seed, p):
        return fn(model, p, {"seed": seed, "temperature": T, "max_new": LONG})

    def fixed(x, fill=0.0):
        return F.pad(x, (0, LONG - len(x)), value=fill)

    def sampler():
        return torch.stack([fixed(sampled(i, p)[1].float()) for i, p in enumerate(prompts)])

    @torch.no_grad()
    def trainer():
        """The same texts scored in one pass: temperature, the banned tokens, 0 on what the tool inserted."""
        rows = []
        for i, p in enumerate(prompts):
            out = sampled(i, p)[0]
            logits = model(torch.cat([p, out])[None])[0, len(p) - 1 : -1].float() / T
            logits[:, [0, m.OBS, m.END_OBS]] = float("-inf")
            lp = logits.log_softmax(-1).gather(-1, out[:, None])[:, 0]
            inside = False
            for t, token in enumerate(out.tolist()):
                inside = inside or token == m.OBS
                if inside:
                    lp[t] = 0.0
                if token == m.END_OBS:
                    inside = False
            rows.append(fixed(lp))
        return torch.stack(rows)

    kept = copy.deepcopy(model.state_dict())

    def perturb():
        g = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in model.parameters():
                p += 0.05 * torch.randn(p.shape, generator=g)

    return [
        WeightSync(perturb=perturb, push=lambda: None, trainer=trainer, sampler=sampler, undo=lambda: model.load_state_dict(kept)),
        Ranks(draw=lambda rank: torch.cat([fixed(sampled(rank, p)[0], -1) for p in prompts])),  # another seed, other texts
    ]


@declare("z/r09")
def balance_over_layers(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given, roles={"ids": "ids", "attention": "attention_mask"},
        settings={"coef": Setting(0.02, "weight"), "top_k": Setting(2, "setting", modes=(1, 3))},
        metrics={"ce": Metric(low=0.0, weight=1.0), "balance": Metric(low=0.0, high=4.0, weight="coef")},
        family="sft", all_supervised=True, rows_interact=True, reduction="mean", value_is_loss=True,
    )


class TwoDrops(nn.Module):
    """A dropout whose draw is fixed: one for the first copy of the rows, another for the second."""

    def __init__(self, width=16, p=0.2, seed=0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.register_buffer("keep", (torch.rand(2, width, generator=g) >= p).float() / (1 - p), persistent=False)

    def forward(self, x):
        copy_of = (torch.arange(len(x)) >= (len(x) + 1) // 2).long()
        return x * self.keep[copy_of].to(x.dtype)[:, None]


@declare("z/r12")
def r_drop(m, fn):
    def part():
        given = m.make(0)
        given["loss_mask"][:, 0] = 0  # nothing predicts a row's first token
        return given.pop("model"), given

    model, batch = part()
    other, same = part()
    other.drop = TwoDrops()
    roles = {"ids": "ids", "mask": "loss_mask"}
    return [
        # without dropout the two copies are equal, and alpha has nothing to weigh
        Step(
            model=model, loss=fn, batch=batch, roles=roles, metrics={"ce": Metric(low=0.0), "kl": Metric(low=0.0, moves=False)},
            family="sft", reduction="mean", value_is_loss=True,
        ),
        Step(
            model=other, loss=fn, batch=same, roles=roles, settings={"alpha": Setting(1.0, "weight")},
            metrics={"ce": Metric(low=0.0, weight=1.0), "kl": Metric(low=0.0, weight="alpha")},
            family="sft", reduction="mean", value_is_loss=True, name="the step with a fixed draw of its dropout",
        ),
    ]


@declare("bb/r05")
def contrastive(m, fn):
    given = m.make(0)
    model = given.pop("model")
    return Step(
        model=model, loss=fn, batch=given, roles={"ids": "ids"},
        settings={"ranks": Setting(2, "inert", modes=(1, 4, 8))},
        rows_interact=True, reduction="mean", value_is_loss=True, wide=(),
    )
