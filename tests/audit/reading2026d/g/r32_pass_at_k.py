"""Pass@k advantages in closed form (Chen et al. 2025). Binomial coefficients replace the mean; a WRONG row gets an advantage that depends on its partners. Right: it is the mean normalised advantage of all size-k subsets that hold the row."""
FAMILY = "advantages"
KIND = "advantages"
INPUTS = {"rewards": "0 or 1, [rows]", "groups": "prompt id, [rows]"}
SETTINGS = {"k": "subset size, 3, at most the group size"}
NOTES = "Binary rewards only. A group where every subset passes, or none, has 0. Closed form, no sampling."
import itertools
import math
import torch


def make(seed):
    return {"rewards": torch.tensor([1., 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), "groups": torch.arange(18) // 6}


def right(rewards, groups, k=3):
    out = torch.zeros_like(rewards)
    for g in groups.unique():
        idx = (groups == g).nonzero()[:, 0]
        n, bad = len(idx), int((rewards[idx] == 0).sum())
        mean = 1 - math.comb(bad, k) / math.comb(n, k)
        sd = math.sqrt(mean * (1 - mean))
        if sd == 0:
            continue
        pos = (1 - mean) / sd
        neg = (1 - mean - math.comb(bad - 1, k - 1) / math.comb(n - 1, k - 1)) / sd
        out[idx] = torch.where(rewards[idx] > 0, pos, neg)
    return out


if __name__ == "__main__":
    b = make(0); a = right(**b)
    for g in range(3):
        r = b["rewards"][g * 6:g * 6 + 6].tolist()
        subs = [(s, max(r[i] for i in s)) for s in itertools.combinations(range(6), 3)]
        mu = sum(v for _, v in subs) / len(subs); sd = math.sqrt(mu * (1 - mu))
        for i in range(6):
            own = [v for s, v in subs if i in s]
            want = (sum(own) / len(own) - mu) / sd if sd else 0.0
            assert abs(a[g * 6 + i].item() - want) < 1e-5
    print(a)
