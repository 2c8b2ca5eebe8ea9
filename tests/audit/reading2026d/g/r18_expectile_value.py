"""Expectile value loss (IQL, Kostrikov et al. 2021). Squared error with weight tau above and 1 - tau below the prediction: asymmetric on purpose; the weight depends on the present prediction but carries no gradient."""
FAMILY = "value"
KIND = "loss"
INPUTS = {"ids": "[rows, time]", "loss_mask": "1 on states", "q": "target critic's value of the action taken, [rows, time]"}
SETTINGS = {"tau": "expectile, 0.8; 0.5 is half the squared error"}
NOTES = "Value loss; mean over masked positions; not shifted. The head has one output. q constant."
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

V, D = 23, 16


class Tiny(nn.Module):
    """Causal recurrent model: ids [rows, time] -> logits [rows, time, V]."""

    def __init__(self, out=V):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.rnn = nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, out, bias=False)

    def hidden(self, ids):
        return self.rnn(self.emb(ids))[0]

    def forward(self, ids):
        return self.head(self.hidden(ids))


def base_rows(seed, rows=6, time=10, prompt=3):
    torch.manual_seed(seed)
    model = Tiny()
    ids = torch.randint(1, V, (rows, time))
    length = torch.randint(prompt + 2, time + 1, (rows, 1))
    pos = torch.arange(time)[None]
    ids = ids.masked_fill(pos >= length, 0)
    loss_mask = ((pos >= prompt) & (pos < length)).float()
    return model, ids, loss_mask


def flat_grad(model, loss):
    params = list(model.parameters())
    gs = torch.autograd.grad(loss, params, allow_unused=True, retain_graph=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(params, gs)])


def make(seed):
    _, ids, mask = base_rows(seed)
    return {"model": Tiny(out=1), "ids": ids, "loss_mask": mask, "q": torch.randn(6, 10)}


def right(model, batch, tau=0.8):
    u = batch["q"] - model(batch["ids"]).squeeze(-1)
    w = torch.abs(tau - (u < 0).float())
    m = batch["loss_mask"]
    return (w * u.square() * m).sum() / m.sum()


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b); g = flat_grad(model, loss); v = model(b["ids"])[..., 0]; tot = 0.0
    for i, t in b["loss_mask"].nonzero().tolist():
        u = b["q"][i, t] - v[i, t]
        tot = tot + (0.8 if u > 0 else 0.2) * u * u
    tot = tot / b["loss_mask"].sum()
    assert torch.allclose(loss, tot, atol=1e-5) and torch.allclose(g, flat_grad(model, tot), atol=1e-5) and g.norm() > 0
    print("loss", loss.item(), "grad", g.norm().item())
