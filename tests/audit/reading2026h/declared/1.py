import math

import torch
import torch.nn.functional as F
from earnest_audit import (
    Accumulation,
    AdapterStart,
    AdvantageEstimator,
    Census,
    ChatTemplate,
    Collator,
    MergedLayer,
    Metric,
    Ranks,
    Resume,
    Schedule,
    Setting,
    Step,
    Update,
)
from tests.audit.reading2026h.reading import declare, no_subject  # noqa: F401


def parts(m, seed=0):
    given = m.make(seed)
    model = given.pop("model")
    return model, given


def token_logprobs(key="ids"):
    """Log-prob of each token at its own index, 0 in column 0."""

    def logprobs(model, batch):
        ids = batch[key]
        lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return F.pad(lp, (1, 0))

    return logprobs


def padded(lists, value):
    width = max(1, max((len(x) for x in lists), default=1))
    return torch.tensor([list(x) + [value] * (width - len(x)) for x in lists])


# ---------------------------------------------------------------- losses


@declare("x/r07")
def context_parallel(m, fn):
    model, batch = parts(m)
    batch["loss_mask"][:, 0] = 0  # nothing predicts the first token

    def loss(model, batch, ranks):
        extra = -batch["ids"].shape[1] % (2 * ranks)  # "time a multiple of 2 * ranks"
        if extra:
            batch = {k: F.pad(batch[k], (0, extra)) for k in ("ids", "loss_mask")}
        return fn(model, batch, ranks=ranks)

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "mask": "loss_mask"},
        settings={"ranks": Setting(2, "inert", modes=(1, 4))},
        family="sft",
        reduction="mean",
        value_is_loss=True,
        name="context parallel cross entropy",
    )


@declare("r/r23")
def robust_dpo(m, fn):
    model, batch = parts(m)

    def logprobs(model, batch):
        def total(name):
            ids = batch[name]
            lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            return (lp * batch[name + "_mask"][:, 1:]).sum(-1)

        return total("chosen"), total("rejected")

    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={
            "chosen": "chosen",
            "rejected": "rejected",
            "chosen_mask": "chosen_mask",
            "rejected_mask": "rejected_mask",
            "reference_chosen": "ref_chosen",
            "reference_rejected": "ref_rejected",
        },
        settings={"beta": Setting(0.1, "setting"), "eps": Setting(0.1, "smoothing")},
        metrics={"margin": Metric()},
        logprobs=logprobs,
        family="preference",
        wide=("chosen", "chosen_mask", "rejected", "rejected_mask"),
        reduction="mean",
        value_is_loss=True,
        name="robust DPO",
    )


@declare("r/d07")
def ppo_with_kl(m, fn):
    model, batch = parts(m)
    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={
            "ids": "ids",
            "mask": "loss_mask",
            "advantages": "advantages",
            "behaviour": "old_logp",
            "reference": "ref_logp",
        },
        settings={"clip": Setting(0.2, "clip"), "kl_coef": Setting(0.1, "weight")},
        metrics={"policy_loss": Metric(weight=1.0), "kl": Metric(low=0.0, weight="kl_coef")},
        logprobs=token_logprobs(),
        wide=("ids", "loss_mask", "old_logp", "ref_logp"),
        family="policy gradient",
        reduction="mean",
        value_is_loss=True,
        name="PPO with a KL",
    )


@declare("r/r06")
def left_padded(m, fn):
    model, batch = parts(m)
    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"ids": "ids", "attention": "attention_mask", "mask": "loss_mask"},
        wide=("ids", "attention_mask", "loss_mask"),
        family="sft",
        reduction="mean",
        value_is_loss=True,
        name="left-padded cross entropy",
    )


@declare("q/r22")
def gspo_token(m, fn):
    model, batch = parts(m)
    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "behaviour": "old_logps", "advantages": "advantages"},
        settings={"low": Setting(3e-4, "clip"), "high": Setting(4e-4, "clip high")},
        logprobs=token_logprobs(),
        wide=("ids", "mask", "old_logps"),
        family="policy gradient",
        reduction="mean",
        value_is_loss=False,  # stop-gradient in the ratio
        empty_rows=False,  # divides by each row's own number of tokens
        name="GSPO (token form)",
    )


def student(model, batch):
    return model(batch["ids"])


@declare("x/r23")
def gkd(m, fn):
    model, batch = parts(m)
    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"ids": "ids", "labels": "labels", "teacher": "teacher_logits"},
        settings={"beta": Setting(0.3, "mixture"), "temperature": Setting(0.9, "setting")},
        student=student,
        wide=("ids", "labels", "teacher_logits"),
        family="divergence",
        reduction="mean",
        value_is_loss=True,
        name="generalised JSD with a temperature",
    )


@declare("q/d07")
def jsd(m, fn):
    model, batch = parts(m)
    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"ids": "ids", "labels": "labels", "teacher": "teacher_logits"},
        settings={"beta": Setting(0.5, "mixture")},
        student=student,
        wide=("ids", "labels", "teacher_logits"),
        family="divergence",
        reduction="mean",
        value_is_loss=True,
        name="generalised JSD",
    )


