"""Group baseline counts every turn of a trajectory. microsoft/agent-lightning#462 (also #444, #445), https://github.com/microsoft/agent-lightning/pull/462, 2026.
Each turn of a roll-out is one training row and carries the reward of the whole roll-out. The GRPO mean and deviation were taken over rows, so a trajectory with more turns weighed more in its group's baseline.
Advantages were shifted against or in favour of long trajectories; nothing failed."""
import torch

FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "reward of the roll-out that the row belongs to, [rows]", "groups": "prompt of the row, [rows]", "rollouts": "roll-out of the row, [rows]; rows with equal group and roll-out are turns of one trajectory"}
SETTINGS = {}
NOTES = "GRPO: (reward - mean) / (std + 1e-6), mean and unbiased std over the trajectories of the group, each counted once; every turn gets the advantage of its trajectory. All groups have at least two trajectories; numbers of turns differ."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rewards, groups, rollouts = [], [], []
    for p in range(3):
        for k in range(4):
            r = torch.rand((), generator=g).item()
            for _ in range(int(torch.randint(1, 6, (), generator=g))):
                rewards.append(r); groups.append(p); rollouts.append(k)
    return {"rewards": torch.tensor(rewards), "groups": torch.tensor(groups), "rollouts": torch.tensor(rollouts)}


def _normalise(rewards, groups, table):
    out = torch.zeros_like(rewards)
    for i in range(len(rewards)):
        s = torch.stack(table[int(groups[i])])
        out[i] = (rewards[i] - s.mean()) / (s.std() + 1e-6)
    return out


def broken(rewards, groups, rollouts):
    table = {}
    for i in range(len(rewards)):
        table.setdefault(int(groups[i]), []).append(rewards[i])
    return _normalise(rewards, groups, table)


def right(rewards, groups, rollouts):
    table, seen = {}, set()
    for i in range(len(rewards)):
        key = (int(groups[i]), int(rollouts[i]))
        if key in seen:
            continue
        seen.add(key)
        table.setdefault(key[0], []).append(rewards[i])
    return _normalise(rewards, groups, table)


if __name__ == "__main__":
    m = make(0)
    b, r = broken(**m), right(**m)
    print("largest difference", (b - r).abs().max().item())
    for p in range(3):
        once = {int(k): r[i] for i, k in enumerate(m["rollouts"]) if m["groups"][i] == p}
        assert abs(torch.stack(list(once.values())).mean()) < 1e-5
    assert (b - r).abs().max() > 1e-2
