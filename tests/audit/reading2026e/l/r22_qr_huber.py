"""Quantile regression Huber loss (QR-DQN). Every predicted quantile meets every target sample, with an asymmetric weight; summed
over predicted quantiles and averaged over target samples, a mixed reduction that is the one of the paper."""
FAMILY = "value"
KIND = "loss"
INPUTS = {"obs": "observations, [rows, 5]", "actions": "action taken, 0..3, [rows]",
          "targets": "samples of the target distribution (already bootstrapped), [rows, samples]"}
SETTINGS = {"kappa": "Huber threshold, 1.0"}
NOTES = ("Reduction: sum over predicted quantiles, mean over target samples, mean over rows. Distributional value loss; targets are "
         "constants. The order of the quantile outputs carries meaning.")
import torch
import torch.nn as nn
import torch.nn.functional as F


class QR(nn.Module):
    def __init__(self, actions=4, quantiles=7):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, actions * quantiles))
        self.shape = (actions, quantiles)

    def forward(self, obs):
        return self.net(obs).reshape(-1, *self.shape)


def make(seed):
    torch.manual_seed(seed)
    return {"obs": torch.randn(12, 5), "actions": torch.randint(0, 4, (12,)), "targets": 1.5 * torch.randn(12, 9), "model": QR()}


def right(model, batch, kappa=1.0):
    theta = model(batch["obs"])[torch.arange(len(batch["obs"])), batch["actions"]]
    n = theta.shape[1]
    tau = (torch.arange(n) + 0.5) / n
    delta = batch["targets"][:, None, :] - theta[:, :, None]
    huber = torch.where(delta.abs() <= kappa, 0.5 * delta.pow(2), kappa * (delta.abs() - 0.5 * kappa))
    weight = (tau[None, :, None] - (delta.detach() < 0).float()).abs()
    return (weight * huber / kappa).mean(2).sum(1).mean()


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
    d = make(0)
    m = d.pop("model")
    out = m(d["obs"]).detach()
    tot = 0.0
    for i in range(12):
        for q in range(7):
            for y in d["targets"][i].tolist():
                e = y - float(out[i, d["actions"][i], q])
                h = 0.5 * e * e if abs(e) <= 1 else abs(e) - 0.5
                tot += abs((q + 0.5) / 7 - (e < 0)) * h / 9
    check(right(m, d), m, tot / 12)
