"""DoRA (Liu et al. 2024, arXiv 2402.09353, section 4.3; PEFT): the column norm of W + BA is treated as a constant in the backward pass, and the base output is scaled by mag/norm - 1."""
import torch, torch.nn as nn
FAMILY = "adapters"
KIND = "adapter"
INPUTS = {"weight": "frozen base weight, [out, in]", "bias": "frozen base bias, [out]", "A": "initial LoRA A, [rank, in]", "B": "LoRA B, [out, rank]", "x": "tokens, [n, in]"}
SETTINGS = {"scaling": "LoRA scaling, 2.0"}
NOTES = ("Wraps a linear layer with DoRA: y = mag * (V x) / ||V|| + bias with V = W + scaling * B A, ||V|| the norm of each row of V in the layout [out, in] (one number per output), mag a trained vector that starts as the row norm of W. "
         "||V|| is detached: its gradient is dropped on purpose as in the paper, so the gradients of A and B differ from those of the exact function. The bias is not scaled. Computed as base(x) + (mag/||V|| - 1) * (W x) + mag/||V|| * scaling * B A x. Trained: A, B, mag. The builder returns a module with forward(x).")

class DoRA(nn.Module):
    def __init__(self, weight, bias, A, B, scaling):
        super().__init__()
        self.register_buffer("weight", weight.clone()); self.register_buffer("bias", bias.clone())
        self.A, self.B, self.scaling = nn.Parameter(A.clone()), nn.Parameter(B.clone()), scaling
        self.mag = nn.Parameter(weight.norm(dim=1))
    def forward(self, x):
        norm = (self.weight + self.scaling * self.B @ self.A).norm(dim=1).detach()
        c = self.mag / norm
        wx = x @ self.weight.T
        return wx + self.bias + (c - 1) * wx + c * self.scaling * ((x @ self.A.T) @ self.B.T)

def make(seed):
    torch.manual_seed(seed)
    return {"weight": torch.randn(7, 5), "bias": torch.randn(7), "A": torch.randn(3, 5), "B": 0.3 * torch.randn(7, 3), "x": torch.randn(6, 5)}

def right(weight, bias, A, B, scaling=2.0):
    return DoRA(weight, bias, A, B, scaling)

if __name__ == "__main__":
    d = make(0); x = d.pop("x"); m = right(**d); y = m(x); (y ** 2).sum().backward()
    A, B, mag = (t.detach().clone().requires_grad_() for t in (d["A"], d["B"], d["weight"].norm(dim=1)))
    V = d["weight"] + 2.0 * B @ A; const = V.norm(dim=1).detach()
    z = torch.stack([torch.stack([mag[o] * (V[o] @ v) / const[o] + d["bias"][o] for o in range(7)]) for v in x]); (z ** 2).sum().backward()
    print("output", (y - z).abs().max().item(), "grads", [(p.grad - q.grad).abs().max().item() for p, q in ((m.A, A), (m.B, B), (m.mag, mag))])
    assert torch.allclose(y, z, atol=1e-4) and torch.allclose(m.A.grad, A.grad, atol=1e-2) and torch.allclose(m.B.grad, B.grad, atol=1e-2)
    z0 = right(**{**d, "B": torch.zeros(7, 3)})(x); assert torch.allclose(z0, x @ d["weight"].T + d["bias"], atol=1e-5)
