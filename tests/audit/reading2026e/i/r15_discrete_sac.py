"""Discrete soft actor-critic (Christodoulou 2019). One scalar carries three losses kept apart by detach: the critics see no actor gradient,
the actor sees the critics as constants and sums over ALL actions (no sample), the temperature sees only a constant entropy gap."""
FAMILY = "value"
KIND = "loss"
INPUTS = {"obs": "[rows, 5]", "actions": "[rows]", "rewards": "[rows]", "done": "1 at the end of an episode, [rows]",
          "next_obs": "[rows, 5]", "next_q": "minimum of the two target critics at next_obs, [rows, actions], constant"}
SETTINGS = {"gamma": "discount, 0.99", "entropy_share": "target entropy as a share of log(actions), 0.98"}
NOTES = "Mean over rows of each of three losses, added. The temperature loss may be negative. Its gradient, and that of the others, meet disjoint parameters, so the sum is exact. All parameters used."
import math
import torch
import torch.nn as nn


class SAC(nn.Module):
    def __init__(self, obs=5, actions=4, width=16):
        super().__init__()
        net = lambda: nn.Sequential(nn.Linear(obs, width), nn.Tanh(), nn.Linear(width, actions))
        self.actor, self.q1, self.q2 = net(), net(), net()
        self.log_alpha = nn.Parameter(torch.tensor(-1.0))


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    R = 8
    return {"model": SAC(), "obs": torch.randn(R, 5, generator=g), "actions": torch.randint(0, 4, (R,), generator=g), "rewards": torch.randn(R, generator=g),
            "done": (torch.rand(R, generator=g) < 0.3).float(), "next_obs": torch.randn(R, 5, generator=g), "next_q": torch.randn(R, 4, generator=g)}


def right(model, batch, gamma=0.99, entropy_share=0.98):
    alpha = model.log_alpha.exp().detach()
    with torch.no_grad():
        nlp = model.actor(batch["next_obs"]).log_softmax(-1)
        soft_v = (nlp.exp() * (batch["next_q"] - alpha * nlp)).sum(-1)
        target = batch["rewards"] + gamma * (1 - batch["done"]) * soft_v
    q1, q2 = model.q1(batch["obs"]), model.q2(batch["obs"])
    pick = lambda q: q.gather(-1, batch["actions"][:, None]).squeeze(-1)
    critic = (pick(q1) - target).square().mean() + (pick(q2) - target).square().mean()
    lp = model.actor(batch["obs"]).log_softmax(-1)
    actor = (lp.exp() * (alpha * lp - torch.minimum(q1, q2).detach())).sum(-1).mean()
    entropy = -(lp.exp() * lp).sum(-1).detach()
    temperature = (model.log_alpha.exp() * (entropy - entropy_share * math.log(lp.shape[-1]))).mean()
    return critic + actor + temperature, {"entropy": entropy.mean().item()}


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    d = make(0); model = d.pop("model")
    loss, info = right(model, d)
    with torch.no_grad():
        al, slow = float(model.log_alpha.exp()), 0.0
        for i in range(8):
            p, np_ = model.actor(d["obs"][i]).softmax(-1).tolist(), model.actor(d["next_obs"][i]).softmax(-1).tolist()
            y = float(d["rewards"][i]) + (0 if d["done"][i] else 0.99 * sum(a * (float(q) - al * math.log(a)) for a, q in zip(np_, d["next_q"][i])))
            A, q1, q2 = int(d["actions"][i]), model.q1(d["obs"][i]).tolist(), model.q2(d["obs"][i]).tolist()
            slow += (q1[A] - y) ** 2 + (q2[A] - y) ** 2
            slow += sum(a * (al * math.log(a) - min(x, z)) for a, x, z in zip(p, q1, q2))
            slow += al * (-sum(a * math.log(a) for a in p) - 0.98 * math.log(4))
    check(loss, slow / 8, model); print(info)
    g = torch.autograd.grad(right(model, d)[0], model.log_alpha)[0]     # too much entropy -> temperature falls
    assert (float(g) > 0) == (info["entropy"] > 0.98 * math.log(4))
