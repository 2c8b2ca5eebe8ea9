"""Every refinement turn is its own sample with a discounted sum of later scores. Kevin (arXiv 2507.11948): the return of turn i is sum_j gamma^(j-i) * score_j over this and later turns of the trajectory, and returns are normalised over all trajectories AND turns of the task together (m*n samples). A turn with score 0 may get a positive advantage; the mean of one trajectory is not zero."""
import torch

FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "score of each turn, [trajectories, turns]", "groups": "task of each trajectory, [trajectories]"}
SETTINGS = {"gamma": "discount per refinement turn, 0.4"}
NOTES = "GRPO over m*n samples of a task: (return - mean) / (std + 1e-6), mean and population std over all turns of all trajectories of the task. Discounting is per turn. All trajectories have the same number of turns."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    score = torch.rand(8, 3, generator=g) * (torch.rand(8, 3, generator=g) > 0.4)
    return {"rewards": score, "groups": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), "gamma": 0.4}


def right(rewards, groups, gamma=0.4):
    ret = rewards.clone()
    for t in range(rewards.shape[1] - 2, -1, -1):
        ret[:, t] = rewards[:, t] + gamma * ret[:, t + 1]
    out = torch.empty_like(ret)
    for g in groups.unique():
        r = ret[groups == g]
        out[groups == g] = (r - r.mean()) / (r.std(unbiased=False) + 1e-6)
    return out


if __name__ == "__main__":
    m = make(0); a = right(**m)
    R, gam = m["rewards"].tolist(), 0.4
    ret = [[sum(gam ** (j - i) * r[j] for j in range(i, 3)) for i in range(3)] for r in R]
    for g, rows in ((0, range(4)), (1, range(4, 8))):
        v = [x for i in rows for x in ret[i]]
        mu = sum(v) / 12; sd = (sum((x - mu) ** 2 for x in v) / 12) ** 0.5
        for i in rows:
            for t in range(3):
                assert abs(a[i, t].item() - (ret[i][t] - mu) / (sd + 1e-6)) < 1e-4
    print(a)
