"""Two-level advantages of GiGPO (Feng et al. 2025). Steps of different trajectories of one task that met the same environment state form a second group; a step whose state was met once gets step advantage 0, and the episode baseline counts each trajectory once although the rows are steps."""
import torch
FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "reward of each step, [steps]", "groups": "task id of each step, [steps]",
          "trajectory": "trajectory id of each step, unique over all tasks; steps of one trajectory stand in time order, [steps]",
          "state": "hash of the environment state before the step, [steps]"}
SETTINGS = {"gamma": "discount of the step returns, 0.95", "omega": "weight of the step advantage, 1.0"}
NOTES = "No division by the standard deviation (the F_norm = 1 variant of the paper). The episode return is undiscounted, the step return is discounted. The result need not have mean zero over the steps of a task, because long trajectories own more steps. One value per step."
def make(seed):
    g = torch.Generator().manual_seed(seed)
    r, gr, tr, st = [], [], [], []
    for traj in range(8):
        n = int(torch.randint(2, 6, (1,), generator=g))
        for i in range(n):
            r.append(float(torch.rand(1, generator=g) < .4) if i == n - 1 else -0.1 * float(torch.rand(1, generator=g) < .3))
            gr.append(traj // 4); tr.append(traj); st.append(0 if i == 0 else int(torch.randint(1, 5, (1,), generator=g)))
    return {"rewards": torch.tensor(r), "groups": torch.tensor(gr), "trajectory": torch.tensor(tr), "state": torch.tensor(st)}

def right(rewards, groups, trajectory, state, gamma=0.95, omega=1.0):
    n = len(rewards)
    ret = rewards.clone()
    last = {}
    for i in range(n - 1, -1, -1):
        t = int(trajectory[i])
        if t in last:
            ret[i] = rewards[i] + gamma * ret[last[t]]
        last[t] = i
    _, ti = trajectory.unique(return_inverse=True)
    R = torch.zeros(int(ti.max()) + 1).index_add_(0, ti, rewards)
    task = torch.zeros(len(R), dtype=torch.long).index_copy_(0, ti, groups)   # every step of a trajectory has the same task
    same = (task[:, None] == task[None]).float()
    episode = (R - same @ R / same.sum(1))[ti]
    twin = ((groups[:, None] == groups[None]) & (state[:, None] == state[None])).float()
    step = ret - twin @ ret / twin.sum(1)                                      # a lone state: its own mean, so 0
    return episode + omega * step

if __name__ == "__main__":
    d = make(1); a = right(**d)
    R, G, T, S = (d[k].tolist() for k in ("rewards", "groups", "trajectory", "state")); n = len(R)
    ret = []
    for i in range(n):
        own = [j for j in range(i, n) if T[j] == T[i]]
        ret.append(sum(.95 ** k * R[j] for k, j in enumerate(own)))
    for i in range(n):
        tot = {t: sum(R[j] for j in range(n) if T[j] == t) for t in set(T[j] for j in range(n) if G[j] == G[i])}
        tw = [ret[j] for j in range(n) if G[j] == G[i] and S[j] == S[i]]
        want = tot[T[i]] - sum(tot.values()) / len(tot) + ret[i] - sum(tw) / len(tw)
        assert abs(want - a[i].item()) < 1e-5
    print("steps", n, "mean (not zero)", a.mean().item())
