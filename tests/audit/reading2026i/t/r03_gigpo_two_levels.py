"""GiGPO: two group-relative advantages added, the second one grouped by equal states. Feng et al. 2025 (arXiv 2505.10978).
The episode part compares whole trajectories of one task; the step part compares all steps, of any trajectory and any time, that started in the same state (anchor). A state that was visited once gets step advantage 0. So two steps of one trajectory differ, and the advantages of a task do not sum to zero over steps."""
import torch
FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "discounted return from each step on, [steps]", "groups": "number of the task of each step, [steps]", "trajectory": "number of the trajectory of each step, [steps]",
          "episode_return": "total reward of the trajectory, repeated on its steps, [steps]", "state": "number of the environment state in which the step was taken (equal number = same state), [steps]"}
SETTINGS = {"omega": "weight of the step part, 1.0"}
NOTES = "Mean-only normalization in both levels (the paper's F_norm = 1 variant). The episode mean is over trajectories (each once), the step mean is over steps with the same task and state. Output: one value per step."

def make(seed):
    g = torch.Generator().manual_seed(seed)
    traj = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3]); task = torch.tensor([0, 0, 1, 1])[torch.tensor([0, 1, 2, 3])][traj]
    state = torch.tensor([0, 1, 2, 0, 1, 0, 3, 0, 4, 0, 3])
    er = torch.rand(4, generator=g)[traj]
    return {"rewards": torch.rand(11, generator=g), "groups": task, "trajectory": traj, "episode_return": er, "state": state}

def right(rewards, groups, trajectory, episode_return, state, omega=1.0):
    out = torch.zeros_like(rewards)
    for t in groups.unique():
        rows = groups == t
        first = [int((trajectory == k).nonzero()[0]) for k in trajectory[rows].unique()]
        out[rows] = episode_return[rows] - episode_return[first].mean()
        for s in state[rows].unique():
            same = rows & (state == s)
            out[same] += omega * (rewards[same] - rewards[same].mean())
    return out

if __name__ == "__main__":
    d = make(0); out = right(**d)
    for i in range(11):
        trajs = sorted({int(d["trajectory"][j]) for j in range(11) if d["groups"][j] == d["groups"][i]})
        rets = [next(d["episode_return"][j].item() for j in range(11) if d["trajectory"][j] == k) for k in trajs]
        peers = [d["rewards"][j].item() for j in range(11) if d["groups"][j] == d["groups"][i] and d["state"][j] == d["state"][i]]
        ref = d["episode_return"][i].item() - sum(rets) / len(rets) + d["rewards"][i].item() - sum(peers) / len(peers)
        assert abs(out[i].item() - ref) < 1e-6
    print(out.tolist())
