"""A rank without data runs a dummy batch and multiplies its loss by 0. Common practice under FSDP and ZeRO-3 with dynamic micro-batches: every rank must take part in the collectives of forward and backward.
With dynamic micro-batching the ranks have different numbers of micro-batches; short ranks repeat their first micro-batch (or a dummy) with weight 0, so that all ranks call the model equally often. The extra backward adds exact zeros, and the token count is not changed by it."""
import torch
import torch.nn as nn
import torch.nn.functional as F
FAMILY = "sharding and reductions"
KIND = "update"
INPUTS = {"batches": "one list of micro-batches per rank; lists differ in length and may be empty; each has ids [rows, time] and labels (pre-shifted, -100 = not trained)"}
SETTINGS = {}
NOTES = "Objective: mean cross-entropy over all trained tokens of all ranks. Gradients are summed over ranks (reduce SUM, not AVG), the loss is divided by the global token count. Repeated micro-batches have weight 0. SGD, one step per call."

class Tiny(nn.Module):
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def mb(rows):
    lab = torch.randint(1, 31, (rows, 8)); lab[torch.rand(rows, 8) < 0.4] = -100
    return {"ids": torch.randint(1, 31, (rows, 8)), "labels": lab}

def make(seed):
    torch.manual_seed(seed); model = Tiny()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.3), "batches": [[mb(2), mb(1), mb(3)], [mb(1)], []]}

def ce_sum(model, b):
    return F.cross_entropy(model(b["ids"]).flatten(0, 1), b["labels"].flatten(), ignore_index=-100, reduction="sum")

def right(model, optimizer, batches):
    tokens = sum((b["labels"] != -100).sum() for rank in batches for b in rank)
    calls = max(len(rank) for rank in batches)
    dummy = {"ids": torch.zeros(1, 2, dtype=torch.long), "labels": torch.zeros(1, 2, dtype=torch.long)}
    optimizer.zero_grad()
    for rank in batches:
        for k in range(calls):
            real = k < len(rank)
            b = rank[k] if real else (rank[0] if rank else dummy)
            (ce_sum(model, b) / tokens * (1.0 if real else 0.0)).backward()       # gradients add up = reduce SUM
    optimizer.step()

if __name__ == "__main__":
    d = make(0); right(d["model"], d["optimizer"], d["batches"])
    e = make(0); mbs = [b for r in e["batches"] for b in r]
    (sum(ce_sum(e["model"], b) for b in mbs) / sum((b["labels"] != -100).sum() for b in mbs)).backward(); e["optimizer"].step()
    diff = max((a - b).abs().max().item() for a, b in zip(d["model"].parameters(), e["model"].parameters()))
    print("largest difference to one process", diff); assert diff < 1e-6
