"""Distillation from stored top-k teacher logprobs: the mass the teacher did not store becomes one tail bucket, and the student's tail is log(1 - sum of its top-k probabilities), so a k+1-way KL is taken instead of renormalising the top-k (which would be biased). Used for offline logit distillation (sparse-KD; top-k plus 'other')."""
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

FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the NEXT token is distilled: position t refers to logits at t", "top_idx": "teacher's top-k token ids at t, [rows, time, k]",
          "top_logps": "their full-softmax logps (sum of probabilities below 1), [rows, time, k]"}
NOTES = "Forward KL(teacher || student) on k+1 buckets, mean over trained positions of all rows; no shift, since teacher and student are compared at the same position. Teacher entries are constants. All parameters used."
SETTINGS = {}


def make(seed):
    torch.manual_seed(seed)
    model, teacher = TinyLM(), TinyLM()
    ids = torch.randint(0, 31, (3, 10))
    with torch.no_grad():
        lp, idx = (2 * teacher(ids)).log_softmax(-1).topk(5, -1)
    m = torch.ones(3, 10)
    m[0, :4], m[1, 8:] = 0, 0
    return {"model": model, "ids": ids, "loss_mask": m, "top_idx": idx, "top_logps": lp}


def log1mexp(x):
    """log(1 - exp(x)) for x < 0, stable on both ends."""
    x = x.clamp(max=-1e-6)
    return torch.where(x > -0.6931, torch.log(-torch.expm1(x)), torch.log1p(-x.exp()))


def right(model, batch):
    s = model(batch["ids"]).log_softmax(-1).gather(-1, batch["top_idx"])
    t = batch["top_logps"]
    s = torch.cat([s, log1mexp(s.logsumexp(-1, keepdim=True))], -1)
    t = torch.cat([t, log1mexp(t.logsumexp(-1, keepdim=True))], -1)
    kl = (t.exp() * (t - s)).sum(-1)
    m = batch["loss_mask"]
    return (kl * m).sum() / m.sum()


if __name__ == "__main__":
    import math
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    p = model(d["ids"]).softmax(-1).detach().double()
    tot = n = 0.0
    for i in range(3):
        for t in range(10):
            if d["loss_mask"][i, t]:
                q = [math.exp(x) for x in d["top_logps"][i, t].tolist()]
                s = [float(p[i, t, j]) for j in d["top_idx"][i, t].tolist()]
                q, s = q + [1 - sum(q)], s + [1 - sum(s)]
                tot += sum(a * math.log(a / b) for a, b in zip(q, s))
                n += 1
    assert abs(float(loss) - tot / n) < 1e-4 and not dead
    print("ok", float(loss), tot / n)
