"""HL-Gauss value loss ("Stop regressing", Farebrother et al. 2024). A value is learned by cross-entropy to a
Gaussian spread over bins; the target is a histogram of CDF differences, renormalised by the mass inside the range,
so the minimum of the loss is the entropy of the target, not zero."""
FAMILY = "value"
KIND = "loss"
INPUTS = {"ids": "token ids, padding 0, [rows, time]", "value_mask": "1 where a value is trained, [rows, time]",
          "returns": "return to go at each token, [rows, time]"}
SETTINGS = {"v_min": "lower end of the bins, -4.0", "v_max": "upper end of the bins, 4.0", "sigma_bins": "sigma in bin widths, 0.75"}
NOTES = ("Reduction: mean over trained tokens of all rows. Value loss by classification with soft targets; returns are "
         "constants and clamped to the range. The value of position t is read at position t (no shift). "
         "The number of bins is the width of the model's output. All parameters are used.")
import torch
import torch.nn as nn
import torch.nn.functional as F


class Critic(nn.Module):
    def __init__(self, vocab=24, width=16, bins=21):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, bins)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def random_rows(n=6, t=12, vocab=24):
    """Right-padded rows: a prompt, trained tokens, then padding (id 0)."""
    ids = torch.randint(1, vocab, (n, t))
    mask = torch.zeros(n, t)
    for i in range(n):
        start, end = int(torch.randint(2, 5, ())), int(torch.randint(6, t + 1, ()))
        mask[i, start:end] = 1.0
        ids[i, end:] = 0
    return ids, mask


def make(seed):
    torch.manual_seed(seed)
    ids, mask = random_rows()
    return {"ids": ids, "value_mask": mask, "returns": 2 * torch.randn(ids.shape), "model": Critic()}


def right(model, batch, v_min=-4.0, v_max=4.0, sigma_bins=0.75):
    logits = model(batch["ids"])
    bins = logits.shape[-1]
    edges = torch.linspace(v_min, v_max, bins + 1)
    sigma = sigma_bins * (v_max - v_min) / bins
    y = batch["returns"].clamp(v_min, v_max)
    cdf = torch.special.ndtr((edges - y[..., None]) / sigma)
    target = (cdf[..., 1:] - cdf[..., :-1]) / (cdf[..., -1:] - cdf[..., :1])
    ce = -(target * logits.log_softmax(-1)).sum(-1)
    mask = batch["value_mask"]
    return (ce * mask).sum() / mask.sum().clamp(min=1.0)


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
    import math
    d = make(0)
    m = d.pop("model")
    lp = m(d["ids"]).log_softmax(-1).detach()
    Phi = lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2)))
    w = 8.0 / 21
    tot, n = 0.0, 0
    for i in range(lp.shape[0]):
        for t in range(lp.shape[1]):
            if d["value_mask"][i, t] == 0:
                continue
            y = min(4.0, max(-4.0, float(d["returns"][i, t])))
            p = [Phi((-4 + (b + 1) * w - y) / (0.75 * w)) - Phi((-4 + b * w - y) / (0.75 * w)) for b in range(21)]
            tot -= sum(a / sum(p) * float(lp[i, t, b]) for b, a in enumerate(p))
            n += 1
    check(right(m, d), m, tot / n)
