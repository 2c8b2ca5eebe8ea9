"""AUROC over ranks by a padded gather. Lengths are gathered first, scores padded to the longest rank, gathered, and trimmed again, because all_gather needs equal shapes and AUROC cannot be averaged (a rank with one class only has none). Ties count one half (Mann-Whitney); as torchmetrics' gather_all_tensors."""
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"ranks": "list, per rank {'score': [n] floats, 'label': [n] 0/1}; n differs and may be 0; a rank may hold one class only"}
SETTINGS = {}
NOTES = "Area under ROC over all examples of all ranks. Padding values never reach the formula. Mid-ranks for ties. Needs at least one positive and one negative in all. Invariant to any rising transform of the scores, so they need not be probabilities. Twin: single(score, label)."
import torch


def gather(parts):
    lengths = [p.numel() for p in parts]                              # all_gather of lengths
    width = max(lengths)
    padded = torch.stack([torch.nn.functional.pad(p, (0, width - p.numel())) for p in parts])
    return torch.cat([row[:n] for row, n in zip(padded, lengths)])


def single(score, label):
    _, inv, cnt = torch.unique(score, return_inverse=True, return_counts=True)     # sorted
    mid = cnt.cumsum(0).double() - (cnt.double() - 1) / 2
    rank = mid[inv]
    p = label.bool()
    n1, n0 = p.sum().item(), (~p).sum().item()
    return ((rank[p].sum() - n1 * (n1 + 1) / 2) / (n1 * n0)).item()


def right(ranks):
    return single(gather([r["score"] for r in ranks]), gather([r["label"] for r in ranks]))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    ranks = []
    for i, n in enumerate([6, 0, 11, 4]):
        y = (torch.rand(n, generator=g) < 0.5).long() if i != 3 else torch.ones(n, dtype=torch.long)
        if i == 0:
            y[0] = 0
        ranks.append({"score": (torch.randn(n, generator=g) + y).mul(2).round() / 2, "label": y})
    return {"ranks": ranks}


if __name__ == "__main__":
    for s in range(20):
        ranks = make(s)["ranks"]
        a = right(ranks)
        x, y = torch.cat([r["score"] for r in ranks]).tolist(), torch.cat([r["label"] for r in ranks]).tolist()
        w = [(p > q) + 0.5 * (p == q) for p, l in zip(x, y) if l for q, m in zip(x, y) if not m]
        assert abs(a - sum(w) / len(w)) < 1e-12
    print("over ranks", a, "all pairs by a loop", sum(w) / len(w))
