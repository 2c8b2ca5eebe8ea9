"""Gradient clipping under tensor parallelism with sequence-parallel norms (Megatron). Gradients of replicated gains are SUMMED over the ranks, not averaged, as each rank saw other tokens; the global norm adds the shards of all ranks but a replicated parameter only from rank 0."""
import torch
from torch import nn
FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "two simulated ranks: replicated gains, one per rank, and row shards of a weight", "optimizer": "over all parameters of both ranks", "batches": "list of dicts x [tokens, width], y [tokens, out]; tokens even"}
SETTINGS = {"max_norm": "0.1"}
NOTES = "Loss: mean squared error over all entries. Tokens are split in half for the gain (sequence parallel) and gathered for the weight (column parallel). Replicas stay equal. One step per batch. Needs an even number of tokens and exactly 2 ranks."
class Two(nn.Module):
    def __init__(self, width=6, out=8):
        super().__init__()
        g, w = torch.rand(width) + .5, torch.randn(out, width)
        self.gain = nn.ParameterList([nn.Parameter(g.clone()) for _ in range(2)])
        self.weight = nn.ParameterList([nn.Parameter(c.clone()) for c in w.chunk(2)])
    def forward(self, x):
        halves = x.chunk(2)
        h = torch.cat([halves[r] * self.gain[r] for r in range(2)])               # all-gather of the sequence
        return torch.cat([h @ w.T for w in self.weight], -1)

def make(seed):
    torch.manual_seed(seed); m = Two()
    return {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=.5), "batches": [{"x": torch.randn(10, 6), "y": torch.randn(10, 8)} for _ in range(3)]}

def right(model, optimizer, batches, max_norm=0.1):
    for b in batches:
        optimizer.zero_grad()
        (model(b["x"]) - b["y"]).square().mean().backward()
        total = model.gain[0].grad + model.gain[1].grad                           # all-reduce SUM
        for p in model.gain:
            p.grad = total.clone()
        square = sum(p.grad.square().sum() for p in model.weight) + model.gain[0].grad.square().sum()
        scale = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
        for p in model.parameters():
            p.grad.mul_(scale)
        optimizer.step()

if __name__ == "__main__":
    d = make(0); m = d["model"]; g = m.gain[0].detach().clone().requires_grad_(); w = torch.cat(list(m.weight)).detach().clone().requires_grad_()
    start = g.detach().clone(); opt = torch.optim.SGD([g, w], lr=.5)
    for b in d["batches"]:
        opt.zero_grad(); ((b["x"] * g) @ w.T - b["y"]).square().mean().backward(); n = nn.utils.clip_grad_norm_([g, w], .1); opt.step()
    right(**d); e = max((m.gain[0] - g).abs().max().item(), (torch.cat(list(m.weight)) - w).abs().max().item())
    print("norm", n.item(), "error", e, "moved", (g - start).abs().max().item()); assert e < 1e-6 and torch.equal(m.gain[0], m.gain[1]) and n > .1
