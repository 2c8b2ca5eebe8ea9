"""LoRA update scaled by alpha instead of alpha / rank. Blaizzy/mlx-vlm#841, https://github.com/Blaizzy/mlx-vlm/issues/841, 2026.
The layer and the merge multiplied the low-rank update by alpha. With the defaults rank 8, alpha 16 the scale was 16 rather than 2.
Training ran but updates were eight times too strong, and the default settings gave unusable adapters."""
import torch

FAMILY = "adapters"
KIND = "adapter"
INPUTS = {"base": "a linear layer, frozen", "x": "inputs, [rows, 12]"}
SETTINGS = {"rank": "rank of the adapter, 8", "alpha": "LoRA alpha, 16"}
NOTES = "LoRA of Hu et al.: y = base(x) + (alpha / rank) * x A B, B starts at zero, only A and B are trained. merged() gives a plain linear layer with the same function."


def make(seed):
    torch.manual_seed(seed)
    return {"base": torch.nn.Linear(12, 10), "x": torch.randn(7, 12), "rank": 8, "alpha": 16.0}


class _LoRA(torch.nn.Module):
    def __init__(self, base, rank, scale):
        super().__init__()
        self.base, self.scale = base, scale
        for p in self.base.parameters():
            p.requires_grad_(False)
        self.A = torch.nn.Parameter(torch.randn(base.in_features, rank) / rank)
        self.B = torch.nn.Parameter(torch.zeros(rank, base.out_features))

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.A @ self.B)

    def merged(self):
        out = torch.nn.Linear(self.base.in_features, self.base.out_features, bias=self.base.bias is not None)
        with torch.no_grad():
            out.weight.copy_(self.base.weight + self.scale * (self.A @ self.B).T)
            if self.base.bias is not None:
                out.bias.copy_(self.base.bias)
        return out


def broken(base, rank=8, alpha=16.0):
    return _LoRA(base, rank, alpha)


def right(base, rank=8, alpha=16.0):
    return _LoRA(base, rank, alpha / rank)


if __name__ == "__main__":
    m = make(0)
    outs = {}
    for name, f in (("broken", broken), ("right", right)):
        torch.manual_seed(1)
        layer = f(m["base"], m["rank"], m["alpha"])
        assert torch.allclose(layer(m["x"]), m["base"](m["x"]))          # B = 0: identity at the start
        with torch.no_grad():
            layer.B.normal_()
        assert torch.allclose(layer(m["x"]), layer.merged()(m["x"]), atol=1e-4)
        outs[name] = (layer(m["x"]) - m["base"](m["x"])).norm().item()
    print(outs, "ratio", outs["broken"] / outs["right"])
    assert abs(outs["broken"] / outs["right"] - 8) < 1e-3
