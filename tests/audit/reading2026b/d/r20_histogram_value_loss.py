"""A value loss that is a cross-entropy over bins, whose minimum is not 0.
The critic predicts a distribution over 21 bins; the target return is spread over the bins by a Gaussian (HL-Gauss) and is
a constant. The loss is the cross-entropy, so a perfect critic has the entropy of the smeared target,
not 0. The value used elsewhere is the mean of the bins. No clipping, no squared error."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'losses'
KIND = 'loss'
INPUTS = {
    'ids': 'token ids, [rows, time]',
    'loss_mask': '1 where a value is trained, [rows, time]',
    'returns': 'target returns in [-1, 1], constants, [rows, time]',
}
SETTINGS = {
    'sigma': "width of the target's Gaussian in value units, 0.075",
    'bins': '21 bins between -1.2 and 1.2',
}
NOTES = (
    'HL-Gauss: cross-entropy between the binned Gaussian around the return (normalised over the '
    'range) and the predicted distribution, mean over the trained positions of all rows. Returns are '
    'constants. '
)


class Tiny(nn.Module):
    """Embedding + learned positions, one causal self-attention layer, MLP, head."""
    def __init__(self, vocab=20, width=16, heads=2, length=64):
        super().__init__()
        self.heads = heads
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def hidden(self, ids, positions=None, allowed=None):
        b, t = ids.shape
        if positions is None:
            positions = torch.arange(t).expand(b, t)
        ok = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)
        if allowed is not None:               # [b, t, t] bool, replaces the causal mask
            ok = allowed
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        s = s.masked_fill(~ok[:, None], float("-inf"))
        x = x + self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))
        return self.norm(x + self.down(F.gelu(self.up(x))))

    def forward(self, ids, positions=None, allowed=None):
        return self.head(self.hidden(ids, positions, allowed))


class Critic(Tiny):
    def __init__(self, bins=21):
        super().__init__()
        self.value = nn.Linear(16, bins)


EDGES = torch.linspace(-1.2, 1.2, 22)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    mask = (torch.rand(3, 9, generator=g) < 0.7).float()
    mask[:, 2] = 1
    return {"model": Critic(), "ids": torch.randint(0, 20, (3, 9), generator=g), "loss_mask": mask,
            "returns": torch.rand(3, 9, generator=g) * 2 - 1}


def right(model, batch, sigma=0.075):
    logits = model.value(model.hidden(batch["ids"]))
    with torch.no_grad():
        cdf = torch.special.erf((EDGES - batch["returns"][..., None]) / (2 ** 0.5 * sigma))
        target = (cdf[..., 1:] - cdf[..., :-1]) / (cdf[..., -1:] - cdf[..., :1])
    ce = -(target * logits.log_softmax(-1)).sum(-1)
    mask = batch["loss_mask"]
    return (ce * mask).sum() / mask.sum()


if __name__ == "__main__":
    b = make(0)
    model = b.pop("model")
    loss = right(model, b)
    loss.backward()
    logp = model.value(model.hidden(b["ids"])).log_softmax(-1).detach()
    phi = lambda x: 0.5 * (1 + math.erf(x / 2 ** 0.5))
    total, n, floor = 0.0, 0, 0.0
    for i in range(3):
        for t in range(9):
            if b["loss_mask"][i, t]:
                y = float(b["returns"][i, t])
                c = [phi((float(e) - y) / 0.075) for e in EDGES]
                p = [(c[k + 1] - c[k]) / (c[-1] - c[0]) for k in range(21)]
                total -= sum(p[k] * float(logp[i, t, k]) for k in range(21))
                floor -= sum(q * math.log(q) for q in p if q > 0)
                n += 1
    print("loss", loss.item(), "slow loop", total / n, "lowest possible", floor / n, "gradient", model.value.weight.grad.norm().item())
    assert abs(loss.item() - total / n) < 1e-4 and model.emb.weight.grad.norm() > 0
