"""Fused expert LoRA: lora_B read with the expert index slowest. unslothai/unsloth-zoo#1269, https://github.com/unslothai/unsloth-zoo/pull/1269, 2026.
PEFT packs the LoRA of a fused expert parameter into two linear weights; lora_A is (experts*rank, in) with the expert slowest, lora_B is
(out, experts*rank) with the expert fastest. The forward pass read lora_B as (out, experts, rank), so every expert was paired with the wrong
rank columns of lora_B, in training and at inference, with no error since the shapes agree."""
import torch, torch.nn as nn
FAMILY = "adapters"
KIND = "adapter"
INPUTS = {"weight": "frozen expert weights, [experts, out, in]", "lora_A": "packed A of all experts as PEFT stores it, [experts*rank, in]",
          "lora_B": "packed B of all experts as PEFT stores it, [out, experts*rank]", "x": "tokens, [n, in]", "expert": "index of the expert of each token, [n]"}
SETTINGS = {"num_experts": "number of experts, 4", "scaling": "LoRA scaling alpha/rank, 2.0"}
NOTES = ("Wraps a fused mixture-of-experts weight with one LoRA pair per expert, in the storage layout of PEFT (ParamWrapper with target_parameters): row e*rank+r of lora_A "
         "is row r of the A of expert e (expert slowest), column r*experts+e of lora_B is column r of the B of expert e (expert fastest). "
         "The result for a token of expert e is (W_e + scaling * B_e A_e) x, the same as PEFT's get_delta_weight and what merging writes. "
         "The builder returns a module with parameters lora_A and lora_B and a frozen buffer weight; its forward takes (x, expert). No dropout.")

def make(seed):
    g = torch.Generator().manual_seed(seed)
    E, r, o, i, n = 4, 3, 7, 6, 10
    return {"weight": torch.randn(E, o, i, generator=g), "lora_A": torch.randn(E * r, i, generator=g), "lora_B": torch.randn(o, E * r, generator=g),
            "x": torch.randn(n, i, generator=g), "expert": torch.randint(0, E, (n,), generator=g)}

class _Base(nn.Module):
    def __init__(self, weight, lora_A, lora_B, num_experts, scaling):
        super().__init__()
        self.register_buffer("weight", weight.clone())
        self.lora_A = nn.Parameter(lora_A.clone())
        self.lora_B = nn.Parameter(lora_B.clone())
        self.num_experts, self.scaling = num_experts, scaling
        self.rank = lora_A.shape[0] // num_experts
    def forward(self, x, expert):
        A = self.lora_A.view(self.num_experts, self.rank, -1)
        B = self.split_b()
        y = torch.einsum("noi,ni->no", self.weight[expert], x)
        h = torch.einsum("nri,ni->nr", A[expert], x)
        return y + self.scaling * torch.einsum("nor,nr->no", B[expert], h)

class _Broken(_Base):
    def split_b(self):
        return self.lora_B.view(-1, self.num_experts, self.rank).permute(1, 0, 2)

class _Right(_Base):
    def split_b(self):
        return self.lora_B.view(-1, self.rank, self.num_experts).permute(2, 0, 1)

def broken(weight, lora_A, lora_B, num_experts=4, scaling=2.0):
    return _Broken(weight, lora_A, lora_B, num_experts, scaling)

def right(weight, lora_A, lora_B, num_experts=4, scaling=2.0):
    return _Right(weight, lora_A, lora_B, num_experts, scaling)

if __name__ == "__main__":
    d = make(0)
    a = (d["weight"], d["lora_A"], d["lora_B"])
    yb, yr = broken(*a)(d["x"], d["expert"]), right(*a)(d["x"], d["expert"])
    slow = []
    for x, e in zip(d["x"], d["expert"].tolist()):
        A = torch.stack([d["lora_A"][e * 3 + r] for r in range(3)]); B = torch.stack([d["lora_B"][:, r * 4 + e] for r in range(3)], 1)
        slow.append((d["weight"][e] + 2.0 * B @ A) @ x)
    slow = torch.stack(slow)
    print("right-slow", (yr - slow).abs().max().item(), "broken-slow", (yb - slow).abs().max().item())
    assert torch.allclose(yr, slow, atol=1e-4) and not torch.allclose(yb, slow, atol=1e-1)
