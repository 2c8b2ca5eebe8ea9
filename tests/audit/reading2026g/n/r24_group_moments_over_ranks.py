"""Group advantages where the answers to one prompt lie on different ranks. Each rank sends (count, mean, M2) per prompt and these are merged by Chan's formula, so a rank that holds one answer still contributes; averaging the ranks' standard deviations would be wrong (Chan et al. 1979; GRPO)."""
import torch
FAMILY = "sharding"
KIND = "advantages"
INPUTS = {"rewards": "reward of each answer, [answers]", "groups": "prompt number of each answer, [answers]", "ranks": "rank that holds each answer, [answers]"}
SETTINGS = {"eps": "1e-6, added to the standard deviation"}
NOTES = "(reward - mean) / (unbiased std + eps) per prompt over all ranks. Prompts with one answer or equal rewards get 0. Result is in the order of the input. Computed in double, returned in the type of rewards."
def make(seed):
    g = torch.Generator().manual_seed(seed); n = 24
    return {"rewards": torch.randn(n, generator=g) + 100, "groups": torch.arange(n) % 4, "ranks": torch.randint(0, 3, (n,), generator=g)}

def right(rewards, groups, ranks, eps=1e-6):
    x = rewards.double(); G = int(groups.max()) + 1
    n = torch.zeros(G, dtype=torch.double); mean, m2 = n.clone(), n.clone()
    for r in ranks.unique():
        at = ranks == r; own = groups[at]
        c = torch.zeros_like(n).index_add_(0, own, torch.ones_like(x[at]))
        mu = torch.zeros_like(n).index_add_(0, own, x[at]) / c.clamp(min=1)
        s = torch.zeros_like(n).index_add_(0, own, (x[at] - mu[own]) ** 2)
        tot = n + c; gap = mu - mean; share = c / tot.clamp(min=1)
        m2 = m2 + s + gap ** 2 * n * share
        mean = mean + gap * share; n = tot
    std = (m2 / (n - 1).clamp(min=1)).sqrt()
    return ((x - mean[groups]) / (std[groups] + eps)).to(rewards.dtype)

if __name__ == "__main__":
    for seed in range(20):
        d = make(seed); a = right(**d)
        for k in range(4):
            x = d["rewards"][d["groups"] == k].double(); assert torch.allclose(a[d["groups"] == k].double(), (x - x.mean()) / (x.std() + 1e-6), atol=1e-5)
    print(a[:6], right(torch.tensor([5.]), torch.tensor([0]), torch.tensor([1])))
