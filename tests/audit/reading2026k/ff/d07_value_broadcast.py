"""Value loss over a broadcast [1, B, B] difference. automl/Mighty#126, https://github.com/automl/Mighty/pull/126, 2026.
The minibatch holds returns of shape (1, B), the critic gives (1, B, 1) (here [B, 1] against [B]); the subtraction broadcasts, so
every state is regressed on the returns of all states and the critic learns the mean return. The loss is finite and looks normal."""
import torch

FAMILY = "policy-gradient losses and advantages"
KIND = "loss"
INPUTS = {"obs": "observations, [rows, 6] floats", "actions": "action index per row, [rows]", "old_logp": "log probability of the action when it was sampled, [rows], constant",
          "advantages": "advantage per row, [rows], constant", "returns": "return per row, [rows], constant"}
SETTINGS = {"clip": "PPO clip, 0.2", "vf_coef": "weight of the value loss, 0.5", "ent_coef": "weight of the entropy bonus, 0.01"}
NOTES = ("PPO: clipped policy loss + vf_coef * mean over rows of (value(row) - return(row))^2 - ent_coef * mean entropy. Mean over rows. Rows are independent: "
         "each row's value is compared only with its own return. All parameters are used.")


class ActorCritic(torch.nn.Module):
    def __init__(self, d=16, actions=5):
        super().__init__()
        self.body = torch.nn.Linear(6, d)
        self.pi = torch.nn.Linear(d, actions)
        self.v = torch.nn.Linear(d, 1)

    def forward(self, obs):
        h = torch.tanh(self.body(obs))
        return self.pi(h), self.v(h)


def make(seed):
    torch.manual_seed(seed)
    n, model = 7, ActorCritic()
    obs, act = torch.randn(n, 6), torch.randint(0, 5, (n,))
    with torch.no_grad():
        old = torch.log_softmax(model(obs)[0], -1).gather(-1, act[:, None])[:, 0] + 0.15 * torch.randn(n)
    return {"model": model, "obs": obs, "actions": act, "old_logp": old, "advantages": torch.randn(n), "returns": 2 * torch.randn(n)}


def _policy(logits, batch, clip):
    lp = torch.log_softmax(logits, -1)
    r = torch.exp(lp.gather(-1, batch["actions"][:, None])[:, 0] - batch["old_logp"])
    a = batch["advantages"]
    return -torch.min(r * a, r.clamp(1 - clip, 1 + clip) * a).mean(), -(lp.exp() * lp).sum(-1).mean()


def broken(model, batch, clip=0.2, vf_coef=0.5, ent_coef=0.01):
    logits, values = model(batch["obs"])
    pg, ent = _policy(logits, batch, clip)
    v_loss = (values - batch["returns"]).pow(2).mean()
    return pg + vf_coef * v_loss - ent_coef * ent


def right(model, batch, clip=0.2, vf_coef=0.5, ent_coef=0.01):
    logits, values = model(batch["obs"])
    pg, ent = _policy(logits, batch, clip)
    v_loss = (values.squeeze(-1) - batch["returns"]).pow(2).mean()
    return pg + vf_coef * v_loss - ent_coef * ent


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    g = []
    for f in (broken, right):
        l = f(m, c)
        g.append(torch.autograd.grad(l, m.v.weight)[0])
        print(f.__name__, float(l), float(g[-1].norm()))
    assert (g[0] - g[1]).norm() > 1e-2