@declare("q/r01")
def turns_of_trajectories(m, fn):
    settings = {"clip": Setting(0.2, "clip"), "max_tokens": Setting(16, "setting")}
    # every row a trajectory of one turn: then an advantage per row, and a mean over rows
    model, batch = parts(m)
    traj = batch.pop("traj")
    batch["advantages"] = batch["advantages"][traj]

    def one_turn(model, batch, clip, max_tokens):
        own = torch.arange(len(batch["ids"]))
        return fn(model, {**batch, "traj": own}, clip=clip, max_tokens=max_tokens)

    single = Step(
        model=model,
        loss=one_turn,
        batch=batch,
        roles={"ids": "ids", "mask": "action_mask", "behaviour": "old_logps", "advantages": "advantages"},
        settings=settings,
        logprobs=token_logprobs(),
        wide=("ids", "action_mask", "old_logps"),
        family="policy gradient",
        reduction="mean",
        value_is_loss=True,
        name="one turn per trajectory",
    )
    # as it is: the number of trajectories does not change with the rows, so rows are added up
    model, batch = parts(m)
    advantages = batch.pop("advantages")

    def many_turns(model, batch, clip, max_tokens):
        return fn(model, {**batch, "advantages": advantages.to(batch["old_logps"].dtype)}, clip=clip, max_tokens=max_tokens)

    many = Step(
        model=model,
        loss=many_turns,
        batch=batch,
        roles={"ids": "ids", "mask": "action_mask", "behaviour": "old_logps"},
        settings=settings,
        wide=("ids", "action_mask", "old_logps"),
        family="policy gradient",
        reduction="sum",
        value_is_loss=True,
        name="several turns per trajectory",
    )
    return [single, many]


@declare("q/d04")
def replay_of_dead_groups(m, fn):
    def given():
        model, batch = parts(m)
        for p in ("", "buf_"):  # 1 on the tokens that the policy sampled: those of the completion only
            batch[p + "tool_mask"] = batch[p + "tool_mask"] * batch[p + "completion_mask"]
        return model, batch

    common = dict(family="policy gradient", reduction="mean", value_is_loss=False, rows_interact=True)
    live_keys = ("ids", "completion_mask", "tool_mask")
    wide = live_keys + tuple("buf_" + k for k in live_keys)
    roles = {"ids": "ids", "mask": "tool_mask", "advantages": "advantages"}

    model, batch = given()
    mixed = Step(
        model=model, loss=fn, batch=batch, roles=roles, wide=wide, drops_tokens=True, name="one group of two is replaced", **common
    )
    model, batch = given()
    batch = {k: batch[k] for k in (*live_keys, "advantages")}
    batch["advantages"] = torch.tensor([0.7, -0.7, 1.1, -1.1])
    live = Step(
        model=model, loss=fn, batch=batch, roles=roles, wide=live_keys, logprobs=token_logprobs(), name="no group is replaced", **common
    )
    model, batch = given()
    batch["advantages"] = torch.zeros(4)
    stored = Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={k: "buf_" + v for k, v in roles.items()},
        wide=wide,
        logprobs=token_logprobs("buf_ids"),
        name="every group is replaced",
        **common,
    )
    return [mixed, live, stored]


@declare("w/d06")
def packed_linear_rnn(m, fn):
    model, given = parts(m)
    cu, ids = given["cu_seqlens"], given["ids"]
    documents = torch.repeat_interleave(torch.arange(len(cu) - 1), cu[1:] - cu[:-1])[None]
    labels = ids.clone()  # not shifted: a document's first token is no target
    labels[0, cu[:-1]] = -100

    def loss(model, batch):
        docs, ids = batch["documents"][0], batch["ids"]
        starts = torch.nonzero(docs[1:] != docs[:-1]).flatten() + 1
        ends = torch.cat([starts, torch.tensor([len(docs)])])
        shifted = batch["labels"].roll(-1, 1)
        shifted[0, ends - 1] = -100  # "-100 at the last token of each sample"
        return fn(
            model,
            {"ids": ids, "labels": shifted, "cu_seqlens": F.pad(ends, (1, 0)), "attention_mask": torch.ones_like(ids)},
        )

    return Step(
        model=model,
        loss=loss,
        batch={"ids": ids, "labels": labels, "documents": documents},
        roles={"ids": "ids", "labels": "labels", "documents": "documents"},
        wide=("ids", "labels", "documents"),
        family="sft",
        all_supervised=True,
        reduction="mean",
        value_is_loss=True,
        rows_interact=True,  # exactly one row
        name="packed linear RNN",
    )


@declare("x/d01")
def prior_preservation(m, fn):
    model, batch = parts(m)

    def two_halves(model, batch, prior_weight):
        """The instance's term alone, plus the weight times the prior's term alone."""

        def alone(i):
            return fn(model, {k: v[[i, i]] for k, v in batch.items()}, prior_weight=0.0)

        return alone(0) + prior_weight * alone(1)

    return Step(
        model=model,
        loss=fn,
        batch=batch,
        settings={"prior_weight": Setting(1.0, "weight")},
        paths={"each term alone": two_halves},
        rows_interact=True,  # an instance row, then its prior row
        value_is_loss=True,
        name="flow matching with a prior",
    )


