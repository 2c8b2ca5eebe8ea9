"""Pass@k advantage, analytic form (Chen et al. 2025, Pass@k Training). Binary rewards of N samples become the mean normalised advantage over all
k-subsets that contain a sample. Right samples get far more than wrong ones lose, and groups with fewer than k wrong samples give zeros; no mean or std of the raw rewards occurs."""
import itertools
from math import comb
import torch

FAMILY = "advantages"
KIND = "advantages"
INPUTS = {"rewards": "0 or 1 per sample, [rows]", "groups": "prompt number of each sample, [rows]"}
SETTINGS = {"k": "subset size, 3; each group needs at least k samples"}
NOTES = ("Advantages for maximising pass@k: mean over rows is 0 inside each group. Population std of the subset reward, sqrt(R(1-R)); a group whose subset "
         "reward is constant (all wrong, or fewer than k wrong) gets zeros. No epsilon in the denominator.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rewards": (torch.rand(24, generator=g) < 0.3).float(), "groups": torch.arange(24) % 3}


def right(rewards, groups, k=3):
    out = torch.zeros_like(rewards)
    for grp in groups.unique().tolist():
        idx = (groups == grp).nonzero().flatten()
        r = rewards[idx]
        n, wrong = len(r), int((r == 0).sum())
        mean = 1 - comb(wrong, k) / comb(n, k)
        std = (mean * (1 - mean)) ** 0.5
        if std == 0:
            continue
        good = (1 - mean) / std
        bad = (1 - mean - comb(wrong - 1, k - 1) / comb(n - 1, k - 1)) / std
        out[idx] = torch.where(r > 0, good, bad)
    return out


if __name__ == "__main__":
    for seed in range(5):
        d = make(seed); a = right(**d); slow = torch.zeros(24)
        for grp in range(3):
            idx = [i for i in range(24) if d["groups"][i] == grp]
            subsets = list(itertools.combinations(idx, 3))
            R = [max(d["rewards"][i].item() for i in s) for s in subsets]
            mu = sum(R) / len(R); sd = (sum((x - mu) ** 2 for x in R) / len(R)) ** 0.5
            for i in idx:
                own = [(x - mu) / sd for x, s in zip(R, subsets) if i in s] if sd > 1e-9 else [0.0]
                slow[i] = sum(own) / len(own)
        print(seed, (a - slow).abs().max().item()); assert torch.allclose(a, slow, atol=1e-5)
