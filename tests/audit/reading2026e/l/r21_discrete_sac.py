"""Discrete soft actor-critic, actor and temperature in one loss (Christodoulou 2019). The expectation over actions is exact, so
there is no sampled action and no reparametrisation; alpha is detached in the actor term and the policy is detached in the alpha term.
The sum's value means nothing, only its gradients do."""
FAMILY = "value and policy"
KIND = "loss"
INPUTS = {"obs": "observations, [rows, 5]", "q1": "first critic of every action, [rows, 4]", "q2": "second critic of every action, [rows, 4]"}
SETTINGS = {"target_share": "target entropy as a share of log(actions), 0.7"}
NOTES = ("Reduction: mean over rows, exact sum over actions. Actor loss plus temperature loss; critics are constants here. "
         "log_alpha is a trained parameter. All parameters are used.")
import torch
import torch.nn as nn
import torch.nn.functional as F
import math


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4))
        self.log_alpha = nn.Parameter(torch.tensor(-1.0))

    def forward(self, obs):
        return self.net(obs)


def make(seed):
    torch.manual_seed(seed)
    return {"obs": torch.randn(8, 5), "q1": torch.randn(8, 4), "q2": torch.randn(8, 4), "model": Actor()}


def right(model, batch, target_share=0.7):
    logp = model(batch["obs"]).log_softmax(-1)
    pi = logp.exp()
    alpha = model.log_alpha.exp()
    q = torch.minimum(batch["q1"], batch["q2"]).detach()
    actor = (pi * (alpha.detach() * logp - q)).sum(-1).mean()
    target = target_share * math.log(logp.shape[-1])
    gap = (-(pi * logp).sum(-1) - target).detach()       # entropy above the target lowers alpha
    temperature = (alpha * gap).mean()
    return actor + temperature, {"entropy_gap": gap.mean().item()}


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
    lp = m(d["obs"]).log_softmax(-1).detach()
    a, tot, gaps = math.exp(-1.0), 0.0, 0.0
    for i in range(8):
        h = 0.0
        for k in range(4):
            p = math.exp(float(lp[i, k]))
            h -= p * float(lp[i, k])
            tot += p * (a * float(lp[i, k]) - min(float(d["q1"][i, k]), float(d["q2"][i, k])))
        gaps += h - 0.7 * math.log(4)
        tot += a * (h - 0.7 * math.log(4))
    check(right(m, d)[0], m, tot / 8)
    assert abs(m.log_alpha.grad.item() - a * gaps / 8) < 1e-5
