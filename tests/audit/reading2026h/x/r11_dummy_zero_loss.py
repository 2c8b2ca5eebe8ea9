"""A rank that has run out of micro-batches runs a dummy one with loss times zero (common in FSDP and ZeRO-3 trainers with dynamic batches, e.g. prime-rl; FSDP needs the same collectives on each rank).
The number of micro-batches differs between ranks with dynamic batch sizes. The forward and backward of a sharded model contain collectives, so ranks with fewer micro-batches
repeat one with its loss multiplied by 0.0; it adds no gradient and no tokens. Gradients are summed over ranks (not averaged), the divisor is the global token count."""
FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "a small causal model", "optimizer": "Adam over all its parameters", "batches": "batches[rank]: list of micro-batches, at least one; lengths differ over ranks; each a dict of ids [rows, time]"}
SETTINGS = {}
NOTES = ("One optimizer step; mean next-token cross entropy over all tokens of all real micro-batches of all ranks. Every rank does as many forward passes as the longest rank. The loss of a dummy is 0.0 * loss, "
         "which is exactly zero for finite logits. Gradients of simulated ranks are summed (FSDP with the divide factor 1).")
import torch
import torch.nn.functional as F
from torch import nn


class Tiny(nn.Module):
    """One causal attention layer: ids [rows, time] -> logits [rows, time, vocabulary]."""
    def __init__(self, vocab=40, width=16, length=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, allow=None):
        t = torch.arange(ids.shape[1])
        x = self.embed(ids) + self.pos(t if positions is None else positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        allow = (t[:, None] >= t[None]) if allow is None else allow
        return self.head(x + score.masked_fill(~allow, float("-inf")).softmax(-1) @ v)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Tiny()
    micro = lambda rows, time: {"ids": torch.randint(0, 40, (rows, time), generator=g)}
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4),
            "batches": [[micro(2, 8), micro(1, 12), micro(3, 5)], [micro(1, 15)], [micro(4, 4), micro(2, 6)]]}


def right(model, optimizer, batches):
    rounds = max(len(rank) for rank in batches)                                               # all-reduce, max
    tokens = sum(b["ids"][:, 1:].numel() for rank in batches for b in rank)                   # all-reduce, sum
    optimizer.zero_grad()
    for k in range(rounds):
        for rank in batches:                                                                  # in lock step
            real = k < len(rank)
            ids = (rank[k] if real else rank[0])["ids"]
            logits = model(ids)[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / tokens
            (loss if real else loss * 0.0).backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    d, e = make(0), make(0)
    right(**d)
    tot = n = 0
    for rank in e["batches"]:
        for b in rank:
            tot = tot + F.cross_entropy(e["model"](b["ids"])[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten(), reduction="sum")
            n += b["ids"][:, 1:].numel()
    (tot / n).backward()
    assert e["model"].head.weight.grad.norm() > 0
    e["optimizer"].step()
    gap = max((p - q).abs().max().item() for p, q in zip(d["model"].parameters(), e["model"].parameters()))
    print("loss", (tot / n).item(), "difference to the plain step", gap)
    assert gap < 1e-5
