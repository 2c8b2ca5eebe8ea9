import torch, torch.nn as nn, torch.nn.functional as F
from tests.audit.reading2026l.reading import declare, no_subject, parts, step_of
from earnest_audit import AdapterStart, Census, Collator, Merge, Ranks, Setting, Step, Update


def seq_logp(model, ids, mask):
    """Sum over the answer tokens; the logits at t-1 belong to the token at t. From the words of the preference files."""
    lp = model(ids).log_softmax(-1)[:, :-1]
    return (torch.take_along_dim(lp, ids[:, 1:].unsqueeze(-1), -1).squeeze(-1) * mask[:, 1:]).sum(1)


def cat_batches(batches):
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


def regression(model_of_x):
    """A squared error on the output of an adapted layer."""
    return lambda model, batch: (model_of_x(model, batch) - batch["target"]).square().mean()


def noise_like(shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@declare("jj/r10")
def _(module, fn):
    case = module.make(0)
    model, optimizer = case["model"], case["optimizer"]

    def update(batches):
        fn(model, optimizer, list(batches))

    def loss(model, batch):
        return F.cross_entropy(model(batch["x"], 2)[0], batch["y"])

    # the change of expert_bias in units of u, as one number; the loads are those of all micro-batches under the old bias
    u, data = 0.01, cat_batches(case["batches"])
    rows = torch.cat([data["x"].double(), data["y"].double()[:, None]], 1)
    code = 3.0 ** torch.arange(5, dtype=torch.float64)

    def bias_change(shards):
        m = module.make(0)["model"].double()
        old = m.expert_bias.clone()
        fn(m, torch.optim.SGD(m.parameters(), lr=0.3), [{"x": s[:, :10], "y": s[:, 10].long()} for s in shards], u, 2)
        return float(((m.expert_bias - old) / u * code).sum())

    def single(shards):
        m = module.make(0)["model"].double()
        x = torch.cat(list(shards))[:, :10]
        with torch.no_grad():
            chosen = (torch.sigmoid(m.router(x)) + m.expert_bias).argsort(-1, descending=True)[:, :2]
        load = torch.stack([(chosen == e).sum() for e in range(5)]).double()
        return float((torch.sign(2 * len(x) - 5 * load) * code).sum())  # mean load = 2n/5

    return [Update(model=model, optimizer=optimizer, update=update, loss=loss, batch=data, clips=False),
            Ranks(metric=bias_change, rows=rows, single=single)]


def peft_delta(lora_A, lora_B, experts, scaling):
    rank = lora_A.shape[0] // experts
    return torch.stack([scaling * lora_B[:, e::experts] @ lora_A[e * rank:(e + 1) * rank] for e in range(experts)])


@declare("jj/d02")
def _(module, fn):
    c = module.make(0)
    W, A, B, x, expert = c["weight"], c["lora_A"], c["lora_B"], c["x"], c["expert"]

    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(W.clone())

        def forward(self, x, expert):
            return torch.einsum("noi,ni->no", self.weight[expert], x)

    def applied(w):
        m, n = fn(W.double(), A.double(), B.double(), 4, 2.0 * w), W.shape[-1]
        eye = torch.eye(n, dtype=torch.float64)
        with torch.no_grad():
            return torch.stack([m(eye, torch.full((n,), e)).T - W[e].double() for e in range(4)])

    def by_definition(model, batch):
        V = W + peft_delta(model.lora_A, model.lora_B, 4, 2.0)
        y = torch.stack([V[e] @ v for v, e in zip(batch["x"], batch["expert"].tolist())])
        return (y - batch["target"]).square().mean()

    return [
        Merge(delta=lambda w: w * peft_delta(A.double(), B.double(), 4, 2.0), applied=applied),
        # B = 0: the result is that of the frozen weight
        AdapterStart(model=Base(), attach=lambda m: fn(m.weight.detach(), A, torch.zeros_like(B), 4, 2.0), outputs=lambda m: m(x, expert)),
        Step(model=fn(W, A, B, 4, 2.0), loss=regression(lambda m, b: m(b["x"], b["expert"])),
             batch={"x": x, "expert": expert, "target": noise_like((10, 7))}, paths={"definition": by_definition},
             reduction="mean", value_is_loss=True, wide=()),
    ]


@declare("jj/r07")
def _(module, fn):
    return step_of(module, fn, roles={"ids": "ids"}, rows_interact=True, wide=(), value_is_loss=True, all_supervised=None)


@declare("jj/d04")
def _(module, fn):
    def one_rank(model, batch, coeff, topk):  # does not depend on the number of ranks
        x, y = batch["x"], batch["y"]
        return fn(model, {"x": x.reshape(1, -1, x.shape[-1]), "y": y.reshape(1, -1)}, coeff=coeff, topk=topk)

    def whole_batch(model, batch, coeff, topk):
        logits, probs, _ = model(batch["x"].flatten(0, 1), topk)
        T, E = probs.shape
        f = torch.bincount(probs.topk(topk, -1).indices.flatten(), minlength=E) / (T * topk)
        return F.cross_entropy(logits, batch["y"].flatten()) + coeff * E * (f * probs.mean(0)).sum()

    return step_of(module, fn, settings={"coeff": Setting(0.1, "weight"), "topk": Setting(2, "setting", modes=(1, 3))},
                   paths={"one rank": one_rank, "whole batch": whole_batch}, rows_interact=True, reduction="mean", wide=(), value_is_loss=True)


@declare("jj/d07")
def _(module, fn):
    case = module.make(0)
    model, optimizer = case["model"], case["optimizer"]

    def update(batches):  # the loader gives the whole generation batch to every micro-step
        whole = cat_batches(batches)
        fn(model, optimizer, [whole] * len(batches))

    def loss(model, batch):
        s, t = model(batch["gen_ids"]).log_softmax(-1)[:, :-1], batch["teacher_logits"].log_softmax(-1)[:, :-1]
        on = batch["gen_labels"][:, 1:] != -100
        return (s.exp() * (s - t)).sum(-1)[on].mean()

    return Update(model=model, optimizer=optimizer, update=update, loss=loss, batch=case["batches"][0], split=(1, 2, 3), clips=False)


@declare("jj/r08")
def _(module, fn):
    return step_of(module, fn, roles={"ids": "ids", "labels": "labels", "teacher": "teacher_logits"}, settings={"lam": Setting(0.1, "mixture")},
                   student=lambda model, batch: model(batch["ids"]), wide=("ids", "labels", "teacher_logits"), reduction="mean", value_is_loss=True)


@declare("jj/d10")
def _(module, fn):
    case = module.make(0)
    ref = case["ref_model"]
    pairs = [{k: v[i] for k, v in s.items()} for s in case["shards"] for i in range(len(s["chosen"]))]

    def stage(examples):
        n = len(examples)
        ranks = 3 if n % 3 == 0 else 2 if n % 2 == 0 else 1  # all ranks have the same number of rows
        size = n // ranks
        shards = [{k: torch.stack([e[k] for e in examples[r * size:(r + 1) * size]]) for k in examples[0]} for r in range(ranks)]
        return {"reference": torch.cat(list(fn(ref, shards)))}

    def scores(example):
        with torch.no_grad():
            return torch.stack([seq_logp(ref, example[k][None], example[k + "_mask"][None])[0] for k in ("chosen", "rejected")])

    return Collator(fn=stage, examples=pairs, columns={"reference": scores})


@declare("jj/d05")
def _(module, fn):
    return step_of(module, fn, roles={"ids": "ids", "mask": "mask"}, family="sft", all_supervised=True,
                   settings={"alpha": Setting(0.05, "weight"), "k": Setting(2, "setting", modes=(1, 3))},
                   rows_interact=True, reduction="mean", wide=("ids", "mask"), value_is_loss=True)


@declare("jj/r03")
def _(module, fn):
    return step_of(module, fn, roles={"ids": "ids", "mask": "mask"}, family="sft", all_supervised=True,
                   settings={"alpha": Setting(1.0, "weight")}, reduction="mean", wide=("ids", "mask"), value_is_loss=True)


@declare("jj/r12")
def _(module, fn):
    def in_the_open(model, batch, alpha, topk):  # cross entropy + alpha * mean over rows of sum f P
        ids = batch["ids"]
        h = model.rnn(model.emb(ids))[0]
        s = model.router(3 * h).softmax(-1)
        on = torch.zeros_like(s).scatter(-1, s.topk(topk, -1).indices, 1.0)
        y = torch.einsum("bte,btd,edf->btf", s * on, h, model.w)
        ce = F.cross_entropy(model.head(h + y)[:, :-1].transpose(1, 2), ids[:, 1:])
        f = on.mean(1) * s.shape[-1] / topk
        return ce + alpha * (f * s.mean(1)).sum(-1).mean()

    return step_of(module, fn, roles={"ids": "ids"}, family="sft", all_supervised=True, wide=(),
                   settings={"alpha": Setting(0.05, "weight"), "topk": Setting(2, "setting", modes=(1, 3))},
                   paths={"sum of both": in_the_open}, value_is_loss=False, reduction="mean")


@declare("jj/d09")
def _(module, fn):
    model, batch = parts(module)
    batch["valid"] = (~batch.pop("action_is_pad")).float()  # the role mask is 1 where the loss is taken

    def loss(model, b):
        return fn(model, {**{k: v for k, v in b.items() if k != "valid"}, "action_is_pad": b["valid"] < 0.5})

    def other_padding(model, b):  # padded steps have no influence
        pad = (b["valid"] < 0.5)[..., None]
        return loss(model, {**b, "actions": b["actions"].masked_fill(pad, 3.0), "noise": b["noise"].masked_fill(pad, -2.0)})

    return Step(model=model, loss=loss, batch=batch, roles={"mask": "valid"}, paths={"other numbers in the padding": other_padding},
                wide=(), reduction="mean", value_is_loss=True)


@declare("jj/r15")
def _(module, fn):
    c = module.make(0)
    base = {k: v.double() for k, v in c["base"].items()}
    experts = [{k: v.double() for k, v in e.items()} for e in c["experts"]]
    start = {k: v.clone() for k, v in base.items()}
    vectors = {k: torch.stack([(e[k] - v).flatten() for e in experts]) for k, v in start.items()}

    def delta(w):
        out = fn(base, experts, density=0.4, lam=w)
        return torch.cat([(out[k] - v).flatten() for k, v in start.items()])

    def by_the_words(w):
        found = []
        for tv in vectors.values():
            least = tv.abs().sort(1, descending=True).values[:, round(0.4 * tv.shape[1]) - 1]
            tv = torch.where(tv.abs() >= least[:, None], tv, 0.0)
            agree = tv * tv.sum(0) > 0
            found.append((tv * agree).sum(0) / agree.sum(0).clamp(min=1))
        return w * torch.cat(found)

    return [Merge(delta=delta, applied=by_the_words),
            Census(wanted=list(start), found=list(fn({k: v.clone() for k, v in start.items()}, experts)), what="keys of the merged state dict")]


@declare("jj/r09")
def _(module, fn):
    return step_of(module, fn, roles={"ids": "ids", "mask": "answer_mask", "teacher": "teacher_logits"}, family="sft",
                   settings={"w": Setting(1.5, "weight")}, wide=("ids", "answer_mask"), reduction="mean", value_is_loss=True)


@declare("jj/r13")
def _(module, fn):
    c = module.make(0)
    W, bias, A, B, x = (c[k] for k in ("weight", "bias", "A", "B", "x"))
    base = nn.Linear(5, 7)
    with torch.no_grad():
        base.weight.copy_(W)
        base.bias.copy_(bias)

    def unit(V):
        return V / V.norm(dim=1, keepdim=True).detach()

    def merged(w):
        V = W.double()
        return V.norm(dim=1, keepdim=True) * unit(V + w * 2.0 * B.double() @ A.double()) - V

    def unmerged(w):
        m = fn(*(t.double() for t in (W, bias, A, B)), 2.0 * w)
        with torch.no_grad():
            return (m(torch.eye(5, dtype=torch.float64)) - bias.double()).T - W.double()

    def by_definition(model, batch):
        y = batch["x"] @ (model.mag[:, None] * unit(W + 2.0 * model.B @ model.A)).T + bias
        return (y - batch["target"]).square().mean()

    return [
        # B = 0: mag = ||V||, so the layer is the base
        AdapterStart(model=base, attach=lambda m: fn(m.weight.detach(), m.bias.detach(), A, torch.zeros_like(B), 2.0), outputs=lambda m: m(x)),
        Merge(delta=merged, applied=unmerged, linear=False),
        Step(model=fn(W, bias, A, B, 2.0), loss=regression(lambda m, b: m(b["x"])), batch={"x": x, "target": noise_like((6, 7))},
             paths={"definition": by_definition}, value_is_loss=False, reduction="mean", wide=()),
    ]


@declare("jj/r02")
def _(module, fn):
    return step_of(module, fn, roles={"ids": "tokens"}, family="sft", all_supervised=True, wide=(), settings={"lam": Setting(0.3, "weight")},
                   reduction="mean", value_is_loss=True)


@declare("jj/d03")
def _(module, fn):
    c = module.make(0)
    W, adapters, weights, x = c["linear_weight"], c["adapters"], c["weights"], c["x"]
    W64, ad64 = W.double(), [{k: v.double() if isinstance(v, torch.Tensor) else v for k, v in a.items()} for a in adapters]
    base = nn.Linear(8, 9, bias=False)
    with torch.no_grad():
        base.weight.copy_(W)

    def build(w, rank):
        return fn(W64, ad64, [w * v for v in weights], rank)

    def stored(w):
        m = build(w, 5)
        return (m.lora_B @ m.lora_A).detach()

    def effect(w, rank):
        with torch.no_grad():
            return build(w, rank)(torch.eye(8, dtype=torch.float64)).T - W64

    def wanted(w):
        return w * sum(v * a["alpha"] / a["r"] * a["B"] @ a["A"] for v, a in zip(weights, ad64))

    def truncated(w, rank):
        U, S, Vh = torch.linalg.svd(wanted(w))
        return sum(S[i] * torch.outer(U[:, i], Vh[i]) for i in range(rank))

    def by_definition(model, batch):
        return (batch["x"] @ (W + model.lora_B @ model.lora_A).T - batch["target"]).square().mean()

    return [
        Merge(delta=stored, applied=wanted),  # rank 5 is the sum of the ranks: exact
        Merge(delta=lambda w: effect(w, 3), applied=lambda w: truncated(w, 3)),
        # weights of 0 combine to nothing
        AdapterStart(model=base, attach=lambda m: fn(m.weight.detach(), adapters, [0.0, 0.0], 5), outputs=lambda m: m(x)),
        Step(model=fn(W, adapters, weights, 5), loss=regression(lambda m, b: m(b["x"])), batch={"x": x, "target": noise_like((6, 9))},
             paths={"definition": by_definition}, value_is_loss=True, reduction="mean", wide=()),
    ]


@declare("jj/r01")
def _(module, fn):
    model, batch = parts(module)
    batch["weight"] = 1 / batch.pop("p_mask")  # the loss of a row is weighed by 1 / p_mask

    def loss(model, b, mask_id):
        return fn(model, {**{k: v for k, v in b.items() if k != "weight"}, "p_mask": 1 / b["weight"]}, mask_id=mask_id)

    # no family: the labels are not shifted, the model is not causal
    return Step(model=model, loss=loss, batch=batch, roles={"ids": "ids", "mask": "masked", "weights": "weight"},
                settings={"mask_id": Setting(40, "setting", modes=(0,))}, wide=(), reduction="mean", value_is_loss=True)


@declare("jj/d01")
def _(module, fn):
    return step_of(module, fn, roles={"ids": "ids", "labels": "labels"}, value_is_loss=False, reduction="mean", wide=("ids", "labels"))


@declare("jj/r11")
def _(module, fn):
    # labels as targets and mask: the role labels would bring the laws on shifted labels, and this is an encoder
    model, batch = parts(module)
    labels = batch.pop("labels")
    batch["mask"], batch["targets"] = (labels != -100).float(), labels.clamp(min=0)

    def loss(model, b, capacity):
        return fn(model, {"ids": b["ids"], "labels": torch.where(b["mask"] > 0.5, b["targets"], -100)}, capacity=capacity)

    return Step(model=model, loss=loss, batch=batch, roles={"ids": "ids", "mask": "mask"}, settings={"capacity": Setting(2, "setting", modes=(1, 3))},
                rows_interact=True, reduction="mean", wide=(), value_is_loss=True)


@declare("jj/d06")
def _(module, fn):
    return step_of(module, fn, roles={"ids": "inputs", "labels": "targets", "mask": "target_mask", "documents": "segments"}, all_supervised=True,
                   settings={"mtp_weight": Setting(0.3, "weight"), "depths": Setting(2, "setting", modes=(1,))},
                   wide=("inputs", "targets", "target_mask", "segments"), reduction="mean", value_is_loss=True)


PAIRS = {"chosen": "chosen", "rejected": "rejected", "chosen_mask": "chosen_mask", "rejected_mask": "rejected_mask",
         "reference_chosen": "ref_chosen", "reference_rejected": "ref_rejected"}


def pair_logps(model, b):
    return seq_logp(model, b["chosen"], b["chosen_mask"]), seq_logp(model, b["rejected"], b["rejected_mask"])


@declare("jj/r06")
def _(module, fn):
    def expected(model, b, beta, eps):  # over labels that are flipped with probability eps
        swapped = {k.replace("chosen", "?").replace("rejected", "chosen").replace("?", "rejected"): v for k, v in b.items()}
        return (1 - eps) * fn(model, b, beta=beta, eps=eps) + eps * fn(model, swapped, beta=beta, eps=eps)

    def dpo(model, b, beta, eps):
        c, r = pair_logps(model, b)
        return -F.logsigmoid(beta * (c - b["ref_chosen"] - r + b["ref_rejected"])).mean()

    return [
        step_of(module, fn, roles=PAIRS, settings={"beta": Setting(0.5, "setting"), "eps": Setting(0.2, "smoothing", modes=(0.1, 0.3))},
                logprobs=pair_logps, reduction="mean", value_is_loss=True),
        step_of(module, expected, roles=PAIRS, settings={"beta": Setting(0.5, "setting"), "eps": Setting(0.2, "inert", modes=(0.1, 0.3))},
                logprobs=pair_logps, paths={"DPO of the clean labels": dpo}, reduction="mean", value_is_loss=True, name="the expectation over flipped labels"),
    ]


@declare("jj/r14")
def _(module, fn):
    c = module.make(0)
    W, x = c["weight"], c["x"]
    base = nn.Linear(6, 8, bias=False)
    with torch.no_grad():
        base.weight.copy_(W)

    def principal(w):
        U, S, Vh = torch.linalg.svd(W.double())
        return w * sum(S[i] * torch.outer(U[:, i], Vh[i]) for i in range(3))

    def adapter(w):
        m = fn(W.double(), 3, 2.0)
        return (w * 2.0 * m.B @ m.A).detach()

    return [
        AdapterStart(model=base, attach=lambda m: fn(m.weight.detach(), 3, 2.0), outputs=lambda m: m(x)),
        Merge(delta=principal, applied=adapter),
        Step(model=fn(W, 3, 2.0), loss=regression(lambda m, b: m(b["x"])), batch={"x": x, "target": noise_like((5, 8))},
             value_is_loss=True, reduction="mean", wide=()),
    ]


@declare("jj/d08")
def _(module, fn):
    g = torch.Generator().manual_seed(5)
    desirable = torch.rand(30, generator=g) < torch.linspace(0.9, 0.1, 30)
    desirable[0], desirable[-1] = True, False
    rows = torch.stack([torch.randn(30, generator=g) + torch.linspace(0, 2, 30) + 2.0 * desirable.float(), desirable.float()], 1)

    def batches(shard):  # two batches since the last log, of different sizes
        cut = max(1, len(shard) // 3)
        return [{"rewards": s[:, 0], "desirable": s[:, 1] > 0.5} for s in (shard[:cut], shard[cut:])]

    def single(shards):
        r = torch.cat(list(shards))
        return float(r[r[:, 1] > 0.5, 0].mean() - r[r[:, 1] <= 0.5, 0].mean())

    return Ranks(metric=lambda shards: float(fn([batches(s) for s in shards])), rows=rows, single=single)


@declare("jj/r04")
def _(module, fn):
    return step_of(module, fn, roles={"ids": "ids", "mask": "mask", "reference": "ref_logp", "correct": "desirable"}, family="preference",
                   settings={"beta": Setting(0.1, "setting"), "w_d": Setting(1.0, "weight"), "w_u": Setting(1.33, "weight")},
                   pairwise=False, rows_interact=True, value_is_loss=False, reduction="mean")


@declare("jj/r05")
def _(module, fn):
    model, b = parts(module)
    n = len(b["ids"]) // 2
    batch = {"chosen": b["ids"][:n], "rejected": b["ids"][n:], "chosen_mask": b["mask"][:n], "rejected_mask": b["mask"][n:],
             "ref_chosen": b["ref_logp"][:n], "ref_rejected": b["ref_logp"][n:]}

    def loss(model, b, beta):  # first the chosen answers, then the rejected ones in the same order
        return fn(model, {"ids": torch.cat([b["chosen"], b["rejected"]]), "mask": torch.cat([b["chosen_mask"], b["rejected_mask"]]),
                          "ref_logp": torch.cat([b["ref_chosen"], b["ref_rejected"]])}, beta=beta)

    return Step(model=model, loss=loss, batch=batch, roles=PAIRS, settings={"beta": Setting(0.2, "setting")}, logprobs=pair_logps,
                pairwise=False, reduction="mean", value_is_loss=True)
