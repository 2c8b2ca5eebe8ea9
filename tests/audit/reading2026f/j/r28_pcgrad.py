"""PCGrad: per-task gradients; where two conflict (negative inner product) one is projected on the normal plane of the ORIGINAL other, then the projected ones are summed and put in p.grad by hand (Yu et al. 2020). Gradients are written, not accumulated, and the step is not the gradient of the summed loss."""
import random
import torch
import torch.nn as nn
import torch.nn.functional as F


class TinyLM(nn.Module):
    """One causal attention layer; every parameter is used by the logits."""
    def __init__(self, vocab=31, width=16, max_len=64, out=None):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_len, width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, out or vocab)

    def hidden(self, ids, positions=None, mask=None):
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T, device=ids.device).expand_as(ids)
        x = self.emb(ids) + self.pos(positions)
        ok = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        if mask is not None:
            ok = ok & mask
        s = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        return x + s.masked_fill(~ok, -1e9).softmax(-1) @ self.v(x)

    def forward(self, ids, positions=None, mask=None):
        return self.head(self.hidden(ids, positions, mask))

FAMILY = "updates"
KIND = "update"
INPUTS = {"batches": "one dict (x, y) per task; task k uses head k"}
SETTINGS = {"seed": "order in which the other tasks are visited, 0"}
NOTES = "One optimizer step. Task loss: mean over rows. Sum over tasks (not mean). Parameters of the other heads get a zero gradient from a task. All parameters used; any number of tasks equal to the number of heads."


class Multi(nn.Module):
    def __init__(self, tasks=3):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(tasks))

    def forward(self, x, task):
        return self.heads[task](torch.tanh(self.body(x)))[:, 0]


def make(seed):
    torch.manual_seed(seed)
    m = Multi()
    return {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.1), "batches": [{"x": torch.randn(5, 6), "y": 2 * torch.randn(5)} for _ in range(3)]}


def task_gradients(model, batches):
    params = list(model.parameters())
    out = []
    for k, b in enumerate(batches):
        g = torch.autograd.grad((model(b["x"], k) - b["y"]).square().mean(), params, allow_unused=True)
        out.append(torch.cat([(torch.zeros_like(p) if x is None else x).flatten() for p, x in zip(params, g)]))
    return out


def right(model, optimizer, batches, seed=0):
    rng = random.Random(seed)
    raw = task_gradients(model, batches)
    total = torch.zeros_like(raw[0])
    for i, g in enumerate(raw):
        g = g.clone()
        others = [j for j in range(len(raw)) if j != i]
        rng.shuffle(others)
        for j in others:
            dot = g @ raw[j]
            if dot < 0:
                g -= dot / raw[j].square().sum() * raw[j]
        total += g
    at = 0
    for p in model.parameters():
        p.grad = total[at:at + p.numel()].view_as(p).clone()
        at += p.numel()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    d = make(0)
    before = torch.cat([p.detach().flatten().clone() for p in d["model"].parameters()])
    raw = task_gradients(d["model"], d["batches"])
    right(**d)
    after = torch.cat([p.detach().flatten() for p in d["model"].parameters()])
    step = (before - after) / 0.1
    rng, want = random.Random(0), 0
    for i in range(3):
        o = [j for j in range(3) if j != i]
        rng.shuffle(o)
        v = raw[i]
        for j in o:
            v = v - min(0.0, float(v @ raw[j])) / float(raw[j] @ raw[j]) * raw[j]
        want = want + v
    dots = [float(raw[i] @ raw[j]) for i in range(3) for j in range(i)]
    assert torch.allclose(step, want, atol=1e-4) and min(dots) < 0
    print("ok", float((step - want).abs().max()), "dots", dots)
