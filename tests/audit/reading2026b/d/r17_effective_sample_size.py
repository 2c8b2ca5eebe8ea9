"""A logged ratio of importance weights that no rank can compute from its own share.
Effective sample size: (sum of w)^2 / sum of w^2 over all rows of all ranks, divided by the number of rows. The ranks add
log-sum-exp terms, since weights of whole sequences overflow when they are exponentiated. The value
does not change if all weights are multiplied by one constant."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'metrics'
KIND = 'metric over ranks'
INPUTS = {
    'parts': 'list of per-rank dicts: log_ratio [rows, time] (log pi - log mu per token) and mask [rows, time]',
}
SETTINGS = {}
NOTES = (
    'Effective sample size of the sequence weights w = exp(sum of masked log ratios), as a share of '
    'all rows, between 1/rows and 1. single(...) computes it in double precision on one process. '
)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    parts = []
    for rows in (3, 5, 4):
        mask = (torch.arange(50)[None] < torch.randint(20, 51, (rows, 1), generator=g)).float()
        drift = 100.0 / mask.sum(1, keepdim=True)             # each sequence is about exp(100) times likelier
        parts.append({"log_ratio": torch.randn(rows, 50, generator=g) * 0.1 + drift, "mask": mask})
    return {"parts": parts}


def right(parts):
    one, two, rows = [], [], 0
    for p in parts:
        log_w = (p["log_ratio"] * p["mask"]).sum(1)
        one.append(torch.logsumexp(log_w, 0))
        two.append(torch.logsumexp(2 * log_w, 0))
        rows += len(log_w)
    total = 2 * torch.logsumexp(torch.stack(one), 0) - torch.logsumexp(torch.stack(two), 0)
    return float(total.exp()) / rows


def single(parts):
    w = torch.cat([(p["log_ratio"].double() * p["mask"]).sum(1) for p in parts])
    w = (w - w.max()).exp()
    return float(w.sum() ** 2 / w.square().sum()) / len(w)


if __name__ == "__main__":
    d = make(0)
    raw = torch.cat([(p["log_ratio"] * p["mask"]).sum(1) for p in d["parts"]])
    print("over ranks", right(**d), "single process", single(**d), "largest weight in float32", raw.max().exp().item())
    assert abs(right(**d) - single(**d)) < 1e-3 and 1 / 12 - 1e-6 <= right(**d) <= 1
