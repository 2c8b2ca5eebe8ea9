"""Mixture-of-experts language model with the Switch balance loss. The loss is experts * sum(f * P): f, the share of tokens sent to an
expert, comes from top-k indices and carries no gradient; only the mean router probability P does. Perfect balance gives k, not zero."""
FAMILY = "auxiliary"
KIND = "loss"
INPUTS = {"ids": "token ids, padding 0, [rows, time]", "attention_mask": "1 on real tokens, [rows, time]"}
SETTINGS = {"balance": "weight of the balance loss, 0.05"}
NOTES = ("Reduction: cross-entropy is the mean over real targets of all rows; the balance loss uses f and P averaged over all real "
         "tokens of the batch, so it is not a mean of per-row losses. f is a constant. Padding does not count as load.")
import torch
import torch.nn as nn
import torch.nn.functional as F


class MoE(nn.Module):
    def __init__(self, vocab=24, width=16, experts=4, top=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.head = nn.Linear(width, vocab)
        self.top = top

    def forward(self, ids):
        h = self.rnn(self.emb(ids))[0]
        probs = self.router(h).softmax(-1)
        best = probs.topk(self.top, -1)
        gate = torch.zeros_like(probs).scatter(-1, best.indices, best.values / best.values.sum(-1, keepdim=True))
        out = torch.stack([torch.tanh(e(h)) for e in self.experts], -1)
        return self.head(h + (out * gate[:, :, None, :]).sum(-1)), probs, best.indices


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(1, 24, (6, 12))
    mask = torch.ones(6, 12)
    for i in range(6):
        end = int(torch.randint(6, 13, ()))
        ids[i, end:], mask[i, end:] = 0, 0.0
    return {"ids": ids, "attention_mask": mask, "model": MoE()}


def right(model, batch, balance=0.05):
    ids, mask = batch["ids"], batch["attention_mask"]
    logits, probs, chosen = model(ids)
    ce = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    ce = (ce * mask[:, 1:]).sum() / mask[:, 1:].sum().clamp(min=1.0)
    experts = probs.shape[-1]
    n = mask.sum().clamp(min=1.0)
    sent = F.one_hot(chosen, experts).sum(-2).float()
    f = (sent * mask[..., None]).sum((0, 1)) / n
    p = (probs * mask[..., None]).sum((0, 1)) / n
    aux = experts * (f * p).sum()
    return ce + balance * aux, {"aux": aux.item(), "load": f.tolist()}


def check(loss, model, want, tol=1e-4):
    model.zero_grad()
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    for n, g in grads.items():
        assert g is not None and float(g.abs().sum()) > 0, n
    norm = sum(float(g.pow(2).sum()) for g in grads.values()) ** 0.5
    print("loss %.6f  slow loop %.6f  grad norm %.5f" % (loss.item(), float(want), norm))
    assert abs(loss.item() - float(want)) < tol


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    lo, pr, ch = m(d["ids"])
    l, f, P, n = [], [0.0] * 4, [0.0] * 4, 0
    for i in range(6):
        for t in range(12):
            if d["attention_mask"][i, t] == 0:
                continue
            n += 1
            if t:
                l.append(-float(lo[i, t - 1].log_softmax(-1)[d["ids"][i, t]]))
            for e in range(4):
                f[e] += e in ch[i, t].tolist()
                P[e] += float(pr[i, t, e])
    check(right(m, d)[0], m, sum(l) / len(l) + 0.05 * 4 * sum(a * b for a, b in zip(f, P)) / n / n)
