"""Power-function EMA (Karras et al. 2024, EDM2). The decay grows with the step, beta_t = (1 - 1/t)^(gamma+1); it is exactly 0 at t = 1, so the start weights are thrown away without any bias correction."""
FAMILY = "moving averages"
KIND = "state"
INPUTS = {"values": "list of parameter tensors, one per step"}
SETTINGS = {"gamma": "exponent, 6.94 (relative width about 0.10)"}
NOTES = "State: the averaged tensor and the step count t; both must be saved, since the decay depends on t. Weights are proportional to t^gamma for large t."
import torch


class PowerEma:
    def __init__(self, start, gamma):
        self.avg, self.t, self.gamma = start.clone(), 0, gamma

    def update(self, value):
        self.t += 1
        beta = (1 - 1 / self.t) ** (self.gamma + 1)
        self.avg = self.avg * beta + value * (1 - beta)

    def state_dict(self):
        return {"avg": self.avg.clone(), "t": self.t, "gamma": self.gamma}

    def load_state_dict(self, s):
        self.avg, self.t, self.gamma = s["avg"].clone(), s["t"], s["gamma"]


def make(seed):
    torch.manual_seed(seed)
    return {"values": [torch.randn(4, dtype=torch.double) for _ in range(30)]}


def right(start, gamma=6.94):
    return PowerEma(start, gamma)


if __name__ == "__main__":
    v = make(0)["values"]
    a = right(torch.full((4,), 99.0, dtype=torch.double))
    for x in v[:12]:
        a.update(x)
    b = right(torch.zeros(4, dtype=torch.double)); b.load_state_dict(a.state_dict())
    for x in v[12:]:
        a.update(x); b.update(x)
    w = [(t / 30) ** 7.94 - ((t - 1) / 30) ** 7.94 for t in range(1, 31)]
    want = sum(c * x for c, x in zip(w, v))
    assert torch.equal(a.avg, b.avg) and torch.allclose(a.avg, want) and abs(sum(w) - 1) < 1e-12
    print("average", a.avg.tolist())
