"""Combining LoRA adapters by SVD applies the scaling twice. huggingface/peft#3111, https://github.com/huggingface/peft/pull/3111, 2026.
In the SVD path of add_weighted_adapter the weight of each adapter was multiplied by its LoRA scaling, but get_delta_weight already contains
the scaling. The combined adapter got weight * scaling**2 * B A. The tests used adapters whose scaling hid it or never compared the merged weight."""
import torch, torch.nn as nn
FAMILY = "adapters and merging"
KIND = "adapter"
INPUTS = {"linear_weight": "frozen base weight, [out, in]", "adapters": "list of dicts with A [r, in], B [out, r], alpha (number), r (rank)",
          "weights": "list with the mixing weight of each adapter; may be negative", "x": "tokens, [n, in]"}
SETTINGS = {"rank": "rank of the combined adapter, 5"}
NOTES = ("Combines several LoRA adapters of one linear layer into a single adapter. Each source adapter contributes delta_i = (alpha_i / r_i) * B_i A_i. "
         "The combined delta is the best approximation of rank `rank` (truncated SVD) of sum_i weights_i * delta_i; with rank at least the sum of the ranks it is exact. "
         "The combined adapter stores its delta as B A with scaling 1 (singular values are put into B). The builder returns a module with the frozen base weight and trainable lora_A, lora_B; forward is x W^T + x A^T B^T.")

def make(seed):
    g = torch.Generator().manual_seed(seed)
    o, i = 9, 8
    ad = [{"A": torch.randn(r, i, generator=g) / 3, "B": torch.randn(o, r, generator=g) / 3, "alpha": a, "r": r} for r, a in ((2, 4.0), (3, 4.5))]
    return {"linear_weight": torch.randn(o, i, generator=g) / 3, "adapters": ad, "weights": [0.7, -0.4], "x": torch.randn(6, i, generator=g)}

class _Merged(nn.Module):
    def __init__(self, weight, A, B):
        super().__init__()
        self.register_buffer("weight", weight.clone())
        self.lora_A, self.lora_B, self.scaling = nn.Parameter(A), nn.Parameter(B), 1.0
    def forward(self, x):
        return x @ self.weight.T + self.scaling * (x @ self.lora_A.T) @ self.lora_B.T

def _delta(a):
    return (a["alpha"] / a["r"]) * a["B"] @ a["A"]

def _svd(delta, rank):
    U, S, Vh = torch.linalg.svd(delta, full_matrices=False)
    return Vh[:rank].contiguous(), (U[:, :rank] * S[:rank]).contiguous()

def broken(linear_weight, adapters, weights, rank=5):
    coef = [w * a["alpha"] / a["r"] for w, a in zip(weights, adapters)]
    A, B = _svd(sum(c * _delta(a) for c, a in zip(coef, adapters)), rank)
    return _Merged(linear_weight, A, B)

def right(linear_weight, adapters, weights, rank=5):
    A, B = _svd(sum(w * _delta(a) for w, a in zip(weights, adapters)), rank)
    return _Merged(linear_weight, A, B)

if __name__ == "__main__":
    d = make(0); x = d.pop("x")
    y = x @ d["linear_weight"].T
    for w, a in zip(d["weights"], d["adapters"]):
        y = y + w * a["alpha"] / a["r"] * x @ a["A"].T @ a["B"].T
    eb, er = (broken(**d)(x) - y).abs().max().item(), (right(**d)(x) - y).abs().max().item()
    print("broken error", eb, "right error", er); assert er < 1e-4 < 1e-1 < eb
