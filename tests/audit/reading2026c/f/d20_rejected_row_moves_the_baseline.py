"""A rejected response still moves the baseline of its group. verl-project/verl#6452, https://github.com/verl-project/verl/pull/6452, 2026.
Rollout rejection sampling empties the response mask of a row, so the row is not trained, but GRPO sums token rewards without looking at the mask: the rejected row's reward enters the mean and the deviation that its
accepted siblings are compared with."""
import torch

FAMILY = "losses"
KIND = "advantages"
INPUTS = {"rewards": "token-level rewards, the outcome on the last token of the response, [rows, time]", "groups": "prompt index of each row, [rows]",
          "mask": "1 on response tokens; all 0 in a row rejected by rollout correction, [rows, time]"}
SETTINGS = {"eps": "added to the deviation, 0.000001"}
NOTES = ("GRPO outcome advantages: (score - group mean) / (group std + eps), unbiased std, on every response token; 0 where mask is 0. Statistics over the rows of the group that are trained. "
         "A group with one such row keeps mean 0 and std 1.")

def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows, time = 12, 7
    lengths = torch.randint(3, time + 1, (rows,), generator=g)
    mask = (torch.arange(time)[None] < lengths[:, None]).float()
    rewards = torch.zeros(rows, time)
    rewards[torch.arange(rows), lengths - 1] = torch.rand(rows, generator=g)
    mask[torch.tensor([2, 7])] = 0  # rejected after generation and scoring
    return {"rewards": rewards, "groups": torch.arange(rows) // 4, "mask": mask}

def advantages(rewards, groups, mask, eps, used):
    scores, out = rewards.sum(-1), torch.zeros(rewards.shape[0])
    for group in groups.unique():
        rows = groups == group
        stat = scores[rows & used]
        mean, std = (stat.mean(), stat.std()) if len(stat) > 1 else (torch.tensor(0.0), torch.tensor(1.0))
        out[rows] = (scores[rows] - mean) / (std + eps)
    return out[:, None] * mask

def broken(rewards, groups, mask, eps=1e-6):
    return advantages(rewards, groups, mask, eps, used=torch.ones(rewards.shape[0], dtype=torch.bool))

def right(rewards, groups, mask, eps=1e-6):
    return advantages(rewards, groups, mask, eps, used=mask.sum(-1) > 0)

if __name__ == "__main__":
    made = make(0)
    a, b = broken(**made), right(**made)
    for group in range(3):
        first = [float(b[r].sum() / made["mask"][r].sum()) for r in range(4 * group, 4 * group + 4) if made["mask"][r].sum()]
        other = [float(a[r].sum() / made["mask"][r].sum()) for r in range(4 * group, 4 * group + 4) if made["mask"][r].sum()]
        print("group", group, "mean advantage of the trained rows: broken", round(sum(other) / len(other), 4), "right", round(sum(first) / len(first), 4))
    assert (a - b).abs().max() > 0.1 and torch.equal(a[8:], b[8:])
