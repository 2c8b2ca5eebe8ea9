"""LongCE: a second forward with only the last K tokens as context; tokens that long context helps get weight min(exp(short_nll - long_nll), gamma), detached, and the loss is divided by the number of tokens and not by the sum of weights (Fang et al. 2024, 'What is wrong with perplexity for long-context'). The short-context pass is masked attention on the same row."""
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

FAMILY = "long-context"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is trained"}
SETTINGS = {"window": "short context K, 4 tokens", "gamma": "largest weight, 5.0"}
NOTES = "Mean over trained tokens of all rows (weights do not enter the normaliser). Weights are constants computed without gradient by the same model. Positions are those of the long row in both passes. All parameters used."


def make(seed):
    torch.manual_seed(seed)
    model = TinyLM()
    with torch.no_grad():
        for p in (model.q.weight, model.k.weight, model.v.weight):
            p.mul_(4)
    m = torch.ones(3, 20)
    m[:, 0], m[2, 15:] = 0, 0
    return {"model": model, "ids": torch.randint(0, 31, (3, 20)), "loss_mask": m}


def nll(model, ids, mask=None):
    return F.cross_entropy(model(ids, None, mask)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


def right(model, batch, window=4, gamma=5.0):
    ids, m = batch["ids"], batch["loss_mask"][:, 1:]
    long = nll(model, ids)
    with torch.no_grad():
        t = torch.arange(ids.shape[1])
        near = (t[:, None] - t[None, :]) < window
        w = (nll(model, ids, near) - long).exp().clamp(max=gamma)
    return (long * w * m).sum() / m.sum(), {"weight_mean": (w * m).sum() / m.sum()}


if __name__ == "__main__":
    import math
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    tot = n = 0.0
    with torch.no_grad():
        lp = model(d["ids"]).log_softmax(-1)
        for i in range(3):
            for t in range(1, 20):
                if d["loss_mask"][i, t]:
                    lo = max(0, t - 4)
                    x = d["ids"][i:i + 1, lo:t]
                    s = -float(model(x, torch.arange(lo, t)[None])[0, -1].log_softmax(-1)[d["ids"][i, t]])
                    l = -float(lp[i, t - 1, d["ids"][i, t]])
                    tot, n = tot + min(5.0, math.exp(s - l)) * l, n + 1
    assert abs(float(loss) - tot / n) < 1e-3 and not dead
    print("ok", float(loss), tot / n, out[1])
