"""OPO (On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585; verl adv_estimator 'opo'): the group baseline is the mean reward weighted with the length of the responses,
the variance-optimal baseline if the squared gradient norm grows with the length. The advantages of a group have a mean that is not 0; their length-weighted mean is 0."""
import torch

FAMILY = "advantages, returns and rewards"
KIND = "advantages"
INPUTS = {"rewards": "outcome reward of each row, [rows]", "groups": "prompt number of each row, [rows]", "lengths": "response tokens of each row, [rows], at least 1"}
SETTINGS = {}
NOTES = ("OPO. Baseline of a prompt = sum(length * reward) / sum(length) over all its rows (the row itself included). advantage = reward - baseline, not divided by a standard deviation. "
         "The length-weighted sum of the advantages of a prompt is 0, the plain sum in general is not. One advantage per row, constant, [rows].")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rewards": (torch.rand(12, generator=g) < 0.5).float(), "groups": torch.tensor([0, 1, 2] * 4),
            "lengths": torch.randint(1, 40, (12,), generator=g)}


def right(rewards, groups, lengths):
    _, inv = groups.unique(return_inverse=True)
    n = int(inv.max()) + 1
    w = lengths.to(rewards.dtype)
    num = torch.zeros(n).index_add_(0, inv, w * rewards)
    den = torch.zeros(n).index_add_(0, inv, w)
    return rewards - (num / den)[inv]


if __name__ == "__main__":
    m = make(0); a = right(**m)
    for i in range(12):
        j = [x for x in range(12) if m["groups"][x] == m["groups"][i]]
        base = sum(float(m["lengths"][x] * m["rewards"][x]) for x in j) / sum(float(m["lengths"][x]) for x in j)
        assert abs(a[i] - (m["rewards"][i] - base)) < 1e-6
    print(a, "sum", a.sum().item(), "weighted", (a * m["lengths"]).sum().item())
    assert abs((a * m["lengths"]).sum()) < 1e-4
