"""DoRA with the norm of the adapted weight as a constant of the gradient. Liu et al. 2024 (arXiv:2402.09353) section 4.3, PEFT use_dora.
The adapted weight is magnitude * (W + scaling * B A) / norm(W + scaling * B A) with one norm per output row. The paper treats the norm as a constant in back-propagation to save memory; so the gradient of A and B
is deliberately not the derivative of the output. The magnitude starts at the row norms of W, so the layer starts as the base layer."""
import torch

FAMILY = "adapters, merging and low precision"
KIND = "adapter"
INPUTS = {"base": "frozen torch.nn.Linear to be adapted"}
SETTINGS = {"r": "rank, 3", "alpha": "12; the adapter is scaled with alpha / r"}
NOTES = ("returns a module with trainable lora_A [r, in], lora_B [out, r] (zeros at the start) and magnitude [out]; at creation the output equals that of the base layer. The row norm is detached: finite differences of the output with "
         "respect to A and B do not agree with the gradient, those with respect to the magnitude do. The base is frozen and unchanged. At the start lora_A has no gradient, since lora_B is zero.")


class Dora(torch.nn.Module):
    def __init__(self, base, r, alpha):
        super().__init__()
        self.base, self.scaling = base, alpha / r
        for p in base.parameters():
            p.requires_grad_(False)
        self.lora_A = torch.nn.Parameter(torch.randn(r, base.in_features) / base.in_features ** 0.5)
        self.lora_B = torch.nn.Parameter(torch.zeros(base.out_features, r))
        self.magnitude = torch.nn.Parameter(base.weight.detach().norm(dim=1))

    def forward(self, x):
        norm = (self.base.weight + self.scaling * self.lora_B @ self.lora_A).norm(dim=1).detach()
        scale = self.magnitude / norm
        plain = x @ self.base.weight.T
        # base output + correction, as in PEFT
        return self.base(x) + (scale - 1) * plain + scale * (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


def make(seed):
    torch.manual_seed(seed)
    return {"base": torch.nn.Linear(10, 8)}


def right(base, r=3, alpha=12):
    return Dora(base, r, alpha)


if __name__ == "__main__":
    case = make(0)
    m = right(**case)
    x = torch.randn(5, 10)
    assert torch.allclose(m(x), case["base"](x), atol=1e-6)
    with torch.no_grad():
        m.lora_B.normal_(std=0.3)
        m.magnitude.mul_(1.1)
    w = m.base.weight + m.scaling * m.lora_B @ m.lora_A
    slow = torch.stack([torch.stack([m.magnitude[o] * (x[i] * w[o]).sum() / w[o].detach().norm() for o in range(8)]) for i in range(5)]) + m.base.bias
    ps = [m.lora_A, m.lora_B, m.magnitude]
    a, b = torch.autograd.grad(m(x).pow(2).sum(), ps), torch.autograd.grad(slow.pow(2).sum(), ps)
    print("output difference", (m(x) - slow).abs().max().item(), "gradient norms", [g.norm().item() for g in a])
    assert torch.allclose(m(x), slow, atol=1e-4) and all(torch.allclose(p, q, atol=1e-2, rtol=1e-4) for p, q in zip(a, b))
