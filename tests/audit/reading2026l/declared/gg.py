import copy
import math
from collections import Counter
from itertools import combinations

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from earnest_audit import AdvantageEstimator, Census, Collator, MergedLayer, Setting, Step, Unbiased, Update
from tests.audit.reading2026l.reading import declare, parts, step_of

PAD = -9999.0


def table(lists, dtype=torch.float32):
    """Rows of different lengths as one tensor, padded with PAD at the end."""
    if not lists:
        return torch.zeros(0, 1, dtype=dtype)
    return pad_sequence([torch.as_tensor(x).to(dtype).reshape(-1) for x in lists], batch_first=True, padding_value=PAD)


def row(x, dtype=torch.float32):
    return torch.as_tensor(x).to(dtype).reshape(-1)


def calls(fn, examples, expected):
    """An example is one whole call (inputs, and settings where they are not the defaults): its result is what the words say."""
    def run(examples):
        return {"result": table([fn(**e) for e in examples])}
    return Collator(run, examples, pads={"result": PAD}, columns={"result": lambda e: row(expected(**e))})


def token_logps(model, ids):
    """Entry t belongs to token t, entry 0 is 0."""
    nll = F.cross_entropy(model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return F.pad(-nll, (1, 0))


def z(x, eps):
    return (x - x.mean()) / (x.std() + eps)


# ---------------------------------------------------------------- k01
def reinforce_pp(rewards, groups, response_mask, eps=1e-8):
    r, m = rewards.double(), response_mask.bool()
    a = torch.stack([r[i] - r[groups == groups[i]].mean() for i in range(len(r))])[:, None].expand(m.shape)
    tokens = a[m]
    out = torch.zeros(m.shape, dtype=torch.float64)
    out[m] = (tokens - tokens.mean()) / tokens.var(unbiased=False).clamp(min=eps).sqrt()
    return out


@declare("gg/d06")
def _(module, fn):
    one_length = AdvantageEstimator(lambda r, g: fn(r, g, torch.ones(len(r), 4))[:, 0], scale="free", over="group", scaled_over="batch")
    examples = [module.make(s) for s in range(4)]
    examples[2]["groups"] = torch.tensor([0, 1, 0, 1, 1, 0, 0, 0])
    examples[3]["eps"] = 1.0
    return [one_length, calls(fn, examples, reinforce_pp)]


# ---------------------------------------------------------------- k02
@declare("gg/d08")
def _(module, fn):
    pool = [r for s in range(5) for r in module.make(s)["rows"]]

    def arrivals(n):
        return [dict(r, id=i + 1) for i, r in enumerate(pool[:n])]

    out = []
    for n, settings in ((3, {}), (8, {}), (10, {}), (11, {}), (13, {}), (20, {}), (26, {}), (39, {}), (17, {"capacity": 7, "block": 3}), (9, {"capacity": 12, "block": 5})):
        rows = arrivals(n)
        kept = rows[-settings.get("capacity", 10):]
        got = fn(copy.deepcopy(rows), **settings)
        out.append(Census([str(r["id"]) for r in kept], [str(r["id"]) for r in got], what=f"transitions of {n}", once=True))

        def numbers(rs):
            return {f"{r['id']} {k}": v for r in rs for k, v in (("action", r["action"]), ("reward", r["reward"]), *((f"obs {j}", x) for j, x in enumerate(r["obs"])))}
        out.append(Census(numbers(kept), numbers(got), what=f"contents of {n}"))

    def run(rows):  # not more than the capacity: all of them, in the order of the slots
        got = fn(rows)
        return {"id": torch.tensor([r["id"] for r in got]), "obs": torch.tensor([r["obs"] for r in got]),
                "action": torch.tensor([r["action"] for r in got]), "reward": torch.tensor([r["reward"] for r in got])}
    columns = {"id": lambda r: torch.tensor(r["id"]), "obs": lambda r: torch.tensor(r["obs"]),
               "action": lambda r: torch.tensor(r["action"]), "reward": lambda r: torch.tensor(r["reward"])}
    return out + [Collator(run, arrivals(7), columns=columns), Collator(run, arrivals(10), columns=columns)]


# ---------------------------------------------------------------- k03
def per_weights(rows, alpha=0.6, beta=0.4):
    p = [r["priority"] ** alpha for r in rows]
    p = [x / sum(p) for x in p]
    w = [(len(rows) * x) ** -beta for x in p]
    return p, [x / max(w) for x in w]


@declare("gg/r15")
def _(module, fn):
    def expected_ids(rows, draws, alpha=0.6, beta=0.4):  # a power of two: the leaves stand in the order of storage
        p, _ = per_weights(rows, alpha, beta)
        ids = []
        for u in draws:
            i = 0
            while i < len(p) - 1 and u > p[i]:
                u, i = u - p[i], i + 1
            ids.append(rows[i]["id"])
        return ids

    def run(examples):
        got = [fn(**e) for e in examples]
        ratio = []
        for e, rs in zip(examples, got):  # the weight of the row that was drawn, over what the words say for this row
            _, w = per_weights(e["rows"], e.get("alpha", 0.6), e.get("beta", 0.4))
            place = {r["id"]: i for i, r in enumerate(e["rows"])}
            ratio.append([r["weight"] / w[place[r["id"]]] for r in rs])
        kept = [[float(any(r["id"] == s["id"] and r["priority"] == s["priority"] for s in e["rows"])) for r in rs] for e, rs in zip(examples, got)]
        return {"weight": table(ratio), "row": table(kept), "id": table([[r["id"] for r in rs] for rs in got])}

    ones = {"weight": lambda e: torch.ones(len(e["draws"])), "row": lambda e: torch.ones(len(e["draws"]))}
    pads = {"weight": PAD, "row": PAD, "id": PAD}
    examples = [module.make(s) for s in range(4)]
    examples[1]["alpha"], examples[2]["beta"] = 1.0, 1.0
    examples[3]["rows"] = examples[3]["rows"][:5]
    two = []
    for s in range(4):
        e = module.make(s)
        e["rows"] = e["rows"][:(8, 4, 8, 2)[s]]
        two.append(e)
    two[2].update(alpha=0.9, beta=0.7)

    rows = module.make(0)["rows"]

    def corrected(x, alpha):  # at beta 1 the weights undo the priorities: the mean of the corrected draws is x
        flat = x.reshape(-1)
        items = [{"id": i, "priority": 0.2 + rows[i % len(rows)]["priority"]} for i in range(len(flat))]
        p, _ = per_weights(items, alpha, 1.0)
        top = 1 / (len(p) * min(p))
        got = fn(rows=items, draws=torch.rand(32).clamp(1e-6, 1 - 1e-6).tolist(), alpha=alpha, beta=1.0)
        y = [0.0] * len(flat)
        for r in got:
            y[r["id"]] += r["weight"] * top * len(p) / len(got)
        return (flat.double() * torch.tensor(y, dtype=torch.float64)).reshape(x.shape).to(x.dtype)

    return [Collator(run, examples, pads=pads, columns=ones),
            Collator(run, two, pads=pads, columns={**ones, "id": lambda e: row(expected_ids(**e))}),
            Unbiased(corrected, settings=(0.3, 0.7))]


# ---------------------------------------------------------------- k04
@declare("gg/r04")
def _(module, fn):
    def inside(batch, v_min, v_max):  # returns are inside the range, whatever a test puts at untrained places
        return dict(batch, returns=batch["returns"].clamp(v_min, v_max))

    def loss(model, batch, v_min, v_max, sigma):
        return fn(model, inside(batch, v_min, v_max), v_min=v_min, v_max=v_max, sigma=sigma)

    def words(model, batch, v_min, v_max, sigma):
        m = batch["loss_mask"].bool()
        logp = model(batch["ids"])[m].log_softmax(-1)
        width = (v_max - v_min) / logp.shape[-1]
        edges = v_min + width * torch.arange(logp.shape[-1] + 1, dtype=torch.float64)
        r = inside(batch, v_min, v_max)["returns"][m].double()
        cdf = torch.special.ndtr((edges - r[:, None]) / (sigma * width))
        mass = cdf.diff(dim=-1)
        target = mass / mass.sum(-1, keepdim=True)
        return -(target.to(logp.dtype) * logp).sum(-1).mean()

    return step_of(module, loss, roles={"ids": "ids", "mask": "loss_mask", "returns": "returns"}, wide=("ids", "loss_mask", "returns"),
                   settings={"v_min": Setting(-2.0, "setting"), "v_max": Setting(2.0, "setting"), "sigma": Setting(0.75, "setting")},
                   reduction="mean", value_is_loss=True, paths={"the words": words})


# ---------------------------------------------------------------- k05
def merge_turns(turns):
    rows = []
    for t in turns:
        p = t["prompt_ids"]
        if not rows or p[:len(rows[-1][0])] != rows[-1][0]:
            rows.append(([], [], [], t["advantage"]))
        ids, mask, logps, _ = rows[-1]
        seen, c = p[len(ids):], t["completion_ids"]
        ids += seen + c
        mask += [0] * len(seen) + [1] * len(c)
        logps += [0.0] * len(seen) + t["logprobs"]
    return rows


@declare("gg/r11")
def _(module, fn):
    rows = module.make(0)["rows"] + [dict(r, episode=r["episode"] + 4) for r in module.make(1)["rows"]]
    episodes = [[r for r in rows if r["episode"] == e] for e in range(8)]
    # an episode that begins with all that the one before it ended on, and a turn without an observation
    last = episodes[-1][-1]
    start = last["prompt_ids"] + last["completion_ids"]
    episodes.append([{"episode": 8, "prompt_ids": start + [7], "completion_ids": [3, 4], "logprobs": [-0.25, -0.5], "advantage": 0.75},
                     {"episode": 8, "prompt_ids": start + [7, 3, 4], "completion_ids": [5], "logprobs": [-0.125], "advantage": 0.75},
                     {"episode": 8, "prompt_ids": start + [7, 3, 9], "completion_ids": [6], "logprobs": [-0.375], "advantage": 0.75}])

    def run(examples):
        got = fn([t for e in examples for t in e])
        per = [[r for r in got if r["episode"] == e[0]["episode"]] for e in examples]
        flat = lambda key: [[x for r in rs for x in r[key]] for rs in per]
        return {"ids": table(flat("ids"), torch.long), "loss_mask": table(flat("loss_mask"), torch.long), "logprobs": table(flat("logprobs")),
                "advantage": table([[r["advantage"] for r in rs] for rs in per]), "lengths": table([[len(r["ids"]) for r in rs] for rs in per], torch.long),
                "labels": pad_sequence([torch.tensor([i if m else -100 for r in rs for i, m in zip(r["ids"], r["loss_mask"])]) for rs in per],
                                       batch_first=True, padding_value=-100)}

    def column(k, dtype):
        return lambda e: row([x for r in merge_turns(e) for x in r[k]], dtype)

    columns = {"ids": column(0, torch.long), "loss_mask": column(1, torch.long), "logprobs": column(2, torch.float32),
               "advantage": lambda e: row([r[3] for r in merge_turns(e)]), "lengths": lambda e: row([len(r[0]) for r in merge_turns(e)], torch.long)}
    return Collator(run, episodes, pads={**{c: PAD for c in columns}, "labels": -100}, columns=columns,
                    targets=lambda e: [i for t in e for i in t["completion_ids"]])


# ---------------------------------------------------------------- k06
@declare("gg/d04")
def _(module, fn):
    examples = []
    for s in range(4):
        b = module.make(s)["batches"]
        b[4]["interest"], b[7]["gamma"], b[6]["gamma_next"] = 0.5, 0.5, 0.5
        examples.append({"seed": s, "batches": b})
    examples[2]["lam"], examples[3]["lam"] = 0.0, 0.4

    def run(examples):
        out = []
        for e in examples:
            model = module.make(e["seed"])["model"]
            fn(model, torch.optim.SGD(model.parameters(), lr=0.02), e["batches"], **({"lam": e["lam"]} if "lam" in e else {}))
            out.append(model.weight.detach().reshape(-1).clone())
        return {"weight": torch.stack(out)}

    def words(e):
        w = module.make(e["seed"])["model"].weight.detach().double().reshape(-1)
        lam, follow, trace, before = e.get("lam", 0.7), 0.0, torch.zeros_like(w), 1.0
        for t in e["batches"]:
            phi, phi_next = t["phi"].double(), t["phi_next"].double()
            follow = before * t["gamma"] * follow + t["interest"]
            emphasis = lam * t["interest"] + (1 - lam) * follow
            trace = t["rho"] * (t["gamma"] * lam * trace + emphasis * phi)
            delta = t["reward"] + t["gamma_next"] * (w @ phi_next) - w @ phi
            w, before = w + 0.02 * delta * trace, t["rho"]
        return w.float()

    return Collator(run, examples, columns={"weight": words})


# ---------------------------------------------------------------- k07
def gigpo(rewards, groups, episodes, states, gamma=0.9, omega=1.0, eps=1e-6):
    r, n = rewards.double(), len(rewards)
    out = torch.zeros(n, dtype=torch.float64)
    ret = torch.stack([sum(gamma ** (s - t) * r[s] for s in range(t, n) if episodes[s] == episodes[t]) for t in range(n)])
    for t in range(n):
        task = groups == groups[t]
        names = episodes[task].unique().tolist()
        totals = torch.stack([r[episodes == e].sum() for e in names])
        out[t] = z(totals, eps)[names.index(int(episodes[t]))]
        same = task & (states == states[t])
        if same.sum() > 1:
            out[t] += omega * (ret[t] - ret[same].mean()) / (ret[same].std() + eps)
    return out


@declare("gg/r09")
def _(module, fn):
    def one_step(states):  # episodes of one step
        return AdvantageEstimator(lambda r, g: fn(r, g, torch.arange(len(r)), states(len(r))), scale="free", over="group")
    examples = [module.make(s) for s in range(5)]
    examples[1]["gamma"], examples[2]["omega"], examples[3]["eps"] = 0.5, 0.5, 0.1
    return [one_step(lambda n: torch.zeros(n, dtype=torch.long)), one_step(torch.arange), calls(fn, examples, gigpo)]


# ---------------------------------------------------------------- k08
def lp_of(model, batch):
    return token_logps(model, batch["ids"])


@declare("gg/r03")
def _(module, fn):
    def words(model, batch, clip, max_completion, group):
        lp, r, total = token_logps(model, batch["ids"]), batch["rewards"], 0.0
        for i in range(len(r)):
            first = i // group * group
            a, m = r[i] - r[first:first + group].mean(), batch["loss_mask"][i].bool()
            ratio = (lp[i] - batch["old_logps"][i])[m].exp()
            total = total - torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a).sum()
        return total / (len(r) * max_completion)

    return step_of(module, fn, roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logps", "rewards": "rewards"},
                   wide=("ids", "loss_mask", "old_logps"), logprobs=lp_of, rows_interact=True, reduction="mean", value_is_loss=True,
                   settings={"clip": Setting(0.2, "clip"), "max_completion": Setting(16, "setting", modes=(12, 32)), "group": Setting(3, "setting", modes=(2, 6))},
                   paths={"the words": words})


