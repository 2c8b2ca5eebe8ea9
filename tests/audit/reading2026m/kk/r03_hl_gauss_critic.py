"""HL-Gauss value loss (Imani & White 2018; Farebrother et al. 2024, 'Stop Regressing', arXiv 2403.03950). The critic has a softmax over value bins and is trained with cross-entropy against a Gaussian histogram around
the return; there is no squared error, and the smallest loss is the entropy of the histogram, not 0."""
import torch
import torch.nn as nn

FAMILY = "policy-gradient and value losses"
KIND = "loss"
INPUTS = {
    "ids": "token ids, [rows, time]",
    "loss_mask": "1 where the critic is trained, [rows, time]",
    "returns": "return to regress to, [rows, time], entry t for the state at token t, constant",
}
SETTINGS = {"v_min": "left edge of the first bin, -2.0", "v_max": "right edge of the last bin, 2.0", "sigma_ratio": "standard deviation of the Gaussian in bin widths, 0.75"}
NOTES = (
    "Categorical critic. The model gives logits over 21 equal value bins between v_min and v_max at each position. Target: the probability mass of a normal distribution with mean = return (limited to [v_min, v_max]) and "
    "standard deviation sigma_ratio*bin width in each bin, divided by its mass inside [v_min, v_max] (so it sums to 1). Token loss = cross-entropy between this target and the softmax of the logits at the same position; its minimum is the entropy of the target. "
    "Mean over all positions with loss_mask 1 of all rows. The targets are constants. All parameters are used; any number of rows."
)


class Critic(nn.Module):
    def __init__(self, vocab=23, width=16, bins=21):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, bins)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    mask = torch.zeros(5, 11)
    for r in range(5):
        mask[r, 2:int(torch.randint(6, 12, (1,), generator=g))] = 1
    return {"model": Critic(), "ids": torch.randint(0, 23, (5, 11), generator=g), "loss_mask": mask, "returns": 0.9 * torch.randn(5, 11, generator=g)}


def _histogram(ret, edges, sigma):
    cdf = torch.special.erf((edges - ret[..., None]) / (2 ** 0.5 * sigma))
    return (cdf[..., 1:] - cdf[..., :-1]) / (cdf[..., -1:] - cdf[..., :1])


def right(model, batch, v_min=-2.0, v_max=2.0, sigma_ratio=0.75):
    logits, m = model(batch["ids"]), batch["loss_mask"]
    edges = torch.linspace(v_min, v_max, logits.shape[-1] + 1)
    with torch.no_grad():
        target = _histogram(batch["returns"].clamp(v_min, v_max), edges, sigma_ratio * (edges[1] - edges[0]))
    ce = -(target * logits.log_softmax(-1)).sum(-1)
    return (ce * m).sum() / m.sum()


if __name__ == "__main__":
    from statistics import NormalDist
    for seed in range(3):
        d = make(seed)
        model = d.pop("model")
        loss = right(model, d)
        loss.backward()
        norm = sum(p.grad.norm() ** 2 for p in model.parameters()).sqrt()
        w, want, n = 4 / 21, 0.0, 0
        lp = model(d["ids"]).log_softmax(-1).detach()
        for r in range(5):
            for t in range(11):
                if d["loss_mask"][r, t]:
                    nd = NormalDist(max(-2.0, min(2.0, d["returns"][r, t].item())), 0.75 * w)
                    ps = [nd.cdf(-2 + w * (k + 1)) - nd.cdf(-2 + w * k) for k in range(21)]
                    want -= sum(p / sum(ps) * lp[r, t, k].item() for k, p in enumerate(ps))
                    n += 1
        print("seed", seed, "loss %.6f explicit %.6f |grad| %.4f" % (loss.item(), want / n, norm))
        assert abs(loss.item() - want / n) < 1e-4 and norm > 0 and all(p.grad is not None for p in model.parameters())
