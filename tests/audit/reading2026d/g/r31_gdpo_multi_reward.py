"""GDPO (NVIDIA 2026 style, decoupled normalisation). Each reward column is normalised in its group BEFORE the sum, then the sum is whitened again over the batch; normalising twice is intended, so that rewards of different scale keep their weights."""
FAMILY = "advantages"
KIND = "advantages"
INPUTS = {"rewards": "[rows, kinds of reward]", "groups": "prompt id, [rows]"}
SETTINGS = {"weights": "weight of each kind, (1.0, 0.5)", "eps": "1e-6"}
NOTES = "Group statistics with population standard deviation, then batch whitening; a column constant in its group gives 0 for it. Result is one number per row."
import torch


def make(seed):
    torch.manual_seed(seed)
    return {"rewards": torch.stack([torch.randint(0, 2, (12,)).float(), 100 * torch.rand(12)], 1), "groups": torch.arange(12) % 3}


def right(rewards, groups, weights=(1.0, 0.5), eps=1e-6):
    out = torch.zeros_like(rewards)
    for g in groups.unique():
        x = rewards[groups == g]
        out[groups == g] = (x - x.mean(0)) / (x.std(0, unbiased=False) + eps)
    s = out @ torch.tensor(weights)
    return (s - s.mean()) / (s.std(unbiased=False) + eps)


if __name__ == "__main__":
    b = make(0); a = right(**b)
    scaled = dict(b, rewards=b["rewards"] * torch.tensor([1.0, 0.01]))
    s = []
    for i in range(12):
        v = 0.0
        for k, w in enumerate((1.0, 0.5)):
            o = [b["rewards"][j, k].item() for j in range(12) if b["groups"][j] == b["groups"][i]]
            mu = sum(o) / 4; sd = (sum((x - mu) ** 2 for x in o) / 4) ** .5
            v += w * (b["rewards"][i, k].item() - mu) / (sd + 1e-6)
        s.append(v)
    mu = sum(s) / 12; sd = (sum((x - mu) ** 2 for x in s) / 12) ** .5
    assert max(abs((x - mu) / sd - y) for x, y in zip(s, a.tolist())) < 1e-4 and torch.allclose(a, right(**scaled), atol=1e-3)
    print(a)
