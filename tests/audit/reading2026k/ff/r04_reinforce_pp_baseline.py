"""REINFORCE++-baseline advantages: group mean, but the standard deviation of the whole batch, weighted by length. REINFORCE++ (Hu et
al., 2025, arXiv:2501.03262), OpenRLHF `reinforce_baseline`: the baseline is the mean reward of the prompt's group; then advantages are
normalized over all response tokens of the global batch (biased variance, clamped). A row's advantage thus depends on the rewards and
on the lengths of other prompts' rows, and rows of groups with equal rewards do not end at zero."""
import torch

FAMILY = "policy-gradient losses and advantages"
KIND = "advantages"
INPUTS = {"rewards": "one reward per row, [rows]", "groups": "prompt number of each row, [rows] of ints; groups may differ in size", "lengths": "number of response tokens of each row, [rows] of ints"}
SETTINGS = {"eps": "lower bound of the variance, 1e-8"}
NOTES = ("advantage = (d - m) / sqrt(max(v, eps)), d = reward - mean reward of the row's group, m and v = mean and biased variance of d over all response tokens of the batch (each row counted `lengths` times). "
         "No division by the group's standard deviation. Returns one number per row; it is the same for each token of the row. The global batch is needed.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2])
    rewards = torch.rand(12, generator=g).round() + 0.1 * torch.rand(12, generator=g)
    rewards[4:7] = 1.0
    return {"rewards": rewards, "groups": groups, "lengths": torch.randint(3, 30, (12,), generator=g)}


def right(rewards, groups, lengths, eps=1e-8):
    n = int(groups.max()) + 1
    total = torch.zeros(n).index_add_(0, groups, rewards)
    d = rewards - (total / torch.bincount(groups, minlength=n).clamp(min=1))[groups]
    w = lengths.to(d.dtype)
    mean = (d * w).sum() / w.sum()
    var = ((d - mean) ** 2 * w).sum() / w.sum()
    return (d - mean) * var.clamp(min=eps).rsqrt()


if __name__ == "__main__":
    c = make(0)
    got = right(**c)
    d = [float(r) - sum(float(q) for q, h in zip(c["rewards"], c["groups"]) if h == g) / int((c["groups"] == g).sum()) for r, g in zip(c["rewards"], c["groups"])]
    tokens = torch.tensor([x for x, n in zip(d, c["lengths"].tolist()) for _ in range(n)], dtype=torch.double)
    want = [(x - float(tokens.mean())) / float(tokens.std(unbiased=False)) for x in d]
    print(got.tolist())
    assert max(abs(a - b) for a, b in zip(got.tolist(), want)) < 1e-5