# ---------------------------------------------------------------- k09
def gdpo(rewards, groups, weights, eps=1e-4):
    r, w = rewards.double(), weights.double()
    s = torch.zeros(len(r), dtype=torch.float64)
    for k in range(r.shape[1]):
        for g in groups.unique():
            s[groups == g] += w[k] * z(r[groups == g, k], eps)
    return z(s, eps)


@declare("gg/r08")
def _(module, fn):
    # rewards of 0 and 1: dividing twice by a spread plus 1e-4 enlarges the rounding of a mean
    one = AdvantageEstimator(lambda r, g: fn(r[:, None], g, torch.ones(1)), scale="free", over="group", scaled_over="batch", values=(0.0, 1.0))
    examples = [module.make(s) for s in range(4)]
    examples[1]["groups"] = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 0, 1, 0, 1])
    examples[2]["eps"] = 0.25
    examples[3]["weights"] = torch.tensor([0.5, 2.0, 1.0])
    return [one, calls(fn, examples, gdpo)]


# ---------------------------------------------------------------- k10
def token_returns(rewards, groups, kl, loss_mask, kl_coef=0.1, gamma=1.0):
    m = loss_mask.bool()
    out = torch.zeros(m.shape, dtype=torch.float64)
    for i in range(len(m)):
        own = m[i].nonzero()[:, 0].tolist()
        for t in own:
            out[i, t] = sum(gamma ** (s - t) * (-kl_coef * kl[i, s].double() + (rewards[i].double() if s == own[-1] else 0.0)) for s in own if s >= t)
    return out


