"""Standard deviation over ranks without gathering the values. Each rank reports count, mean and sum of squared deviations
from its own mean; the merge adds the between-rank part delta**2 * n_a * n_b / (n_a + n_b). A rank with no values reports
zeros and changes nothing. Averaging the ranks' deviations would be wrong; this is exact."""
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "list of one tensor per rank, rewards of any number, [n]; may be empty"}
SETTINGS = {}
NOTES = ("Bessel-corrected standard deviation over all values of all ranks; 0.0 for fewer than two values. The single-process "
         "twin is torch.cat(ranks).std().")
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"ranks": [torch.randn(n, generator=g) * s + m for n, s, m in ((7, 1.0, 100.0), (0, 1.0, 0.0), (3, 2.0, 103.0), (1, 1.0, 90.0))]}


def right(ranks):
    n, mean, m2 = 0, 0.0, 0.0
    for values in ranks:
        k = values.numel()
        if k == 0:
            continue
        local_mean = values.double().mean().item()
        local_m2 = (values.double() - local_mean).square().sum().item()
        delta = local_mean - mean
        m2 += local_m2 + delta * delta * n * k / (n + k)
        mean += delta * k / (n + k)
        n += k
    return (m2 / (n - 1)) ** 0.5 if n > 1 else 0.0


if __name__ == "__main__":
    data = make(0)
    print(right(**data), torch.cat(data["ranks"]).double().std().item())
    assert abs(right(**data) - torch.cat(data["ranks"]).double().std().item()) < 1e-9
