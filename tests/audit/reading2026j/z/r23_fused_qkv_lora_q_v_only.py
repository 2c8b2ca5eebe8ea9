"""LoRA on a fused q-k-v projection for q and v only (loralib MergedLinear, GPT-2): the base weight is stored transposed [in, 3*out] (Conv1D, fan_in_fan_out), the two enabled parts run as one grouped convolution and are written into a zero-padded output,
so the middle third (k) never gets an update. A has 2r rows but each part has rank r."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "adapters and merged weights"
KIND = "adapter"
INPUTS = {"base": "Conv1D module: weight [in, 3*d], bias [3*d], y = x @ weight + bias", "x": "inputs [rows, time, in]", "y": "targets for a test loss [rows, time, 3*d]"}
SETTINGS = {"r": "rank of each part, 2", "alpha": "LoRA alpha, 4", "enable": "which thirds get LoRA, (True, False, True) = q and v"}
NOTES = ("right(base, r, alpha, enable) returns a module; trained are lora_A [2r, in] and lora_B [2d, r] only. The k third of the output is exactly the base's for ever. The output width must be a multiple of len(enable). B starts at 0: at start the function is the base's and lora_A has no gradient. "
         "merge() adds in place to the transposed weight, unmerge() takes it out; both are idempotent; train(True) unmerges and eval() merges, as in loralib.")

class Conv1D(nn.Module):
    def __init__(self, i, o): super().__init__(); self.weight = nn.Parameter(torch.randn(i, o) * i ** -0.5); self.bias = nn.Parameter(torch.randn(o) * 0.1)
    def forward(self, x): return x @ self.weight + self.bias

class MergedLora(nn.Module):
    def __init__(self, base, r, alpha, enable):
        super().__init__()
        self.base = base.requires_grad_(False); i, o = base.weight.shape; n = sum(enable); assert o % len(enable) == 0
        self.g, self.s, self.merged = n, alpha / r, False
        self.lora_A = nn.Parameter(torch.empty(r * n, i)); nn.init.kaiming_uniform_(self.lora_A, a=5 ** 0.5); self.lora_B = nn.Parameter(torch.zeros(o // len(enable) * n, r))
        self.register_buffer("cols", torch.tensor(enable).repeat_interleave(o // len(enable)).nonzero()[:, 0], persistent=False)
    def pad(self, z): return z.new_zeros(*z.shape[:-1], self.base.weight.shape[1]).index_copy(-1, self.cols, z)
    def delta(self):
        """[in, 3*d], like the base weight"""
        return self.pad(F.conv1d(self.lora_A[None], self.lora_B[..., None], groups=self.g)[0].T) * self.s
    def forward(self, x):
        if self.merged: return self.base(x)
        a = x @ self.lora_A.T
        b = F.conv1d(a.transpose(-1, -2), self.lora_B[..., None], groups=self.g).transpose(-1, -2)
        return self.base(x) + self.pad(b) * self.s
    @torch.no_grad()
    def merge(self):
        if not self.merged: self.base.weight += self.delta(); self.merged = True
        return self
    @torch.no_grad()
    def unmerge(self):
        if self.merged: self.base.weight -= self.delta(); self.merged = False
        return self
    def train(self, mode=True):
        super().train(mode); return self.unmerge() if mode else self.merge()

def make(seed):
    torch.manual_seed(seed); return {"base": Conv1D(12, 24), "x": torch.randn(3, 5, 12), "y": torch.randn(3, 5, 24)}

def right(base, r=2, alpha=4, enable=(True, False, True)):
    return MergedLora(base, r, alpha, enable)

if __name__ == "__main__":
    D = make(0); x, y = D["x"], D["y"]; ref = D["base"](x).detach(); m = right(D["base"]); W0 = m.base.weight.detach().clone(); e0 = (m(x) - ref).abs().max().item()
    opt = torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=0.02); l0 = F.mse_loss(m(x), y); l0.backward(); assert m.lora_A.grad.norm() == 0 and m.lora_B.grad.norm() > 0
    for _ in range(40): opt.zero_grad(); l = F.mse_loss(m(x), y); l.backward(); opt.step()
    A, B = m.lora_A, m.lora_B; slow = ref.clone()
    for i in range(3):
        for t in range(5):
            slow[i, t, :8] += 2 * (B[:8] @ (A[:2] @ x[i, t])); slow[i, t, 16:] += 2 * (B[8:] @ (A[2:] @ x[i, t]))
    e1 = (slow - m(x)).abs().max().item(); out = m(x).detach(); m.eval(); m.eval(); e2 = (m(x) - out).abs().max().item(); m.train(); e3 = (m.base.weight - W0).abs().max().item()
    print("start", e0, "loss", l0.item(), "->", l.item(), "slow", e1, "merged", e2, "unmerged", e3, "k untouched", torch.equal(out[..., 8:16], ref[..., 8:16]))
    assert e0 == 0 and max(e1, e2, e3) < 1e-5 and l < l0 and torch.equal(out[..., 8:16], ref[..., 8:16]) and A.grad.norm() > 0