@declare("gg/d03")
def _(module, fn):
    plain = AdvantageEstimator(lambda r, g: fn(r, g, torch.zeros(len(r), 5), torch.ones(len(r), 5))[:, 0], scale="equal", over="none")
    examples = [module.make(s) for s in range(4)]
    examples[1]["gamma"], examples[2]["kl_coef"] = 0.5, 0.5
    examples[3].update(gamma=0.875, kl_coef=1.0, rewards=torch.tensor([-1.0, 0.5, 2.0, 1.0]))
    return [plain, calls(fn, examples, token_returns)]


# ---------------------------------------------------------------- k11
@declare("gg/r14")
def _(module, fn):
    def words(model, batch, clip, cap):
        m = batch["loss_mask"].bool()
        lp, prox, beh, a = token_logps(model, batch["ids"])[m], batch["proximal_logps"][m], batch["behaviour_logps"][m], batch["advantages"][m]
        w, ratio = (prox - beh).exp(), (lp - prox).exp()
        keep = w <= cap
        tok = -w * torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
        return tok[keep].sum() / m.sum()

    return step_of(module, fn, roles={"ids": "ids", "mask": "loss_mask", "behaviour": "behaviour_logps", "proximal": "proximal_logps", "advantages": "advantages"},
                   wide=("ids", "loss_mask", "behaviour_logps", "proximal_logps", "advantages"), logprobs=lp_of, reduction="mean", value_is_loss=True,
                   drops_tokens=True, settings={"clip": Setting(0.2, "clip"), "cap": Setting(2.0, "bound")}, paths={"the words": words})


