"""GiGPO: two group-relative advantages, by episode and by equal observation. Feng et al. 2025, "Group-in-Group Policy Optimization" (verl-agent).
Steps of different trajectories (and of the same one) that saw the same observation form a second group over discounted returns. A state seen only once gets step advantage exactly zero, although its return is not zero: this is intended, a group of one has no baseline."""
import torch
FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "reward of each step, [steps]; steps of all trajectories one after another, in time order", "groups": "trajectory index of each step, non-decreasing, [steps]", "states": "hash of the observation of each step, [steps]"}
SETTINGS = {"gamma": "discount per step, 0.9", "omega": "weight of the step advantage, 1.0"}
NOTES = "All trajectories answer one and the same task. Returns [steps]: episode advantage (sum of rewards of the trajectory minus the mean over trajectories, no division by the standard deviation) plus omega times step advantage (discounted return from the step minus the mean over steps with the same state). Single-member state groups give zero. Groups have unequal sizes. Needs at least two trajectories."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    groups = torch.tensor([0] * 4 + [1] * 3 + [2] * 5)
    return {"rewards": torch.rand(12, generator=g).round(decimals=2), "groups": groups, "states": torch.tensor([7, 3, 5, 3, 7, 5, 9, 7, 3, 8, 5, 2])}


def right(rewards, groups, states, gamma=0.9, omega=1.0):
    ret = torch.zeros_like(rewards)
    run = 0.0
    for i in reversed(range(len(rewards))):
        if i + 1 < len(rewards) and groups[i] != groups[i + 1]:
            run = 0.0
        run = rewards[i] + gamma * run
        ret[i] = run
    total = torch.zeros(int(groups.max()) + 1).index_add_(0, groups, rewards)
    episode = (total - total.mean())[groups]
    _, inv, cnt = states.unique(return_inverse=True, return_counts=True)
    base = torch.zeros(len(cnt)).index_add_(0, inv, ret) / cnt
    return episode + omega * (ret - base[inv])


if __name__ == "__main__":
    d = make(0)
    got = right(**d)
    r, gr, st = d["rewards"].tolist(), d["groups"].tolist(), d["states"].tolist()
    ret = [sum(r[j] * 0.9 ** (j - i) for j in range(i, 12) if gr[j] == gr[i]) for i in range(12)]
    tot = [sum(x for x, k in zip(r, gr) if k == t) for t in range(3)]
    want = []
    for i in range(12):
        same = [ret[j] for j in range(12) if st[j] == st[i]]
        want.append(tot[gr[i]] - sum(tot) / 3 + ret[i] - sum(same) / len(same))
    print([round(x, 3) for x in got.tolist()])
    assert torch.allclose(got, torch.tensor(want), atol=1e-5)
