"""Value learning as classification: the scalar return becomes a Gaussian histogram over 21 bins (differences of an erf, divided by the mass inside the support) and the critic is trained with cross-entropy; the loss has a positive floor, the target's entropy, and never reaches 0.
Returns beyond the support are clamped. Farebrother et al. 2024, 'Stop regressing' (HL-Gauss)."""
import math
import torch
from torch import nn

FAMILY = "distillation and value losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right padded with 0", "value_mask": "1 at the positions whose state value is trained (aligned with the model's outputs, no shift), [rows, time]",
          "returns": "return from that position on, [rows, time], constant"}
SETTINGS = {"low": "lower end of the support, -1.0", "high": "upper end of the support, 1.0", "sigma_ratio": "sigma of the Gaussian in bin widths, 0.75"}
NOTES = ("Value loss as classification; the model gives 21 logits per position, [rows, time, 21]; the number of bins is read from the model. Reduction: mean over positions with value_mask 1 of all rows. The minimum is the mean entropy of the targets, not 0. "
         "returns is constant. All parameters are used. Any number of rows.")

class TinyCritic(nn.Module):
    def __init__(self, vocab=32, width=16, outputs=1):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

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
    ids, mask = random_rows(g, 6, 10, 32)
    value_mask = torch.cat([mask[:, 1:], torch.zeros(6, 1)], 1)
    return {"model": TinyCritic(outputs=21), "ids": ids, "value_mask": value_mask, "returns": 0.6 * torch.randn(6, 10, generator=g)}


def right(model, batch, low=-1.0, high=1.0, sigma_ratio=0.75):
    logits, mask = model(batch["ids"]), batch["value_mask"]
    bins = logits.shape[-1]
    edges = torch.linspace(low, high, bins + 1, dtype=logits.dtype)
    sigma = sigma_ratio * (high - low) / bins
    with torch.no_grad():
        target = batch["returns"].clamp(low, high).unsqueeze(-1)
        cdf = torch.special.erf((edges - target) / (math.sqrt(2.0) * sigma))
        probs = (cdf[..., 1:] - cdf[..., :-1]) / (cdf[..., -1:] - cdf[..., :1])
    ce = -(probs * logits.log_softmax(-1)).sum(-1)
    value = (logits.softmax(-1) * (edges[1:] + edges[:-1]) / 2).sum(-1)
    return (ce * mask).sum() / mask.sum(), {"value_mean": ((value * mask).sum() / mask.sum()).item()}


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, metrics = right(model, d)
    phi = lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2)))
    slow, n, floor = 0.0, 0, 0.0
    w, s = 2.0 / 21, 0.75 * 2.0 / 21
    for i in range(6):
        for t in range(10):
            if d["value_mask"][i, t] == 1:
                y = min(1.0, max(-1.0, d["returns"][i, t].item()))
                lp = model(d["ids"][i:i + 1, :t + 1])[0, -1].log_softmax(-1)
                mass = [phi((-1 + (b + 1) * w - y) / s) - phi((-1 + b * w - y) / s) for b in range(21)]
                z = sum(mass)
                slow, n = slow - sum(m / z * lp[b] for b, m in enumerate(mass)), n + 1
                floor -= sum(m / z * math.log(m / z) for m in mass if m > 0)
    g1, g2 = grads(loss, model), grads(slow / n, model)
    print("loss", loss.item(), "explicit", (slow / n).item(), "floor (entropy of targets)", floor / n, metrics)
    print("gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2))
    assert abs(loss.item() - (slow / n).item()) < 1e-5 and close(g1, g2)
