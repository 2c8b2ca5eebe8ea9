"""Pass@k training: the reward of a set of k completions is the best of the set, and a completion's advantage is the average over all sets that hold it, in closed form by binomials; a WRONG completion may get a less negative value than usual and a prompt solved by most gets almost no signal (Chen et al. 2025, 'Pass@k training', analytical derivation)."""
from itertools import combinations
from math import comb
import torch

FAMILY = "advantages"
KIND = "advantages"
INPUTS = {"rewards": "0 or 1 per completion, [rows]", "groups": "number of the prompt, [rows]"}
SETTINGS = {"k": "set size, 3; not above the group size"}
NOTES = "Set reward: max over the set. Mean and population standard deviation over all C(n, k) sets. A group whose sets all agree gets zeros (also when it is not all solved: fewer than k wrong ones). Sums to zero over a group. No gradient."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rewards": (torch.rand(18, generator=g) < 0.25).float(), "groups": torch.arange(3).repeat(6)}


def right(rewards, groups, k=3):
    out = torch.zeros_like(rewards)
    for g in groups.unique().tolist():
        idx = (groups == g).nonzero()[:, 0]
        n, wrong = len(idx), int((rewards[idx] == 0).sum())
        mean = 1 - comb(wrong, k) / comb(n, k)
        sd = (mean * (1 - mean)) ** 0.5
        if sd == 0:
            continue
        good = (1 - mean) / sd
        fail = comb(wrong - 1, k - 1) / comb(n - 1, k - 1) if wrong else 0.0       # all mates wrong too
        bad = (1 - mean - fail) / sd
        out[idx] = torch.where(rewards[idx] > 0, torch.tensor(good), torch.tensor(bad))
    return out


if __name__ == "__main__":
    for s in range(15):
        d = make(s)
        a = right(**d)
        want = torch.zeros(18)
        for g in range(3):
            idx = [i for i in range(18) if d["groups"][i] == g]
            sets = list(combinations(idx, 3))
            r = [max(float(d["rewards"][i]) for i in c) for c in sets]
            mu = sum(r) / len(r)
            sd = (sum((x - mu) ** 2 for x in r) / len(r)) ** 0.5
            if sd > 0:
                for i in idx:
                    own = [(x - mu) / sd for c, x in zip(sets, r) if i in c]
                    want[i] = sum(own) / len(own)
        assert torch.allclose(a, want, atol=1e-5), (a, want)
        for g in range(3):
            assert abs(float(a[d["groups"] == g].sum())) < 1e-4
    print("ok", a.tolist())
