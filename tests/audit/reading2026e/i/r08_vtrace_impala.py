"""V-trace actor-critic (Espeholt et al. 2018). Two different truncations of the same ratio (rho for the TD error, c for the trace),
all targets are computed from the model's own values without gradient, and losses are SUMS over time."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"obs": "observations, [rows, time+1, 5]; the last one only gives the bootstrap value", "actions": "actions, [rows, time]", "behaviour_logps": "log probability of the action under the actor's policy, [rows, time], constant",
          "rewards": "[rows, time], constant", "discounts": "0 where the episode ended at that step, otherwise 0.99, [rows, time]"}
SETTINGS = {"rho_bar": "truncation of the TD weight, 1.0", "c_bar": "truncation of the trace weight, 1.0", "value_cost": "weight of the value loss, 0.5", "entropy_cost": "weight of the entropy bonus, 0.01"}
NOTES = "Sum over time, mean over rows. vs, rho and the advantage are constants (no gradient); the last observation gets no direct loss. All parameters of trunk, policy and value are used."
import torch
import torch.nn as nn


class ActorCritic(nn.Module):
    def __init__(self, obs=5, actions=4, width=16):
        super().__init__()
        self.trunk, self.policy, self.value = nn.Linear(obs, width), nn.Linear(width, actions), nn.Linear(width, 1)

    def forward(self, x):
        h = torch.tanh(self.trunk(x))
        return self.policy(h), self.value(h).squeeze(-1)


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    R, T = 4, 7
    return {"model": ActorCritic(), "obs": torch.randn(R, T + 1, 5, generator=g), "actions": torch.randint(0, 4, (R, T), generator=g),
            "behaviour_logps": -1.4 + 0.3 * torch.randn(R, T, generator=g), "rewards": torch.randn(R, T, generator=g),
            "discounts": 0.99 * (torch.rand(R, T, generator=g) > 0.15).float()}


def right(model, batch, rho_bar=1.0, c_bar=1.0, value_cost=0.5, entropy_cost=0.01):
    logits, v = model(batch["obs"])
    logp_all = logits[:, :-1].log_softmax(-1)
    lp = logp_all.gather(-1, batch["actions"][..., None]).squeeze(-1)
    disc, rew = batch["discounts"], batch["rewards"]
    with torch.no_grad():
        ratio = (lp - batch["behaviour_logps"]).exp()
        rho, c = ratio.clamp(max=rho_bar), ratio.clamp(max=c_bar)
        delta = rho * (rew + disc * v[:, 1:] - v[:, :-1])
        acc, out = torch.zeros_like(v[:, 0]), []
        for t in reversed(range(rew.shape[1])):
            acc = delta[:, t] + disc[:, t] * c[:, t] * acc
            out.append(acc)
        vs = torch.stack(out[::-1], 1) + v[:, :-1]
        vs_next = torch.cat([vs[:, 1:], v[:, -1:]], 1)
        adv = rho * (rew + disc * vs_next - v[:, :-1])
    pg = -(adv * lp).sum(1).mean()
    critic = 0.5 * (vs - v[:, :-1]).square().sum(1).mean()
    entropy = -(logp_all.exp() * logp_all).sum(-1).sum(1).mean()
    return pg + value_cost * critic - entropy_cost * entropy, {"pg": pg.item(), "critic": critic.item()}


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
        logits, v = model(d["obs"])
        P = logits[:, :-1].log_softmax(-1)
        slow, T = 0.0, 7
        for i in range(4):
            lp = [float(P[i, t, d["actions"][i, t]]) for t in range(T)]
            w = [min(1.0, 2.718281828 ** (lp[t] - float(d["behaviour_logps"][i, t]))) for t in range(T)]
            V, r, g = [float(x) for x in v[i]], d["rewards"][i].tolist(), d["discounts"][i].tolist()
            vs = []
            for s in range(T):   # the definition: a forward sum
                tot, front = V[s], 1.0
                for t in range(s, T):
                    tot += front * w[t] * (r[t] + g[t] * V[t + 1] - V[t]); front *= g[t] * w[t]
                vs.append(tot)
            vs.append(V[T])
            for t in range(T):
                slow += (-w[t] * (r[t] + g[t] * vs[t + 1] - V[t]) * lp[t] + 0.25 * (vs[t] - V[t]) ** 2) / 4
        slow += 0.01 * float((P.exp() * P).sum()) / 4
    check(loss, slow, model); print(info)
