"""Fusing LoRA into a quantized base loses the adapter. ml-explore/mlx-lm#1564 (issue #1172), https://github.com/ml-explore/mlx-lm/pull/1564, 2026.
fuse() dequantized the base weight, added the LoRA delta and quantized the sum to the bits of the base again. The entries of the delta are smaller than half a step of the 4-bit grid,
and the base lies on that grid, so rounding gave back almost the base weight: the fused model behaved as if it had never been trained."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "adapters"
KIND = "adapter"
INPUTS = {"layer": "LoRA layer over a 4-bit base: forward(x) = base(x) + scale * x A B"}
SETTINGS = {"dequantize": "False: the user did not ask for a full-precision model"}
NOTES = "broken/right take the trained adapter layer and return a plain module with the adapter merged in; its outputs must be those of the layer up to rounding that is small beside the adapter's own effect. The adapter B is not zero."


def quantize(w, bits=4, group=32):
    g = w.reshape(w.shape[0], -1, group)
    lo, hi = g.amin(-1, keepdim=True), g.amax(-1, keepdim=True)
    scale = ((hi - lo) / (2 ** bits - 1)).clamp(min=1e-8)
    return ((g - lo) / scale).round(), scale, lo


def dequantize(q, scale, lo):
    return (q * scale + lo).flatten(1)


class QLinear(nn.Module):
    def __init__(self, weight, bits=4, group=32):
        super().__init__()
        self.bits, self.group = bits, group
        for n, t in zip(("q", "scale", "lo"), quantize(weight, bits, group)):
            self.register_buffer(n, t)

    def weight(self):
        return dequantize(self.q, self.scale, self.lo)

    def forward(self, x):
        return F.linear(x, self.weight())


class LoRAQLinear(nn.Module):
    def __init__(self, base, rank=4, scale=2.0):
        super().__init__()
        out, inp = base.weight().shape
        self.base, self.scale = base, scale
        self.a, self.b = nn.Parameter(torch.randn(inp, rank) / inp ** 0.5), nn.Parameter(torch.zeros(rank, out))

    def delta(self):
        return self.scale * (self.a @ self.b).T

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.a) @ self.b


class DenseLinear(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.w = nn.Parameter(weight)

    def forward(self, x):
        return F.linear(x, self.w)


def make(seed):
    torch.manual_seed(seed)
    layer = LoRAQLinear(QLinear(torch.randn(32, 64) * 0.1))
    with torch.no_grad():
        layer.b.copy_(torch.randn_like(layer.b) * 0.006)
    return {"layer": layer}


@torch.no_grad()
def broken(layer, dequantize=False):
    fused = layer.base.weight() + layer.delta()
    if dequantize:
        return DenseLinear(fused)
    return QLinear(fused, layer.base.bits, layer.base.group)


@torch.no_grad()
def right(layer, dequantize=False):
    fused = layer.base.weight() + layer.delta()
    return DenseLinear(fused)        # a layer that carried an adapter is kept unquantized


if __name__ == "__main__":
    layer = make(0)["layer"]
    x = torch.randn(200, 64)
    effect = (layer(x) - layer.base(x)).norm().item()
    print("largest delta", layer.delta().abs().max().item(), "half a step", layer.base.scale.median().item() / 2)
    for f in (broken, right):
        m = f(layer)
        print(f.__name__, "distance to adapter / effect of adapter", (m(x) - layer(x)).norm().item() / effect)
    assert (broken(layer)(x) - layer(x)).norm() > 0.5 * effect and torch.allclose(right(layer)(x), layer(x), atol=1e-4)
