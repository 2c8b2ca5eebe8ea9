"""An optimizer that splits parameters by kind forgets the learning rate and decay of the groups it was given.
deepspeedai/DeepSpeed#8440, https://github.com/deepspeedai/DeepSpeed/pull/8440, 2026 (September).
For Muon the engine collapses the caller's groups into one list and builds two new ones (Muon for
matrices, Adam for the rest) with the config's lr and weight decay. The usual "no decay on biases
and norms" and a lower rate for some parameters are dropped without a word."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'schedules'
KIND = 'update'
INPUTS = {
    'model': 'attention model',
    'optimizer': "carries the caller's parameter groups (params, lr, weight_decay)",
    'batches': "list of {'ids': [rows, time]}, one step each",
}
SETTINGS = {
    'lr': 'learning rate of the config, used where a group has none, 5e-3',
    'weight_decay': 'decay of the config, used where a group has none, 0.01',
}
NOTES = (
    'One optimizer step per batch. Matrices take an orthogonalised momentum step, vectors an Adam '
    "step, both with decoupled decay. A parameter uses its own group's lr and weight_decay. "
)


class Tiny(nn.Module):
    """Embedding + learned positions, one causal self-attention layer, MLP, head."""
    def __init__(self, vocab=20, width=16, heads=2, length=64):
        super().__init__()
        self.heads = heads
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def hidden(self, ids, positions=None, allowed=None):
        b, t = ids.shape
        if positions is None:
            positions = torch.arange(t).expand(b, t)
        ok = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)
        if allowed is not None:               # [b, t, t] bool, replaces the causal mask
            ok = allowed
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        s = s.masked_fill(~ok[:, None], float("-inf"))
        x = x + self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))
        return self.norm(x + self.down(F.gelu(self.up(x))))

    def forward(self, ids, positions=None, allowed=None):
        return self.head(self.hidden(ids, positions, allowed))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Tiny()
    decay = [p for n, p in model.named_parameters() if p.ndim >= 2 and not n.startswith("head")]
    rest = [p for p in model.parameters() if p.ndim < 2]
    opt = torch.optim.SGD([{"params": decay, "lr": 1e-2, "weight_decay": 0.1},
                           {"params": [model.head.weight], "lr": 1e-3, "weight_decay": 0.1},
                           {"params": rest, "lr": 1e-3, "weight_decay": 0.0}], lr=5e-3)
    return {"model": model, "optimizer": opt,
            "batches": [{"ids": torch.randint(0, 20, (3, 8), generator=g)} for _ in range(3)]}


class Muon:
    """groups: dicts with params, lr, weight_decay, use_muon"""
    def __init__(self, groups):
        self.groups, self.state, self.t = groups, {}, 0

    @torch.no_grad()
    def step(self):
        self.t += 1
        for g in self.groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                m, v = self.state.setdefault(p, (torch.zeros_like(p), torch.zeros_like(p)))
                p.mul_(1 - g["lr"] * g["weight_decay"])
                if g["use_muon"]:
                    m.mul_(0.9).add_(p.grad)
                    u, _, vt = torch.linalg.svd(m, full_matrices=False)
                    p.add_(u @ vt, alpha=-g["lr"])
                else:
                    m.mul_(0.9).add_(p.grad, alpha=0.1)
                    v.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                    p.sub_(g["lr"] * (m / (1 - 0.9 ** self.t)) / ((v / (1 - 0.99 ** self.t)).sqrt() + 1e-8))


def _train(model, opt, batches):
    for b in batches:
        model.zero_grad()
        F.cross_entropy(model(b["ids"])[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten()).backward()
        opt.step()


def broken(model, optimizer, batches, lr=5e-3, weight_decay=0.01):
    everything = []
    for g in optimizer.param_groups:                       # flatten the group dicts
        everything.extend(g["params"])
    groups = [{"params": [p for p in everything if (p.ndim >= 2) == use], "lr": lr, "weight_decay": weight_decay,
               "use_muon": use} for use in (True, False)]
    _train(model, Muon(groups), batches)


def right(model, optimizer, batches, lr=5e-3, weight_decay=0.01):
    groups = []
    for g in optimizer.param_groups:
        for use in (True, False):
            params = [p for p in g["params"] if (p.ndim >= 2) == use]
            if params:
                groups.append({"params": params, "lr": g.get("lr", lr),
                               "weight_decay": g.get("weight_decay", weight_decay), "use_muon": use})
    _train(model, Muon(groups), batches)


if __name__ == "__main__":
    moved = []
    for f in (broken, right):
        d = make(0)
        before = {n: p.detach().clone() for n, p in d["model"].named_parameters()}
        f(**d)
        moved.append({n: (p.detach() - before[n]).norm().item() for n, p in d["model"].named_parameters()})
    for n in ("qkv.weight", "head.weight", "norm.bias"):
        print(n, "moved: broken", moved[0][n], "right", moved[1][n])
    assert moved[0]["head.weight"] > 2 * moved[1]["head.weight"]
