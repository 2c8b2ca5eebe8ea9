"""Group statistics over turns instead of rollouts. NVIDIA/Megatron-LM#2966, https://github.com/NVIDIA/Megatron-LM/pull/2966, 2026.
With several turns per rollout, every turn is a row that carries the reward of the whole rollout. Mean and standard deviation
of the group were taken over the rows, so that a rollout of six turns counted six times in the baseline; the pull request lists
"proper advantage computation (not to skew stats by averaging over the same turn rewards)". Long (mostly failing) episodes
pull the baseline towards their reward."""
FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "reward of the rollout to which the row belongs, float, [rows]; one row per turn, all turns of one rollout carry the same reward",
          "groups": "id of the prompt of the row, [rows]",
          "rollouts": "id of the rollout of the row, [rows]; a rollout belongs to one prompt; its number of turns varies"}
SETTINGS = {"eps": "added to the standard deviation, 1e-4"}
NOTES = ("GRPO advantages: reward of the rollout minus the mean over the rollouts of its prompt, divided by the standard deviation (unbiased) of the "
         "rollouts of its prompt plus eps. Each rollout counts once, whatever its number of turns; all its turns get the same advantage. "
         "Every prompt has at least two rollouts.")
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rewards, groups, rollouts = [], [], []
    k = 0
    for p in range(3):
        for _ in range(4):
            n = int(torch.randint(1, 6, (1,), generator=g))
            r = float(torch.rand(1, generator=g))
            rewards += [r] * n; groups += [p] * n; rollouts += [k] * n
            k += 1
    return {"rewards": torch.tensor(rewards), "groups": torch.tensor(groups), "rollouts": torch.tensor(rollouts)}


def broken(rewards, groups, rollouts, eps=1e-4):
    out = torch.zeros_like(rewards)
    for p in groups.unique():
        rows = groups == p
        r = rewards[rows]
        out[rows] = (r - r.mean()) / (r.std() + eps)
    return out


def right(rewards, groups, rollouts, eps=1e-4):
    out = torch.zeros_like(rewards)
    for p in groups.unique():
        rows = groups == p
        first = torch.stack([rewards[rollouts == k][0] for k in rollouts[rows].unique()])
        out[rows] = (rewards[rows] - first.mean()) / (first.std() + eps)
    return out


if __name__ == "__main__":
    x = make(0)
    a, b = broken(**x), right(**x)
    print(a); print(b)
    assert (a - b).abs().max() > 1e-2
    print("max difference", float((a - b).abs().max()))
