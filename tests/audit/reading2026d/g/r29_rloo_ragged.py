"""RLOO on ragged, unsorted groups. The leave-one-out baseline equals (r - group mean) * n/(n-1), which looks like a wrong rescale; a group of one gets 0 instead of its raw reward."""
FAMILY = "advantages"
KIND = "advantages"
INPUTS = {"rewards": "[rows]", "groups": "prompt id of each row, [rows], any order, any size"}
SETTINGS = {}
NOTES = "Sums to zero in each group. No standard deviation. No fixed group size. Groups of one row are dropped (0)."
import torch


def make(seed):
    torch.manual_seed(seed)
    return {"rewards": torch.randn(9), "groups": torch.tensor([4, 1, 4, 7, 1, 4, 4, 1, 9])}


def right(rewards, groups):
    _, g = groups.unique(return_inverse=True)
    k = int(g.max()) + 1
    n = torch.zeros(k).index_add(0, g, torch.ones_like(rewards))
    mean = torch.zeros(k).index_add(0, g, rewards) / n
    scale = torch.where(n > 1, n / (n - 1).clamp(min=1), torch.zeros_like(n))
    return (rewards - mean[g]) * scale[g]


if __name__ == "__main__":
    b = make(0); a = right(**b)
    for i in range(9):
        o = [b["rewards"][j].item() for j in range(9) if j != i and b["groups"][j] == b["groups"][i]]
        want = b["rewards"][i].item() - sum(o) / len(o) if o else 0.0
        assert abs(a[i].item() - want) < 1e-5
    print(a)
