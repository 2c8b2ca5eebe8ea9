"""Retrace(lambda) (Munos et al. 2016; ACER, MPO, Reactor): off-policy Q targets with traces lambda * min(1, ratio). The ratio of the step itself is not used, only those of the later ones: Q(s,a) is conditioned
on its action. Target and prediction come from the same network here, the target without gradient."""
import torch
import torch.nn as nn

FAMILY = "replay and off-policy corrections"
KIND = "loss"
INPUTS = {
    "obs": "observations of one stored trajectory, [time + 1, 6]; the last is the state after the last action", "actions": "actions taken, [time]",
    "rewards": "[time]", "terminal": "1.0 where the step ended in a terminal state, [time]; only the last step can", "mu": "probability of the action taken under the behaviour policy, [time]",
    "pi": "target policy in each state, [time + 1, actions], constant",
}
SETTINGS = {"gamma": "discount, 0.97", "lam": "trace decay, 0.9"}
NOTES = ("Retrace(lambda). Backward: target_t = r_t + gamma * (1 - terminal_t) * (E_pi Q(s_{t+1}, .) + c_{t+1} * (target_{t+1} - Q(s_{t+1}, a_{t+1}))), c_{t+1} = lam * min(1, pi(a_{t+1}|s_{t+1}) / mu_{t+1}); "
         "after the last step the correction term is 0 and E_pi Q of the last state bootstraps. The ratio of step t itself does not enter target_t. Targets carry no gradient (semi-gradient, the same network). "
         "Loss = mean over the steps of 0.5 * (Q(s_t, a_t) - target_t)^2; no importance weight on the squared error. All parameters are used.")


class Q(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, obs):
        return self.net(obs)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    T = 9
    mu_all = (torch.randn(T, 4, generator=g)).softmax(-1)
    a = torch.multinomial(mu_all, 1, generator=g).squeeze(1)
    term = torch.zeros(T); term[-1] = float(seed % 2)
    return {"model": Q(), "obs": torch.randn(T + 1, 6, generator=g), "actions": a, "rewards": torch.randn(T, generator=g), "terminal": term,
            "mu": mu_all[torch.arange(T), a], "pi": torch.randn(T + 1, 4, generator=g).softmax(-1)}


def right(model, batch, gamma=0.97, lam=0.9):
    q = model(batch["obs"])
    T = len(batch["actions"])
    idx = torch.arange(T)
    qa = q[:-1][idx, batch["actions"]]
    with torch.no_grad():
        v = (batch["pi"] * q).sum(-1)
        c = lam * (batch["pi"][:-1][idx, batch["actions"]] / batch["mu"]).clamp(max=1.0)
        target, corr = torch.zeros(T), torch.zeros(())
        for t in reversed(range(T)):
            target[t] = batch["rewards"][t] + gamma * (1 - batch["terminal"][t]) * (v[t + 1] + corr)
            corr = c[t] * (target[t] - qa[t])
    return 0.5 * (qa - target).pow(2).mean()


if __name__ == "__main__":
    for seed in (0, 1):
        b = make(seed); model = b.pop("model")
        loss = right(model, b); loss.backward(); g = model.net[2].weight.grad.norm().item()
        with torch.no_grad():                    # the definition as a sum of weighted TD errors
            q = model(b["obs"]); T = 9; tot = 0.0
            for t in range(T):
                x, w = 0.0, 1.0
                for s in range(t, T):
                    if s > t:
                        w *= 0.97 * 0.9 * min(1.0, float(b["pi"][s, b["actions"][s]] / b["mu"][s]))
                    td = b["rewards"][s] + 0.97 * (1 - b["terminal"][s]) * (b["pi"][s + 1] * q[s + 1]).sum() - q[s, b["actions"][s]]
                    x += w * td
                tot += 0.5 * float(x) ** 2 / T
        print(loss.item(), tot, g)
        assert abs(loss.item() - tot) < 1e-4 and g > 0
