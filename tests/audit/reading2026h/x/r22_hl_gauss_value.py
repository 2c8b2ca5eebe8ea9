"""A value function trained by cross entropy over bins with a gaussian histogram as target (HL-Gauss, Farebrother et al., arXiv 2403.03950).
The return is a number; the target is the mass that a normal distribution around the return has in each bin, from differences of the error function, divided by the mass inside
the range. The value is the mean of the bin centres. There is no squared error and no value clipping, and the loss has a minimum above zero."""
FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "returns": "return at each token, between -1 and 1, [rows, time]", "mask": "1 on tokens whose value is trained, [rows, time]"}
SETTINGS = {"sigma": "width of the gaussian, 0.15 (0.75 bin widths)", "low": "lower end, -1.0", "high": "upper end, 1.0"}
NOTES = ("Value loss. Cross entropy against soft bins, mean over the masked tokens of all rows. No shift: the value of a token is at the token. returns are constants. 10 bins; every parameter is used. "
         "The loss at the optimum is the entropy of the target, not 0.")
import math
import torch
from torch import nn


class Critic(nn.Module):
    def __init__(self, vocab=40, width=16, bins=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, bins)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return {"model": Critic(), "ids": torch.randint(0, 40, (4, 8), generator=g), "returns": torch.rand(4, 8, generator=g) * 2 - 1, "mask": (torch.rand(4, 8, generator=g) < 0.7).float()}


def right(model, batch, sigma=0.15, low=-1.0, high=1.0):
    logits = model(batch["ids"])
    edges = torch.linspace(low, high, logits.shape[-1] + 1)
    cdf = torch.erf((edges - batch["returns"].unsqueeze(-1)) / (math.sqrt(2) * sigma))
    target = (cdf[..., 1:] - cdf[..., :-1]) / (cdf[..., -1:] - cdf[..., :1])
    logp = logits.log_softmax(-1)
    ce = -(target * logp).sum(-1)
    loss = (ce * batch["mask"]).sum() / batch["mask"].sum()
    centres = (edges[1:] + edges[:-1]) / 2
    with torch.no_grad():
        value = (logp.exp() * centres).sum(-1)
        error = (((value - batch["returns"]) ** 2) * batch["mask"]).sum() / batch["mask"].sum()
    return loss, {"value_mse": error.item()}


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    loss, metrics = right(m, d)
    loss.backward()
    phi = lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2)))
    lp = m(d["ids"]).log_softmax(-1).detach()
    tot = n = 0
    for i in range(4):
        for t in range(8):
            if d["mask"][i, t]:
                r = d["returns"][i, t].item()
                mass = [phi((-1 + 0.2 * (k + 1) - r) / 0.15) - phi((-1 + 0.2 * k - r) / 0.15) for k in range(10)]
                tot -= sum(q / sum(mass) * lp[i, t, k].item() for k, q in enumerate(mass))
                n += 1
    print(loss.item(), tot / n, metrics, m.head.weight.grad.norm().item())
    assert abs(loss.item() - tot / n) < 1e-4
