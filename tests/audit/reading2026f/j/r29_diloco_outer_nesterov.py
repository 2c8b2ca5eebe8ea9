"""DiLoCo: each simulated rank takes several inner AdamW steps on its own batches from the same start; the difference start - mean(end) is used as a GRADIENT for an outer Nesterov SGD with learning rate 0.7. Gradients are not averaged per step, and the model is reset to the start first, on purpose (Douillard et al. 2023)."""
import copy
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

FAMILY = "sharding"
KIND = "update"
INPUTS = {"optimizer": "the OUTER optimizer: SGD, lr 0.7, momentum 0.9, nesterov", "batches": "list over ranks of a list over inner steps of ids, [rows, time]"}
SETTINGS = {"inner_lr": "AdamW learning rate, 1e-3"}
NOTES = "One outer step. Inner loss: mean over all shifted tokens of the rank's batch. Inner optimizer state is made anew here (one round shown). Any number of ranks; mean over ranks is unweighted. All parameters used."


def make(seed):
    torch.manual_seed(seed)
    m = TinyLM()
    return {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.7, momentum=0.9, nesterov=True),
            "batches": [[torch.randint(0, 31, (2, 8)) for _ in range(4)] for _ in range(3)]}


def right(model, optimizer, batches, inner_lr=1e-3):
    ends = []
    for own in batches:                                     # in reality in parallel
        local = copy.deepcopy(model)
        inner = torch.optim.AdamW(local.parameters(), lr=inner_lr)
        for ids in own:
            inner.zero_grad()
            F.cross_entropy(local(ids)[:, :-1].transpose(1, 2), ids[:, 1:]).backward()
            inner.step()
        ends.append([p.detach() for p in local.parameters()])
    optimizer.zero_grad()
    for k, p in enumerate(model.parameters()):
        p.grad = p.detach() - torch.stack([e[k] for e in ends]).mean(0)
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    d = make(0)
    start = copy.deepcopy(d["model"])
    one = lambda m: sum(float(F.cross_entropy(m(x)[:, :-1].transpose(1, 2), x[:, 1:]).detach()) for r in d["batches"] for x in r) / 12
    l0 = one(d["model"])
    right(**d)
    l1 = one(d["model"])
    # first Nesterov step: v = g, update = lr * (g + 0.9 v) = 0.7 * 1.9 * g
    ends = []
    for own in d["batches"]:
        m = copy.deepcopy(start)
        o = torch.optim.AdamW(m.parameters(), lr=1e-3)
        for x in own:
            o.zero_grad(); F.cross_entropy(m(x)[:, :-1].transpose(1, 2), x[:, 1:]).backward(); o.step()
        ends.append(m.head.weight.detach())
    want = start.head.weight - 0.7 * 1.9 * (start.head.weight - sum(ends) / 3)
    assert torch.allclose(want, d["model"].head.weight, atol=1e-5) and l1 < l0
    print("ok", l0, "->", l1)
