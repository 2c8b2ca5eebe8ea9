"""GiGPO (Feng et al. 2025): the advantage of a step is the episode advantage plus an advantage within all steps of the task that started in the same
environment state, whatever their trajectory or time. Steps at different times share a group, a lone state gets 0, and there is no division by the deviation."""
FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "reward of each step, [steps]; the steps of a trajectory stand in order of time, trajectories may be interleaved",
          "groups": "task of each step, [steps]", "traj": "trajectory of each step, unique over tasks, [steps]",
          "state": "hash of the observation before the step, [steps]; equal hashes of different tasks are different states"}
SETTINGS = {"gamma": "discount of the step returns, 0.9", "omega": "weight of the step advantage, 0.5"}
NOTES = ("Result [steps]. Episode part: undiscounted return minus the mean over trajectories of the task (each trajectory once, however long). Step part: discounted return "
         "minus the mean over the anchor group; a trajectory that visits a state twice is twice in the group. No deviation (F_norm = 1 of the paper). "
         "The episode part does not sum to zero over steps, only over trajectories. A task with one trajectory has episode part 0, but may have a step part.")
import torch


def _mean_of(values, key):
    _, inv = torch.unique(key, return_inverse=True, dim=0)
    n = int(inv.max()) + 1
    total = torch.zeros(n, dtype=values.dtype).index_add(0, inv, values)
    count = torch.zeros(n, dtype=values.dtype).index_add(0, inv, torch.ones_like(values))
    return (total / count)[inv]


def right(rewards, groups, traj, state, gamma=0.9, omega=0.5):
    names, where = torch.unique(traj, return_inverse=True)
    total = torch.zeros(len(names), dtype=rewards.dtype).index_add(0, where, rewards)
    task = torch.zeros(len(names), dtype=groups.dtype).scatter(0, where, groups)
    episode = (total - _mean_of(total, task))[where]
    returns, carry = torch.zeros_like(rewards), {}
    for i in range(len(rewards) - 1, -1, -1):
        k = int(where[i])
        returns[i] = carry[k] = rewards[i] + gamma * carry.get(k, 0.0)
    step = returns - _mean_of(returns, torch.stack([groups, state], 1))
    return episode + omega * step


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rewards, groups, traj, state = [], [], [], []
    k = 0
    for task in range(3):
        for _ in range(4):
            n = int(torch.randint(1, 6, (1,), generator=g))
            for t in range(n):
                rewards.append(float(torch.rand(1, generator=g)) if t == n - 1 else 0.0)
                groups.append(task)
                traj.append(k)
                state.append(100 if t == 0 else int(torch.randint(0, 4, (1,), generator=g)))
            k += 1
    return {"rewards": torch.tensor(rewards), "groups": torch.tensor(groups), "traj": torch.tensor(traj), "state": torch.tensor(state)}


if __name__ == "__main__":
    for seed in range(10):
        c = make(seed)
        got = right(**c)
        r, gr, tr, st = (c[k].tolist() for k in ("rewards", "groups", "traj", "state"))
        n = len(r)
        ret = []
        for i in range(n):
            later = [j for j in range(i, n) if tr[j] == tr[i]]
            ret.append(sum(0.9 ** k * r[j] for k, j in enumerate(later)))
        for i in range(n):
            ids = sorted({tr[j] for j in range(n) if gr[j] == gr[i]})
            sums = {t: sum(r[j] for j in range(n) if tr[j] == t) for t in ids}
            peers = [ret[j] for j in range(n) if gr[j] == gr[i] and st[j] == st[i]]
            want = sums[tr[i]] - sum(sums.values()) / len(sums) + 0.5 * (ret[i] - sum(peers) / len(peers))
            assert abs(float(got[i]) - want) < 1e-5
        order = torch.argsort(torch.rand(12, generator=torch.Generator().manual_seed(seed))[c["traj"]], stable=True)
        again = right(**{k: v[order] for k, v in c.items()})
        assert torch.allclose(again, got[order], atol=1e-6)
    print("ok", got[:6].tolist())
