"""Decoupled knowledge distillation: KL on the two-way split (label / not label) plus beta = 8 times the KL among the NON-label tokens, where the label's logit is removed by subtracting 1000 (so it gets no gradient there). The weights 1 and 8 no longer form a KL,
and the sum is multiplied by T^2 (T = 4) on purpose. Zhao et al. 2022 (DKD), mdistiller; here per token."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "distillation and value losses"
KIND = "loss"
INPUTS = {"ids": "input token ids, [rows, time], right padded with 0", "targets": "the NEXT token at each position, already shifted, -100 where not trained, [rows, time]",
          "teacher_logits": "teacher logits for the same positions, [rows, time, vocab], constant"}
SETTINGS = {"alpha": "weight of the target-class KL, 1.0", "beta": "weight of the non-target-class KL, 8.0", "temperature": "softening of both, 4.0; the distillation terms are multiplied by its square"}
NOTES = ("Distillation (DKD) plus plain cross-entropy at temperature 1 with weight 1. Reduction: everything is a mean over trained positions of all rows. targets are pre-shifted: no shift inside. teacher_logits is constant. "
         "With alpha = 1 and beta = (1 - teacher probability of the label) it would be ordinary KD. All parameters are used. Any number of rows.")

class TinyLM(nn.Module):
    """Causal by construction; right padding after a row's end cannot change earlier logits."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def random_rows(g, rows, time, vocab):
    """Right-padded rows; mask is 1 on the completion (never on position 0, which nothing predicts)."""
    ids, mask = torch.zeros(rows, time, dtype=torch.long), torch.zeros(rows, time)
    for i in range(rows):
        prompt = int(torch.randint(2, 4, (1,), generator=g))
        end = int(torch.randint(prompt + 2, time + 1, (1,), generator=g))
        ids[i, :end] = torch.randint(1, vocab, (end,), generator=g)
        mask[i, prompt:end] = 1.0
    return ids, mask

def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    full, mask = random_rows(g, 6, 11, 32)
    targets = full[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
    return {"model": TinyLM(), "ids": full[:, :-1].contiguous(), "targets": targets.contiguous(), "teacher_logits": 3.0 * torch.randn(6, 10, 32, generator=g)}


def right(model, batch, alpha=1.0, beta=8.0, temperature=4.0):
    keep = batch["targets"] != -100
    y = batch["targets"][keep]
    zs, zt = model(batch["ids"])[keep], batch["teacher_logits"][keep]
    gt = F.one_hot(y, zs.shape[-1]).to(zs.dtype)
    ps, pt = (zs / temperature).softmax(-1), (zt / temperature).softmax(-1)
    two = lambda p: torch.stack([(p * gt).sum(-1), (p * (1 - gt)).sum(-1)], -1)
    tckd = F.kl_div(two(ps).log(), two(pt), reduction="sum")
    nckd = F.kl_div((zs / temperature - 1000.0 * gt).log_softmax(-1), (zt / temperature - 1000.0 * gt).softmax(-1), reduction="sum")
    kd = (alpha * tckd + beta * nckd) * temperature ** 2 / len(y)
    return F.cross_entropy(zs, y) + kd


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, slow, n = right(model, d), 0.0, 0
    for i in range(6):
        for t in range(10):
            y = int(d["targets"][i, t])
            if y == -100:
                continue
            z = model(d["ids"][i:i + 1, :t + 1])[0, -1]
            p, q = (z / 4).softmax(-1), (d["teacher_logits"][i, t] / 4).softmax(-1)
            tc = q[y] * torch.log(q[y] / p[y]) + (1 - q[y]) * torch.log((1 - q[y]) / (1 - p[y]))
            nc = sum(q[v] / (1 - q[y]) * torch.log((q[v] / (1 - q[y])) / (p[v] / (1 - p[y]))) for v in range(32) if v != y)
            slow, n = slow - z.log_softmax(-1)[y] + 16 * (tc + 8 * nc), n + 1
    g1, g2 = grads(loss, model), grads(slow / n, model)
    print("loss", loss.item(), "explicit", (slow / n).item(), "gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2, 1e-4))
    assert abs(loss.item() - (slow / n).item()) < 1e-4 * loss.item() and close(g1, g2, 1e-4)
