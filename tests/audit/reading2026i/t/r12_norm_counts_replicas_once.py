"""Global gradient norm under tensor parallelism: sharded parameters from all ranks, replicated ones from rank 0 only. Megatron-LM (param_is_not_tensor_parallel_duplicate).
Ranks 1.. leave norms, biases and embeddings out of their local sum of squares, which looks as if their gradients were forgotten. All parameters, counted or not, are multiplied by the same clip factor."""
import torch
import torch.nn as nn
import torch.nn.functional as F
FAMILY = "sharding and reductions"
KIND = "update"
INPUTS = {"batches": "micro-batches with ids [rows, time] and labels (pre-shifted, -100 = not trained)"}
SETTINGS = {"max_norm": "clip at this global norm, 0.05", "tp": "ranks, 2"}
NOTES = ("Objective: mean cross-entropy over all trained tokens. The head weight is split by rows over tp ranks, all other parameters are replicas with equal gradients on each rank (simulated). "
         "The result equals clip_grad_norm_ without tensor parallelism. The vocabulary (30) must be divisible by tp. SGD.")

class Tiny(nn.Module):
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    torch.manual_seed(seed); model = Tiny(vocab=30); out = []
    for _ in range(2):
        lab = torch.randint(0, 30, (2, 8)); lab[:, :3] = -100
        out.append({"ids": torch.randint(0, 30, (2, 8)), "labels": lab})
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0), "batches": out}

def backward(model, batches):
    n = sum((b["labels"] != -100).sum() for b in batches)
    for b in batches:
        (F.cross_entropy(model(b["ids"]).flatten(0, 1), b["labels"].flatten(), ignore_index=-100, reduction="sum") / n).backward()

def right(model, optimizer, batches, max_norm=0.05, tp=2):
    optimizer.zero_grad(); backward(model, batches)
    squares = 0.0
    for rank in range(tp):
        local = 0.0
        for name, p in model.named_parameters():
            if name == "head.weight":
                local = local + p.grad.chunk(tp, 0)[rank].pow(2).sum()
            elif rank == 0:
                local = local + p.grad.pow(2).sum()
        squares = squares + local                                   # all-reduce SUM
    factor = (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        p.grad.mul_(factor)
    optimizer.step()

if __name__ == "__main__":
    d = make(0); right(d["model"], d["optimizer"], d["batches"])
    e = make(0); backward(e["model"], e["batches"]); n = torch.nn.utils.clip_grad_norm_(e["model"].parameters(), 0.05); e["optimizer"].step()
    diff = max((a - b).abs().max().item() for a, b in zip(d["model"].parameters(), e["model"].parameters()))
    print("norm before clip", n.item(), "difference", diff); assert diff < 1e-7 and n > 0.05
