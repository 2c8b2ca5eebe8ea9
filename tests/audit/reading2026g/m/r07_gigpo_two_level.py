"""GiGPO: two-level group advantages. To the episode advantage (over the trajectories of one task) comes a step advantage over all steps, of any trajectory and any time, that started from the same environment state ("anchor state"). A trajectory that comes back to a state has several steps in one group; a state seen once gives step advantage exactly 0."""
FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "[steps], reward of each environment step", "groups": "[steps], task number",
          "traj_ids": "[steps], trajectory number, unique over tasks; steps of a trajectory are in time order",
          "state_ids": "[steps], id of the environment state in which the step was taken, comparable inside one task only"}
SETTINGS = {"gamma": "discount of the step returns, 0.95", "omega": "weight of the step level, 1.0"}
NOTES = "Both levels use F_norm = 1: mean taken off, no division by the standard deviation. Episode return is the undiscounted sum and each trajectory counts once in its group's mean, whatever its number of steps; hence the step-wise sum of advantages need not be 0. A task with one trajectory gets 0 at the episode level."
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    R, G, J, S = [], [], [], []
    j = 0
    for task in range(2):
        for _ in range(4):
            n = int(torch.randint(2, 6, (1,), generator=g))
            win = float(torch.rand(1, generator=g) < 0.5)
            R += [0.0] * (n - 1) + [10 * win]
            G += [task] * n
            J += [j] * n
            S += [0] + torch.randint(0, 4, (n - 1,), generator=g).tolist()
            j += 1
    return {"rewards": torch.tensor(R), "groups": torch.tensor(G), "traj_ids": torch.tensor(J), "state_ids": torch.tensor(S)}


def right(rewards, groups, traj_ids, state_ids, gamma=0.95, omega=1.0):
    _, tr = traj_ids.unique(return_inverse=True)
    n = int(tr.max()) + 1
    total = torch.zeros(n, dtype=rewards.dtype).index_add(0, tr, rewards)
    _, gr = groups.unique(return_inverse=True)
    task = torch.zeros(n, dtype=torch.long).scatter(0, tr, gr)
    k = int(gr.max()) + 1
    mean = torch.zeros(k, dtype=rewards.dtype).index_add(0, task, total) / torch.bincount(task, minlength=k)
    episode = (total - mean[task])[tr]
    ret = torch.zeros_like(rewards)
    carry = [rewards.new_zeros(())] * n
    for i in range(len(rewards) - 1, -1, -1):
        carry[int(tr[i])] = ret[i] = rewards[i] + gamma * carry[int(tr[i])]
    _, anchor = torch.stack([gr, state_ids], 1).unique(dim=0, return_inverse=True)
    a = int(anchor.max()) + 1
    amean = torch.zeros(a, dtype=rewards.dtype).index_add(0, anchor, ret) / torch.bincount(anchor, minlength=a)
    alone = torch.bincount(anchor, minlength=a)[anchor] == 1
    step = torch.where(alone, torch.zeros_like(ret), ret - amean[anchor])
    return episode + omega * step


if __name__ == "__main__":
    b = make(0)
    out = right(**b)
    N = len(out)
    R, G, J, S = (b[k].tolist() for k in ("rewards", "groups", "traj_ids", "state_ids"))
    ret = [sum(0.95 ** (u - t) * R[u] for u in range(t, N) if J[u] == J[t]) for t in range(N)]
    for t in range(N):
        tot = {j: sum(R[u] for u in range(N) if J[u] == j) for j in {J[u] for u in range(N) if G[u] == G[t]}}
        e = tot[J[t]] - sum(tot.values()) / len(tot)
        same = [ret[u] for u in range(N) if (G[u], S[u]) == (G[t], S[t])]
        assert abs(out[t].item() - (e + ret[t] - sum(same) / len(same))) < 1e-4, t
    print(out)
