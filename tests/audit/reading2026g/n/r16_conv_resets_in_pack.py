"""Adapter that makes a causal depthwise convolution respect packed documents (seq_idx of Mamba's causal_conv1d). Attention masks do not help here: the kernel reaches left over the border, so each tap is multiplied by "same document"; the first tokens of each document see zeros as if they stood alone."""
import torch
from torch import nn
FAMILY = "packing"
KIND = "adapter"
INPUTS = {"conv": "nn.Conv1d, depthwise, without padding of its own", "x": "hidden states, [rows, time, width]", "seq_idx": "document number in the row, contiguous runs, [rows, time]"}
SETTINGS = {}
NOTES = "right(conv) wraps and owns no new parameters; weight and bias are those of the wrapped convolution (same objects). With one document per row it equals the plain causal convolution. Document numbers need not grow, but a number must not return later in the row within the kernel width."
class PackedConv(nn.Module):
    def __init__(self, conv):
        super().__init__()
        assert conv.groups == conv.in_channels == conv.out_channels and conv.padding == (0,)
        self.conv = conv
    def forward(self, x, seq_idx):
        w, k = self.conv.weight[:, 0], self.conv.kernel_size[0]
        y = torch.zeros_like(x) if self.conv.bias is None else self.conv.bias.expand_as(x)
        for back in range(k):
            if back >= x.shape[1]:
                break
            past = nn.functional.pad(x, (0, 0, back, 0))[:, :x.shape[1]]
            other = nn.functional.pad(seq_idx, (back, 0), value=-1)[:, :x.shape[1]]
            y = y + past * w[:, k - 1 - back] * (other == seq_idx)[..., None]
        return y

def make(seed):
    torch.manual_seed(seed)
    idx = torch.tensor([[0] * 5 + [1] * 2 + [2] * 7, [0] * 1 + [1] * 9 + [2] * 4])
    return {"conv": nn.Conv1d(6, 6, 4, groups=6), "x": torch.randn(2, 14, 6), "seq_idx": idx}

def right(conv):
    return PackedConv(conv)

if __name__ == "__main__":
    d = make(0); m = right(d["conv"]); y = m(d["x"], d["seq_idx"])
    for b in range(2):
        for k in range(3):
            at = d["seq_idx"][b] == k
            alone = d["conv"](nn.functional.pad(d["x"][b, at].T[None], (3, 0)))[0].T
            assert torch.allclose(alone, y[b, at], atol=1e-5)
    plain = d["conv"](nn.functional.pad(d["x"].transpose(1, 2), (3, 0))).transpose(1, 2)
    assert torch.allclose(plain, m(d["x"], torch.zeros_like(d["seq_idx"])), atol=1e-5)
    y.square().mean().backward(); print("max difference to the plain one:", (plain - y).abs().max().item(), "grad", d["conv"].weight.grad.norm().item())