# ---------------------------------------------------------------- k12
@declare("gg/r01")
def _(module, fn):
    def words(model, batch, eps_high):
        m = batch["loss_mask"].bool()
        lp, a = token_logps(model, batch["ids"])[m], batch["advantages"][:, None].expand(m.shape)[m]
        w = (lp.detach() - batch["old_logps"][m]).exp().clamp(max=eps_high)
        return -(w * a * lp).mean()

    return step_of(module, fn, roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logps", "advantages": "advantages"},
                   wide=("ids", "loss_mask", "old_logps"), logprobs=lp_of, reduction="mean", value_is_loss=False,
                   settings={"eps_high": Setting(1.3, "bound")}, paths={"the words": words})


# ---------------------------------------------------------------- k13
@declare("gg/r12")
def _(module, fn):
    def words(model, batch, gamma, lam):
        q, a, pi, n = model(batch["obs"]), batch["actions"], batch["pi"], len(batch["actions"])
        c = lam * torch.minimum(torch.ones(n), pi[:n].gather(1, a[:, None])[:, 0] / batch["mu"])
        taken, fixed = q[:n].gather(1, a[:, None])[:, 0], q.detach()
        target = [None] * n
        for t in range(n - 1, -1, -1):
            after = (pi[t + 1] * fixed[t + 1]).sum()
            if t + 1 < n:
                after = after + c[t + 1] * (target[t + 1] - fixed[t + 1, a[t + 1]])
            target[t] = batch["rewards"][t] + gamma * (1 - batch["terminal"][t]) * after
        return (0.5 * (taken - torch.stack(target)) ** 2).mean()

    steps = []
    for seed in (0, 1):  # the last step is not terminal, and is
        batch = module.make(seed)
        batch["terminal"][-1] = float(seed)
        steps.append(Step(model=batch.pop("model"), loss=fn, batch=batch, rows_interact=True, wide=(), value_is_loss=False,
                          settings={"gamma": Setting(0.97, "setting"), "lam": Setting(0.9, "setting")}, paths={"the words": words}))
    return steps


