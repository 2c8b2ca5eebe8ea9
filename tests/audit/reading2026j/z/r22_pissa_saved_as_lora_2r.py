"""PiSSA (Meng et al. 2024) changes the FROZEN base weight to the residual W - B0 A0 and starts A, B at the top singular directions, so B is not zero and the base in memory is not the checkpoint. For saving, the adapter is turned into a plain LoRA of rank 2r
against the original W (PEFT path_initial_model_for_weight_conversion): [B, -B0] and [A; A0]; the double rank and the minus sign are right."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "adapters and merged weights"
KIND = "state"
INPUTS = {"module": "a PissaLinear after some training", "original": "the untouched nn.Linear of the checkpoint", "x": "inputs [n, in]"}
SETTINGS = {"r": "rank of PiSSA, 3 (the saved LoRA has rank 6)"}
NOTES = ("right(module) returns the state {lora_A [2r, in], lora_B [out, 2r], scaling}; load(original, state) gives a module with the same function on the ORIGINAL weights. A0 and B0 are kept as buffers from the init (an SVD made anew may differ in sign). "
         "The base bias is unchanged and not saved. Saving does not change the module. B is not 0 at the start, yet the function is that of the base.")

class PissaLinear(nn.Module):
    def __init__(self, lin, r):
        super().__init__()
        U, S, Vh = torch.linalg.svd(lin.weight.detach(), full_matrices=False); q = S[:r].sqrt()
        self.B = nn.Parameter(U[:, :r] * q); self.A = nn.Parameter(q[:, None] * Vh[:r])
        self.register_buffer("B0", self.B.detach().clone()); self.register_buffer("A0", self.A.detach().clone())
        self.register_buffer("residual", lin.weight.detach() - self.B0 @ self.A0); self.register_buffer("bias", lin.bias.detach().clone())
    def forward(self, x): return F.linear(x, self.residual, self.bias) + x @ self.A.T @ self.B.T

class LoadedLora(nn.Module):
    def __init__(self, lin, st): super().__init__(); self.lin = lin; self.A = nn.Parameter(st["lora_A"].clone()); self.B = nn.Parameter(st["lora_B"].clone()); self.scaling = st["scaling"]
    def forward(self, x): return self.lin(x) + self.scaling * (x @ self.A.T @ self.B.T)

def make(seed, r=3):
    torch.manual_seed(seed); lin = nn.Linear(14, 11); m = PissaLinear(lin, r); x, y = torch.randn(32, 14), torch.randn(32, 11)
    opt = torch.optim.Adam(m.parameters(), lr=0.02)
    for _ in range(10): opt.zero_grad(); F.mse_loss(m(x), y).backward(); opt.step()
    return {"module": m, "original": lin, "x": x}

def right(module):
    with torch.no_grad():
        return {"lora_A": torch.cat([module.A, module.A0], 0).clone(), "lora_B": torch.cat([module.B, -module.B0], 1).clone(), "scaling": 1.0}

def load(original, state): return LoadedLora(original, state)

if __name__ == "__main__":
    D = make(0); m, lin, x = D["module"], D["original"], D["x"]; st = right(m); L = load(lin, st)
    e = (L(x) - m(x)).abs().max().item(); delta = (m.residual + m.B @ m.A - lin.weight).detach(); e2 = (st["lora_B"] @ st["lora_A"] - delta).abs().max().item()
    fresh = PissaLinear(lin, 3); e3 = (fresh(x) - lin(x)).abs().max().item(); f = F.mse_loss(fresh(x), torch.zeros(32, 11)); f.backward()
    print("loaded vs trained", e, "delta", e2, "size of delta", delta.abs().max().item(), "rank of delta", int(torch.linalg.matrix_rank(delta.double(), tol=1e-5)), "fresh vs base", e3, "grads A, B", fresh.A.grad.norm().item(), fresh.B.grad.norm().item())
    assert e < 1e-5 and e2 < 1e-5 and e3 < 1e-5 and delta.abs().max() > 1e-2 and fresh.A.grad.norm() > 0 and fresh.B.grad.norm() > 0
