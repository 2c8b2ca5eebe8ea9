"""HL-Gauss value loss ('Stop Regressing', arXiv:2403.03950): the critic is a classifier over bins of the return, trained with cross-entropy against
the mass of a Gaussian around the return in each bin. No squared error anywhere; the targets are soft and the sum over bins is renormalised."""
import torch
import torch.nn as nn

FAMILY = "policy-gradient and value losses"
KIND = "loss"
INPUTS = {
    "ids": "token ids, [rows, time]", "loss_mask": "1 where the state is trained, [rows, time]",
    "returns": "return of the state after token t, [rows, time], constant, inside [v_min, v_max] where trained",
}
SETTINGS = {"v_min": "left edge of the first bin, -2.0", "v_max": "right edge of the last bin, 2.0", "sigma": "standard deviation of the Gaussian, 0.75 bin widths"}
NOTES = ("HL-Gauss. The model gives logits over equal bins between v_min and v_max for each position (the state that includes token t; no shift against ids). Target of a bin = mass of a normal distribution "
         "with mean return and the given sigma between the bin's edges, divided by the mass inside [v_min, v_max]. Loss = mean over the trained positions of all rows of the cross-entropy "
         "between target and softmax(logits). Its minimum is the entropy of the target, not 0. The value estimate (not used here) is the mean of the bin centres. Returns are constants. All parameters are used.")


class Critic(nn.Module):
    def __init__(self, vocab=24, width=16, bins=21):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, bins)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    mask = torch.ones(4, 8); mask[:, :2] = 0; mask[1, 6:] = 0; mask[3, 4:] = 0
    return {"model": Critic(), "ids": torch.randint(0, 24, (4, 8), generator=g), "loss_mask": mask,
            "returns": torch.randn(4, 8, generator=g).clamp(-1.8, 1.8)}


def right(model, batch, v_min=-2.0, v_max=2.0, sigma=0.75):
    logits = model(batch["ids"])
    bins = logits.shape[-1]
    edges = torch.linspace(v_min, v_max, bins + 1)
    s = sigma * (v_max - v_min) / bins
    cdf = 0.5 * (1 + torch.erf((edges - batch["returns"][..., None]) / (s * 2 ** 0.5)))
    target = (cdf[..., 1:] - cdf[..., :-1]) / (cdf[..., -1:] - cdf[..., :1])
    ce = -(target * logits.log_softmax(-1)).sum(-1)
    m = batch["loss_mask"]
    return (ce * m).sum() / m.sum().clamp(min=1)


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b); loss.backward()
    logits, edges, tot, n = model(b["ids"]), torch.linspace(-2, 2, 22), 0.0, 0
    for i in range(4):
        for t in range(8):
            if b["loss_mask"][i, t]:
                c = torch.distributions.Normal(b["returns"][i, t], 0.75 * 4 / 21).cdf(edges)
                for k in range(21):
                    tot = tot - (c[k + 1] - c[k]) / (c[-1] - c[0]) * logits[i, t].log_softmax(0)[k]
                n += 1
    print(loss.item(), float((tot / n).detach()), model.head.weight.grad.norm().item())
    assert abs(loss - tot / n) < 1e-4 and model.head.weight.grad.norm() > 0