# ---------------------------------------------------------------- k14
@declare("gg/d10")
def _(module, fn):
    def loss(model, batch, clip, ent_coef):  # a step is a row with one token
        return fn(model, dict(batch, old_logps=batch["old_logps"][:, 0]), clip=clip, ent_coef=ent_coef)

    def masked(model, batch):
        return model(batch["obs"]).masked_fill(~batch["action_mask"], -math.inf).log_softmax(-1)

    def logprobs(model, batch):
        return masked(model, batch).gather(1, batch["actions"][:, None])

    def words(model, batch, clip, ent_coef):
        lp, a = masked(model, batch), batch["advantages"]
        ratio = lp.gather(1, batch["actions"][:, None])[:, 0].sub(batch["old_logps"][:, 0]).exp()
        legal = lp.masked_fill(~batch["action_mask"], 0.0)
        entropy = -(legal.exp() * legal).sum(-1)
        return (-torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a) - ent_coef * entropy).mean()

    model, batch = parts(module)
    batch["old_logps"] = batch["old_logps"][:, None]
    return Step(model=model, loss=loss, batch=batch, roles={"behaviour": "old_logps", "advantages": "advantages"}, wide=(), logprobs=logprobs,
                reduction="mean", value_is_loss=True, settings={"clip": Setting(0.2, "clip"), "ent_coef": Setting(0.01, "weight")}, paths={"the words": words})


# ---------------------------------------------------------------- k15
def async_loss(model, batch, clip=0.2):
    m = batch["loss_mask"].bool()
    a = batch["advantages"][:, None].expand(m.shape)[m]
    ratio = (token_logps(model, batch["ids"])[m] - batch["rollout_logps"][m]).exp()
    return -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a).mean()


@declare("gg/d05")
def _(module, fn):
    made = module.make(0)
    model, optimizer = made["model"], made["optimizer"]

    def update(batches):  # one rollout, one step
        fn(model, optimizer, [{k: torch.cat([b[k] for b in batches]) for k in batches[0]}])

    def run(examples):
        out = []
        for e in examples:
            m = module.make(e["seed"])["model"]
            fn(m, torch.optim.SGD(m.parameters(), lr=0.5), e["batches"], **({"clip": e["clip"]} if "clip" in e else {}))
            out.append(torch.cat([p.detach().reshape(-1) for p in m.parameters()]))
        return {"weights": torch.stack(out)}

    def words(e):
        m = module.make(e["seed"])["model"]
        for b in e["batches"]:
            grads = torch.autograd.grad(async_loss(m, b, e.get("clip", 0.2)), list(m.parameters()))
            with torch.no_grad():
                for p, g in zip(m.parameters(), grads):
                    p.sub_(0.5 * g)
        return torch.cat([p.detach().reshape(-1) for p in m.parameters()])

    examples = [{"seed": s, "batches": module.make(s)["batches"]} for s in range(3)]
    examples[1]["clip"] = 0.05
    examples[2]["batches"] = examples[2]["batches"] + module.make(7)["batches"][:1]
    return [Update(model, optimizer, update, async_loss, made["batches"][0], clips=False), Collator(run, examples, columns={"weights": words})]


# ---------------------------------------------------------------- k16
@declare("gg/d02")
def _(module, fn):
    def words(model, batch, clip):
        lp, rows = token_logps(model, batch["ids"]), []
        for i, a in enumerate(batch["advantages"]):
            m = batch["loss_mask"][i].bool()
            if m.any():
                s = (lp[i] - batch["old_logps"][i])[m].mean().exp()
                rows.append(-torch.minimum(s * a, s.clamp(1 - clip, 1 + clip) * a))
        return torch.stack(rows).mean()

    return step_of(module, fn, roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logps", "advantages": "advantages"},
                   wide=("ids", "loss_mask", "old_logps"), logprobs=lp_of, reduction="mean", value_is_loss=True,
                   settings={"clip": Setting(0.2, "clip")}, paths={"the words": words})


# ---------------------------------------------------------------- k17
@declare("gg/r02")
def _(module, fn):
    def words(model, batch, eps):
        lp, rows = token_logps(model, batch["ids"]), []
        for i, a in enumerate(batch["advantages"]):
            m = batch["loss_mask"][i].bool()
            d = (lp[i] - batch["old_logps"][i])[m]
            d = d.clamp(max=eps) if a > 0 else d.clamp(min=-eps)
            rows.append(-a * d.mean().exp())
        return torch.stack(rows).mean()

    return step_of(module, fn, roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logps", "advantages": "advantages"},
                   wide=("ids", "loss_mask", "old_logps"), logprobs=lp_of, reduction="mean", value_is_loss=True, empty_rows=False,
                   settings={"eps": Setting(0.4, "bound")}, paths={"the words": words})


