"""Distillation from a teacher's stored top-k with one tail bucket. Only k teacher log-probs are known; the remaining mass of teacher and student is put into one extra class, so the target sums to 1 without renormalising the top-k. Right: KL of a coarse-grained distribution, a lower bound of the full KL."""
FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "[rows, time]", "loss_mask": "1 on trained tokens", "top_ids": "teacher's top tokens at each predicting position, [rows, time-1, k]", "top_logps": "their exact teacher log-probs (not renormalised), same shape"}
SETTINGS = {}
NOTES = "Distillation, forward KL on k+1 classes; mean over trained tokens of all rows. Teacher values constants; the student's log-softmax is over the full vocabulary before gathering."
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


def make(seed, k=4):
    model, ids, mask = base_rows(seed)
    v, i = torch.randn(6, 9, V).mul(2).log_softmax(-1).topk(k, -1)
    return {"model": model, "ids": ids, "loss_mask": mask, "top_ids": i, "top_logps": v}


def log_rest(lp):
    return torch.log1p(-lp.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))


def right(model, batch):
    s = model(batch["ids"])[:, :-1].log_softmax(-1).gather(-1, batch["top_ids"])
    s = torch.cat([s, log_rest(s)], -1)
    t = torch.cat([batch["top_logps"], log_rest(batch["top_logps"])], -1)
    m = batch["loss_mask"][:, 1:]
    return ((t.exp() * (t - s)).sum(-1) * m).sum() / m.sum()


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b); g = flat_grad(model, loss); tot = 0.0; m = b["loss_mask"][:, 1:]
    out = model(b["ids"]).softmax(-1)
    for i, t in m.nonzero().tolist():
        rest_q, rest_p = 1.0, 1.0
        for j, l in zip(b["top_ids"][i, t].tolist(), b["top_logps"][i, t].tolist()):
            p, q = math.exp(l), out[i, t, j]
            tot = tot + p * (math.log(p) - q.log()); rest_p -= p; rest_q = rest_q - q
        tot = tot + rest_p * (math.log(rest_p) - rest_q.log())
    tot = tot / m.sum()
    assert torch.allclose(loss, tot, atol=1e-4) and torch.allclose(g, flat_grad(model, tot), atol=1e-4) and g.norm() > 0
    print("loss", loss.item(), "grad", g.norm().item())
