"""Expert gradients left out of the clipping norm under TP and EP. NVIDIA/Megatron-LM#5916,
https://github.com/NVIDIA/Megatron-LM/pull/5916, 2026 (same symptom with numbers: radixark/Megatron-LM#80). To count replicated parameters once, the norm keeps a parameter only
on tensor-parallel rank 0 unless it is sharded. Experts were filtered with the dense tensor-parallel rank although they
follow the expert topology (each rank holds other experts), so ranks above 0 dropped their experts: the norm was too
small and clipping too weak."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "update"
INPUTS = {"model": "tiny mixture-of-experts language model", "optimizer": "SGD over all its parameters",
          "batches": "list of micro-batches {'ids': [rows, time]}"}
SETTINGS = {"max_norm": "clipping norm, 0.5", "tp": "tensor-parallel ranks = expert-parallel ranks, 2; expert tensor parallelism 1; must divide the 4 experts"}
NOTES = ("One optimizer step: mean of the micro-batches' mean token losses, gradient clipped by the global norm over all "
         "parameters, each counted once. The ranks are simulated: dense parameters are replicated on all ranks, rank r "
         "holds the experts r * (experts / tp) and following. All parameters are used.")


class TinyMoE(nn.Module):
    def __init__(self, vocab=32, width=16, experts=4):
        super().__init__()
        self.tok, self.router, self.head = nn.Embedding(vocab, width), nn.Linear(width, experts), nn.Linear(width, vocab)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(experts))

    def forward(self, ids):
        x = self.tok(ids)
        w = self.router(x).softmax(-1)
        y = sum(w[..., e:e + 1] * f(x) for e, f in enumerate(self.experts))
        return self.head(x + y)


def make(seed):
    torch.manual_seed(seed)
    model = TinyMoE()
    for e in model.experts:
        for p in e.parameters():
            p.data.mul_(2.0)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
            "batches": [{"ids": torch.randint(0, 32, (2, 12))} for _ in range(2)]}


def backward(model, batches):
    for b in batches:
        loss = F.cross_entropy(model(b["ids"][:, :-1]).transpose(1, 2), b["ids"][:, 1:])
        (loss / len(batches)).backward()


def rank_view(model, rank, tp):
    """(parameter, is an expert's) of one rank."""
    dense = [(p, False) for n, p in model.named_parameters() if not n.startswith("experts.")]
    per = len(model.experts) // tp
    mine = [(p, True) for e in range(rank * per, (rank + 1) * per) for p in model.experts[e].parameters()]
    return dense + mine


def clip_and_step(model, optimizer, total_sq, max_norm):
    coefficient = max_norm / (total_sq.sqrt() + 1e-6)
    if coefficient < 1:
        for p in model.parameters():
            p.grad.mul_(coefficient)
    optimizer.step()
    optimizer.zero_grad()


def broken(model, optimizer, batches, max_norm=0.5, tp=2):
    backward(model, batches)
    total = torch.zeros(())
    for rank in range(tp):                              # all-reduce SUM over the ranks
        tp_rank = rank
        for p, is_expert in rank_view(model, rank, tp):
            if tp_rank == 0:                            # not a tensor-parallel duplicate
                total += p.grad.pow(2).sum()
    clip_and_step(model, optimizer, total, max_norm)


def right(model, optimizer, batches, max_norm=0.5, tp=2):
    backward(model, batches)
    total = torch.zeros(())
    for rank in range(tp):
        tp_rank, expert_tp_rank = rank, 0               # experts: expert tensor parallelism is 1
        for p, is_expert in rank_view(model, rank, tp):
            if (expert_tp_rank if is_expert else tp_rank) == 0:
                total += p.grad.pow(2).sum()
    clip_and_step(model, optimizer, total, max_norm)


if __name__ == "__main__":
    a, b, c = make(0), make(0), make(0)
    broken(**a)
    right(**b)
    backward(c["model"], c["batches"])
    norm = nn.utils.clip_grad_norm_(c["model"].parameters(), 0.5)
    c["optimizer"].step()
    w = [x["model"].head.weight for x in (a, b, c)]
    print("norm", norm.item(), "broken", (w[0] - w[2]).abs().max().item(), "right", (w[1] - w[2]).abs().max().item())
    assert norm > 0.5 and (w[0] - w[2]).abs().max() > 1e-4 and torch.allclose(w[1], w[2], atol=1e-6)
