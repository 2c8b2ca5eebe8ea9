"""Length-shaped rewards are compared with the mean of the unshaped rewards. PrimeIntellect-ai/prime-rl#2040,
https://github.com/PrimeIntellect-ai/prime-rl/pull/2040, 2026.
GR3 multiplies each reward by 1 / (1 + alpha * length / mean length). The baseline stayed the mean of the raw rewards, which is larger, so advantages no longer sum to zero and right
but longer answers of a mostly solved group get a negative advantage."""
import torch

FAMILY = "losses"
KIND = "advantages"
INPUTS = {"rewards": "0 or 1 for each answer, [rows]", "groups": "prompt id, [rows]", "lengths": "answer tokens, [rows]"}
SETTINGS = {"alpha": "strength of the length factor, 0.33"}
NOTES = "Group-relative: shaped reward minus the mean shaped reward of the group, no division by std; sums to zero in each group. Constants."


def broken(rewards, groups, lengths, alpha=0.33):
    out = torch.zeros_like(rewards)
    for g in groups.unique():
        s = groups == g
        r, n = rewards[s], lengths[s].float()
        shaped = r / (1 + alpha * n / n.mean())
        out[s] = shaped - r.mean()
    return out


def right(rewards, groups, lengths, alpha=0.33):
    out = torch.zeros_like(rewards)
    for g in groups.unique():
        s = groups == g
        r, n = rewards[s], lengths[s].float()
        shaped = r / (1 + alpha * n / n.mean())
        out[s] = shaped - shaped.mean()
    return out


def make(seed):
    g = torch.Generator().manual_seed(seed)
    groups = torch.arange(3).repeat_interleave(4)
    return {"rewards": (torch.rand(12, generator=g) < 0.7).float(), "groups": groups, "lengths": torch.randint(50, 400, (12,), generator=g)}


if __name__ == "__main__":
    x = make(0)
    a, b = broken(**x), right(**x)
    print("broken", [round(v, 3) for v in a.tolist()])
    print("right ", [round(v, 3) for v in b.tolist()])
    for g in range(3):
        assert abs(float(b[x["groups"] == g].sum())) < 1e-5
    assert not torch.allclose(a, b)
    issue = dict(rewards=torch.tensor([1., 1., 1., 0.]), groups=torch.zeros(4, dtype=torch.long), lengths=torch.tensor([100, 200, 300, 150]))
    print("the PR's example", broken(**issue).tolist(), right(**issue).tolist())