# ---------------------------------------------------------------- k18
@declare("gg/r05")
def _(module, fn):
    def sigma(mu, nu):
        return (nu - mu ** 2).sqrt().clamp(min=1e-4)

    def run(examples):
        out = []
        for e in examples:
            m = module.make(e["seed"])["model"]
            fn(m, torch.optim.SGD(m.parameters(), lr=0.05), e["batches"], **({"beta": e["beta"]} if "beta" in e else {}))
            out.append(torch.cat([p.detach().reshape(-1) for p in (*m.parameters(), m.mu, m.nu)]))
        return {"state": torch.stack(out)}

    def words(e):
        m, beta = module.make(e["seed"])["model"], e.get("beta", 0.1)
        for b in e["batches"]:
            with torch.no_grad():
                mu, old = m.mu.clone(), sigma(m.mu, m.nu)
                m.mu.add_(beta * (b["returns"].mean() - m.mu))
                m.nu.add_(beta * ((b["returns"] ** 2).mean() - m.nu))
                new = sigma(m.mu, m.nu)
                m.head.weight.mul_(old / new)
                m.head.bias.copy_((old * m.head.bias + mu - m.mu) / new)
            loss = 0.5 * ((m(b["obs"]) - (b["returns"] - m.mu) / new) ** 2).mean()
            grads = torch.autograd.grad(loss, list(m.parameters()))
            with torch.no_grad():
                for p, g in zip(m.parameters(), grads):
                    p.sub_(0.05 * g)
        return torch.cat([p.detach().reshape(-1) for p in (*m.parameters(), m.mu, m.nu)])

    examples = [{"seed": s, "batches": module.make(s)["batches"]} for s in range(3)]
    examples[1]["beta"] = 0.5
    # without a learning rate the statistics move, and the unnormalised value of every obs stays
    made = module.make(3)
    model, batches = made["model"], made["batches"]
    obs = torch.cat([b["obs"] for b in batches])
    still = MergedLayer(lambda: (sigma(model.mu, model.nu) * model(obs) + model.mu).detach().clone(),
                        lambda: fn(model, torch.optim.SGD(model.parameters(), lr=0.0), batches), tolerance=1e-3)
    return [Collator(run, examples, columns={"state": words}), still]


# ---------------------------------------------------------------- k19
@declare("gg/d09")
def _(module, fn):
    def estimate(rewards, groups):
        seen, rows = Counter(), []
        for r, g in zip(rewards.tolist(), groups.tolist()):
            rows.append({"prompt": g, "gen": seen[g], "reward": r})
            seen[g] += 1
        got = {(r["prompt"], r["gen"]): r["advantage"] for r in fn(rows)}
        left_out = lambda r: 0.0 if math.isfinite(r["reward"]) else math.nan  # a dropped prompt trains nothing
        return torch.tensor([got.get((r["prompt"], r["gen"]), left_out(r)) for r in rows], dtype=rewards.dtype)

    lists = [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1], [0.5, 0.25, 1.0, 0.25], [0.5, 0.5, 0.5, 0.5], [0, 1], [1, 0, 0]]
    prompts = [[{"prompt": p, "gen": k, "reward": float(r)} for k, r in enumerate(rs)] for p, rs in enumerate(lists)]

    def run(examples):
        got, per = fn([r for e in examples for r in e]), {}
        for r in got:
            per.setdefault(r["prompt"], []).append(r)
        return {k: table([[r[k] for r in rs] for rs in per.values()]) for k in ("prompt", "gen", "reward", "advantage")}

    def expected(e):
        total = sum(r["reward"] for r in e)
        return row([r["reward"] - (total - r["reward"]) / (len(e) - 1) for r in e])

    columns = {k: (lambda e, k=k: row([r[k] for r in e])) for k in ("prompt", "gen", "reward")}
    stage = Collator(run, prompts, pads={k: PAD for k in ("prompt", "gen", "reward", "advantage")}, columns={**columns, "advantage": expected},
                     keeps=lambda e: len({r["reward"] for r in e}) > 1)
    return [AdvantageEstimator(estimate, scale="equal", over="group"), stage]


# ---------------------------------------------------------------- k20
def vtrace(rewards, groups, terminated, values, next_values, log_rhos, gamma=0.95, rho_clip=1.0, c_clip=1.0):
    r, v, after, rho = rewards.double(), values.double(), next_values.double(), log_rhos.double().exp()
    out = torch.zeros(len(r), dtype=torch.float64)
    for g in groups.unique():
        correction, vs_next = 0.0, None
        for t in reversed((groups == g).nonzero()[:, 0].tolist()):
            live, p, c = gamma * (1 - float(terminated[t])), min(rho_clip, float(rho[t])), min(c_clip, float(rho[t]))
            out[t] = p * (r[t] + live * (after[t] if vs_next is None else vs_next) - v[t])
            correction = p * (r[t] + live * after[t] - v[t]) + gamma * c * correction
            vs_next = v[t] + correction
    return out


