"""GRPO groups are keyed by the rollout's own id, so each group has one member.
rllm-org/rllm#924, https://github.com/rllm-org/rllm/pull/924, 2026 (September).
The agent-workflow trainer passes trajectory ids as the group index. The GRPO estimator takes mean 0
and std 1 for a group of one, so rewards [1, 0, 1, 0] of one task stay [1, 0, 1, 0] instead of
being centred within the task."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'agents'
KIND = 'advantages'
INPUTS = {
    'rewards': 'outcome reward of each trajectory, [rows]',
    'groups': 'task id of each trajectory, [rows]',
    'roles': 'which agent of the workflow wrote the trajectory, [rows]',
    'rollout_ids': 'unique id of each trajectory, [rows]',
}
SETTINGS = {
    'eps': 'added to the standard deviation, 1e-6',
}
NOTES = (
    'GRPO: reward minus the mean of the trajectories of the same task and role, divided by their '
    'standard deviation; a group of one keeps its raw reward (mean 0, std 1), as in the framework. '
)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    tasks, n = 3, 4
    groups = torch.arange(tasks).repeat_interleave(n)
    rewards = torch.randint(0, 2, (tasks * n,), generator=g).float()
    rewards[0], rewards[1] = 1.0, 0.0
    return {"rewards": rewards, "groups": groups, "roles": torch.zeros(tasks * n, dtype=torch.long),
            "rollout_ids": torch.randperm(1000, generator=g)[:tasks * n]}


def _grpo(rewards, index, eps):
    out = torch.zeros_like(rewards)
    for key in sorted(set(index)):
        rows = torch.tensor([i for i, k in enumerate(index) if k == key])
        r = rewards[rows]
        mean, std = (r.mean(), r.std()) if len(r) > 1 else (torch.tensor(0.0), torch.tensor(1.0))
        out[rows] = (r - mean) / (std + eps)
    return out


def broken(rewards, groups, roles, rollout_ids, eps=1e-6):
    return _grpo(rewards, rollout_ids.tolist(), eps)


def right(rewards, groups, roles, rollout_ids, eps=1e-6):
    return _grpo(rewards, list(zip(groups.tolist(), roles.tolist())), eps)


if __name__ == "__main__":
    d = make(0)
    print("rewards", d["rewards"].tolist())
    print("broken ", broken(**d).tolist())
    print("right  ", right(**d).tolist())
    assert not torch.allclose(broken(**d), right(**d), atol=1e-3)
    assert abs(right(**d)[:4].mean().item()) < 1e-5
