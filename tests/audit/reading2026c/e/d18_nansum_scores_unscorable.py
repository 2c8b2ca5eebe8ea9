"""A completion that no reward function scored enters the group baseline as reward 0. huggingface/trl#5773,
https://github.com/huggingface/trl/pull/5773, 2026. Reward functions may return None (stored as NaN); nansum over the
functions turns a completion with only NaN into 0.0, which then counts in the group mean and std and gets an advantage
of its own. The fix restores NaN for such rows, uses nanmean / nanstd and gives them no advantage."""
FAMILY = "losses"
KIND = "advantages"
INPUTS = {"rewards": "[completions, functions], NaN where a function returned None",
          "groups": "prompt index of each completion, [completions]"}
SETTINGS = {"weights": "weight of each function, (1.0, 0.5)", "eps": "added to the std, 1e-4"}
NOTES = ("Group-relative advantages: (reward - group mean) / (group std + eps), Bessel-corrected std, over the scored "
         "completions of the group; a completion without any score has advantage 0.")
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.rand(12, 2, generator=g) + 1.0
    rewards[1, 0] = float("nan")
    rewards[6] = float("nan")
    rewards[9] = float("nan")
    return {"rewards": rewards, "groups": torch.arange(3).repeat_interleave(4)}


def broken(rewards, groups, weights=(1.0, 0.5), eps=1e-4):
    total = (rewards * torch.tensor(weights)).nansum(1)
    out = torch.zeros_like(total)
    for g in groups.unique():
        mine = groups == g
        out[mine] = (total[mine] - total[mine].mean()) / (total[mine].std() + eps)
    return out


def right(rewards, groups, weights=(1.0, 0.5), eps=1e-4):
    unscored = rewards.isnan().all(1)
    total = (rewards * torch.tensor(weights)).nansum(1)
    out = torch.zeros_like(total)
    for g in groups.unique():
        mine = (groups == g) & ~unscored
        if mine.sum() > 1:
            out[mine] = (total[mine] - total[mine].mean()) / (total[mine].std() + eps)
    return out


if __name__ == "__main__":
    b, r = broken(**make(0)), right(**make(0))
    print(b.tolist())
    print(r.tolist())
    assert (b - r).abs().max() > 0.1
