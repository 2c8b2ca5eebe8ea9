"""The critic is trained by cross entropy: returns become a histogram (Gaussian smeared over bins), the value is its mean.
The target is a soft distribution from differences of the normal CDF; returns outside the range are clamped to it, because the outer
bins cannot represent more. There is no squared error anywhere and no value clipping."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 on sampled tokens, [rows, time]", "returns": "return at each position, a constant, [rows, time]"}
SETTINGS = {"low": "lower end of the bins, -2.0", "high": "upper end, 2.0", "bins": "number of bins, 21", "sigma": "width of the smearing, 0.15"}
NOTES = "Cross entropy between the critic's histogram and the smeared return, mean over sampled tokens. Metric value_mae is on the mean of the histogram."

class TinyCritic(nn.Module):
    def __init__(self, vocab=32, dim=16, bins=21):
        super().__init__()
        self.emb, self.mix, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, dim), nn.Linear(dim, bins)

    def forward(self, ids):
        x = self.emb(ids)
        x = x.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[None, :, None]
        return self.head(torch.tanh(self.mix(x)))

def make(seed):
    torch.manual_seed(seed)
    mask = torch.zeros(3, 12)
    mask[:, 4:] = 1
    return {"model": TinyCritic(), "ids": torch.randint(0, 32, (3, 12)), "loss_mask": mask, "returns": torch.randn(3, 12) * 1.2}

def right(model, batch, low=-2.0, high=2.0, bins=21, sigma=0.15):
    edges = torch.linspace(low, high, bins + 1)
    returns = batch["returns"].clamp(low, high)
    cdf = 0.5 * (1 + torch.erf((edges - returns[..., None]) / (sigma * 2 ** 0.5)))
    target = cdf.diff(dim=-1)
    target = target / target.sum(-1, keepdim=True)
    logp = model(batch["ids"]).log_softmax(-1)
    per_token = -(target * logp).sum(-1)
    centers = (edges[1:] + edges[:-1]) / 2
    mae = ((logp.exp() @ centers - returns).abs() * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    return (per_token * batch["loss_mask"]).sum() / batch["loss_mask"].sum(), {"value_mae": mae.detach()}

def grads(fn):
    d = make(0)
    model = d.pop("model")
    out = fn(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

if __name__ == "__main__":
    import math
    loss, grad = grads(right)
    d = make(0)
    logp, total = d["model"](d["ids"]).log_softmax(-1), 0.0
    edges = [-2 + 4 * i / 21 for i in range(22)]
    for r in range(3):
        for t in range(4, 12):
            x = min(2.0, max(-2.0, d["returns"][r, t].item()))
            p = [0.5 * (math.erf((b - x) / (0.15 * 2 ** 0.5)) - math.erf((a - x) / (0.15 * 2 ** 0.5))) for a, b in zip(edges, edges[1:])]
            total -= sum(q / sum(p) * logp[r, t, i].item() for i, q in enumerate(p))
    opt = torch.optim.Adam(d["model"].parameters(), 0.05)
    start = right(d["model"], d)[1]["value_mae"].item()
    for _ in range(150):
        opt.zero_grad()
        right(d["model"], d)[0].backward()
        opt.step()
    print("loss", loss, "explicit", total / 24, "error of the mean before and after training", start, right(d["model"], d)[1]["value_mae"].item())
    assert abs(loss - total / 24) < 1e-4 and grad.norm() > 0 and right(d["model"], d)[1]["value_mae"] < 0.5 * start
