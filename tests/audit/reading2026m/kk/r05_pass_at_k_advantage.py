"""Advantages for pass@k (Walder & Karkhanis 2025, 'Pass@K Policy Optimization', arXiv 2505.15201). A wrong answer gets a positive weight before centring, a correct one less the more others are correct,
and a correct answer in a group of many correct ones gets almost nothing; none of this is a group mean."""
from math import comb

import torch

FAMILY = "advantages, returns and rewards"
KIND = "advantages"
INPUTS = {"rewards": "1 for a correct, 0 for a wrong answer, [rows]", "groups": "number of the prompt of each row, [rows]; each prompt has at least k+1 rows"}
SETTINGS = {"k": "number of attempts whose best counts, 3"}
NOTES = (
    "Unbiased weights for the gradient of pass@k, binary rewards. For a prompt with n samples of which c are correct, the weight of sample i is s_i = (1/C(n,k)) * sum over all subsets S of k samples that contain i of max reward in S. In closed form: correct, "
    "s_i = k/n; wrong, s_i = (k/n)*(1 - C(n-1-c, k-1)/C(n-1, k-1)). The baseline removes what does not depend on i: b_i = the same sum over the k-1 other members of S only, max reward in S without i (the baseline 'loo-1' of the paper), and the advantage is "
    "s_i - b_i. For a wrong sample it is 0, for a correct one (k/n)*C(n-c, k-1)/C(n-1, k-1), the probability that the others of the subset all fail. Not normalised by a standard deviation. Returns [rows]; constant."
)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rewards": (torch.rand(14, generator=g) < 0.4).float(), "groups": torch.tensor([0] * 6 + [1] * 8)}


def right(rewards, groups, k=3):
    out = torch.zeros_like(rewards)
    for gr in groups.unique():
        sel = groups == gr
        n, c = int(sel.sum()), int(rewards[sel].sum())
        out[sel] = rewards[sel] * (k / n) * comb(n - c, k - 1) / comb(n - 1, k - 1)
    return out


if __name__ == "__main__":
    from itertools import combinations
    for seed in range(4):
        d = make(seed)
        got = right(**d)
        want = torch.zeros(14)
        for gr in (0, 1):
            idx = [i for i in range(14) if d["groups"][i] == gr]
            n = len(idx)
            c = sum(int(d["rewards"][i]) for i in idx)
            for i in idx:
                s = b = 0.0
                for S in combinations(idx, 3):
                    if i in S:
                        s += max(d["rewards"][j].item() for j in S)
                        b += max(d["rewards"][j].item() for j in S if j != i)
                s, b = s / comb(n, 3), b / comb(n, 3)
                closed = 3 / n if d["rewards"][i] else 3 / n * (1 - comb(n - 1 - c, 2) / comb(n - 1, 2))
                assert abs(s - closed) < 1e-9
                want[i] = s - b
        print("seed", seed, "rewards", d["rewards"].int().tolist(), "advantages", [round(x, 3) for x in got.tolist()])
        assert torch.allclose(got, want, atol=1e-6)
