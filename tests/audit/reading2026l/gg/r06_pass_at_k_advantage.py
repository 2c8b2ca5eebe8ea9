"""Pass@k training with analytic advantages (Chen et al., 'Pass@k Training', arXiv:2508.10751): with binary rewards, the mean over all k-subsets
of the max-reward advantage has a closed form. Right answers in an easy group (fewer than k wrong) get 0, and the scale is not the standard deviation of the rewards but that of the sets."""
import math
from itertools import combinations
import torch

FAMILY = "advantages, returns and rewards"
KIND = "advantages"
INPUTS = {"rewards": "0 or 1 for each row, [rows]", "groups": "prompt number of each row, [rows]; each prompt has N >= k rows"}
SETTINGS = {"k": "size of a subset, 3"}
NOTES = ("Pass@k training. A set of k different rows of a prompt has reward 1 if any of them is right. With N rows of which W are wrong: R = 1 - C(W,k)/C(N,k) is the mean over all sets, "
         "S = sqrt(R(1-R)) their standard deviation. The advantage of a row is the mean over all sets that contain it of (set reward - R)/S: for a right row (1-R)/S, for a wrong row "
         "(1 - C(W-1,k-1)/C(N-1,k-1) - R)/S. If S = 0 (all sets right or all wrong; this happens whenever W < k) every row of the prompt has 0. Deterministic, constant, [rows].")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.cat([(torch.rand(8, generator=g) < p).float() for p in (0.15, 0.3, 0.5, 0.95)])
    return {"rewards": rewards, "groups": torch.arange(4).repeat_interleave(8)}


def right(rewards, groups, k=3):
    out = torch.zeros_like(rewards)
    for gr in groups.unique():
        idx = (groups == gr).nonzero().squeeze(1)
        N = len(idx); W = int((rewards[idx] == 0).sum())
        R = 1 - math.comb(W, k) / math.comb(N, k)
        S = math.sqrt(R * (1 - R))
        if S == 0:
            continue
        neg = (1 - math.comb(W - 1, k - 1) / math.comb(N - 1, k - 1) - R) / S if W else 0.0
        out[idx] = torch.where(rewards[idx] > 0, (1 - R) / S, neg)
    return out


if __name__ == "__main__":
    m = make(0); a = right(**m); slow = torch.zeros(32)
    for gr in range(4):
        idx = list(range(8 * gr, 8 * gr + 8))
        sets = list(combinations(idx, 3))
        val = torch.tensor([max(m["rewards"][list(s)]) for s in sets])
        sd = val.std(unbiased=False)
        if sd > 0:
            for i in idx:
                slow[i] = torch.stack([(v - val.mean()) / sd for s, v in zip(sets, val) if i in s]).mean()
    print(m["rewards"].view(4, 8)); print(a.view(4, 8)); print("max diff to the loop over subsets", (a - slow).abs().max().item())
    assert torch.allclose(a, slow, atol=1e-5) and a.abs().max() > 0
