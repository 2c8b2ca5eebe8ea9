"""Merging two DoRA adapters of one layer normalises with an already merged weight. huggingface/peft#3608 (fix huggingface/peft#3609),
https://github.com/huggingface/peft/issues/3608, 2026. merge applies the adapters one after another and hands each the live base weight, so from the
second adapter on the DoRA norm ||W + BA|| is taken from a weight that contains the earlier adapters. The forward norms against the unmerged weight. The
merged layer differs from the trained one by 2.6 % in the issue; one adapter alone is right."""
import torch, torch.nn as nn

FAMILY = "adapters and merging"
KIND = "adapter"
INPUTS = {
    "base": "a frozen nn.Linear (8 -> 6, with bias)",
    "adapters": "ordered dict name -> dict(A [r, in], B [out, r], magnitude [out], scaling float); all are active",
}
SETTINGS = {}
NOTES = """Wraps a linear layer with several active DoRA adapters. With W the pretrained weight and D_i = scaling_i * B_i A_i, adapter i has the factor
f_i = magnitude_i / ||W + D_i|| (norm of each output row; always of the pretrained W, held constant in the gradient). Forward, bias left aside: start with r = W x; for each
adapter in order r <- f_i * (r + D_i x); then add the bias. A, B and magnitude are trained, W and the bias are not. merge() folds all adapters into the
weight so that the forward of the merged layer (a plain linear) equals the unmerged forward; unmerge() restores W. merge() twice is the same as
once. Any number of adapters."""


def make(seed):
    torch.manual_seed(seed)
    base = nn.Linear(8, 6)
    adapters = {}
    for name, r in (("default", 3), ("b", 2)):
        A, B = torch.randn(r, 8) * 0.3, torch.randn(6, r) * 0.15
        norm = base.weight.detach().norm(dim=1)
        adapters[name] = {"A": A, "B": B, "magnitude": norm * (1 + 0.05 * torch.randn(6)), "scaling": 2.0}
    return {"base": base, "adapters": adapters}


class DoraLinear(nn.Module):
    def __init__(self, base, adapters):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.names = list(adapters)
        self.A = nn.ParameterDict({n: nn.Parameter(a["A"].clone()) for n, a in adapters.items()})
        self.B = nn.ParameterDict({n: nn.Parameter(a["B"].clone()) for n, a in adapters.items()})
        self.magnitude = nn.ParameterDict({n: nn.Parameter(a["magnitude"].clone()) for n, a in adapters.items()})
        self.scaling = {n: a["scaling"] for n, a in adapters.items()}
        self.backup = None

    def _factor(self, name, weight):
        delta = self.scaling[name] * self.B[name] @ self.A[name]
        norm = (weight + delta).norm(dim=1).detach()
        return self.magnitude[name] / norm, delta

    def forward(self, x):
        r = x @ self.base.weight.t()
        if self.backup is None:
            for n in self.names:
                f, delta = self._factor(n, self.base.weight)
                r = f * (r + x @ delta.t())
        return r + self.base.bias

    @torch.no_grad()
    def merge(self):
        if self.backup is not None:
            return
        self.backup = self.base.weight.detach().clone()
        for n in self.names:
            weight = self.base.weight
            f, delta = self._factor(n, self.backup)
            self.base.weight.copy_(f[:, None] * (weight + delta))

    @torch.no_grad()
    def unmerge(self):
        if self.backup is not None:
            self.base.weight.copy_(self.backup)
            self.backup = None


class _LiveNorm(DoraLinear):
    @torch.no_grad()
    def merge(self):
        if self.backup is not None:
            return
        self.backup = self.base.weight.detach().clone()
        for n in self.names:
            weight = self.base.weight
            f, delta = self._factor(n, weight)
            self.base.weight.copy_(f[:, None] * (weight + delta))


def broken(base, adapters):
    return _LiveNorm(base, adapters)


def right(base, adapters):
    return DoraLinear(base, adapters)


if __name__ == "__main__":
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(9))
    for f in (broken, right):
        for keep in (["default"], ["default", "b"]):
            i = make(0)
            layer = f(i["base"], {n: i["adapters"][n] for n in keep})
            a = layer(x); layer.merge(); b = layer(x); layer.unmerge(); c = layer(x)
            print(f.__name__, keep, "merged vs unmerged", float((a - b).detach().abs().max() / a.detach().abs().max()), "after unmerge", float((a - c).detach().abs().max()))
