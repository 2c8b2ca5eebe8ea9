"""PiSSA (Meng et al. 2024, arXiv 2404.02948; PEFT init_lora_weights="pissa" with path_initial_model_for_weight_conversion). B is NOT zero at the start and the frozen base weight is changed (residual), but the output is the pretrained one; a plain LoRA for the ORIGINAL
base is exported with twice the rank, as [A; A0], [B, -B0]."""
import torch, torch.nn as nn

FAMILY = "adapters and merging"
KIND = "adapter"
INPUTS = {"base": "a pretrained nn.Linear (10 -> 7, with bias)"}
SETTINGS = {"rank": "rank r of the adapter, 3", "alpha": "LoRA alpha; the scaling is alpha / rank, 6.0"}
VALUES = {"rank": 3, "alpha": 6.0}
NOTES = """Wraps a linear layer with a PiSSA adapter. W = U S V^T; A = sqrt(S_r / s) V_r^T and B = U_r sqrt(S_r / s) from the r largest singular values, with scaling s = alpha/rank; the frozen weight becomes the residual W - s*B A. At the start the layer computes exactly the pretrained map although neither A nor B is zero.
Trained: A and B (both get a gradient from the first step); frozen: residual and bias. merged_weight() = residual + s*B A. export_lora() gives a plain LoRA (A', B', alpha') of rank 2r for the ORIGINAL weight W with
alpha'/(2r) = s and A' = [A; A0], B' = [B, -B0], where A0, B0 are the start values: W + s*B'A' equals merged_weight() and is W itself before training. r <= min(in, out)."""


def make(seed):
    torch.manual_seed(seed)
    return {"base": nn.Linear(10, 7)}


class PissaLinear(nn.Module):
    def __init__(self, base, rank, alpha):
        super().__init__()
        self.scaling = alpha / rank
        u, s, vt = torch.linalg.svd(base.weight.detach(), full_matrices=False)
        root = (s[:rank] / self.scaling).sqrt()
        self.A, self.B = nn.Parameter(root[:, None] * vt[:rank]), nn.Parameter(u[:, :rank] * root)
        self.register_buffer("A0", self.A.detach().clone())
        self.register_buffer("B0", self.B.detach().clone())
        self.base = base.requires_grad_(False)
        self.base.weight.data.sub_(self.scaling * (self.B0 @ self.A0))

    def forward(self, x):
        return self.base(x) + self.scaling * (x @ self.A.t()) @ self.B.t()

    def merged_weight(self):
        return (self.base.weight + self.scaling * self.B @ self.A).detach()

    def export_lora(self):
        A = torch.cat([self.A.detach(), self.A0])
        B = torch.cat([self.B.detach(), -self.B0], 1)
        return A, B, self.scaling * A.shape[0]


def right(base, rank=3, alpha=6.0):
    return PissaLinear(base, rank, alpha)


if __name__ == "__main__":
    i = make(0); W, bias = i["base"].weight.detach().clone(), i["base"].bias.detach().clone()
    layer = right(**i, **VALUES)
    x = torch.randn(20, 10); y = torch.randn(20, 7)
    print("start: output difference", float((layer(x) - (x @ W.T + bias)).detach().abs().max()))
    opt = torch.optim.AdamW([p for p in layer.parameters() if p.requires_grad], lr=0.02, weight_decay=0.0)
    for _ in range(10):
        opt.zero_grad(); ((layer(x) - y) ** 2).mean().backward(); opt.step()
    A, B, alpha = layer.export_lora()
    plain = x @ (W + alpha / A.shape[0] * B @ A).T + bias
    print("after training: export vs layer", float((plain - layer(x)).detach().abs().max()), "merged vs layer", float((x @ layer.merged_weight().T + bias - layer(x)).detach().abs().max()),
          "rank", A.shape[0], "moved", float((layer.merged_weight() - W).abs().max()))
