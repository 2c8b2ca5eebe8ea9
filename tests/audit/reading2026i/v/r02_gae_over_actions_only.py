"""GAE that jumps over tool observations. In multi-turn agent training (VAGEN, RAGEN, verl's masked GAE) the tokens of the
environment are no actions: the recursion carries the next value and the running advantage across them unchanged, with
no discount, so the token before an observation bootstraps from the first token after it."""
import torch

FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "token rewards; a tool's reward sits on the last action token before its output [rows, time]", "values": "critic values at each token [rows, time]",
          "action_mask": "1 where the policy wrote the token; holes are observations, the tail is padding [rows, time]"}
SETTINGS = {"gamma": "discount per action token, 0.97", "lam": "GAE lambda, 0.9"}
NOTES = ("GAE on the subsequence of action tokens only. The critic's values at observation tokens are not used, neither "
         "is a reward there. Advantages at observations and padding are 0. Every row ends terminal.")


def make(seed):
    torch.manual_seed(seed)
    rows, time = 4, 16
    mask = torch.zeros(rows, time)
    mask[:, 0:4], mask[:, 7:10], mask[:, 12:15] = 1, 1, 1
    mask[1, 9:] = 0
    mask[2, 12:] = 0
    rewards = torch.zeros(rows, time)
    for i in range(rows):
        last = int(mask[i].nonzero().max())
        rewards[i, last] = torch.randn(())
        rewards[i, 3] += 0.1
    return {"rewards": rewards, "values": torch.randn(rows, time), "action_mask": mask, "gamma": 0.97, "lam": 0.9}


def right(rewards, values, action_mask, gamma=0.97, lam=0.9):
    rows, time = rewards.shape
    next_value, running = torch.zeros(rows), torch.zeros(rows)
    adv = torch.zeros_like(rewards)
    for t in reversed(range(time)):
        m = action_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        candidate = delta + gamma * lam * running
        running = m * candidate + (1 - m) * running
        next_value = m * values[:, t] + (1 - m) * next_value
        adv[:, t] = running * m
    return adv


if __name__ == "__main__":
    d = make(0)
    a = right(**d)
    for i in range(4):
        idx = d["action_mask"][i].nonzero().flatten().tolist()
        run = 0.0
        for k in reversed(range(len(idx))):
            nxt = d["values"][i, idx[k + 1]] if k + 1 < len(idx) else 0.0
            run = d["rewards"][i, idx[k]] + 0.97 * nxt - d["values"][i, idx[k]] + 0.97 * 0.9 * run
            assert abs(run - a[i, idx[k]]) < 1e-5
    print(a[0])
    assert (a[d["action_mask"] == 0] == 0).all()
