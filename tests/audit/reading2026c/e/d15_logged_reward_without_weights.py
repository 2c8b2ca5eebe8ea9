"""Logged reward is the unweighted sum of the reward functions. huggingface/trl#5352,
https://github.com/huggingface/trl/issues/5352 (fix 5353), 2026. Advantages use reward_weights, but the logging code
recomputed rewards as rewards_per_func.nansum(dim=1), so `reward` and `reward_std` on the dashboard follow another
objective than training when the weights are not all one."""
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "list of one tensor per rank, [completions, functions]; NaN where a function does not apply"}
SETTINGS = {"reward_weights": "weight of each function, (0.7, 0.1, 0.2)"}
NOTES = ("Mean over all completions of all ranks of the weighted sum of the reward functions (NaN counts as absent). The "
         "single-process twin is the same on the concatenated tensor.")
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    ranks = [torch.rand(6, 3, generator=g) * torch.tensor([1.0, 4.0, 1.0]) for _ in range(2)]
    ranks[1][2, 2] = float("nan")
    return {"ranks": ranks}


def broken(ranks, reward_weights=(0.7, 0.1, 0.2)):
    rewards_per_func = torch.cat(ranks)
    rewards = rewards_per_func.nansum(1)                         # advantages use the weighted sum elsewhere
    return rewards.mean().item()


def right(ranks, reward_weights=(0.7, 0.1, 0.2)):
    rewards_per_func = torch.cat(ranks)
    rewards = (rewards_per_func * torch.tensor(reward_weights)).nansum(1)
    return rewards.mean().item()


if __name__ == "__main__":
    print(broken(**make(0)), right(**make(0)))
    assert abs(broken(**make(0)) - right(**make(0))) > 1e-3
