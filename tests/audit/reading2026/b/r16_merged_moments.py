"""Standard deviation over ranks from merged counts, means and squared deviations; ranks without tokens send zeros and a mean of 0 that is not averaged in.
Right: Chan's merge of moments; exact for unequal counts and stable for a large common offset, unlike mean of squares minus square of mean."""
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "one dict for each rank: advantages [tokens], mask [tokens]; a rank may have no token on"}
SETTINGS = {}
NOTES = "Unbiased standard deviation of all masked-in values of all ranks."


def right(ranks):
    n, mean, m2 = 0.0, 0.0, 0.0
    for r in ranks:
        x = r["advantages"][r["mask"].bool()].double()
        k = float(len(x))
        if k == 0:
            continue
        mu = float(x.mean())
        s = float(((x - mu) ** 2).sum())
        d = mu - mean
        tot = n + k
        m2 += s + d * d * n * k / tot
        mean += d * k / tot
        n = tot
    return (m2 / (n - 1)) ** 0.5


def twin(ranks):
    """One process."""
    return float(torch.cat([r["advantages"][r["mask"].bool()] for r in ranks]).double().std())


def make(seed):
    g = torch.Generator().manual_seed(seed)
    ranks = []
    for k, n in enumerate((7, 30, 12, 5)):
        mask = (torch.rand(n, generator=g) < 0.6).float()
        if k == 3:
            mask.zero_()
        ranks.append({"advantages": 1000 + torch.randn(n, generator=g) * (k + 1), "mask": mask})
    return {"ranks": ranks}


if __name__ == "__main__":
    x = make(0)
    print("merged", right(**x), "one process", twin(**x))
    assert abs(right(**x) - twin(**x)) < 1e-6