@declare("gg/d01")
def _(module, fn):
    examples = [module.make(s) for s in range(6)]
    examples[1]["gamma"] = 0.5
    examples[2].update(rho_clip=2.0, c_clip=0.75)
    examples[3].update(rho_clip=0.75, c_clip=1.5)
    examples[4]["terminated"] = torch.zeros(9, dtype=torch.bool)
    examples[5]["terminated"] = torch.tensor([0, 0, 1, 0, 0, 0, 0, 0, 1]).bool()

    # an example is one trajectory: nothing of another enters
    def run(trajectories):
        n = [len(t["rewards"]) for t in trajectories]
        joined = {k: torch.cat([t[k] for t in trajectories]) for k in trajectories[0]}
        got = fn(groups=torch.arange(len(n)).repeat_interleave(torch.tensor(n)), **joined)
        return {"advantages": table(got.split(n))}

    trajectories = []
    for s in (0, 1):
        e = module.make(10 + s)
        for g in range(3):
            trajectories.append({k: x[e["groups"] == g].clone() for k, x in e.items() if k != "groups"})
    one = Collator(run, trajectories, pads={"advantages": PAD},
                   columns={"advantages": lambda t: row(vtrace(groups=torch.zeros(len(t["rewards"]), dtype=torch.long), **t))})
    return [calls(fn, examples, vtrace), one]


# ---------------------------------------------------------------- k21
@declare("gg/d07")
def _(module, fn):
    episodes = module.make(0)["rows"] + [dict(r, episode=r["episode"] + 4, interactions=[dict(x, id="b" + x["id"]) for x in r["interactions"]],
                                              result={"b" + k: v for k, v in r["result"].items()} if isinstance(r["result"], dict) else r["result"])
                                         for r in module.make(1)["rows"]]
    inter = lambda e, n: [{"id": f"n{e}-{k}", "prompt_ids": [e, k, 7], "completion_ids": [k, e]} for k in range(n)]
    episodes += [{"episode": 8, "interactions": inter(8, 3), "result": {"n8-1": 0.5}},                   # only one is named
                 {"episode": 9, "interactions": inter(9, 4), "result": {"n9-3": -0.25, "n9-0": 0.75}},
                 {"episode": 10, "interactions": inter(10, 1), "result": -0.5},
                 {"episode": 11, "interactions": inter(11, 3), "result": {}},
                 {"episode": 12, "interactions": inter(12, 3), "result": 0.25}]
    number = {x["id"]: i for i, x in enumerate(x for e in episodes for x in e["interactions"])}

    def run(examples):
        got, per = fn(examples), {}
        for r in got:
            per.setdefault(r["episode"], []).append(r)
        per = list(per.values())
        return {"episode": table([[r["episode"] for r in rs] for rs in per]), "id": table([[number[r["id"]] for r in rs] for rs in per]),
                "reward": table([[r["reward"] for r in rs] for rs in per]),
                "prompt_ids": table([[i for r in rs for i in r["prompt_ids"]] for rs in per]),
                "completion_ids": table([[i for r in rs for i in r["completion_ids"]] for rs in per])}

    def rewards(e):
        out = [0.0] * len(e["interactions"])
        if isinstance(e["result"], dict):
            out = [e["result"].get(x["id"], 0.0) for x in e["interactions"]]
        else:
            out[-1] = e["result"]
        return row(out)

    columns = {"episode": lambda e: row([e["episode"]] * len(e["interactions"])), "id": lambda e: row([number[x["id"]] for x in e["interactions"]]),
               "reward": rewards, "prompt_ids": lambda e: row([i for x in e["interactions"] for i in x["prompt_ids"]]),
               "completion_ids": lambda e: row([i for x in e["interactions"] for i in x["completion_ids"]])}
    return Collator(run, episodes, pads={c: PAD for c in columns}, columns=columns)


# ---------------------------------------------------------------- k22
def turn_advantages(rewards, groups, trajectory, turn, gamma=0.4, eps=1e-6):
    n, r = len(rewards), rewards.double()
    R = torch.stack([sum(gamma ** int(turn[s] - turn[i]) * r[s] for s in range(n)
                         if groups[s] == groups[i] and trajectory[s] == trajectory[i] and turn[s] >= turn[i]) for i in range(n)])
    out = torch.zeros_like(R)
    for g in groups.unique():
        out[groups == g] = z(R[groups == g], eps)
    return out


@declare("gg/r10")
def _(module, fn):
    single = AdvantageEstimator(lambda r, g: fn(r, g, torch.arange(len(r)), torch.zeros(len(r), dtype=torch.long)), scale="free", over="group")
    examples = [module.make(s) for s in range(4)]
    examples[1]["gamma"], examples[2]["eps"] = 0.75, 0.25
    return [single, calls(fn, examples, turn_advantages)]


# ---------------------------------------------------------------- k23
def opo(rewards, groups, lengths):
    r, n = rewards.double(), lengths.double()
    return torch.stack([r[i] - (n * r)[groups == g].sum() / n[groups == g].sum() for i, g in enumerate(groups)])


