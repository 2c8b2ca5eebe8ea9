"""Adafactor's second-moment decay 1 - t^-0.8. The decay is 0 at the first step (the zero-initialised state is thrown away) and goes to 1, so no bias correction is needed and none is done; Shazeer & Stern 2018, section 7."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, counted from 0"}
SETTINGS = {"power": "exponent of the decay, 0.8"}
NOTES = ("Returns beta2 for v = beta2 * v + (1 - beta2) * g^2. t = step + 1, beta2(t) = 1 - t ** -power: 0 at the first step, about 0.426 at the second, near 1 late in the run. "
         "Never reaches 1. v is a proper weighted mean of all past g^2 (weights sum to 1) at each step; a bias correction on top would be wrong. No total length.")


def right(step, power=0.8):
    return 1.0 - float(step + 1) ** (-power)


def make(seed):
    import random
    return {"step": random.Random(seed).randrange(10000)}


if __name__ == "__main__":
    import torch
    torch.manual_seed(0)
    g2 = torch.randn(300, dtype=torch.float64).pow(2)
    v, w = 123.0, torch.zeros(300, dtype=torch.float64)          # a senseless start value must not matter
    for t in range(300):
        b = right(t)
        v = b * v + (1 - b) * g2[t].item()
        w *= b
        w[t] += 1 - b
        assert abs(w.sum().item() - 1) < 1e-12
        assert abs(v - (w * g2).sum().item()) < 1e-9
    assert right(0) == 0 and abs(right(1) - (1 - 2 ** -0.8)) < 1e-15 and right(10 ** 6) < 1
    print("beta2 at t = 1, 2, 300:", right(0), right(1), right(299), "v", v)
