"""Median-centred advantages with one extra rollout (MC-GRPO style). Groups have an odd size; the baseline is the median, so exactly the pivot row has advantage 0 and the others do not sum to zero. Right: a robust baseline for small groups."""
FAMILY = "advantages"
KIND = "advantages"
INPUTS = {"rewards": "[rows]", "groups": "prompt id, [rows], each group of odd size"}
SETTINGS = {}
NOTES = "Needs odd groups; no scaling; the group sum is not zero by intent."
import torch


def make(seed):
    torch.manual_seed(seed)
    return {"rewards": torch.randn(10), "groups": torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1])}


def right(rewards, groups):
    out = torch.empty_like(rewards)
    for g in groups.unique():
        k = groups == g
        assert int(k.sum()) % 2 == 1
        out[k] = rewards[k] - rewards[k].median()
    return out


if __name__ == "__main__":
    b = make(0); a = right(**b)
    for g in (0, 1):
        r = sorted(b["rewards"][g * 5:g * 5 + 5].tolist())
        assert all(abs(a[g * 5 + i].item() - (b["rewards"][g * 5 + i].item() - r[2])) < 1e-6 for i in range(5))
        assert (a[g * 5:g * 5 + 5] == 0).sum() == 1
    print(a)
