"""Straight-through estimator of fake quantization lost at the bounds of the clamp. pytorch/ao#4806, https://github.com/pytorch/ao/pull/4806, 2026.
Quantization-aware training rounds, clamps to the integer range and back-propagates straight through. A change of the subgradient of clamp
from >= / <= to > / < set the gradient at the bounds to zero; since the clamped values are integers, a large share of them lies exactly on a bound.
These weights silently stopped to train and runs diverged thousands of steps later. Fixed by a clamp whose backward passes the gradient at the bounds."""
import torch
import torch.nn.functional as F

FAMILY = "adapters, merging and low precision"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is a trained target (the first position never), [rows, time]"}
SETTINGS = {"bits": "bits of the fake-quantized head weight, 4 (integers from -8 to 7)"}
NOTES = ("next-token cross-entropy, mean over the trained tokens of all rows; the logits at t predict the token t+1. The weight of the head is fake-quantized per output "
         "row: scale = largest absolute value of the row / 7.5 (a constant for the gradient), integers round(weight / scale) clamped to [-8, 7], times scale. The gradient "
         "is straight-through by design: 1 for every weight whose rounded value lies within the range, both bounds included, and 0 only for those outside. All parameters are used.")


class Tiny(torch.nn.Module):
    def __init__(self, vocab=24, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.mid = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, vocab, bias=False)

    def hidden(self, ids):
        h = self.emb(ids)
        return h + torch.tanh(self.mid(h))


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class ClampOpen(torch.autograd.Function):
    """Subgradient of clamp after the change."""

    @staticmethod
    def forward(ctx, x, low, high):
        ctx.save_for_backward((x > low) & (x < high))
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None, None


class ClampClosed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, low, high):
        ctx.save_for_backward((x >= low) & (x <= high))
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None, None


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 24, (3, 10))
    mask = (torch.rand(3, 10) < 0.7).long()
    mask[:, 0] = 0
    mask[:, 1] = 1
    return {"model": Tiny(), "ids": ids, "loss_mask": mask}


def run(model, batch, bits, clamp):
    low, high = -2 ** (bits - 1), 2 ** (bits - 1) - 1
    w = model.head.weight
    scale = w.detach().abs().amax(1, keepdim=True) / ((high - low) / 2)
    w = clamp.apply(Round.apply(w / scale), low, high) * scale
    logits = F.linear(model.hidden(batch["ids"]), w)[:, :-1]
    per_token = F.cross_entropy(logits.transpose(1, 2), batch["ids"][:, 1:], reduction="none")
    mask = batch["loss_mask"][:, 1:]
    return (per_token * mask).sum() / mask.sum()


def broken(model, batch, bits=4):
    return run(model, batch, bits, ClampOpen)


def right(model, batch, bits=4):
    return run(model, batch, bits, ClampClosed)


if __name__ == "__main__":
    case = make(0)
    model = case.pop("model")
    for fn in (broken, right):
        loss = fn(model, case)
        (g,) = torch.autograd.grad(loss, [model.head.weight])
        print(fn.__name__, "loss", loss.item(), "gradient norm", g.norm().item(), "zero entries", (g == 0).sum().item(), "of", g.numel())
    w = model.head.weight.detach()
    scale = w.abs().amax(1, keepdim=True) / 7.5
    q = (w / scale).round()
    leaf = (q.clamp(-8, 7) * scale).requires_grad_()
    logits = (model.hidden(case["ids"]) @ leaf.T)[:, :-1]
    lp = torch.log_softmax(logits, -1).gather(-1, case["ids"][:, 1:, None])[..., 0]
    m = case["loss_mask"][:, 1:]
    (ref,) = torch.autograd.grad(-(lp * m).sum() / m.sum(), [leaf])
    assert torch.allclose(g, ref * ((q >= -8) & (q <= 7)), atol=1e-6)
