"""Generalized advantage estimation on the sampled tokens only: observation tokens are skipped, not treated as steps.
The recursion jumps over tool output: the next value of the last token before an observation is the value of the first
sampled token after it, and gamma*lambda decays once per sampled token. The reward sits on the last sampled token, even
if the row ends with an observation. Values at observation positions are never read."""
import torch
FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "outcome reward of each trajectory, [rows]", "groups": "each trajectory is its own group (no group baseline), [rows]",
          "values": "critic values at the state before each token, constants, [rows, time]",
          "action_mask": "1 for tokens sampled by the policy, 0 for prompt, observation and padding, [rows, time]"}
SETTINGS = {"gamma": "discount, 0.98", "lam": "GAE lambda, 0.9"}
NOTES = "Advantages [rows, time], 0 outside action_mask; not normalized. Terminal state has value 0."

def make(seed):
    g = torch.Generator().manual_seed(seed)
    mask = torch.zeros(3, 16)
    mask[0, 2:6] = mask[0, 9:14] = 1
    mask[1, 3:5] = mask[1, 8:10] = mask[1, 12:13] = 1     # ends with an observation
    mask[2, 2:12] = 1
    return {"rewards": torch.randn(3, generator=g), "groups": torch.arange(3), "values": torch.randn(3, 16, generator=g), "action_mask": mask}

def right(rewards, groups, values, action_mask, gamma=0.98, lam=0.9):
    out = torch.zeros_like(values)
    carry = torch.zeros_like(rewards)
    next_value = torch.zeros_like(rewards)
    reward = rewards.clone()                               # paid at the last sampled token
    for t in range(values.shape[1] - 1, -1, -1):
        acts = action_mask[:, t].bool()
        delta = reward + gamma * next_value - values[:, t]
        new = delta + gamma * lam * carry
        out[:, t] = torch.where(acts, new, torch.zeros_like(new))
        carry = torch.where(acts, new, carry)
        next_value = torch.where(acts, values[:, t], next_value)
        reward = torch.where(acts, torch.zeros_like(reward), reward)
    return out

def slow(rewards, groups, values, action_mask, gamma=0.98, lam=0.9):
    out = torch.zeros_like(values)
    for r in range(len(rewards)):
        where = action_mask[r].nonzero().flatten().tolist()
        v = [values[r, t].item() for t in where] + [0.0]
        deltas = [(rewards[r].item() if i == len(where) - 1 else 0.0) + gamma * v[i + 1] - v[i] for i in range(len(where))]
        for i, t in enumerate(where):
            out[r, t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(where)))
    return out

if __name__ == "__main__":
    d = make(0)
    a, s = right(**d), slow(**d)
    print("largest difference to the explicit loop", (a - s).abs().max().item(), "last sampled token of row 1", a[1, 12].item())
    assert torch.allclose(a, s, atol=1e-5) and (a[d["action_mask"] == 0] == 0).all()