@declare("x/r24")
def kto(m, fn):
    model, batch = parts(m)
    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "reference": "ref_logps", "correct": "desirable"},
        settings={
            "beta": Setting(0.1, "setting"),
            "good_weight": Setting(1.0, "weight"),
            "bad_weight": Setting(1.33, "weight"),
        },
        metrics={"kl": Metric(low=0.0)},
        wide=("ids", "kl_ids", "mask", "kl_mask"),
        family="preference",
        pairwise=False,
        rows_interact=True,  # z is of all rows
        reduction="mean",
        value_is_loss=False,  # z is detached
        name="KTO",
    )


# ---------------------------------------------------------------- metrics over ranks


@declare("x/r18")
def bits_per_byte(m, fn):
    ranks = m.make(0)["ranks"]
    table = ranks[0]["bytes"]
    rows = torch.cat([torch.stack([r["nll"], r["targets"].float()], 1) for r in ranks])

    def rank(s):
        return {"nll": s[:, 0].clone(), "targets": s[:, 1].long(), "bytes": table}

    def single(shards):
        nats = size = 0.0
        for s in shards:
            for x, t in s.tolist():
                if t >= 0 and table[int(t)] > 0:
                    nats += x
                    size += int(table[int(t)])
        return nats / (math.log(2) * size)

    nothing = torch.tensor([[1.5, -1.0], [2.5, 0.0], [0.5, 2.0]])  # ignored or special only
    return [
        Ranks(metric=lambda shards: fn([rank(s) for s in shards]), rows=rows, single=single),
        Ranks(metric=lambda shards: fn([rank(s) for s in [*shards, nothing]]), rows=rows, single=single),
    ]


@declare("q/r19")
def bits_per_byte_constant(m, fn):
    ranks = m.make(0)["ranks"]
    table = m.TOKEN_BYTES
    rows = torch.cat([torch.stack([r["nll"], r["target"].float()], 1) for r in ranks[:-1]])

    def rank(s):
        return {"nll": s[:, 0].clone(), "target": s[:, 1].long()}

    def single(shards):
        nats = size = 0.0
        for s in shards:
            for x, t in s.tolist():
                if t >= 0 and table[int(t)] > 0:
                    nats += x
                    size += int(table[int(t)])
        return nats / (math.log(2) * size)

    nothing = torch.tensor([[0.5, -1.0], [0.7, 0.0], [0.2, 2.0]])
    return [
        Ranks(metric=lambda shards: fn([rank(s) for s in shards]), rows=rows, single=single),
        Ranks(metric=lambda shards: fn([rank(s) for s in [*shards, nothing]]), rows=rows, single=single),
    ]


@declare("x/d04")
def accepted_length(m, fn):
    rows = torch.cat([b for rank in m.make(0)["ranks"] for b in rank]).float()

    def micro_batches(s):
        s, k = s > 0.5, (len(s) + 2) // 3
        return [x for x in (s[:k], s[k:]) if len(x)]

    def single(shards):
        runs = [len("".join("1" if c > 0.5 else "0" for c in r).split("0")[0]) for s in shards for r in s.tolist()]
        return sum(runs) / len(runs)

    return [
        Ranks(metric=lambda shards: fn([micro_batches(s) for s in shards]), rows=rows, single=single),
        Ranks(metric=lambda shards: fn([[s > 0.5] for s in shards]), rows=rows, single=single),
        Ranks(metric=lambda shards: fn([[s > 0.5 for s in shards]]), rows=rows, single=single),
    ]


@declare("r/r21")
def accuracy_of_a_padded_sampler(m, fn):
    ranks = m.make(0)["ranks"]
    n, world = ranks[0]["n"], len(ranks)
    rows = torch.empty(n)
    for r, given in enumerate(ranks):
        for i, c in enumerate(given["correct"]):
            if r + i * world < n:
                rows[r + i * world] = c

    def metric(shards, more=0):
        correct, world = torch.cat(list(shards)), len(shards) + more
        n = len(correct)
        index = torch.arange(n)
        index = torch.cat([index, index[: -n % world]])  # the sampler's surplus
        return fn([{"correct": correct[index[r::world]], "n": n} for r in range(world)])

    def single(shards):
        return torch.cat(list(shards)).mean().item()

    return [
        Ranks(metric=metric, rows=rows, single=single),
        Ranks(metric=lambda shards: metric(shards, 3), rows=rows, single=single),
    ]


