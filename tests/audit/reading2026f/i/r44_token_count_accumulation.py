"""Accumulation and data parallelism with a global token count (transformers' num_items_in_batch, torchtitan). The loss is a SUM, multiplied by the world size because the gradient average of DDP divides
by it, and divided by the trained tokens of ALL ranks and micro-batches. The factor `world` looks like a bug."""
FAMILY = "update"
KIND = "update"
INPUTS = {"model": "a tiny language model", "optimizer": "its optimizer", "batches": "list over ranks of lists over micro-batches of {'ids': [rows, time], 'loss_mask': [rows, time-1]}"}
SETTINGS = {"max_norm": "gradient clip, 1.0, applied once after averaging"}
NOTES = "Equal to one big batch with a mean over all trained tokens. Ranks are simulated one after the other and their gradients averaged (as DDP does). Ranks and micro-batches may have different sizes. No scaling by 1/accumulation steps, on purpose."
import copy
import torch
import torch.nn as nn
import torch.nn.functional as F


class Tiny(nn.Module):
    """Causal language model: ids [rows, time] -> logits [rows, time, vocabulary]."""
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]): [rows, time-1]."""
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def fake_rows(g, rows, time=10, prompt=3, vocab=31):
    """Right-padded ids (pad = 0) and the mask [rows, time-1] of the targets ids[:, 1:] that belong to the completion."""
    ids = torch.randint(1, vocab, (rows, time), generator=g)
    n = torch.randint(2, time - prompt + 1, (rows,), generator=g)
    pos = torch.arange(time)
    ids[pos >= (prompt + n)[:, None]] = 0
    mask = ((pos >= prompt) & (pos < (prompt + n)[:, None])).float()
    return ids, mask[:, 1:]

def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    model = Tiny()
    micro = lambda r, t: dict(zip(("ids", "loss_mask"), fake_rows(g, r, time=t)))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "batches": [[micro(2, 10), micro(3, 7)], [micro(1, 8), micro(2, 9)]]}


def right(model, optimizer, batches, max_norm=1.0):
    world = len(batches)
    tokens = sum(b["loss_mask"].sum() for rank in batches for b in rank)        # the all-reduce
    total = [torch.zeros_like(p) for p in model.parameters()]
    for rank in batches:
        optimizer.zero_grad(set_to_none=True)
        for b in rank:
            (-(logps(model, b["ids"]) * b["loss_mask"]).sum() * world / tokens).backward()
        for t, p in zip(total, model.parameters()):
            t += p.grad / world                                                 # DDP's average
    for t, p in zip(total, model.parameters()):
        p.grad = t
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    d = make(0)
    twin = copy.deepcopy(d["model"]); opt = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    start = [p.detach().clone() for p in twin.parameters()]
    every = [b for r in d["batches"] for b in r]
    loss = -sum((logps(twin, b["ids"]) * b["loss_mask"]).sum() for b in every) / sum(b["loss_mask"].sum() for b in every)
    loss.backward(); torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0); opt.step()
    right(**d)
    gap = max((a - b).abs().max().item() for a, b in zip(d["model"].parameters(), twin.parameters()))
    moved = max((a - b).abs().max().item() for a, b in zip(start, twin.parameters()))
    assert gap < 1e-4 < moved, (gap, moved)
    print("ok  gap", gap, "moved", moved)
