"""Power-function EMA of EDM2 (Karras et al. 2024, arXiv:2312.02696): the decay is (1-1/t)^(gamma+1), grows with the step and is exactly 0 in the first update, so the initial weights have no influence. Two averages with different widths are kept."""
import torch
from torch import nn

FAMILY = "updates"
KIND = "update"
INPUTS = {"model": "module with model.net (trained) and model.ema (a list with one copy of net per gamma)", "optimizer": "Adam over model.net", "batches": "list of dicts x [n, 3], y [n, 1]; one step per batch"}
SETTINGS = {"gammas": "exponents of the two averages, 16.97 (width 0.05) and 6.94 (width 0.10)"}
NOTES = ("Each batch: one Adam step of net on the mean squared error; then, with t = number of steps done so far including this one, each average becomes beta*ema + (1-beta)*net with beta = (1-1/t)**(gamma+1). beta is 0 at t = 1. "
         "After T steps the average weighs the weights after step t proportionally to t**gamma approximately (exactly: (1-beta_t) * product of later betas; the weights sum to 1). The averages get no gradient and never feed back into net.")


class Holder(nn.Module):
    def __init__(self, n):
        super().__init__()
        mk = lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.net = mk()
        self.ema = nn.ModuleList([mk().requires_grad_(False) for _ in range(n)])


def make(seed):
    torch.manual_seed(seed)
    m = Holder(2)
    return {"model": m, "optimizer": torch.optim.Adam(m.net.parameters(), lr=0.02), "batches": [{"x": torch.randn(6, 3), "y": torch.randn(6, 1)} for _ in range(12)]}


def right(model, optimizer, batches, gammas=(16.97, 6.94)):
    for t, b in enumerate(batches, 1):
        optimizer.zero_grad()
        ((model.net(b["x"]) - b["y"]) ** 2).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for gamma, avg in zip(gammas, model.ema):
                beta = (1 - 1 / t) ** (gamma + 1)
                for p, q in zip(model.net.parameters(), avg.parameters()):
                    q.lerp_(p, 1 - beta)


if __name__ == "__main__":
    i = make(0); snaps = []
    step = i["optimizer"].step
    def rec(*a, **k):
        r = step(*a, **k); snaps.append(i["model"].net[0].weight.detach().double().clone()); return r
    i["optimizer"].step = rec
    right(**i)
    for g, avg in zip((16.97, 6.94), i["model"].ema):
        w = []
        for t in range(1, 13):
            x = 1 - (1 - 1 / t) ** (g + 1)
            for s in range(t + 1, 13):
                x *= (1 - 1 / s) ** (g + 1)
            w.append(x)
        ref = sum(a * b for a, b in zip(w, snaps))
        print("sum of weights", sum(w), "error", (ref - avg[0].weight).abs().max().item(), "moved", (avg[0].weight - snaps[0]).norm().item())
