"""Expected calibration error over ranks. Each rank sends signed bin sums (count, confidence, hits) and the absolute value is taken once after the sum; a rank that is over-confident and one that is under-confident in the same bin cancel, as they should (Guo et al. 2017)."""
import torch
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of {'confidence': float tensor [n] in (0, 1], 'correct': 0/1 tensor [n]}, n may differ or be 0"}
SETTINGS = {"bins": "equal-width bins, open on the left and closed on the right, 10"}
NOTES = "Never larger than the weighted mean of the ranks' ECEs. Confidence exactly on an edge belongs to the bin below. Empty bins add 0. Edges are fixed, not quantiles, so that bins agree between ranks. nan with no samples at all. Twin: single(confidence, correct)."
def make(seed):
    g = torch.Generator().manual_seed(seed)
    ranks = []
    for n, shift in ((20, 0.2), (0, 0.0), (7, -0.3), (33, 0.0)):
        c = 1 - torch.rand(n, generator=g, dtype=torch.float64)
        ranks.append({"confidence": c, "correct": (torch.rand(n, generator=g) < c + shift).long()})
    return {"ranks": ranks}
def _sums(confidence, correct, bins):
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]
    at = torch.bucketize(confidence.double(), edges)
    out = torch.zeros(3, bins, dtype=torch.float64)
    for k, v in enumerate((torch.ones_like(confidence), confidence, correct)):
        out[k].index_add_(0, at, v.double())
    return out
def right(ranks, bins=10):
    total = torch.stack([_sums(r["confidence"], r["correct"], bins) for r in ranks]).sum(0)    # all-reduce
    # n_b/N * |hits/n_b - conf/n_b| = |hits - conf| / N: no division by an empty bin
    return ((total[2] - total[1]).abs().sum() / total[0].sum()).item()
def single(confidence, correct, bins=10):
    e = 0.0
    for b in range(bins):
        m = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        if m.any():
            e += m.double().mean().item() * abs(correct[m].double().mean().item() - confidence[m].mean().item())
    return e
if __name__ == "__main__":
    for seed in range(20):
        ranks = make(seed)["ranks"]
        c, y = torch.cat([r["confidence"] for r in ranks]), torch.cat([r["correct"] for r in ranks])
        a, b = right(ranks), single(c, y)
        mean = sum(len(r["correct"]) * right([r]) for r in ranks if len(r["correct"])) / len(y)
        assert abs(a - b) < 1e-12 and a <= mean + 1e-12
    print("ok", a, b, "weighted mean of ranks' ECE", mean)
