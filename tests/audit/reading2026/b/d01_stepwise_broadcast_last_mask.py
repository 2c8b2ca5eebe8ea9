"""Step-wise agent training copied the last step's already masked advantage row to every step. NovaSky-AI/SkyRL#1507 (issue #1492),
https://github.com/NovaSky-AI/SkyRL/pull/1507, 2026.
Each turn is a row of its own; the outcome advantage is computed on the last turn of each trajectory and broadcast to the other turns.
The estimator returns scalar * response_mask of the last turn, so earlier turns get the value at the last turn's token positions:
tokens of theirs outside that mask get 0 and most of the trajectory is trained with the wrong (mostly zero) advantage."""
import torch

FAMILY = "agents"
KIND = "advantages"
INPUTS = {
    "rewards": "outcome reward of the trajectory, written on its last step, 0 on the other steps, [rows]",
    "groups": "prompt id of each row, [rows]; several trajectories share a prompt",
    "response_mask": "1 where the token of this step was produced by the policy, right-aligned, [rows, time]",
    "is_last_step": "True on the last step of each trajectory; rows of one trajectory are adjacent, in order, [rows]",
}
SETTINGS = {"eps": "added to the group's standard deviation, 1e-6"}
NOTES = ("GRPO: reward of the trajectory minus the mean of its prompt group, over the group's std; one scalar for each trajectory, "
         "the same on all policy tokens of all its steps, 0 elsewhere. Constants, no gradient.")


def _group_norm(rewards, groups, mask, eps):
    out = torch.zeros_like(rewards)
    for g in groups.unique():
        sel = groups == g
        r = rewards[sel]
        out[sel] = (r - r.mean()) / (r.std() + eps)
    return out[:, None] * mask


def broken(rewards, groups, response_mask, is_last_step, eps=1e-6):
    last = is_last_step
    adv_last = _group_norm(rewards[last], groups[last], response_mask[last], eps)
    traj = torch.cat([torch.zeros(1, dtype=torch.bool), last[:-1]]).int().cumsum(0)
    return adv_last[traj]


def right(rewards, groups, response_mask, is_last_step, eps=1e-6):
    last = is_last_step
    adv_last = _group_norm(rewards[last], groups[last], torch.ones_like(response_mask[last]), eps)
    traj = torch.cat([torch.zeros(1, dtype=torch.bool), last[:-1]]).int().cumsum(0)
    return adv_last[traj] * response_mask


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rewards, groups, last, masks = [], [], [], []
    T = 20
    for prompt in range(2):
        for _ in range(3):
            steps = int(torch.randint(1, 4, (1,), generator=g))
            r = float(torch.rand(1, generator=g))
            for s in range(steps):
                n = int(torch.randint(2, 10, (1,), generator=g))
                end = T - int(torch.randint(0, 8, (1,), generator=g))
                pos = torch.arange(T)
                masks.append(((pos >= end - n) & (pos < end)).float())
                rewards.append(r if s == steps - 1 else 0.0)
                groups.append(prompt)
                last.append(s == steps - 1)
    return {"rewards": torch.tensor(rewards), "groups": torch.tensor(groups),
            "response_mask": torch.stack(masks), "is_last_step": torch.tensor(last)}


if __name__ == "__main__":
    x = make(0)
    a, b = broken(**x), right(**x)
    on = x["response_mask"].bool()
    print("rows", len(on), "trained tokens", int(on.sum()), "differing trained tokens", int((a != b)[on].sum()))
    print("sum |adv| on trained tokens: broken", float(a[on].abs().sum()), "right", float(b[on].abs().sum()))
    assert not torch.allclose(a, b)
