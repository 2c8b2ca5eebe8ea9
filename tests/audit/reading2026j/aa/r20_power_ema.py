"""Average of weights with the power-function profile of EDM2 (Karras et al. 2024): beta_t = (1 - 1/t) ** (gamma + 1), so the first update has beta 0 and wipes the initial weights, and the decay grows forever.
The number of updates is part of the state. Buffers are copied and not averaged (integers must be; running statistics follow the live model)."""
FAMILY = "optimizers and updates"
KIND = "state"
INPUTS = {"model": "the live torch module; its parameters change between the updates", "track": "list of parameter snapshots to walk through (lists of tensors), for the check"}
SETTINGS = {"gamma": "exponent of the profile, 6.94 (relative width about 0.10)"}
NOTES = ("right(model) returns an object with update(), copy_to(other), state_dict(), load_state_dict(). The average is in float32 even for a half-precision model; copy_to rounds. After n updates snapshot t has a weight proportional (for large t) to t ** gamma; the weights sum to 1 and the initial weights have none. "
         "Resume without the counter would give a wrong decay: load_state_dict restores it. Parameters that are shared are averaged once. copy_to before the first update gives the initial weights.")
import copy
import torch
from torch import nn


class PowerEMA:
    def __init__(self, model, gamma):
        self.model, self.gamma, self.t = model, gamma, 0
        self.mean = {n: p.detach().float().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self):
        self.t += 1
        beta = (1.0 - 1.0 / self.t) ** (self.gamma + 1.0)
        for n, p in self.model.named_parameters():
            self.mean[n].lerp_(p.detach().float(), 1.0 - beta)

    @torch.no_grad()
    def copy_to(self, other):
        for n, p in other.named_parameters():
            p.copy_(self.mean[n].to(p.dtype))
        live = dict(self.model.named_buffers())
        for n, b in other.named_buffers():
            b.copy_(live[n])
        return other

    def state_dict(self):
        return {"t": self.t, "gamma": self.gamma, "mean": {n: v.clone() for n, v in self.mean.items()}}

    def load_state_dict(self, state):
        if state["mean"].keys() != self.mean.keys():
            raise ValueError("other parameters")
        self.t, self.gamma = state["t"], state["gamma"]
        self.mean = {n: v.clone() for n, v in state["mean"].items()}


def right(model, gamma=6.94):
    return PowerEMA(model, gamma)


def make(seed, steps=12):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    return {"model": model, "track": [[torch.randn_like(p) for p in model.parameters()] for _ in range(steps)]}


def _walk(model, snapshot):
    with torch.no_grad():
        for p, v in zip(model.parameters(), snapshot):
            p.copy_(v)
    model.train()
    model(torch.randn(4, 5))                        # moves the running statistics


if __name__ == "__main__":
    c = make(0)
    model, track = c["model"], c["track"]
    ema = right(model)
    for k, snap in enumerate(track):
        _walk(model, snap)
        ema.update()
        if k == 4:
            saved, kept = copy.deepcopy(ema.state_dict()), copy.deepcopy(model.state_dict())
    n = len(track)
    weights = []
    for t in range(1, n + 1):                       # explicit: (1 - beta_t) * product of the later betas
        w = 1 - (1 - 1 / t) ** 7.94
        for s in range(t + 1, n + 1):
            w *= (1 - 1 / s) ** 7.94
        weights.append(w)
        assert abs(w - (t ** 7.94 - (t - 1) ** 7.94) / n ** 7.94) < 1e-12      # telescopes
    assert abs(sum(weights) - 1) < 1e-12
    for i, v in enumerate(ema.mean.values()):
        want = sum(w * s[i] for w, s in zip(weights, track))
        assert torch.allclose(v, want, atol=1e-5)
    other = ema.copy_to(copy.deepcopy(model))
    assert torch.equal(other[1].running_mean, model[1].running_mean) and int(other[1].num_batches_tracked) == n
    x = torch.randn(3, 5)
    assert not torch.allclose(other.eval()(x), model.eval()(x))
    again = copy.deepcopy(model)                    # resume after five updates
    again.load_state_dict(kept)
    resumed = right(again)
    resumed.load_state_dict(saved)
    for snap in track[5:]:
        _walk(again, snap)
        resumed.update()
    assert all(torch.allclose(resumed.mean[k], ema.mean[k], atol=1e-6) for k in ema.mean)
    print("ok weights", [round(w, 4) for w in weights])
