"""Pass@k advantages (after Walder & Karkhanis 2025, PKPO, and Chen et al. 2025, "Pass@k training"). A right answer's weight falls with the number of right answers in its group:
the leave-one-out pass@k change is C(wrong, k-1)/C(n, k) for right rows and exactly 0 for wrong ones, minus the group's mean. With many right answers all are zero."""
FAMILY = "advantages"
KIND = "advantages"
INPUTS = {"rewards": "0 or 1 per row, [rows]", "groups": "integer prompt group per row, [rows]"}
SETTINGS = {"k": "the k of pass@k, 2 (no larger than a group)"}
NOTES = "Per row: the number of subsets of size k that succeed only through this row, over C(n, k); centred by the group's mean. No division by a standard deviation. Constants (no gradient)."
from math import comb
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rewards": (torch.rand(10, generator=g) < 0.4).float(), "groups": torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1])}


def right(rewards, groups, k=2):
    out = torch.zeros_like(rewards)
    for name in groups.unique():
        rows = (groups == name).nonzero().squeeze(1)
        r = rewards[rows]
        n, wrong = len(rows), int((r == 0).sum())
        w = torch.where(r > 0, comb(wrong, k - 1) / comb(n, k), 0.0)
        out[rows] = w - w.mean()
    return out


if __name__ == "__main__":
    from itertools import combinations
    for seed in range(5):
        d = make(seed); a = right(**d)
        for grp in (0, 1):
            rows = [i for i in range(10) if d["groups"][i] == grp]
            w = {i: 0.0 for i in rows}
            for sub in combinations(rows, 2):      # subsets that succeed only through row i
                hits = [i for i in sub if d["rewards"][i] > 0]
                if len(hits) == 1:
                    w[hits[0]] += 1 / comb(5, 2)
            mu = sum(w.values()) / 5
            assert all(abs(float(a[i]) - (w[i] - mu)) < 1e-6 for i in rows)
    print("ok", a)
