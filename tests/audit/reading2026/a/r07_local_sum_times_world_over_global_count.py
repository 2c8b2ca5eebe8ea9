"""Local sum times world size over the global count, then averaged gradients; one rank may have nothing to train.
The factor 'world' undoes the average that the data-parallel wrapper takes over ranks. A micro-batch without any target still
runs backward with a loss of exactly 0, so that all ranks take part in the reduction."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "tiny language model", "optimizer": "SGD", "batches": "batches[rank][micro]: dicts with 'ids' and 'labels' (-100: not trained) [rows, time]"}
SETTINGS = {"max_norm": "gradient clipping, 1.0, on the averaged gradient"}
NOTES = ("One optimizer step over 3 ranks and 2 micro-batches each; ranks simulated, gradients averaged over ranks. Objective: mean cross "
         "entropy over the trained tokens of all ranks and micro-batches.")

class TinyLM(nn.Module):
    """One causal attention layer; returns logits [rows, time, vocabulary]."""
    def __init__(self, vocab=32, dim=16, max_pos=128):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_pos, dim)
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, attention_mask=None, position_ids=None, document_ids=None):
        rows, time = ids.shape
        if position_ids is None:
            position_ids = torch.arange(time).expand(rows, time)
        x = self.emb(ids) + self.pos(position_ids)
        allowed = torch.ones(time, time, dtype=torch.bool).tril()[None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, :]
        if document_ids is not None:
            allowed = allowed & (document_ids[:, :, None] == document_ids[:, None, :])
        allowed = allowed | torch.eye(time, dtype=torch.bool)[None]
        scores = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        x = x + scores.masked_fill(~allowed, -1e9).softmax(-1) @ self.v(x)
        return self.head(x)

def make(seed):
    torch.manual_seed(seed)
    model, batches = TinyLM(), []
    for rank in range(3):
        micros = []
        for m in range(2):
            ids = torch.randint(0, 32, (2, 10))
            labels = ids.clone()
            labels[:, :2 + 2 * rank + m] = -100
            if rank == 2 and m == 1:
                labels[:] = -100
            micros.append({"ids": ids, "labels": labels})
        batches.append(micros)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}

def right(model, optimizer, batches, max_norm=1.0):
    world = len(batches)
    count = sum((b["labels"][:, 1:] != -100).sum() for micros in batches for b in micros)      # all-reduce
    optimizer.zero_grad()
    for micros in batches:
        for b in micros:
            logits = model(b["ids"])
            local = F.cross_entropy(logits[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum")
            loss = local * world / count
            (loss / world).backward()                      # / world: the average over ranks
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()

if __name__ == "__main__":
    a, b = make(0), make(0)
    right(**a)
    model, flat = b["model"], [x for micros in b["batches"] for x in micros]
    ids, labels = torch.cat([x["ids"] for x in flat]), torch.cat([x["labels"] for x in flat])
    b["optimizer"].zero_grad()
    F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    b["optimizer"].step()
    diff = max((p - q).abs().max().item() for p, q in zip(a["model"].parameters(), model.parameters()))
    print("largest difference to one big batch", diff)
    assert diff < 1e-5
