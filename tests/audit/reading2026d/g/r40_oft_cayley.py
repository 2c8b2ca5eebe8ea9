"""Orthogonal fine-tuning (OFT, Qiu et al. 2023). The base weight is MULTIPLIED by a rotation from the Cayley map of a skew matrix; half of the parameter's entries cancel (Q - Q^T) and the norms of the weight never change."""
FAMILY = "adapters"
KIND = "adapter"
INPUTS = {"base": "frozen linear layer", "x": "[rows, in]"}
SETTINGS = {"blocks": "block-diagonal rotation of 3 blocks; must divide the input width"}
NOTES = "Trained: one square matrix per block, zero at the start (rotation = identity). The gradient of the raw matrix is skew by construction. blocks divides in_features."
import torch
import torch.nn as nn
import torch.nn.functional as F


class Oft(nn.Module):
    def __init__(self, base, blocks):
        super().__init__()
        assert base.in_features % blocks == 0
        n = base.in_features // blocks
        self.base = base.requires_grad_(False)
        self.q = nn.Parameter(torch.zeros(blocks, n, n))

    def rotation(self):
        s = self.q - self.q.transpose(1, 2)
        eye = torch.eye(s.shape[-1]).expand_as(s)
        return torch.block_diag(*torch.linalg.solve(eye - s, eye + s))

    def forward(self, x):
        return F.linear(x @ self.rotation(), self.base.weight, self.base.bias)


def make(seed):
    torch.manual_seed(seed)
    return {"base": nn.Linear(12, 10), "x": torch.randn(5, 12)}


def right(base, blocks=3):
    return Oft(base, blocks)


if __name__ == "__main__":
    b = make(0); m = right(b["base"])
    assert torch.allclose(m(b["x"]), b["base"](b["x"]), atol=1e-6)
    opt = torch.optim.SGD([m.q], 0.1)
    for _ in range(5):
        opt.zero_grad(); m(b["x"]).square().mean().backward(); opt.step()
    R = m.rotation(); w = m.base.weight @ R.t()
    assert torch.allclose(R @ R.t(), torch.eye(12), atol=1e-5) and torch.allclose(w.norm(dim=1), m.base.weight.norm(dim=1), atol=1e-5)
    assert m.q.grad.norm() > 0 and (R - torch.eye(12)).norm() > 1e-3 and torch.allclose(m(b["x"]), b["x"] @ w.t() + m.base.bias, atol=1e-5)
    print("distance from identity", (R - torch.eye(12)).norm().item(), "orthogonality error", (R @ R.t() - torch.eye(12)).abs().max().item())
