"""Value function as a classifier (HL-Gauss; Farebrother et al., arXiv 2403.03950). Returns are turned into a histogram: a Gaussian around the return is integrated over fixed bins by differences of erf, and the critic is trained by cross-entropy. There is no squared error; the loss is not zero at the best fit; returns outside the support are clipped."""
import math
import torch

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the value is trained, [rows, time]", "returns": "returns per token, [rows, time], within about -1 .. 1"}
SETTINGS = {"sigma": "width of the Gaussian, 0.1 (1.33 bin widths)"}
NOTES = "The model's 32 outputs are the logits of 32 bins from -1.2 to 1.2 (it is used as a critic). Cross-entropy to the soft target, mean over trained tokens of all rows; the value itself is the expectation of bin centres. Returns are constants; the target is normalised over the support."

class TinyLM(torch.nn.Module):
    """One causal attention layer with fixed sinusoidal positions; every parameter is used by every forward."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, vocab)

    def hidden(self, ids, positions=None, mask=None):
        b, t = ids.shape
        w = self.emb.embedding_dim
        if positions is None:
            positions = torch.arange(t).expand(b, t)
        if mask is None:
            mask = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)
        freq = torch.exp(-torch.arange(0, w, 2).float() / w * math.log(100.0))
        ang = positions.float().unsqueeze(-1) * freq
        x = self.emb(ids) + torch.cat([ang.sin(), ang.cos()], -1)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(-1, -2) / math.sqrt(w)
        score = score.masked_fill(~mask, -1e9)
        return x + self.out(score.softmax(-1) @ v)

    def forward(self, ids, positions=None, mask=None):
        return self.head(self.hidden(ids, positions, mask))


def make(seed):
    torch.manual_seed(seed)
    mask = torch.zeros(3, 9)
    for i, (a, b) in enumerate([(2, 9), (0, 4), (3, 6)]):
        mask[i, a:b] = 1
    return {"model": TinyLM(), "ids": torch.randint(0, 32, (3, 9)), "loss_mask": mask, "returns": torch.rand(3, 9) * 2 - 1}


def right(model, batch, sigma=0.1):
    edges = torch.linspace(-1.2, 1.2, 33)
    logits = model(batch["ids"])
    ret = batch["returns"].clamp(-1.2, 1.2)
    cdf = torch.erf((edges - ret[..., None]) / (math.sqrt(2.0) * sigma))
    target = (cdf[..., 1:] - cdf[..., :-1]) / (cdf[..., -1:] - cdf[..., :1])
    loss = -(target * torch.log_softmax(logits, -1)).sum(-1)
    mask = batch["loss_mask"]
    centres = (edges[1:] + edges[:-1]) / 2
    value = (logits.softmax(-1) * centres).sum(-1).detach()
    return (loss * mask).sum() / mask.sum(), {"value_error": (((value - ret) ** 2 * mask).sum() / mask.sum()).item()}


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    loss, met = right(m, b); loss.backward()
    lp = torch.log_softmax(m(b["ids"]), -1); tot = n = 0
    phi = lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2)))
    e = [-1.2 + 2.4 * k / 32 for k in range(33)]
    for i in range(3):
        for t in range(9):
            if b["loss_mask"][i, t]:
                r = b["returns"][i, t].item()
                z = phi((1.2 - r) / 0.1) - phi((-1.2 - r) / 0.1)
                tot -= sum((phi((e[k + 1] - r) / 0.1) - phi((e[k] - r) / 0.1)) / z * lp[i, t, k].item() for k in range(32)); n += 1
    print(loss.item(), tot / n, met); assert abs(loss.item() - tot / n) < 1e-4
    start = met["value_error"]
    opt = torch.optim.Adam(m.parameters(), lr=0.02)
    for _ in range(150):
        opt.zero_grad(); l, met = right(m, b); l.backward(); opt.step()
    print("value error after fitting", start, met["value_error"]); assert met["value_error"] < 0.3 * start
