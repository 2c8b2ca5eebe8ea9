"""Right: the critic's explained variance over ranks from (count, mean, squared deviation) triples, joined pairwise with the term delta^2 * n1 * n2 / (n1 + n2). It is not the mean of the ranks' explained variances, and no rank ever sees the global mean before the end."""
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "per rank {returns: [rows, time], values: critic's predictions, [rows, time], mask: 1 on trained tokens, [rows, time]}; a rank may have no trained token"}
SETTINGS = {}
NOTES = "1 - var(returns - values) / var(returns), population variance over the trained tokens of all ranks. Joined in the manner of Chan et al.; ranks with no token are passed over."

def make(seed):
    g = torch.Generator().manual_seed(seed)
    ranks = []
    for shift, rows in ((0.0, 3), (4.0, 2), (-2.0, 4), (1.0, 1)):
        returns = shift + torch.randn(rows, 6, generator=g)
        mask = (torch.rand(rows, 6, generator=g) < 0.7).float() * (rows > 1)
        ranks.append({"returns": returns, "values": returns + 0.8 * torch.randn(rows, 6, generator=g), "mask": mask})
    return {"ranks": ranks}

def triple(x):
    return len(x), float(x.mean()), float(((x - x.mean()) ** 2).sum())

def join(a, b):
    n, delta = a[0] + b[0], b[1] - a[1]
    return n, a[1] + delta * b[0] / n, a[2] + b[2] + delta ** 2 * a[0] * b[0] / n

def right(ranks):
    total, error = None, None
    for r in ranks:
        keep = r["mask"] > 0
        if not keep.any():
            continue
        t, e = triple(r["returns"][keep]), triple((r["returns"] - r["values"])[keep])
        total, error = (t, e) if total is None else (join(total, t), join(error, e))
    return 1 - error[2] / total[2]

def twin(ranks):
    """Single process: all trained tokens in one vector."""
    returns = torch.cat([r["returns"][r["mask"] > 0] for r in ranks])
    values = torch.cat([r["values"][r["mask"] > 0] for r in ranks])
    return float(1 - (returns - values).var(unbiased=False) / returns.var(unbiased=False))

if __name__ == "__main__":
    made = make(0)
    print("right", right(**made), "single process", twin(**made))
    assert abs(right(**made) - twin(**made)) < 1e-5
