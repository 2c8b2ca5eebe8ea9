"""HL-Gauss value loss (Farebrother et al. 2024). A value is trained by CLASSIFICATION: the scalar return becomes a Gaussian histogram over bins, normalised over the covered range, and cross-entropy is taken. No squared error, and the minimum of the loss is the entropy of the target, not zero."""
FAMILY = "value"
KIND = "loss"
INPUTS = {"ids": "[rows, time]", "loss_mask": "1 on states with a value", "returns": "target return at each position, inside [-2, 2], [rows, time]"}
SETTINGS = {"low": "-3.0, lower edge", "high": "3.0, upper edge", "sigma": "0.75 bin widths"}
NOTES = "Value loss, cross-entropy with soft targets; mean over masked positions of all rows; not shifted: the value of position t is read at position t. The model's head has one output per bin (30). returns constant."
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
BINS = 30


def make(seed):
    _, ids, mask = base_rows(seed)
    torch.manual_seed(seed)
    return {"model": Tiny(out=BINS), "ids": ids, "loss_mask": mask, "returns": 4 * torch.rand(6, 10) - 2}


def target(returns, low, high, sigma):
    edges = torch.linspace(low, high, BINS + 1)
    s = sigma * (high - low) / BINS
    cdf = torch.special.erf((edges - returns[..., None]) / (math.sqrt(2) * s))
    return (cdf[..., 1:] - cdf[..., :-1]) / (cdf[..., -1:] - cdf[..., :1])


def right(model, batch, low=-3.0, high=3.0, sigma=0.75):
    y = target(batch["returns"], low, high, sigma)
    ce = -(y * model(batch["ids"]).log_softmax(-1)).sum(-1)
    m = batch["loss_mask"]
    return (ce * m).sum() / m.sum()


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b); g = flat_grad(model, loss)
    y = target(b["returns"], -3.0, 3.0, .75); centers = -3 + (torch.arange(BINS) + .5) * .2
    slow, n = 0.0, 0
    out = model(b["ids"]).log_softmax(-1)
    for i, k in b["loss_mask"].nonzero().tolist():
        slow -= (y[i, k] * out[i, k]).sum().item(); n += 1
    assert torch.allclose(y.sum(-1), torch.ones(6, 10), atol=1e-5) and ((y * centers).sum(-1) - b["returns"]).abs().max() < 1e-2 and abs(loss.item() - slow / n) < 1e-4 and g.norm() > 0
    print("loss", loss.item(), "grad", g.norm().item())
