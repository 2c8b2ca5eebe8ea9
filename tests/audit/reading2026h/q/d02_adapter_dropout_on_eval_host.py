"""Adapter injected into an .eval() model starts in training mode. huggingface/peft#3753 (PR #3760), https://github.com/huggingface/peft/issues/3753, 2026.
inject_adapter builds new modules, among them Dropout, with PyTorch's default training=True and never copies the mode of the host. On a model in eval() the adapter dropout stays on: two equal forwards disagree while model.training says False.
Scores, reference log-probs and evaluations after the injection are silently noisy. The fix sets the new children to the host's mode."""
import torch
from torch import nn
FAMILY = "state"
KIND = "adapter"
INPUTS = {"host": "a torch module whose Linear layers get an adapter; may be in train or eval mode", "x": "input, [rows, width]"}
SETTINGS = {"r": "LoRA rank, 2", "alpha": "LoRA alpha, 4", "p": "LoRA dropout, 0.5"}
NOTES = "Wraps every Linear that is a direct child of host in place and returns host. Scaling alpha / r = 2. The base weights are frozen. Dropout on the adapter's input acts in training mode only."


class LoraLinear(nn.Module):
    def __init__(self, base, r, alpha, p):
        super().__init__()
        self.base = base
        self.A = nn.Linear(base.in_features, r, bias=False)
        self.B = nn.Linear(r, base.out_features, bias=False)
        nn.init.normal_(self.B.weight, std=0.5)
        self.drop = nn.Dropout(p)
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + self.scale * self.B(self.A(self.drop(x)))


def make(seed):
    torch.manual_seed(seed)
    host = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    return {"host": host, "x": torch.randn(3, 8)}


def broken(host, r=2, alpha=4, p=0.5):
    for q in host.parameters():
        q.requires_grad_(False)
    for name, child in list(host.named_children()):
        if isinstance(child, nn.Linear):
            setattr(host, name, LoraLinear(child, r, alpha, p))
    return host


def right(host, r=2, alpha=4, p=0.5):
    for q in host.parameters():
        q.requires_grad_(False)
    for name, child in list(host.named_children()):
        if isinstance(child, nn.Linear):
            setattr(host, name, LoraLinear(child, r, alpha, p))
    host.train(host.training)
    return host


if __name__ == "__main__":
    for f in (broken, right):
        d = make(0)
        m = f(d["host"])
        a, b = m(d["x"]), m(d["x"])
        print(f.__name__, "host.training", m.training, "difference of two forwards", (a - b).abs().max().item())
        assert ((a - b).abs().max() > 1e-3) == (f is broken)
