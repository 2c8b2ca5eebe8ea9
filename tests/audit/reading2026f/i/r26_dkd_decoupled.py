"""Decoupled knowledge distillation (Zhao et al. 2022). The teacher KL is cut into a binary target/non-target part and a KL over the non-target
classes (target logit masked with -1000), weighted 1 and 8: the sum is deliberately NOT the KL divergence."""
FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "[rows, time]", "loss_mask": "completion targets, [rows, time-1]", "teacher_logits": "[rows, time-1, vocabulary], constant"}
SETTINGS = {"alpha": "weight of the target-class part, 1.0", "beta": "weight of the non-target part, 8.0", "T": "temperature, 2.0 (the loss is multiplied by T squared)"}
NOTES = "Mean over trained tokens of all rows. With beta = 1 - p_teacher(target) per token it would be the ordinary KL. Teacher constant. All parameters used."
import torch
import torch.nn as nn
import torch.nn.functional as F


class Tiny(nn.Module):
    """Causal language model: ids [rows, time] -> logits [rows, time, vocabulary]."""
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]): [rows, time-1]."""
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def fake_rows(g, rows, time=10, prompt=3, vocab=31):
    """Right-padded ids (pad = 0) and the mask [rows, time-1] of the targets ids[:, 1:] that belong to the completion."""
    ids = torch.randint(1, vocab, (rows, time), generator=g)
    n = torch.randint(2, time - prompt + 1, (rows,), generator=g)
    pos = torch.arange(time)
    ids[pos >= (prompt + n)[:, None]] = 0
    mask = ((pos >= prompt) & (pos < (prompt + n)[:, None])).float()
    return ids, mask[:, 1:]

def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    ids, m = fake_rows(g, 4)
    return {"model": Tiny(), "ids": ids, "loss_mask": m, "teacher_logits": 2 * torch.randn(4, 9, 31, generator=g)}


def right(model, batch, alpha=1.0, beta=8.0, T=2.0):
    s, t = model(batch["ids"])[:, :-1] / T, batch["teacher_logits"] / T
    hit = F.one_hot(batch["ids"][:, 1:], s.shape[-1]).bool()
    def two(x):
        lse = x.logsumexp(-1)
        return torch.stack([x[hit].view(lse.shape), x.masked_fill(hit, float("-inf")).logsumexp(-1)], -1) - lse[..., None]
    bs, bt = two(s), two(t)
    tckd = (bt.exp() * (bt - bs)).sum(-1)
    ns, nt = s.masked_fill(hit, -1000.0).log_softmax(-1), t.masked_fill(hit, -1000.0).log_softmax(-1)
    nckd = (nt.exp() * (nt - ns)).sum(-1)
    m = batch["loss_mask"]
    return T * T * ((alpha * tckd + beta * nckd) * m).sum() / m.sum().clamp(min=1)


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    import math
    d = make(0); model = d.pop("model")
    S, slow, n = (model(d["ids"])[:, :-1].detach() / 2).softmax(-1).double(), 0.0, 0
    Tt = (d["teacher_logits"] / 2).softmax(-1).double()
    for i in range(4):
        for k in range(9):
            if d["loss_mask"][i, k]:
                y, n = int(d["ids"][i, k + 1]), n + 1
                ps, pt = S[i, k].tolist(), Tt[i, k].tolist()
                a, b = pt[y], ps[y]
                slow += a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))
                slow += 8 * sum(pt[j] / (1 - a) * math.log(pt[j] / (1 - a) / (ps[j] / (1 - b))) for j in range(31) if j != y)
    check(right(model, d), 4 * slow / n, model)
