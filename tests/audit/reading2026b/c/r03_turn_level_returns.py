"""Discount is applied per turn, not per token. Every token of a turn gets the same discounted return of the rewards from its turn on, and the baseline is taken over the turns with the same number in
the group, where rollouts that ended earlier are missing (so the size of the group shrinks with the turn, down to one rollout whose advantage is 0). No division by the standard deviation."""
import random
import torch

FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "one list per rollout with the reward of each turn (lists of different length)", "groups": "index of the prompt of each rollout"}
SETTINGS = {"gamma": "discount from turn to turn, 0.9"}
NOTES = "Advantage of turn k of a rollout = its discounted return from k on, minus the mean of that return over the rollouts of the same group that reached turn k. Result: [rollouts, turns], 0 where there is no turn."


def make(seed):
    r = random.Random(seed)
    return {"rewards": [[r.choice([0.0, 0.2, 1.0]) for _ in range(n)] for n in (3, 1, 2, 4, 2, 2)], "groups": [0, 0, 0, 1, 1, 1]}


def right(rewards, groups, gamma=0.9):
    width = max(len(x) for x in rewards)
    got = torch.tensor([x + [0.0] * (width - len(x)) for x in rewards])
    alive = torch.tensor([[1.0] * len(x) + [0.0] * (width - len(x)) for x in rewards])
    returns, run = torch.zeros_like(got), torch.zeros(len(rewards))
    for k in reversed(range(width)):
        run = got[:, k] + gamma * run
        returns[:, k] = run
    g = torch.tensor(groups)
    same = (g[:, None] == g[None]).float()
    mean = same @ (returns * alive) / (same @ alive).clamp(min=1)
    return (returns - mean) * alive


if __name__ == "__main__":
    d = make(0)
    got = right(**d)
    ret = [[sum(0.9 ** (j - k) * x[j] for j in range(k, len(x))) for k in range(len(x))] for x in d["rewards"]]
    for i, x in enumerate(ret):
        for k in range(got.shape[1]):
            peers = [ret[j][k] for j in range(len(ret)) if d["groups"][j] == d["groups"][i] and k < len(ret[j])]
            want = x[k] - sum(peers) / len(peers) if k < len(x) else 0.0
            assert abs(got[i, k].item() - want) < 1e-6, (i, k)
    print(got)
