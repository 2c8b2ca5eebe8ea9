"""Rows of one trajectory share one advantage and count once in the baseline.
A trajectory whose context was reset is trained as several rows, each with the full reward. The group mean and
deviation are over trajectories, not over rows, so rows of a group do not sum to zero and the mean
is not that of the rows. Weighting by rows would favour long trajectories."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'agents'
KIND = 'advantages'
INPUTS = {
    'rewards': 'outcome reward of the trajectory, repeated on each of its rows, [rows]',
    'groups': 'prompt index of each row, [rows]',
    'trajectories': 'trajectory id of each row, [rows]',
}
SETTINGS = {
    'eps': 'added to the standard deviation, 1e-6',
}
NOTES = (
    'GRPO over trajectories: (reward - mean over the distinct trajectories of the prompt) / (their '
    'standard deviation + eps), the same for each row of a trajectory. '
)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rewards, groups, traj = [], [], []
    n = 0
    for prompt in range(3):
        for _ in range(4):
            r = float(torch.rand(1, generator=g))
            for _ in range(int(torch.randint(1, 4, (1,), generator=g))):
                rewards.append(r)
                groups.append(prompt)
                traj.append(n)
            n += 1
    order = torch.randperm(len(rewards), generator=g)
    return {"rewards": torch.tensor(rewards)[order], "groups": torch.tensor(groups)[order],
            "trajectories": torch.tensor(traj)[order]}


def right(rewards, groups, trajectories, eps=1e-6):
    ids, inverse = trajectories.unique(return_inverse=True)
    one_r = torch.zeros(len(ids)).scatter_(0, inverse, rewards)
    one_g = torch.zeros(len(ids), dtype=torch.long).scatter_(0, inverse, groups)
    same = (one_g[:, None] == one_g[None, :]).float()
    n = same.sum(1)
    mean = same @ one_r / n
    std = ((same * (one_r[None, :] - mean[:, None]).square()).sum(1) / (n - 1).clamp(min=1)).sqrt()
    return ((one_r - mean) / (std + eps))[inverse]


if __name__ == "__main__":
    d = make(0)
    out = right(**d)
    for i in range(len(out)):
        seen = {}
        for r, g, t in zip(d["rewards"].tolist(), d["groups"].tolist(), d["trajectories"].tolist()):
            if g == int(d["groups"][i]):
                seen[t] = r
        v = torch.tensor(list(seen.values()))
        assert abs(float(out[i]) - float((d["rewards"][i] - v.mean()) / (v.std() + 1e-6))) < 1e-4
    print("advantages", [round(x, 3) for x in out.tolist()])
    print("mean over the rows of prompt 0 (need not be 0):", out[d["groups"] == 0].mean().item())
