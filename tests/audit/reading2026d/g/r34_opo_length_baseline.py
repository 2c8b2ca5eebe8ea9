"""OPO (Hao et al. 2025). The baseline is the LENGTH-weighted mean reward; advantages of a group do not sum to zero, but the length-weighted ones do. Right: variance-optimal when the squared gradient norm grows with length."""
FAMILY = "advantages"
KIND = "advantages"
INPUTS = {"rewards": "[rows]", "groups": "prompt id, [rows]", "lengths": "trained tokens of each row, [rows]"}
SETTINGS = {}
NOTES = "No standard deviation. Plain mean of a group is not zero by intent. Lengths at least 1."
import torch


def make(seed):
    torch.manual_seed(seed)
    return {"rewards": torch.randn(8), "groups": torch.arange(8) % 2, "lengths": torch.randint(1, 50, (8,))}


def right(rewards, groups, lengths):
    same = (groups[:, None] == groups[None, :]).float()
    l = lengths.float()
    return rewards - (same @ (l * rewards)) / (same @ l)


if __name__ == "__main__":
    b = make(0); a = right(**b)
    for g in (0, 1):
        s = [i for i in range(8) if b["groups"][i] == g]
        base = sum(b["lengths"][i].item() * b["rewards"][i].item() for i in s) / sum(b["lengths"][i].item() for i in s)
        assert all(abs(a[i].item() - b["rewards"][i].item() + base) < 1e-5 for i in s)
        assert abs(sum(a[i].item() * b["lengths"][i].item() for i in s)) < 1e-3
    print(a)