@declare("gg/r07")
def _(module, fn):
    one_length = AdvantageEstimator(lambda r, g: fn(r, g, torch.full((len(r),), 5)), scale="equal", over="group")
    examples = [module.make(s) for s in range(4)]
    examples[1]["rewards"] = examples[1]["rewards"] * 0.5 + torch.arange(12) / 16
    examples[2]["groups"] = torch.tensor([7, 7, 3, 3, 3, 3, 5, 7, 5, 7, 7, 7])
    return [one_length, calls(fn, examples, opo)]


# ---------------------------------------------------------------- k24
@declare("gg/r13")
def _(module, fn):
    def stage(k, seed, episodes):
        def run(examples):
            rows = [t for e in examples for t in e]
            got, at, out = fn(rows, k=k, seed=seed), 0, {"same": [], "original": [], "goal": [], "reward": [], "rows": []}
            for e in examples:
                mine = got[at * (k + 1):(at + len(e)) * (k + 1)]
                at += len(e)
                allowed = [{u["next_achieved"] for u in e[i:]} for i in range(len(e)) for _ in range(k + 1)]
                copies = [(j, r) for j, r in enumerate(mine) if j % (k + 1)]
                out["same"].append([x for r in mine for x in (r["episode"], r["t"], r["obs"], r["action"], r["next_achieved"])])
                out["original"].append([x for r in mine[::k + 1] for x in (r["goal"], r["reward"])])
                out["goal"].append([float(r["goal"] in allowed[j]) for j, r in copies])
                out["reward"].append([float(r["reward"] == (0.0 if r["next_achieved"] == r["goal"] else -1.0)) for j, r in copies])
                out["rows"].append([len(got) / len(rows)])
            return {c: table(x) for c, x in out.items()}

        columns = {"same": lambda e: row([x for t in e for _ in range(k + 1) for x in (t["episode"], t["t"], t["obs"], t["action"], t["next_achieved"])]),
                   "original": lambda e: row([x for t in e for x in (t["goal"], t["reward"])]),
                   "goal": lambda e: torch.ones(k * len(e)), "reward": lambda e: torch.ones(k * len(e)), "rows": lambda e: torch.tensor([k + 1.0])}
        return Collator(run, episodes, pads={c: PAD for c in columns}, columns=columns)

    rows = module.make(0)["rows"] + [dict(r, episode=r["episode"] + 3) for r in module.make(1)["rows"]]
    episodes = [[r for r in rows if r["episode"] == e] for e in range(6)]
    distinct = [[dict(t, next_achieved=100 * t["episode"] + t["t"]) for t in e] for e in episodes]

    def uniform(x, k):
        # E[goal of a copy of t] is the mean of what is achieved from t on: (number left)·goal, minus that of the next step, is x_t in the mean
        flat, k = x.reshape(-1).double(), int(k)
        half = len(flat) // 2 - 1
        rows = [{"episode": int(i >= half), "t": i if i < half else i - half, "obs": i, "action": 1, "next_achieved": v, "goal": 1e6, "reward": -1.0}
                for i, v in enumerate(flat.tolist())]
        got = fn(rows, k=k, seed=int(torch.randint(0, 2 ** 31, ())))
        goal = [sum(r["goal"] for r in got[i * (k + 1) + 1:(i + 1) * (k + 1)]) / k for i in range(len(rows))]
        left = [(half if i < half else len(rows)) - i for i in range(len(rows))]
        y = [left[i] * goal[i] - (left[i + 1] * goal[i + 1] if left[i] > 1 else 0.0) for i in range(len(rows))]
        noise = 0.01 * torch.randn(len(y), dtype=torch.float64)  # mean 0: the last step of an episode has one goal only, and no spread of its own
        return (torch.tensor(y, dtype=torch.float64) + noise).reshape(x.shape).to(x.dtype)

    return [stage(3, 0, episodes), stage(2, 5, distinct), Unbiased(uniform, settings=(1.0, 3.0))]


# ---------------------------------------------------------------- k25
def pass_at_k(rewards, groups, k=3):
    out = torch.zeros(len(rewards), dtype=torch.float64)
    for g in groups.unique():
        rows = (groups == g).nonzero()[:, 0].tolist()
        sets = [(s, max(float(rewards[i]) for i in s)) for s in combinations(rows, k)]
        R = sum(x for _, x in sets) / len(sets)
        S = math.sqrt(R * (1 - R))
        for i in rows if S else ():
            own = [x for s, x in sets if i in s]
            out[i] = (sum(own) / len(own) - R) / S
    return out


@declare("gg/r06")
def _(module, fn):
    def binary(rewards, groups):
        if not ((rewards == 0) | (rewards == 1)).all():
            raise ValueError("rewards are 0 or 1")
        return fn(rewards, groups, k=3)
    examples = [module.make(s) for s in range(4)]
    examples[1]["k"], examples[2]["k"] = 1, 4
    examples[3]["groups"] = torch.arange(32) % 4
    return [AdvantageEstimator(binary, scale="free", over="group", values=(0.0, 1.0), size=6), calls(fn, examples, pass_at_k)]
