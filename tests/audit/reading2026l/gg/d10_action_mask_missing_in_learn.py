"""Action masking is not applied when the policy is evaluated for learning. AgileRL/AgileRL#487,
https://github.com/AgileRL/AgileRL/pull/487, 2026. Actions are sampled with the illegal ones masked out, and their log-probs are
stored so; in learn() the same states are evaluated without the mask. The PPO ratio is biased (below 1 already at the first epoch),
and probability on illegal actions enters the gradient and the entropy."""
import torch
import torch.nn as nn

FAMILY = "policy-gradient and value losses"
KIND = "loss"
INPUTS = {
    "obs": "observations, [steps, 6]",
    "actions": "index of the action taken, always a legal one, [steps]",
    "action_mask": "true where the action is legal in that state, [steps, 5]",
    "old_logps": "log-prob of the action taken, under the acting policy over the legal actions, [steps]",
    "advantages": "one advantage per step, [steps]",
}
SETTINGS = {"clip": "PPO clip, 0.2", "ent_coef": "weight of the entropy bonus, 0.01"}
NOTES = ("PPO for a discrete policy with legal-action masks. The policy is the softmax over the legal actions of the state (illegal ones have probability 0), in acting and in learning alike. "
         "ratio = pi(a|s) / pi_old(a|s), both under this masked policy. Loss = mean over steps of -min(ratio * A, clip(ratio) * A) minus ent_coef * mean over steps of the entropy of the masked policy. "
         "old_logps, advantages, action_mask are constants. A logit of an illegal action has no influence in that step. All parameters are used.")


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))

    def forward(self, obs):
        return self.net(obs)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Policy()
    obs = torch.randn(16, 6, generator=g)
    mask = torch.rand(16, 5, generator=g) < 0.6
    mask[torch.arange(16), torch.randint(0, 5, (16,), generator=g)] = True
    with torch.no_grad():
        lp = model(obs).masked_fill(~mask, -1e8).log_softmax(-1)
    actions = torch.multinomial(lp.exp(), 1, generator=g).squeeze(1)
    old = lp.gather(1, actions[:, None]).squeeze(1) + 0.1 * torch.randn(16, generator=g)
    return {"model": model, "obs": obs, "actions": actions, "action_mask": mask, "old_logps": old.clamp(max=-1e-3), "advantages": torch.randn(16, generator=g)}


def _ppo(lp, batch, clip, ent_coef):
    ratio = (lp.gather(1, batch["actions"][:, None]).squeeze(1) - batch["old_logps"]).exp()
    A = batch["advantages"]
    ent = -(lp.exp() * lp).sum(-1).mean()
    return -torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A).mean() - ent_coef * ent


def broken(model, batch, clip=0.2, ent_coef=0.01):
    return _ppo(model(batch["obs"]).log_softmax(-1), batch, clip, ent_coef)


def right(model, batch, clip=0.2, ent_coef=0.01):
    logits = model(batch["obs"]).masked_fill(~batch["action_mask"], -1e8)
    return _ppo(logits.log_softmax(-1), batch, clip, ent_coef)


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    gs = []
    for f in (broken, right):
        model.zero_grad(); l = f(model, b); l.backward()
        gs.append(model.net[2].weight.grad.clone()); print(f.__name__, l.item(), gs[-1].norm().item())
    assert (gs[0] - gs[1]).norm() > 0.05 * gs[1].norm()
