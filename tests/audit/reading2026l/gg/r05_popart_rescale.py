"""PopArt (van Hasselt et al. 2016; used in IMPALA multi-task, MAPPO, rl_games): the statistics of the returns are updated first, and the last layer of the
critic is then rewritten in place, outside the optimizer, so that its unnormalised outputs stay the same; only then comes the gradient step on normalised errors."""
import torch
import torch.nn as nn

FAMILY = "policy-gradient and value losses"
KIND = "update"
INPUTS = {
    "model": "critic: body and linear head (normalised value), with buffers mu (mean of the returns) and nu (mean of their squares); model(obs) is the normalised value",
    "optimizer": "torch SGD over body and head",
    "batches": "a list of dicts: obs [rows, 6], returns [rows] (unnormalised, constant)",
}
SETTINGS = {"beta": "step size of the running statistics, 0.1"}
NOTES = ("PopArt, for each batch in this order: (1) mu and nu move by beta towards the batch's mean of returns and of squared returns; sigma = sqrt(nu - mu^2), at least 1e-4. "
         "(2) head.weight *= sigma_old / sigma_new and head.bias = (sigma_old * bias + mu_old - mu_new) / sigma_new, so that sigma * model(obs) + mu is unchanged for every obs. "
         "(3) one optimizer step on 0.5 * mean over rows of (model(obs) - (returns - mu) / sigma)^2 with the new statistics. The rewriting in (2) is part of the algorithm, not of the gradient. All parameters are used.")


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.head = nn.Linear(16, 1)
        self.register_buffer("mu", torch.zeros(()))
        self.register_buffer("nu", torch.ones(()))

    def sigma(self):
        return (self.nu - self.mu ** 2).clamp(min=1e-8).sqrt()

    def forward(self, obs):
        return self.head(self.body(obs)).squeeze(-1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Critic()
    batches = [{"obs": torch.randn(8, 6, generator=g), "returns": 30 * k + 20 * torch.randn(8, generator=g)} for k in range(1, 5)]
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05), "batches": batches}


def right(model, optimizer, batches, beta=0.1):
    for b in batches:
        with torch.no_grad():
            mu, sigma = model.mu.clone(), model.sigma()
            model.mu.lerp_(b["returns"].mean(), beta)
            model.nu.lerp_(b["returns"].pow(2).mean(), beta)
            new = model.sigma()
            model.head.weight.mul_(sigma / new)
            model.head.bias.copy_((sigma * model.head.bias + mu - model.mu) / new)
        optimizer.zero_grad()
        target = (b["returns"] - model.mu) / model.sigma()
        (0.5 * (model(b["obs"]) - target).pow(2)).mean().backward()
        optimizer.step()


if __name__ == "__main__":
    m = make(0); model = m["model"]
    x = m["batches"][0]["obs"]
    still = torch.optim.SGD(model.parameters(), lr=0.0)          # without learning the outputs must not move
    before = (model.sigma() * model(x) + model.mu).detach()
    right(model, still, m["batches"])
    after = (model.sigma() * model(x) + model.mu).detach()
    print("largest change of the outputs by the rescaling", (before - after).abs().max().item(), "mu", model.mu.item(), "sigma", model.sigma().item())
    assert torch.allclose(before, after, atol=1e-3) and model.mu > 5
    m = make(0); w = m["model"].body[0].weight.detach().clone(); right(**m)
    assert (m["model"].body[0].weight - w).abs().max() > 0
    m2, m3 = make(0), make(0)
    right(**m2)
    mod, mu, nu = m3["model"], 0.0, 1.0                          # the same in unnormalised terms, by hand
    for b in m3["batches"]:
        s0, mu0 = max(nu - mu * mu, 1e-8) ** .5, mu
        mu += .1 * (float(b["returns"].mean()) - mu); nu += .1 * (float((b["returns"] ** 2).mean()) - nu)
        s1 = max(nu - mu * mu, 1e-8) ** .5
        mod.head.weight.data *= s0 / s1; mod.head.bias.data = (s0 * mod.head.bias.data + mu0 - mu) / s1
        loss = sum(0.5 * (mod(b["obs"][i]) - (b["returns"][i] - mu) / s1) ** 2 for i in range(8)) / 8
        for p, gr in zip(mod.parameters(), torch.autograd.grad(loss, list(mod.parameters()))):
            p.data -= 0.05 * gr
    assert all(torch.allclose(p, q, atol=1e-4) for p, q in zip(m2["model"].parameters(), mod.parameters()))
