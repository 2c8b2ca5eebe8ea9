"""Right: returns discounted per turn, not per token, against a leave-one-out baseline of the same turn index. All tokens of a turn get the same advantage although the discount is below 1, rollouts of one group have different
numbers of turns, and a turn that only one rollout reaches has baseline 0."""
import torch

FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "reward of each turn, [rows, turns]; 0 for turns that did not happen", "groups": "task index of each row, [rows]",
          "turn_of_token": "turn number of each model token, -1 on prompt, tool output and padding, [rows, time]"}
SETTINGS = {"gamma": "discount per turn, 0.8"}
NOTES = "Returns token advantages [rows, time]: return of the token's turn minus the mean return at that turn of the other rows of the group that reached it (0 if there is none). 0 where turn_of_token is -1. Constants, no gradient."

def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows, turns, time = 6, 3, 16
    turn_of_token, rewards = torch.full((rows, time), -1), torch.zeros(rows, turns)
    for r in range(rows):
        at = 1
        for t in range(1 + int(torch.randint(0, turns, (1,), generator=g))):
            n = int(torch.randint(2, 4, (1,), generator=g))
            turn_of_token[r, at:at + n] = t
            rewards[r, t] = torch.randn(1, generator=g)
            at += n + 1
    return {"rewards": rewards, "groups": torch.arange(rows) // 3, "turn_of_token": turn_of_token}

def right(rewards, groups, turn_of_token, gamma=0.8):
    reached = torch.arange(rewards.shape[1])[None] <= turn_of_token.max(1, keepdim=True).values
    power = gamma ** torch.arange(rewards.shape[1]).float()
    returns = (rewards * reached * power).flip(1).cumsum(1).flip(1) / power
    same = (groups[:, None] == groups[None]).float() - torch.eye(len(groups))
    others = same @ reached.float()
    baseline = same @ (returns * reached) / others.clamp(min=1)
    advantage = (returns - baseline) * reached
    return advantage.gather(1, turn_of_token.clamp(min=0)) * (turn_of_token >= 0)

def slow(rewards, groups, turn_of_token, gamma=0.8):
    n = [int(row.max()) + 1 for row in turn_of_token]
    ret = [[sum(gamma ** (s - t) * float(rewards[r, s]) for s in range(t, n[r])) for t in range(n[r])] for r in range(len(n))]
    out = torch.zeros(turn_of_token.shape)
    for r in range(len(n)):
        for i, t in enumerate(turn_of_token[r].tolist()):
            if t >= 0:
                rest = [ret[o][t] for o in range(len(n)) if o != r and groups[o] == groups[r] and t < n[o]]
                out[r, i] = ret[r][t] - (sum(rest) / len(rest) if rest else 0.0)
    return out

if __name__ == "__main__":
    made = make(0)
    a, b = right(**made), slow(**made)
    print("largest difference to the loop", float((a - b).abs().max()), "advantages", a[0])
    assert torch.allclose(a, b, atol=1e-5) and a.abs().max() > 0.1
