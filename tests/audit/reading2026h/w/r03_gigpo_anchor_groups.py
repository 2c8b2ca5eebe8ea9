"""GiGPO: advantage of a step = episode advantage + advantage within all steps that started from the same environment state.
Feng et al. 2025 (arXiv 2505.10978), verl-agent. The inner groups are found after the rollout by hashing the anchor state, across rollouts and across time steps of the same task; they have different sizes. A state seen
once has inner advantage exactly 0, so many entries of that term are 0 on purpose. Here without division by the deviation (the paper's F_norm = 1 form)."""
import torch

FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "return of the episode, repeated at each of its steps, [steps]", "groups": "task index of each step, [steps]", "episodes": "episode index of each step, [steps]",
          "anchors": "hash of the state before the step, [steps]", "step_returns": "discounted return from the step on, [steps]"}
SETTINGS = {"step_weight": "weight of the inner term, 1.0"}
NOTES = ("Rewards centred over the episodes of a task (each episode counts once, however many steps it has), plus step returns centred over steps with equal (task, anchor). No division by the deviation. "
         "The result does not sum to zero over the steps of a group because episodes differ in length. Constants, no gradient.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    groups, episodes, anchors, rewards, returns = [], [], [], [], []
    for ep in range(8):
        r = float(torch.randint(0, 2, (1,), generator=g))
        n = int(torch.randint(2, 6, (1,), generator=g))
        for t in range(n):
            groups.append(ep // 4); episodes.append(ep); rewards.append(r); returns.append(r * 0.9 ** (n - 1 - t))
            anchors.append(0 if t == 0 else int(torch.randint(1, 8, (1,), generator=g)))
    return {"rewards": torch.tensor(rewards), "groups": torch.tensor(groups), "episodes": torch.tensor(episodes), "anchors": torch.tensor(anchors), "step_returns": torch.tensor(returns)}


def right(rewards, groups, episodes, anchors, step_returns, step_weight=1.0):
    out = torch.zeros_like(rewards)
    for task in groups.unique():
        in_task = groups == task
        per_episode = torch.stack([rewards[episodes == e][0] for e in episodes[in_task].unique()])
        out[in_task] = rewards[in_task] - per_episode.mean()
    key = groups * (int(anchors.max()) + 1) + anchors
    _, inv, count = key.unique(return_inverse=True, return_counts=True)
    mean = torch.zeros(len(count)).index_add(0, inv, step_returns) / count
    return out + step_weight * (step_returns - mean[inv])


if __name__ == "__main__":
    d = make(0); a = right(**d)
    n = len(a)
    for i in range(n):
        eps = {int(d["episodes"][j]): float(d["rewards"][j]) for j in range(n) if d["groups"][j] == d["groups"][i]}
        same = [float(d["step_returns"][j]) for j in range(n) if d["groups"][j] == d["groups"][i] and d["anchors"][j] == d["anchors"][i]]
        want = float(d["rewards"][i]) - sum(eps.values()) / len(eps) + float(d["step_returns"][i]) - sum(same) / len(same)
        assert abs(want - float(a[i])) < 1e-5
    print("steps", n, "advantages", a[:6].tolist())
