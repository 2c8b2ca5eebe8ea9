"""Perplexity over ranks from two sums. The exponential comes after the reduction and the denominator is the number of tokens of ALL ranks; a rank without any trained token takes part with (0, 0). The mean of the ranks' perplexities or losses would be wrong."""
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"ranks": "list, per rank {'nll': [rows, time] negative log-likelihoods, 'mask': [rows, time], 1 where scored}; shapes differ by rank"}
SETTINGS = {}
NOTES = ("exp(sum of masked nll over all ranks / number of masked tokens over all ranks). Entries of nll outside of the mask may be anything, even nan or inf (torch.where, not a product). Sums in float64. A rank may have no token; all ranks together need at least one. Any number of ranks. Twin: single(whole).")
import torch


def local(r):
    m = r["mask"].bool()
    return torch.stack([torch.where(m, r["nll"], torch.zeros_like(r["nll"])).double().sum(), m.sum().double()])


def right(ranks):
    total = sum(local(r) for r in ranks)                  # all_reduce(SUM) of a vector of two
    return torch.exp(total[0] / total[1]).item()


def single(whole):
    return torch.exp(torch.cat([r["nll"][r["mask"].bool()] for r in whole]).double().mean()).item()


def make(seed):
    g = torch.Generator().manual_seed(seed)
    ranks = []
    for r in range(4):
        n, t = 2 + r, 5 + 3 * r
        x = torch.rand(n, t, generator=g) * (1 + 2 * r)
        m = (torch.rand(n, t, generator=g) < 0.6).long() * (r != 2)
        ranks.append({"nll": torch.where(m.bool(), x, torch.full_like(x, float("nan"))), "mask": m})
    return {"ranks": ranks}


if __name__ == "__main__":
    for s in range(10):
        ranks = make(s)["ranks"]
        a, b = right(ranks), single(ranks)
        assert abs(a - b) < 1e-9 * b
    naive = sum(single([r]) for r in ranks if r["mask"].any()) / 3
    assert abs(naive - a) > 1e-3
    print("over ranks", a, "one process", b, "mean of perplexities (wrong)", naive)
