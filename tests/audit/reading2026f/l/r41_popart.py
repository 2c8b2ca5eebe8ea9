"""PopArt value head. When the running mean and deviation of returns move, the LAST LAYER is rewritten in place so that its unnormalised outputs stay what they were: parameters change outside the
optimizer on purpose. The statistics are buffers in float64 and are part of the saved state."""
FAMILY = "state"
KIND = "state"
INPUTS = {"hidden": "features, [rows, 8]", "returns": "raw returns, [rows]", "width": "features of the head, 8"}
SETTINGS = {"beta": "step of the moving statistics, 0.05", "floor": "smallest deviation, 1e-4"}
NOTES = ("right(width) makes the module. update(returns) leaves forward(hidden) unchanged up to rounding; normalised(hidden) does change. Saved and loaded by state_dict; "
         "mu and nu start at 0 and 1 and are not bias-corrected. An optimizer with momentum keeps its moments unscaled, as in the paper.")
import torch
import torch.nn as nn


class PopArt(nn.Module):
    def __init__(self, width, beta, floor):
        super().__init__()
        self.linear = nn.Linear(width, 1)
        self.beta, self.floor = beta, floor
        self.register_buffer("mu", torch.zeros((), dtype=torch.float64))
        self.register_buffer("nu", torch.ones((), dtype=torch.float64))

    def sigma(self):
        return (self.nu - self.mu ** 2).clamp(min=self.floor ** 2).sqrt()

    def normalised(self, hidden):
        return self.linear(hidden).squeeze(-1)

    def forward(self, hidden):
        return self.normalised(hidden) * self.sigma().float() + self.mu.float()

    def targets(self, returns):
        return ((returns.double() - self.mu) / self.sigma()).float()

    @torch.no_grad()
    def update(self, returns):
        mu, sigma = self.mu.clone(), self.sigma()
        r = returns.double()
        self.mu.lerp_(r.mean(), self.beta)
        self.nu.lerp_(r.pow(2).mean(), self.beta)
        new = self.sigma()
        self.linear.weight.mul_((sigma / new).float())
        self.linear.bias.copy_(((sigma * self.linear.bias.double() + mu - self.mu) / new).float())


def make(seed):
    torch.manual_seed(seed)
    return {"hidden": torch.randn(9, 8), "returns": 50 + 20 * torch.randn(9), "width": 8}


def right(width=8, beta=0.05, floor=1e-4):
    return PopArt(width, beta, floor)


if __name__ == "__main__":
    d = make(0)
    m = right()
    mu = nu = None
    for k in range(60):
        before = m(d["hidden"])
        m.update(d["returns"] + k)
        gap = float((m(d["hidden"]) - before).abs().max())
        assert gap < 1e-2 and gap < 1e-4 * float(before.abs().max() + 50), gap
        mu = (0.0 if mu is None else mu) * 0.95 + 0.05 * float((d["returns"] + k).double().mean())
    assert abs(mu - float(m.mu)) < 1e-6
    twin = right()
    twin.load_state_dict(m.state_dict())
    assert torch.equal(twin(d["hidden"]), m(d["hidden"])) and torch.equal(twin.targets(d["returns"]), m.targets(d["returns"]))
    (m.normalised(d["hidden"]) - m.targets(d["returns"])).pow(2).mean().backward()
    print("mu %.3f sigma %.3f, last change of outputs %.1e, grad %.4f" % (m.mu, m.sigma(), gap, m.linear.weight.grad.norm()))
