"""Effective sample size of importance weights over ranks. First the MAX of the log-ratios is reduced, then two sums are taken relative to it; ESS = (sum w)^2 / sum w^2 is computed without ever forming the weights, which would overflow (log-ratios of whole sequences reach hundreds). Kong 1992; used to watch off-policy RL."""
import torch
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of 1-d float tensors of log importance ratios, -inf allowed for weight 0, any length, also empty"}
SETTINGS = {}
NOTES = "Share ESS/N in [1/N, 1] over all entries of all ranks, those of weight 0 counted in N. Unchanged if a constant is added on ALL ranks, but each rank must use the same shift: a shift by the rank's own max would be wrong. 0.0 if all weights are 0 or there are none. Not additive over ranks. Twin: single(logratios)."
def make(seed):
    g = torch.Generator().manual_seed(seed)
    r = [torch.randn(n, generator=g) * 2 + m for n, m in ((6, 800.0), (0, 0.0), (3, 803.0), (11, 801.0))]
    r[3][0] = float("-inf")
    return {"ranks": r}
def right(ranks):
    top = max((x.max().item() for x in ranks if x.numel()), default=float("-inf"))         # all-reduce, max
    if top == float("-inf"):
        return 0.0
    parts = torch.stack([torch.stack([(x.double() - top).exp().sum(), (2 * (x.double() - top)).exp().sum(), torch.tensor(float(x.numel())).double()]) for x in ranks])
    s1, s2, n = parts.sum(0).tolist()                                                       # all-reduce, sum
    return s1 * s1 / s2 / n
def single(logratios):
    w = torch.softmax(logratios.double(), 0)
    return (1 / w.square().sum() / len(w)).item()
if __name__ == "__main__":
    for seed in range(20):
        ranks = make(seed)["ranks"]
        a, b = right(ranks), single(torch.cat(ranks))
        assert abs(a - b) < 1e-10 and 1 / 20 - 1e-12 <= a <= 1
        assert abs(right([x - 500 for x in ranks]) - a) < 1e-4          # float32 rounding of the shifted inputs
    assert abs(right([torch.zeros(3), torch.zeros(5)]) - 1) < 1e-12 and right([torch.tensor([])]) == 0.0
    print("ok", a, b, "mean of ranks", sum(right([x]) for x in ranks if len(x)) / 3, "naive weights", torch.cat(ranks).exp().max().item())