@declare("r/r20")
def explained_variance(m, fn):
    ranks = m.make(0)["ranks"]
    width = max(r["mask"].shape[1] for r in ranks)
    keys = ("values", "returns", "mask")
    rows = torch.cat([torch.stack([F.pad(r[k], (0, width - r[k].shape[1])) for k in keys], 1) for r in ranks])

    def rank(s):
        return {k: s[:, i].clone() for i, k in enumerate(keys)}

    def single(shards):
        x = torch.cat(list(shards)).double()
        keep = x[:, 2] > 0
        returns, residual = x[:, 1][keep], (x[:, 1] - x[:, 0])[keep]
        return (1 - residual.var(unbiased=False) / returns.var(unbiased=False)).item()

    nothing = torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(1))
    nothing[:, 2] = 0
    return [
        Ranks(metric=lambda shards: fn([rank(s) for s in shards]), rows=rows, single=single),
        Ranks(metric=lambda shards: fn([rank(s) for s in [*shards, nothing]]), rows=rows, single=single),
    ]


@declare("w/d03")
def pass_at_1(m, fn):
    episodes = [e for rank in m.make(0)["per_rank"] for e in rank]
    rows = torch.tensor([[float(e["num_steps"]), float(e["correct"])] for e in episodes])

    def rank(r, s):
        return [
            {
                "task_id": f"{r}-{i}",
                "num_steps": int(n),
                "correct": bool(c),
                "termination": "env_done" if n else "max_prompt_length_exceeded",
            }
            for i, (n, c) in enumerate(s.tolist())
        ]

    def single(shards):
        x = torch.cat(list(shards))
        return float((x[:, 1] * (x[:, 0] > 0)).sum()) / len(x)

    return Ranks(metric=lambda shards: fn([rank(r, s) for r, s in enumerate(shards)]), rows=rows, single=single)


@declare("w/r20")
def standard_deviation(m, fn):
    rows = torch.cat(m.make(0)["per_rank"])

    def single(shards):
        return float(torch.cat(list(shards)).double().std(unbiased=False))

    empty = torch.zeros(0)
    return [
        Ranks(metric=lambda shards: fn(list(shards)), rows=rows, single=single),
        Ranks(metric=lambda shards: fn([empty, *shards, empty]), rows=rows, single=single),
        Ranks(metric=lambda shards: fn(list(shards)[::-1]), rows=rows, single=single),
    ]


