"""PiSSA (Meng et al. 2024, arXiv 2404.02948; init_lora_weights="pissa" in PEFT): A and B start as the leading singular part of the weight, and the frozen base weight is changed to the remainder."""
import torch, torch.nn as nn
FAMILY = "adapters"
KIND = "adapter"
INPUTS = {"weight": "pretrained weight, [out, in]", "x": "tokens, [n, in]"}
SETTINGS = {"rank": "rank of the adapter, 3", "scaling": "LoRA scaling alpha/rank, 2.0"}
NOTES = ("Wraps a linear layer (no bias). W = U S V^T; with the leading `rank` singular values divided by scaling: A = sqrt(S_r/scaling) V_r^T, B = U_r sqrt(S_r/scaling). The frozen base becomes W - scaling * B A. At the start the output is that of the pretrained weight although neither A nor B is zero; both get a gradient from the first step. "
         "Only A and B are trained, the principal part, while the frozen remainder differs from the pretrained weight: an adapter saved as A and B alone must not be put on the original weight. forward(x) = x base^T + scaling * x A^T B^T.")

class PiSSA(nn.Module):
    def __init__(self, weight, rank, scaling):
        super().__init__()
        U, S, Vh = torch.linalg.svd(weight, full_matrices=False)
        root = (S[:rank] / scaling).sqrt()
        A, B = root[:, None] * Vh[:rank], U[:, :rank] * root
        self.A, self.B, self.scaling = nn.Parameter(A), nn.Parameter(B), scaling
        self.register_buffer("base", weight - scaling * B @ A)
    def forward(self, x):
        return x @ self.base.T + self.scaling * (x @ self.A.T) @ self.B.T

def make(seed):
    torch.manual_seed(seed)
    return {"weight": torch.randn(8, 6), "x": torch.randn(5, 6)}

def right(weight, rank=3, scaling=2.0):
    return PiSSA(weight, rank, scaling)

if __name__ == "__main__":
    d = make(0); m = right(d["weight"]); y = m(d["x"]); y.pow(2).sum().backward()
    s, sb = torch.linalg.svdvals(d["weight"]), torch.linalg.svdvals(m.base)
    print("output error at start", (y - d["x"] @ d["weight"].T).abs().max().item(), "grads", m.A.grad.norm().item(), m.B.grad.norm().item(), "singular values of base", sb.tolist())
    assert torch.allclose(y, d["x"] @ d["weight"].T, atol=1e-4) and torch.allclose(sb[:3], s[3:], atol=1e-4) and m.A.grad.norm() > 0
