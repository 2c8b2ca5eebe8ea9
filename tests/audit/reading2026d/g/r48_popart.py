"""PopArt (van Hasselt et al. 2016). When the running mean and deviation of returns change, the value head's weight and bias are REWRITTEN outside the optimiser so that unnormalised outputs stay the same."""
FAMILY = "value"
KIND = "state"
INPUTS = {"returns": "stream of return batches", "h": "features, [rows, 8]"}
SETTINGS = {"beta": "step of the moving moments, 0.1"}
NOTES = "Saved: head, mean, second moment (buffers). The rewrite preserves outputs exactly up to rounding; optimiser moments are not rescaled, as in the paper."
import torch
import torch.nn as nn


class PopArt(nn.Module):
    def __init__(self, width, beta):
        super().__init__()
        self.head = nn.Linear(width, 1)
        self.beta = beta
        self.register_buffer("mu", torch.zeros(1)); self.register_buffer("nu", torch.ones(1))

    def sigma(self):
        return (self.nu - self.mu ** 2).clamp(min=1e-4).sqrt()

    def forward(self, h):
        return self.sigma() * self.head(h) + self.mu

    @torch.no_grad()
    def update(self, returns):
        mu, sigma = self.mu.clone(), self.sigma()
        self.mu.lerp_(returns.mean().view(1), self.beta)
        self.nu.lerp_(returns.square().mean().view(1), self.beta)
        self.head.weight.mul_(sigma / self.sigma())
        self.head.bias.mul_(sigma).add_(mu - self.mu).div_(self.sigma())

    def loss(self, h, returns):
        return ((returns - self.mu) / self.sigma() - self.head(h)[:, 0]).square().mean()


def make(seed):
    torch.manual_seed(seed)
    return {"returns": [50 + 10 * torch.randn(32) for _ in range(5)], "h": torch.randn(32, 8)}


def right(beta=0.1, width=8):
    return PopArt(width, beta)


if __name__ == "__main__":
    b = make(0); m = right()
    for r in b["returns"]:
        before = m(b["h"]).detach(); m.update(r)
        assert torch.allclose(before, m(b["h"]), atol=1e-3)
    m.loss(b["h"], b["returns"][0]).backward()
    n = right(); n.load_state_dict(m.state_dict())
    assert m.head.weight.grad.norm() > 0 and torch.equal(n(b["h"]), m(b["h"])) and m.mu.item() > 15
    print("mean", m.mu.item(), "sigma", m.sigma().item(), "grad", m.head.weight.grad.norm().item())
