"""Adafactor's second-moment decay, which starts at 0 and grows to 1. Shazeer & Stern 2018: beta2_t = 1 - t^(-0.8); T5, PaLM and transformers' Adafactor (decay_rate -0.8).
At t = 1 the factor is exactly 0, so the first statistics are the squared gradient itself and no bias correction is needed afterwards. A schedule that begins with 0 and has no upper limit below 1 looks like a missing default of 0.999."""
import torch
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, counted from 1"}
SETTINGS = {"decay": "exponent, -0.8"}
NOTES = "The decay factor of the running second moment at step t >= 1, in [0, 1). No bias correction is used with it. Non-decreasing in t."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"step": list(range(1, 1001)), "grads": torch.randn(1000, generator=g)}


def right(step, decay=-0.8):
    return 1.0 - step ** decay


if __name__ == "__main__":
    d = make(0)
    v = torch.tensor(123.0)                       # the start value must not matter
    weights = torch.zeros(1000)
    for t in d["step"]:
        b = right(t)
        v = b * v + (1 - b) * d["grads"][t - 1] ** 2
        weights *= b
        weights[t - 1] += 1 - b
    print(right(1), right(2), right(1000), "sum of weights", weights.sum().item(), "second moment", v.item())
    assert right(1) == 0.0 and abs(weights.sum() - 1) < 1e-4 and abs(v - (weights * d["grads"] ** 2).sum()) < 1e-3
