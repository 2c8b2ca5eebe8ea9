"""OPO, on-policy RL with optimal baseline (Hao et al. 2025). The group baseline is the mean reward WEIGHTED BY COMPLETION LENGTH (the variance-minimal one if
gradient norms grow with length); so advantages do not sum to zero over rows but over tokens, and there is no division by a std."""
import torch

FAMILY = "advantages"
KIND = "advantages"
INPUTS = {"rewards": "reward per row, [rows]", "groups": "prompt number of each row, any order, [rows]", "lengths": "number of completion tokens of each row, at least 1, [rows]"}
SETTINGS = {}
NOTES = "advantage = r - sum(len * r) / sum(len) within the group. The length-weighted sum is zero in each group; the plain sum is not. Exactly on-policy use intended."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rewards": torch.randn(12, generator=g), "groups": torch.randint(0, 3, (12,), generator=g), "lengths": torch.randint(1, 50, (12,), generator=g)}


def right(rewards, groups, lengths):
    w = lengths.to(rewards.dtype)
    _, inv = torch.unique(groups, return_inverse=True)
    n = int(inv.max()) + 1
    num = torch.zeros(n, dtype=rewards.dtype).index_add(0, inv, w * rewards)
    den = torch.zeros(n, dtype=rewards.dtype).index_add(0, inv, w)
    return rewards - (num / den)[inv]


if __name__ == "__main__":
    d = make(0); a = right(**d)
    for i in range(12):
        same = [j for j in range(12) if d["groups"][j] == d["groups"][i]]
        tokens = [d["rewards"][j].item() for j in same for _ in range(int(d["lengths"][j]))]     # each token votes
        assert abs(a[i].item() - (d["rewards"][i].item() - sum(tokens) / len(tokens))) < 1e-5
    print("length-weighted sum", (a * d["lengths"]).sum().item(), "plain sum", a.sum().item())
