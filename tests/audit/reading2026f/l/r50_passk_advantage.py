"""Pass@k advantages in closed form (Chen et al. 2025). Each row's advantage is the mean over all k-subsets that contain it of the subset's normalised pass@k reward, by binomials and without sampling. Right rows of a group all get the
same, wrong ones too, and a group with few failures (fewer than k) gets zero everywhere, although its rewards differ."""
FAMILY = "advantages"
KIND = "advantages"
INPUTS = {"rewards": "1.0 for a right answer and 0.0 for a wrong one, [rows]", "groups": "prompt number of each row, [rows]"}
SETTINGS = {"k": "the k of pass@k, 2; every group must have at least k rows"}
NOTES = ("Returns one advantage per row; sums to zero within each group. Rewards must be 0 or 1. Groups with fewer wrong rows than k, or no right row, give zeros. The divisor is the population deviation over the k-subsets, "
         "without epsilon, as the zero case is taken out. Groups are independent of one another.")
import math

import torch


def make(seed):
    torch.manual_seed(seed)
    return {"rewards": torch.randint(0, 2, (14,)).float() * torch.randint(0, 2, (14,)), "groups": torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])}


def right(rewards, groups, k=2):
    adv = torch.zeros_like(rewards)
    for g in groups.unique():
        at = groups == g
        n = int(at.sum())
        wrong = n - int((rewards[at] > 0.5).sum())
        mean = 1.0 - math.comb(wrong, k) / math.comb(n, k)
        if mean <= 0.0 or mean >= 1.0:
            continue
        std = math.sqrt(mean * (1.0 - mean))
        a_right = (1.0 - mean) / std
        a_wrong = (1.0 - mean - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)) / std
        adv[at] = torch.where(rewards[at] > 0.5, torch.tensor(a_right), torch.tensor(a_wrong)).to(adv.dtype)
    return adv


if __name__ == "__main__":
    from itertools import combinations
    d = {"rewards": torch.tensor([1., 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 1, 0]), "groups": make(0)["groups"]}
    for k in (1, 2, 3):
        keep = torch.tensor([int((d["groups"] == g).sum()) >= k for g in d["groups"]])
        r, g = d["rewards"][keep], d["groups"][keep]
        out = right(r, g, k)
        want = torch.zeros(len(r))
        for grp in g.unique().tolist():
            rows = [i for i in range(len(r)) if g[i] == grp]
            sub = {c: float(max(r[i] for i in c)) for c in combinations(rows, k)}
            m = sum(sub.values()) / len(sub)
            s = (sum((v - m) ** 2 for v in sub.values()) / len(sub)) ** 0.5
            for i in rows:
                mine = [(v - m) / s for c, v in sub.items() if i in c] if s > 1e-9 else [0.0]
                want[i] = sum(mine) / len(mine)
            assert abs(float(out[rows].sum())) < 1e-5
        assert torch.allclose(out, want, atol=1e-5), (k, out, want)
        print(k, [round(x, 3) for x in out.tolist()])
