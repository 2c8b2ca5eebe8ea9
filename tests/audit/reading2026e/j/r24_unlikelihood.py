"""Unlikelihood training: next to cross-entropy, -log(1 - p(c)) for every DISTINCT earlier token c of the row except the true one, so the loss pushes probabilities down (Welleck et al. 2019; fairseq). The scatter of earlier tokens makes a set, so repeats count once."""
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

FAMILY = "supervised"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is trained"}
SETTINGS = {"alpha": "weight of the unlikelihood term, 1.0"}
NOTES = "Sum over negative candidates, mean over trained tokens of all rows. Candidates of target t are ids[:, :t] (prompt included) without ids[:, t]. All parameters used."


def make(seed):
    torch.manual_seed(seed)
    m = torch.ones(3, 12)
    m[:, 0], m[0, 9:] = 0, 0
    return {"model": TinyLM(), "ids": torch.randint(0, 31, (3, 12)) % 13, "loss_mask": m}


def right(model, batch, alpha=1.0):
    ids, m = batch["ids"], batch["loss_mask"][:, 1:]
    lp = model(ids)[:, :-1].log_softmax(-1)
    V = lp.shape[-1]
    seen = F.one_hot(ids[:, :-1], V).cumsum(1).clamp(max=1).to(lp.dtype)
    negative = seen * (1 - F.one_hot(ids[:, 1:], V).to(lp.dtype))
    ul = -(torch.log((1 - lp.exp()).clamp(min=1e-5)) * negative).sum(-1)
    ce = -lp.gather(-1, ids[:, 1:, None])[..., 0]
    return ((ce + alpha * ul) * m).sum() / m.sum()


if __name__ == "__main__":
    import math
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    p = model(d["ids"]).softmax(-1).detach()
    tot = n = 0.0
    for i in range(3):
        row = d["ids"][i].tolist()
        for t in range(1, 12):
            if d["loss_mask"][i, t]:
                tot -= math.log(float(p[i, t - 1, row[t]])) + sum(math.log(1 - float(p[i, t - 1, c])) for c in set(row[:t]) - {row[t]})
                n += 1
    assert abs(float(loss) - tot / n) < 1e-3 and not dead
    print("ok", float(loss), tot / n)
