"""The local loss is multiplied by the number of ranks. transformers Trainer with average_tokens_across_devices, ms-swift, verl: DDP averages gradients, so a loss that is already divided by the GLOBAL token count must be scaled by world size.
local_sum * world / global_tokens, then the mean of gradients over ranks, is exactly the gradient of global_sum / global_tokens. The loss printed on one rank is not the loss of that rank."""
import torch
import torch.nn as nn
import torch.nn.functional as F
FAMILY = "sharding and reductions"
KIND = "update"
INPUTS = {"batches": "one list per rank (all equally long) of micro-batches with ids [rows, time] and labels (next token, pre-shifted, -100 = not trained)"}
SETTINGS = {}
NOTES = "Objective: mean cross-entropy over all trained tokens of all ranks and micro-batches. Gradients are averaged over ranks (simulated: one backward per rank, then division by the number of ranks). One optimizer step per call; SGD."

class Tiny(nn.Module):
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    torch.manual_seed(seed); model = Tiny(); ranks = []
    for r in range(3):
        mbs = []
        for _ in range(2):
            ids = torch.randint(1, 31, (2, 10)); lab = torch.randint(1, 31, (2, 10)); lab[torch.rand(2, 10) < 0.2 + 0.25 * r] = -100
            mbs.append({"ids": ids, "labels": lab})
        ranks.append(mbs)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.3), "batches": ranks}

def ce_sum(model, b):
    return F.cross_entropy(model(b["ids"]).flatten(0, 1), b["labels"].flatten(), ignore_index=-100, reduction="sum")

def right(model, optimizer, batches):
    world = len(batches)
    tokens = sum((b["labels"] != -100).sum() for rank in batches for b in rank)      # all-reduce SUM
    params = list(model.parameters()); total = [torch.zeros_like(p) for p in params]
    for rank in batches:
        optimizer.zero_grad()
        for b in rank:
            (ce_sum(model, b) * world / tokens).backward()
        for t, p in zip(total, params):
            t += p.grad
    for t, p in zip(total, params):
        p.grad = t / world                                                         # DDP: all-reduce AVG
    optimizer.step()

if __name__ == "__main__":
    d = make(0); right(d["model"], d["optimizer"], d["batches"])
    e = make(0); mbs = [b for r in e["batches"] for b in r]
    (sum(ce_sum(e["model"], b) for b in mbs) / sum((b["labels"] != -100).sum() for b in mbs)).backward(); e["optimizer"].step()
    diff = max((a - b).abs().max().item() for a, b in zip(d["model"].parameters(), e["model"].parameters()))
    print("largest difference to one process", diff); assert diff < 1e-6
