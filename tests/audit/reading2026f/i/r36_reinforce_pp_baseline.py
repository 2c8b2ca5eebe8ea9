"""REINFORCE++-baseline (Hu et al. 2025). The mean is taken per prompt GROUP but the standard deviation over the WHOLE batch, after the group means were removed.
Two different scopes in one normalisation look like a mix-up."""
FAMILY = "advantages"
KIND = "advantages"
INPUTS = {"rewards": "[rows]", "groups": "integer prompt group per row, any order, [rows]"}
SETTINGS = {"eps": "added to the standard deviation, 1e-8"}
NOTES = "One number per row. Batch std (biased, over all rows) of the group-centred rewards; a group whose rewards are all equal gives exact zeros. Constants. Depends on the whole batch, so it must run before the batch is cut into micro-batches or ranks."
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    r = torch.rand(9, generator=g)
    groups = torch.tensor([2, 0, 1, 2, 0, 1, 2, 0, 1])
    r[groups == 1] = 0.5
    return {"rewards": r, "groups": groups}


def right(rewards, groups, eps=1e-8):
    _, inv = groups.unique(return_inverse=True)
    n = torch.zeros(int(inv.max()) + 1).index_add_(0, inv, torch.ones_like(rewards))
    mean = torch.zeros_like(n).index_add_(0, inv, rewards) / n
    centred = rewards - mean[inv]
    return centred / (centred.std(unbiased=False) + eps)


if __name__ == "__main__":
    d = make(0); a = right(**d)
    r, g = d["rewards"].tolist(), d["groups"].tolist()
    c = [r[i] - sum(r[j] for j in range(9) if g[j] == g[i]) / g.count(g[i]) for i in range(9)]
    sd = (sum(x * x for x in c) / 9) ** 0.5
    assert all(abs(float(a[i]) - c[i] / sd) < 1e-4 for i in range(9)) and float(a[d["groups"] == 1].abs().max()) < 1e-6
    print("ok", a)
