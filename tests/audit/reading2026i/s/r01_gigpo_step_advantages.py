"""GiGPO: episode advantage plus an advantage among steps that start from the same state (Feng et al. 2025, verl-agent). Steps of different episodes and different turns
are compared when their observation is identical; a state that occurs once has step advantage exactly 0. Looks odd: groups of size one are not dropped, and one episode may occur several times in one state group."""
import torch

FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "reward of each step, [steps]", "groups": "task number of each step's episode, [steps]", "episode": "episode number of each step, [steps]; steps of an episode are in time order",
          "state": "hash of the observation before the step, [steps]"}
SETTINGS = {"gamma": "discount of the step return, 0.95", "omega": "weight of the step part, 1.0"}
NOTES = ("Advantage of a step = (episode return - mean of the episode returns of the task) / (std + 1e-6) + omega * (discounted return from the step - mean over steps of the task in the same state), no std in the second part. "
         "The episode statistics count each episode once, not once per step. std is unbiased. Needs at least two episodes per task.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rewards, groups, episode, state = [], [], [], []
    for e in range(8):
        n = int(torch.randint(2, 6, (1,), generator=g))
        for t in range(n):
            rewards.append(float(torch.rand(1, generator=g) < 0.5) if t == n - 1 else 0.0)
            groups.append(e // 4)
            episode.append(e)
            state.append(100 * (e // 4) + (0 if t == 0 else int(torch.randint(1, 4, (1,), generator=g))))
    return {"rewards": torch.tensor(rewards), "groups": torch.tensor(groups), "episode": torch.tensor(episode), "state": torch.tensor(state)}


def right(rewards, groups, episode, state, gamma=0.95, omega=1.0):
    n = len(rewards)
    ret = torch.zeros(n)
    running = 0.0
    for i in reversed(range(n)):
        if i == n - 1 or episode[i + 1] != episode[i]:
            running = 0.0
        running = float(rewards[i]) + gamma * running
        ret[i] = running
    ids, inverse = torch.unique(episode, return_inverse=True)
    total = torch.zeros(len(ids)).index_add(0, inverse, rewards)
    task = torch.zeros(len(ids), dtype=groups.dtype).scatter(0, inverse, groups)
    out = torch.zeros(n)
    for k in torch.unique(task):
        own = total[task == k]
        z = (total - own.mean()) / (own.std() + 1e-6)
        out = torch.where(groups == k, z[inverse], out)
    _, where = torch.unique(torch.stack([groups, state]), dim=1, return_inverse=True)
    count = torch.bincount(where).float()
    mean = torch.zeros(len(count)).index_add(0, where, ret) / count
    return out + omega * (ret - mean[where])


if __name__ == "__main__":
    d = make(0)
    a = right(**d)
    for i in range(len(a)):
        e = int(d["episode"][i])
        eps = sorted({int(x) for x, k in zip(d["episode"], d["groups"]) if k == d["groups"][i]})
        tot = torch.tensor([sum(float(r) for r, x in zip(d["rewards"], d["episode"]) if x == y) for y in eps])
        def back(j):
            steps = [t for t in range(len(a)) if d["episode"][t] == d["episode"][j] and t >= j]
            return sum(0.95 ** k * float(d["rewards"][t]) for k, t in enumerate(steps))
        same = [j for j in range(len(a)) if d["state"][j] == d["state"][i] and d["groups"][j] == d["groups"][i]]
        want = (tot[eps.index(e)] - tot.mean()) / (tot.std() + 1e-6) + back(i) - sum(map(back, same)) / len(same)
        assert abs(float(want) - float(a[i])) < 1e-4, (i, want, a[i])
    print("steps", len(a), "first", a[:5].tolist())
