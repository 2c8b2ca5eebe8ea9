"""A completion that no reward function could score gets reward 0. huggingface/trl#5902 (also #5773),
https://github.com/huggingface/trl/pull/5902, 2026. Reward functions may return None (NaN); the sum over functions used
nansum, which turns a row of NaN into 0. The invented 0 shifts mean and std of its group for the other completions, and
the unscored completion is itself pushed up or down without any signal."""
import torch
FAMILY = "losses"
KIND = "advantages"
INPUTS = {"rewards": "reward of each completion by each function, NaN where the function abstains, [completions, functions]",
          "groups": "index of the prompt of each completion, [completions]"}
SETTINGS = {"weights": "weights of the reward functions, (1.0, 0.5)", "eps": "added to the std, 1e-4"}
NOTES = ("GRPO advantages: weighted sum over the functions that gave a score, minus the mean of the group, over the std of the "
         "group. A completion without any score takes no part in mean and std and has advantage 0.")

def make(seed):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.rand(16, 2, generator=g) - 1.0
    rewards[3, 1] = rewards[9, 0] = float("nan")          # one function abstains
    rewards[5] = rewards[12] = float("nan")               # all abstain
    return {"rewards": rewards, "groups": torch.arange(16) // 4}

def broken(rewards, groups, weights=(1.0, 0.5), eps=1e-4):
    total = (rewards * torch.tensor(weights)).nansum(1)
    out = torch.zeros_like(total)
    for g in groups.unique():
        i = groups == g
        out[i] = (total[i] - total[i].mean()) / (total[i].std() + eps)
    return out

def right(rewards, groups, weights=(1.0, 0.5), eps=1e-4):
    weighted = rewards * torch.tensor(weights)
    scored = ~weighted.isnan().all(1)
    total = weighted.nansum(1)
    out = torch.zeros_like(total)
    for g in groups.unique():
        i = (groups == g) & scored
        if i.sum() > 1:
            out[i] = (total[i] - total[i].mean()) / (total[i].std() + eps)
    return out

if __name__ == "__main__":
    b, r = broken(**make(0)), right(**make(0))
    print("group of the unscored completion:", b[4:8].tolist(), r[4:8].tolist())
    assert b[5] > 0.5 and r[5] == 0 and torch.allclose(b[:4], r[:4])