@declare("x/d09")
def seeds_of_requests(m, fn):
    steps, workers, prompts, n = 3, 4, 12, 4
    seeds = {(s, r): list(fn(r, s)) for s in range(steps) for r in range(workers)}
    names = [str(x) for v in seeds.values() for x in v]
    return [
        Ranks(draw=lambda rank: torch.tensor(fn(rank, 0))),
        Ranks(draw=lambda rank: torch.tensor(fn(rank, 2))),
        Ranks(draw=lambda step: torch.tensor(fn(1, step))),  # steps differ, too
        Census(wanted=set(names), found=names, what="seeds of requests", once=True),
        Census(
            wanted={"different seeds": float(steps * prompts * n), **{f"step {s} worker {r}": prompts // workers * n for s, r in seeds}},
            found={"different seeds": float(len(set(names))), **{f"step {s} worker {r}": len(v) for (s, r), v in seeds.items()}},
            what="numbers of seeds",
        ),
    ]


# ---------------------------------------------------------------- advantages


@declare("w/r03")
def episodes_and_steps(m, fn):
    def outer(rewards, groups):
        """Rows are episodes of 1 to 3 steps; each episode counts once."""
        n = len(rewards)
        lengths = torch.tensor([1 + i % 3 for i in range(n)])
        row = torch.repeat_interleave(torch.arange(n), lengths)
        anchors = torch.arange(len(row)) % 5
        out = fn(rewards.float()[row], groups[row], row, anchors, torch.zeros(len(row)), step_weight=0.0)
        return out[lengths.cumsum(0) - 1]

    def inner(rewards, groups):
        """Rows are steps; a group is a (task, anchor)."""
        n = len(rewards)
        return fn(torch.zeros(n), groups // 2, torch.arange(n), groups % 2, rewards.float())

    def both(rewards, groups):
        """Episodes of one step from the same state."""
        rewards = rewards.float()
        return fn(rewards, groups, torch.arange(len(rewards)), torch.zeros_like(groups), rewards)

    return [AdvantageEstimator(fn=f, scale="equal", over="group") for f in (outer, inner, both)]


@declare("r/d03")
def sharded_whitening(m, fn):
    given = m.make(0)
    adv, mask = given["advantages"], given["mask"]
    more = m.make(1)
    adv, mask = torch.cat([adv, more["advantages"][:4]]), torch.cat([mask, more["mask"][:4]])  # 12 rows: 1, 2, 3 blocks
    rows = torch.stack([adv, mask], 1)
    weights = torch.linspace(-1, 2, adv.numel(), dtype=torch.float64).view_as(adv).sin() + 0.3

    def value(white, mask):
        return float((white.double() * mask.double() * weights).sum())

    def metric(shards, cp):
        x = torch.cat(list(shards))
        return value(fn(x[:, 0].double(), x[:, 1].double(), dp=len(shards), cp=cp), x[:, 1])  # a sum that cancels: float64

    def single(shards):
        x = torch.cat(list(shards)).double()
        kept = x[:, 0][x[:, 1] > 0]
        return value((x[:, 0] - kept.mean()) / kept.std(), x[:, 1])

    def whiten(rewards, groups):
        """The rewards are the trained tokens of four ragged rows."""
        n = len(rewards)
        cuts = [0, n // 8, n // 3, (2 * n) // 3, n]
        sizes = [b - a for a, b in zip(cuts, cuts[1:])]
        width = -(-max(sizes) // 4) * 4
        row = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
        col = torch.cat([torch.arange(s) for s in sizes])
        adv = torch.zeros(4, width, dtype=torch.float64)
        mask = torch.zeros(4, width, dtype=torch.float64)
        adv[row, col], mask[row, col] = rewards.double(), 1.0
        return fn(adv, mask)[row, col].to(rewards.dtype)

    return [
        Ranks(metric=lambda shards: metric(shards, 2), rows=rows, single=single),
        Ranks(metric=lambda shards: metric(shards, 1), rows=rows, single=single),
        AdvantageEstimator(fn=whiten, scale="free", over="batch"),
    ]


# ---------------------------------------------------------------- schedules


@declare("w/r14")
def weight_decay(m, fn):
    # it rises over the whole run and is held at its end value from `total` on
    rising = Schedule(
        rates=lambda total, ranks, start=0.04, end=0.4: [fn(k, start=start, end=end, total=300) for k in range(total)],
        peak=0.4,
        final=0.4,
        total=330,
        warmup=300,
        ends=300,
        settings={"start": 0.04, "end": 0.4},
    )
    # mirrored (start + end - value), it falls from the end value to the start value over the run
    mirrored = Schedule(
        rates=lambda total, ranks: [0.44 - fn(k, start=0.04, end=0.4, total=total) for k in range(total)],
        peak=0.4,
        final=0.04,
        total=300,
    )
    return [rising, mirrored]


@declare("q/r14")
def cosine_with_rewarming(m, fn):
    def rates(total, ranks, **settings):
        optimizer = m.make(0)["optimizer"]
        schedule = fn(optimizer, total=total, **settings)
        out = []
        for _ in range(total):
            out.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return out

    return Schedule(
        rates=rates,
        peak=0.01,
        final=0.001,
        total=200,
        warmup=10,
        restarts=True,
        settings={"warmup": 10, "cycle": 50, "rewarm": 5, "floor": 0.1},
    )


@declare("r/d04")
def resumed_schedule(m, fn):
    def plan(**fixed):
        return Schedule(
            rates=lambda total, ranks, peak=1e-3, warmup_steps=10: [
                fn(k, peak=peak, warmup_steps=warmup_steps, total_steps=total, **fixed) for k in range(total)
            ],
            peak=1e-3,
            final=0.0,
            total=200,
            warmup=10,
            settings={"peak": 1e-3, "warmup_steps": 10},
        )

    def same(**fixed):
        kept = {k: v for k, v in fixed.items() if k != "saved_rollout"}
        return Census(
            wanted={f"step {k}": fn(k, saved_rollout=10**6, **kept) for k in range(200)},  # never stopped
            found={f"step {k}": fn(k, **fixed) for k in range(200)},
            what="rates of a resumed run",
        )

    cuts = ({}, {"saved_rollout": 30}, {"saved_rollout": 1}, {"steps_per_rollout": 3, "global_batch_size": 8})
    return [plan(**c) for c in cuts] + [same(**c) for c in cuts]


@declare("q/d06")
def resumed_samples(m, fn):
    batch = 8

    def rates(total, ranks, warmup=80, lr=1e-3, cut=60):
        plan = dict(batch=batch, warmup=warmup, total=total * batch, lr=lr)
        first = fn({"num_steps": 0}, 0, cut, **plan)
        return [*first, *fn({"num_steps": cut * batch}, cut, total - cut, **plan)]

    unbroken = list(fn({"num_steps": 0}, 0, 200))

    def later(cut):
        found = fn({"num_steps": cut * batch}, cut, 200 - cut)
        return Census(
            wanted={f"step {cut + k}": x for k, x in enumerate(unbroken[cut:])},
            found={f"step {cut + k}": x for k, x in enumerate(found)},
            what="rates after a resume",
        )

    class Run:  # a run since its last resume
        start, since = 0, 0

        def next(self, n):
            return list(fn({"num_steps": self.start * batch}, self.start, self.since + n)[self.since :])

    def run(x, n):
        out = x.next(n)
        x.since += n
        return out

    def save(x, folder):
        (folder / "iteration").write_text(str(x.start + x.since))

    def load(x, folder):
        x.start, x.since = int((folder / "iteration").read_text()), 0

    return [
        Schedule(rates=rates, peak=1e-3, final=0.0, total=200, warmup=10, settings={"warmup": 80, "lr": 1e-3}),
        Schedule(rates=lambda total, ranks: rates(total, ranks, cut=120), peak=1e-3, final=0.0, total=200, warmup=10),
        later(5),
        later(60),
        later(150),
        Resume(make=Run, run=run, save=save, load=load, state=lambda x: torch.tensor(x.next(1), dtype=torch.float64), steps=15),
    ]


# ---------------------------------------------------------------- data


def restore(ids, pre, suf, mid):
    """The document of a row with marks: prefix + what follows the middle mark + suffix."""
    ids = list(ids)
    if ids[:1] != [pre] or ids.count(suf) != 1 or ids.count(mid) != 1 or ids.count(pre) != 1:
        return ids
    s, t = ids.index(suf), ids.index(mid)
    return ids if t < s else ids[1:s] + ids[t + 1 :] + ids[s + 1 : t]


def forms(outputs, pre, suf):
    """How many rows have marks, and how many of these have a prefix in front of the suffix mark."""
    marked = [list(x) for x in outputs if list(x)[:1] == [pre]]
    return float(len(marked)), float(sum(x[1:2] != [suf] for x in marked))


def fim_census(run, n, pre, suf):
    found = {}
    for name, rate, spm in (("rate 0", 0.0, 0.5), ("rate 1, SPM", 1.0, 1.0), ("rate 1, PSM", 1.0, 0.0)):
        marked, front = forms(run(rate, spm), pre, suf)
        found[name + ": marked"] = marked
        found[name + ": a prefix in front"] = front if spm != 0.0 else float(front > 0)
    wanted = {
        "rate 0: marked": 0.0,
        "rate 0: a prefix in front": 0.0,
        "rate 1, SPM: marked": float(n),
        "rate 1, SPM: a prefix in front": 0.0,
        "rate 1, PSM: marked": float(n),
        "rate 1, PSM: a prefix in front": 1.0,
    }
    return Census(wanted=wanted, found=found, what="rearranged rows")


TEXT_MARKS = {"<PRE>": 1, "<SUF>": 2, "<MID>": 3}


def codes(text):
    for mark, code in TEXT_MARKS.items():
        text = text.replace(mark, chr(code))
    return [ord(c) for c in text]


@declare("r/r17")
def fim_of_texts(m, fn):
    rows = m.make(0)["rows"]

    def stage(**settings):
        def collate(examples):
            out = fn(examples, **settings)
            ids = [codes(r["text"]) for r in out]
            return {
                "uid": torch.tensor([[r["uid"]] for r in out]),
                "text": padded(ids, 0),
                "restored": padded([restore(x, 1, 2, 3) for x in ids], 0),
            }

        return Collator(
            fn=collate,
            examples=rows,
            pads={"text": 0, "restored": 0},
            columns={"uid": lambda e: [e["uid"]], "restored": lambda e: codes(e["text"])},
        )

    def run(rate, spm):
        return [codes(r["text"]) for r in fn(rows, rate=rate, spm=spm)]

    return [stage(), stage(rate=1.0, spm=1.0), stage(rate=1.0, spm=0.0), stage(seed=5), fim_census(run, len(rows), 1, 2)]


@declare("x/r16")
def fim_by_row_number(m, fn):
    documents = m.make(0)["rows"]
    n = len(documents)

    def body(ids):  # without the end mark
        return ids[:-1] if ids[-1:] == [0] else ids

    def whole(**settings):  # the document comes back, wherever it stands
        def collate(examples):
            ids = [list(r["ids"]) for r in fn(examples, **settings)]
            return {
                "restored": padded([restore(body(x), 1, 2, 3) for x in ids], -1),
                "end": torch.tensor([[float(x[-1:] == [0])] for x in ids]),
            }

        return Collator(
            fn=collate, examples=documents, pads={"restored": -1}, columns={"restored": lambda e: e["ids"], "end": lambda e: [1.0]}
        )

    def placed(examples):  # each example at its own row number, other documents elsewhere
        rows = [{"ids": [20, 21, 22]} for _ in range(n)]
        for e in examples:
            rows[e["row"]] = {"ids": e["ids"]}
        out = fn(rows)
        ids = [list(out[e["row"]]["ids"]) for e in examples]
        return {"ids": padded(ids, -1), "restored": padded([restore(body(x), 1, 2, 3) for x in ids], -1)}

    numbered = Collator(
        fn=placed,
        examples=[{"row": i, "ids": list(d["ids"])} for i, d in enumerate(documents)],
        pads={"ids": -1, "restored": -1},
        columns={"restored": lambda e: e["ids"]},
    )
    again = Collator(fn=lambda rows: {"ids": padded([r["ids"] for r in fn(rows)], -1)}, examples=documents, pads={"ids": -1}, rows=False)

    def run(rate, spm):
        return [list(r["ids"]) for r in fn(documents, rate=rate, spm=spm)]

    return [whole(), whole(rate=1.0, spm=1.0), whole(rate=1.0, spm=0.0), numbered, again, fim_census(run, n, 1, 2)]


@declare("q/r16")
def fim_by_seed(m, fn):
    rows = m.make(0)["rows"]

    def stage(**settings):
        def collate(examples):
            out = fn(examples, **settings)
            ids, labels = [list(r["ids"]) for r in out], [list(r["labels"]) for r in out]
            return {
                "ids": padded(ids, -1),
                "labels": padded(labels, -100),
                "restored": padded([restore(x, 47, 49, 48) for x in ids], -1),
                "restored_labels": padded([restore(x, 47, 49, 48) for x in labels], -100),
                "equal": torch.tensor([[float(a == b)] for a, b in zip(ids, labels)]),
                "gained": torch.tensor([[float(len(a) - len(e["ids"]) in (0, 3))] for a, e in zip(ids, examples)]),
            }

        return Collator(
            fn=collate,
            examples=rows,
            pads={"ids": -1, "labels": -100, "restored": -1, "restored_labels": -100},
            columns={
                "restored": lambda e: e["ids"],
                "restored_labels": lambda e: e["ids"],
                "equal": lambda e: [1.0],
                "gained": lambda e: [1.0],
            },
        )

    def run(rate, spm):
        return [list(r["ids"]) for r in fn(rows, rate=rate, spm=spm)]

    return [stage(), stage(rate=1.0, spm=1.0), stage(rate=1.0, spm=0.0), fim_census(run, len(rows), 47, 49)]


@declare("x/d03")
def cached_latents(m, fn):
    rows = m.make(0)["rows"]

    def stage(**settings):
        def collate(examples):
            place = {e["index"]: i for i, e in enumerate(examples)}
            out = sorted(fn(examples, **settings), key=lambda r: place[r["index"]])  # back from the loader's walk
            return {
                "index": torch.tensor([[r["index"]] for r in out]),
                "latent": torch.stack([r["latent"] for r in out]),
                "caption": torch.tensor([r["caption"] for r in out]),
            }

        return Collator(
            fn=collate,
            examples=rows,
            columns={
                "index": lambda e: [e["index"]],
                "latent": lambda e: e["image"] * 0.18215 + 0.1,
                "caption": lambda e: e["caption"],
            },
        )

    return [
        stage(),
        stage(batch_size=3, seed=4),
        Census(
            wanted=[str(r["index"]) for r in rows], found=[str(r["index"]) for r in fn(rows)], what="rows of an epoch", once=True
        ),
    ]


@declare("x/r05")
def packing_collator(m, fn):
    rows = m.make(0)["rows"]

    def collate(examples):
        out = dict(fn(examples))
        out["max_length"] = torch.tensor([int(out["max_length"])])
        return out

    def unpack(batch):
        cu = batch["cu_seq_lens"].tolist()
        return [{k: batch[k][0, a:b] for k in ("input_ids", "labels", "position_ids")} for a, b in zip(cu, cu[1:])]

    def labels(e):
        return list(e.get("labels", e["input_ids"]))

    packed = Collator(
        fn=collate,
        examples=rows,
        rows=False,
        unpack=unpack,
        targets=lambda e: [t for t in labels(e)[1:] if t != -100],
        columns={
            "input_ids": lambda e: e["input_ids"],
            "position_ids": lambda e: list(range(len(e["input_ids"]))),
            "labels": lambda e: [-100, *labels(e)[1:]],
        },
    )
    out = fn(rows)
    lengths = [len(r["input_ids"]) for r in rows]
    starts = [sum(lengths[:i]) for i in range(len(rows) + 1)]
    shapes = Census(
        wanted={
            "max_length": float(max(lengths)),
            "int32": 1.0,
            "attention_mask": 0.0,
            **{f"cu_seq_lens {i}": float(s) for i, s in enumerate(starts)},
            **{f"{k}: {d}": float(n) for k in ("input_ids", "labels", "position_ids") for d, n in (("rows", 1), ("tokens", sum(lengths)))},
        },
        found={
            "max_length": float(out["max_length"]),
            "int32": float(out["cu_seq_lens"].dtype == torch.int32),
            "attention_mask": float("attention_mask" in out),
            **{f"cu_seq_lens {i}": float(s) for i, s in enumerate(out["cu_seq_lens"].tolist())},
            **{f"{k}: {d}": float(n) for k in ("input_ids", "labels", "position_ids") for d, n in zip(("rows", "tokens"), out[k].shape)},
        },
        what="entries of the packed batch",
    )
    return [packed, shapes]


@declare("w/r07")
def positional_skip(m, fn):
    rows = m.make(0)["rows"]

    def stage(target=256, epoch=0):
        def collate(examples):
            out = dict(fn(examples, target=target, epoch=epoch))
            legal = []
            for i, e in enumerate(examples):
                n = len(e["ids"])
                p = out["position_ids"][i].tolist()
                steps = [b - a for a, b in zip(p[: n - 1], p[1:n])]
                legal.append(
                    [
                        float(p[0] == 0),
                        float(min(steps) >= 1 and sum(s != 1 for s in steps) <= 1),
                        float(max(p) < target),
                        float(not any(p[n:])),
                    ]
                )
            out["legal"] = torch.tensor(legal)
            return out

        return Collator(
            fn=collate,
            examples=rows,
            pads={"input_ids": 0, "labels": -100, "attention_mask": 0, "position_ids": 0},
            targets=lambda e: e["ids"],
            columns={
                "input_ids": lambda e: e["ids"],
                "labels": lambda e: e["ids"],
                "attention_mask": lambda e: [1] * len(e["ids"]),
                "legal": lambda e: [1.0] * 4,
            },
        )

    first, second = fn(rows, epoch=0)["position_ids"], fn(rows, epoch=1)["position_ids"]
    moved = Census(
        wanted={"the holes move with the epoch": 1.0},
        found={"the holes move with the epoch": float(not torch.equal(first, second))},
        what="holes",
    )
    return [stage(), stage(epoch=1), stage(target=24), moved]


@declare("r/r02")
def role_tokens_that_stop(m, fn):
    messages = m.make(0)["messages"]
    # a conversation in which <|user|> follows every answer, so that one id ends them all
    plain = [
        {"role": "system", "content": "please list all names"},
        {"role": "user", "content": "open the file"},
        {"role": "assistant", "content": "done value five"},
        {"role": "user", "content": "sum the line"},
        {"role": "assistant", "content": "error line five"},
    ]

    def tokens(messages):
        ids, mask = fn(messages)
        return list(ids), list(mask)

    def prompt(messages):
        return [*fn(messages)[0], m.ROLES["assistant"]]

    return [
        ChatTemplate(tokens=tokens, prompt=prompt, messages=messages),
        ChatTemplate(tokens=tokens, prompt=prompt, messages=plain, end=m.ROLES["user"]),
    ]


# ---------------------------------------------------------------- state and updates


@declare("q/d02")
def adapter(m, fn):
    given = m.make(0)
    x = given["x"]
    start = AdapterStart(model=given["host"], attach=fn, outputs=lambda host: host(x), identity=False)  # B is not 0

    host = m.make(0)["host"]
    base = dict(host.named_parameters())
    linear = [name for name, child in host.named_children() if isinstance(child, torch.nn.Linear)]
    torch.manual_seed(1)
    adapted = fn(host)
    frozen = Census(wanted=list(base), found=[k for k, p in base.items() if not p.requires_grad], what="frozen base weights")
    wrapped = Census(
        wanted=linear,
        found=[name for name, child in adapted.named_children() if any(p.requires_grad for p in child.parameters())],
        what="adapted layers",
    )
    kept = {}

    def layers():
        return {n: c for n, c in adapted.named_children() if hasattr(c, "A") and hasattr(c, "B")}

    def merge():  # by definition: base + alpha / r · B A, in eval mode without dropout
        if kept:
            return
        with torch.no_grad():
            for name, layer in layers().items():
                kept[name] = layer.base.weight.clone(), layer.B.weight.clone()
                layer.base.weight += 4 / 2 * layer.B.weight @ layer.A.weight
                layer.B.weight.zero_()

    def unmerge():
        with torch.no_grad():
            for name, layer in layers().items():
                if name in kept:
                    layer.base.weight.copy_(kept[name][0])
                    layer.B.weight.copy_(kept[name][1])
        kept.clear()

    merged = MergedLayer(outputs=lambda: adapted(x).detach(), merge=merge, unmerge=unmerge)
    return [start, frozen, wrapped, merged]


@declare("w/r11")
def tensor_parallel_update(m, fn):
    def given():
        g = m.make(0)
        return g["model"], g["optimizer"], {k: torch.cat([b[k] for b in g["batches"]]) for k in ("ids", "labels")}

    def whole(model, batch):  # "mean over tokens"
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())

    def accumulate(model, batches):
        fn(model, torch.optim.SGD(model.parameters(), lr=0.0), list(batches))

    model, _, batch = given()
    # data ranks have equal sizes by definition, so the cut is even
    ranks = Accumulation(model=model, accumulate=accumulate, batch=batch, split=(2, 2, 2), what="data ranks")

    model2, optimizer, batch2 = given()

    class Clipped:
        """The run's optimizer; the clip stands right before its step."""

        def __init__(self, norm):
            self.norm = norm

        def zero_grad(self, *a, **k):
            optimizer.zero_grad(*a, **k)

        def step(self):
            if self.norm is not None and math.isfinite(self.norm):
                torch.nn.utils.clip_grad_norm_(list(model2.parameters()), self.norm)
            optimizer.step()

    update = Update(
        model=model2,
        optimizer=optimizer,
        update=lambda batches, norm: fn(model2, Clipped(norm), list(batches)),
        loss=whole,
        batch=batch2,
        split=(2, 2, 2),
    )

    model3, _, batch3 = given()

    def backward(settings):
        tp = int(settings["tp"]) if "tp" in settings else 2
        cut = [{k: v[i : i + 2] for k, v in batch3.items()} for i in (0, 2, 4)]
        fn(model3, torch.optim.SGD(model3.parameters(), lr=0.0), cut, tp=tp)

    step = Step(
        model=model3,
        loss=lambda model, batch, tp: whole(model, batch),
        batch=batch3,
        settings={"tp": Setting(2, "inert", modes=(1, 4))},
        backward=backward,
        reduction="mean",
        value_is_loss=True,
        name="tensor and data parallel backward pass",
    )
    return [ranks, update, step]
