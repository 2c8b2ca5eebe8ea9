"""ROC-AUC with the pairs across ranks. The number of (positive, negative) pairs won is summed over all ordered pairs of RANKS, because a positive of rank 0 must also beat the negatives of rank 3; ranks with one class only are legal. Ties count one half (Mann-Whitney)."""
import torch
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of {'score': float tensor [n], 'label': 0/1 tensor [n]}, n may differ, a rank may hold one class only"}
SETTINGS = {}
NOTES = "AUC is not decomposable: no mean of ranks' AUCs is right. Each rank sends its sorted negatives to all (all-gather), counts for its own positives, and counts are summed. nan if one class is missing on all ranks. Twin: single(score, label). Scores are compared exactly, so all ranks need the same dtype."
def make(seed):
    g = torch.Generator().manual_seed(seed)
    ranks = []
    for n, p in ((8, 0.5), (5, 0.0), (3, 1.0), (9, 0.3)):
        y = (torch.rand(n, generator=g) < p).long()
        s = ((torch.randn(n, generator=g) + y) * 4).round() / 4
        ranks.append({"score": s, "label": y})
    return {"ranks": ranks}
def right(ranks):
    negatives = [r["score"][r["label"] == 0].sort().values for r in ranks]           # all-gather
    won = pairs = 0.0
    for r in ranks:                                                                   # each rank, then sum
        pos = r["score"][r["label"] == 1].contiguous()
        for neg in negatives:
            below = torch.searchsorted(neg, pos, right=False)
            upto = torch.searchsorted(neg, pos, right=True)
            won += 0.5 * (below + upto).sum().item()
            pairs += len(pos) * len(neg)
    return won / pairs if pairs else float("nan")
def single(score, label):
    p, n = score[label == 1], score[label == 0]
    d = p[:, None] - n[None]
    return ((d > 0).double() + 0.5 * (d == 0).double()).mean().item()
if __name__ == "__main__":
    for seed in range(30):
        ranks = make(seed)["ranks"]
        s, y = torch.cat([r["score"] for r in ranks]), torch.cat([r["label"] for r in ranks])
        a, b = right(ranks), single(s, y)
        assert abs(a - b) < 1e-12
        flipped = [{"score": -r["score"], "label": r["label"]} for r in ranks]
        assert abs(right(flipped) + a - 1) < 1e-12
    print("ok", a, b, "own-rank AUCs", [single(r["score"], r["label"]) for r in ranks])
