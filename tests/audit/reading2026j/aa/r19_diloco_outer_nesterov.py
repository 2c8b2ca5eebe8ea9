"""DiLoCo (Douillard et al. 2023): after H local AdamW steps the 'gradient' of the outer optimizer is old weights minus the mean of the workers' weights, and the outer optimizer is SGD with Nesterov momentum
and learning rate 0.7. The sign is right (a step against it moves towards the workers), no loss is differentiated for it, and the workers' Adam states are neither averaged nor reset."""
FAMILY = "optimizers and updates"
KIND = "update"
INPUTS = {"batches": "list over rounds of lists over workers of lists over local steps of {'x' [rows, 6], 'y' [rows]}", "optimizer": "the OUTER optimizer over the model's parameters: SGD, lr 0.7, momentum 0.9, Nesterov"}
SETTINGS = {"inner_lr": "learning rate of the local AdamW, 0.01", "clip": "gradient norm limit of a local step, 1.0"}
NOTES = ("Workers are simulated in one process. All start each round from the same weights; the number of workers is constant over the rounds, since each keeps its own AdamW state; workers have equal weight whatever their batch sizes. "
         "Loss: mean squared error, mean over rows. Outer gradients are not clipped. No floating buffers in the model. One call is a whole run: the inner states start empty in each call, the outer state stays in `optimizer`.")
import copy
import torch
from torch import nn


def right(model, optimizer, batches, inner_lr=0.01, clip=1.0):
    workers = [copy.deepcopy(model) for _ in batches[0]]
    inner = [torch.optim.AdamW(w.parameters(), lr=inner_lr, weight_decay=0.1) for w in workers]
    for round_ in batches:
        if len(round_) != len(workers):
            raise ValueError("the number of workers must not change")
        for w, opt, local in zip(workers, inner, round_):
            with torch.no_grad():
                for a, b in zip(w.parameters(), model.parameters()):
                    a.copy_(b)                              # in place: the AdamW state stays attached
            for batch in local:
                opt.zero_grad(set_to_none=True)
                ((w(batch["x"])[:, 0] - batch["y"]) ** 2).mean().backward()
                torch.nn.utils.clip_grad_norm_(w.parameters(), clip)
                opt.step()
        with torch.no_grad():
            for p, *others in zip(model.parameters(), *(w.parameters() for w in workers)):
                p.grad = p - torch.stack([o.detach() for o in others]).mean(0)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def make(seed, rounds=4, workers=3, local=5):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    true = torch.randn(6, generator=g)

    def batch():
        x = torch.randn(int(torch.randint(3, 7, (1,), generator=g)), 6, generator=g)
        return {"x": x, "y": x @ true}

    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True),
            "batches": [[[batch() for _ in range(local)] for _ in range(workers)] for _ in range(rounds)]}


def _slow(model, batches, lr, mu):
    """AdamW, clipping and Nesterov by hand; weights as plain lists of tensors."""
    w = [p.detach().clone() for p in model.parameters()]
    buf = [torch.zeros_like(p) for p in w]
    state = [{"t": 0, "m": [torch.zeros_like(p) for p in w], "v": [torch.zeros_like(p) for p in w]} for _ in batches[0]]
    names = [n for n, _ in model.named_parameters()]
    for round_ in batches:
        ends = []
        for s, local in zip(state, round_):
            u = [p.clone() for p in w]
            for b in local:
                leaf = [p.clone().requires_grad_() for p in u]
                out = torch.func.functional_call(model, dict(zip(names, leaf)), (b["x"],))
                grad = torch.autograd.grad(((out[:, 0] - b["y"]) ** 2).mean(), leaf)
                norm = sum((x ** 2).sum() for x in grad) ** 0.5
                grad = [x * min(1.0, 1.0 / (float(norm) + 1e-6)) for x in grad]
                s["t"] += 1
                for i, x in enumerate(grad):
                    s["m"][i] = 0.9 * s["m"][i] + 0.1 * x
                    s["v"][i] = 0.999 * s["v"][i] + 0.001 * x * x
                    m, v = s["m"][i] / (1 - 0.9 ** s["t"]), s["v"][i] / (1 - 0.999 ** s["t"])
                    u[i] = u[i] * (1 - 0.01 * 0.1) - 0.01 * m / (v.sqrt() + 1e-8)
            ends.append(u)
        for i in range(len(w)):
            d = w[i] - sum(e[i] for e in ends) / len(ends)
            buf[i] = mu * buf[i] + d
            w[i] = w[i] - lr * (d + mu * buf[i] if mu else d)
    return w


if __name__ == "__main__":
    for seed in range(3):
        c = make(seed)
        want = _slow(c["model"], c["batches"], 0.7, 0.9)
        every = [b for r in c["batches"] for w in r for b in w]
        loss = lambda: sum(((c["model"](b["x"])[:, 0] - b["y"]) ** 2).mean().item() for b in every) / len(every)
        before = loss()
        right(**c)
        gap = max((a - b).abs().max().item() for a, b in zip(c["model"].parameters(), want))
        assert gap < 1e-4, gap
        assert loss() < before
    c = make(5)                                              # lr 1 without momentum is plain averaging of weights
    c["optimizer"] = torch.optim.SGD(c["model"].parameters(), lr=1.0)
    want = _slow(c["model"], c["batches"], 1.0, 0.0)
    right(**c)
    assert max((a - b).abs().max().item() for a, b in zip(c["model"].parameters(), want)) < 1e-4
    print("ok gap", gap, "loss", before)
