"""Value as a classification: two-hot target over symlog bins, cross entropy instead of squared error. Hafner et al. 2023 (DreamerV3); also MuZero-like critics.
The target return is squeezed by symlog and split over the two nearest bins in proportion to nearness; the loss never is zero, even at a perfect prediction, because the entropy of the two-hot target stays. The read-out (symexp of the expected bin) is a metric only and has no gradient."""
import torch
from torch import nn
FAMILY = "losses"
KIND = "loss"
INPUTS = {"obs": "features per token, [rows, time, 8]", "returns": "returns to fit, of any size and sign, [rows, time]", "mask": "1 on trained tokens, [rows, time]"}
SETTINGS = {"bins": "number of bins on [-10, 10] in symlog space, 21"}
NOTES = "Value loss. Mean over trained tokens of all rows of the cross entropy between the two-hot target and the softmax of the head. returns and mask are constants. The number of bins is the width of the model's output. Returns (loss, metrics); metrics value_mae is detached. Uses all parameters."


class Critic(nn.Module):
    def __init__(self, bins=21):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, bins)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def make(seed):
    torch.manual_seed(seed)
    return {"model": Critic(), "obs": torch.randn(3, 6, 8), "returns": 30 * torch.randn(3, 6), "mask": (torch.rand(3, 6) > 0.3).float()}


def symlog(x):
    return x.sign() * (x.abs() + 1).log()


def symexp(x):
    return x.sign() * (x.abs().exp() - 1)


def right(model, batch, bins=21):
    grid = torch.linspace(-10, 10, bins)
    y = symlog(batch["returns"]).clamp(-10, 10)
    at = (y + 10) / 20 * (bins - 1)
    lo = at.floor().long().clamp(0, bins - 2)
    w = at - lo
    target = torch.zeros(*y.shape, bins)
    target.scatter_(-1, lo[..., None], (1 - w)[..., None])
    target.scatter_(-1, lo[..., None] + 1, w[..., None])
    logp = model(batch["obs"]).log_softmax(-1)
    m = batch["mask"]
    loss = (-(target * logp).sum(-1) * m).sum() / m.sum()
    with torch.no_grad():
        value = symexp((logp.exp() * grid).sum(-1))
        mae = ((value - batch["returns"]).abs() * m).sum() / m.sum()
    return loss, {"value_mae": mae.item()}


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, met = right(model, d)
    loss.backward()
    import math
    lp, tot, n = model(d["obs"]).log_softmax(-1), 0.0, 0
    for i in range(3):
        for t in range(6):
            if d["mask"][i, t]:
                r = d["returns"][i, t].item()
                y = math.copysign(math.log(abs(r) + 1), r) + 10
                k, w = int(y), y - int(y)
                tot -= (1 - w) * lp[i, t, k].item() + w * lp[i, t, k + 1].item()
                n += 1
    print("loss", loss.item(), "loop", tot / n, met)
    assert abs(loss.item() - tot / n) < 1e-4 and model.body.weight.grad.norm() > 0
