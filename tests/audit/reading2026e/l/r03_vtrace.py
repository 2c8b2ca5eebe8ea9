"""V-trace actor-critic (IMPALA). The advantage of the policy uses the corrected target of the NEXT state, v_{t+1},
not the one of the value's own target, and the two clips (rho, c) have different roles; targets are constants.
The last observation is only a bootstrap and has no loss of its own."""
FAMILY = "value and policy"
KIND = "loss"
INPUTS = {
    "obs": "observations, one more than there are actions, [rows, steps + 1, 5]",
    "actions": "actions taken, 0..3, [rows, steps]",
    "behaviour_logps": "log-probability of the action under the behaviour policy, [rows, steps]",
    "rewards": "reward after each action, [rows, steps]",
    "discounts": "gamma, or 0 where the episode ended with this action, [rows, steps]",
}
SETTINGS = {"rho_bar": "clip of the ratio in the temporal difference, 1.0", "c_bar": "clip of the trace ratio, 1.0",
            "value_coef": "weight of the value loss, 0.5", "entropy_coef": "weight of the entropy bonus, 0.01"}
NOTES = ("Reduction: mean over all steps of all rows (every step is real, no padding). Policy gradient plus value "
         "regression plus entropy; V-trace targets and advantages are constants. All parameters are used.")
import torch
import torch.nn as nn
import torch.nn.functional as F


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 16)
        self.pi = nn.Linear(16, 4)
        self.v = nn.Linear(16, 1)

    def forward(self, obs):
        h = torch.tanh(self.body(obs))
        return self.pi(h), self.v(h).squeeze(-1)


def make(seed):
    torch.manual_seed(seed)
    n, t = 5, 7
    disc = torch.where(torch.rand(n, t) < 0.15, 0.0, 0.97)
    return {"obs": torch.randn(n, t + 1, 5), "actions": torch.randint(0, 4, (n, t)),
            "behaviour_logps": torch.randn(n, t, 4).log_softmax(-1)[..., 0], "rewards": torch.randn(n, t),
            "discounts": disc, "model": ActorCritic()}


def right(model, batch, rho_bar=1.0, c_bar=1.0, value_coef=0.5, entropy_coef=0.01):
    logits, values = model(batch["obs"])
    logp_all = logits[:, :-1].log_softmax(-1)
    logp = logp_all.gather(-1, batch["actions"][..., None]).squeeze(-1)
    with torch.no_grad():
        ratio = (logp - batch["behaviour_logps"]).exp()
        rho, c = ratio.clamp(max=rho_bar), ratio.clamp(max=c_bar)
        v, v_next = values[:, :-1], values[:, 1:]
        delta = rho * (batch["rewards"] + batch["discounts"] * v_next - v)
        acc = torch.zeros_like(v[:, 0])
        diffs = []
        for t in reversed(range(v.shape[1])):
            acc = delta[:, t] + batch["discounts"][:, t] * c[:, t] * acc
            diffs.append(acc)
        vs = torch.stack(diffs[::-1], 1) + v
        vs_next = torch.cat([vs[:, 1:], values[:, -1:]], 1)
        adv = rho * (batch["rewards"] + batch["discounts"] * vs_next - v)
    pg = -(adv * logp).mean()
    value = 0.5 * (vs - values[:, :-1]).pow(2).mean()
    entropy = -(logp_all.exp() * logp_all).sum(-1).mean()
    return pg + value_coef * value - entropy_coef * entropy


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
    logits, V = m(d["obs"])
    lp = logits.log_softmax(-1).detach()
    V = V.detach()
    n, T = d["actions"].shape
    tot = 0.0
    for i in range(n):
        r = [float((lp[i, t, d["actions"][i, t]] - d["behaviour_logps"][i, t]).exp()) for t in range(T)]
        g = d["discounts"][i].tolist()

        def target(s):            # the definition: a sum of products
            out, w = float(V[i, s]), 1.0
            for t in range(s, T):
                out += w * min(1, r[t]) * (float(d["rewards"][i, t]) + g[t] * float(V[i, t + 1]) - float(V[i, t]))
                w *= g[t] * min(1, r[t])
            return out
        for t in range(T):
            nxt = target(t + 1) if t + 1 < T else float(V[i, T])
            adv = min(1, r[t]) * (float(d["rewards"][i, t]) + g[t] * nxt - float(V[i, t]))
            ent = -float((lp[i, t].exp() * lp[i, t]).sum())
            tot += -adv * float(lp[i, t, d["actions"][i, t]]) + 0.25 * (target(t) - float(V[i, t])) ** 2 - 0.01 * ent
    check(right(m, d), m, tot / (n * T))
