"""REINFORCE++ returns carry the KL penalty of tool tokens into the policy's tokens.
THUDM/slime#1372, https://github.com/THUDM/slime/pull/1372, 2026 (January).
The per-token reward is -kl_coef * kl over the whole response, without the loss mask. Tokens that
the environment wrote have a KL too, and the discounted sum from the back passes it on to the
policy's earlier tokens."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'agents'
KIND = 'advantages'
INPUTS = {
    'rewards': 'outcome reward of each response, [rows]',
    'groups': 'prompt index of each row, [rows] (this estimator does not use it)',
    'kl': 'per-token estimate log pi - log ref on the response, [rows, time]',
    'loss_mask': '1 where the policy wrote the token, 0 on tool output and padding, [rows, time]',
}
SETTINGS = {
    'kl_coef': 'weight of the KL penalty in the reward, 0.1',
    'gamma': 'discount per token, 0.95',
}
NOTES = (
    "Discounted returns per token: token reward -kl_coef*kl on the policy's tokens, the outcome "
    "reward on the policy's last token. Everything is a constant for the policy loss. Positions "
    'outside loss_mask are returned as 0. '
)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows, time = 4, 10
    mask = torch.ones(rows, time)
    for i in range(rows):
        start = int(torch.randint(2, 5, (1,), generator=g))
        mask[i, start:start + 3] = 0                      # one tool turn
        end = int(torch.randint(8, 11, (1,), generator=g))
        mask[i, end:] = 0                                 # padding
    return {"rewards": torch.rand(rows, generator=g), "groups": torch.tensor([0, 0, 1, 1]),
            "kl": torch.randn(rows, time, generator=g) * 0.5 + 0.3, "loss_mask": mask}


def _returns(rewards, token_rewards, loss_mask, gamma):
    token_rewards = token_rewards.clone()
    rows, time = token_rewards.shape
    for i in range(rows):
        last = int(loss_mask[i].nonzero()[-1])
        token_rewards[i, last] += rewards[i]
    out = torch.zeros_like(token_rewards)
    running = torch.zeros(rows)
    for t in reversed(range(time)):
        running = token_rewards[:, t] + gamma * running
        out[:, t] = running
    return out * loss_mask


def broken(rewards, groups, kl, loss_mask, kl_coef=0.1, gamma=0.95):
    return _returns(rewards, -kl_coef * kl, loss_mask, gamma)


def right(rewards, groups, kl, loss_mask, kl_coef=0.1, gamma=0.95):
    return _returns(rewards, -kl_coef * kl * loss_mask, loss_mask, gamma)


if __name__ == "__main__":
    d = make(0)
    a, b = broken(**d), right(**d)
    print("broken", a[0].tolist())
    print("right ", b[0].tolist())
    print("largest difference", (a - b).abs().max().item())
    assert (a - b).abs().max() > 1e-3
