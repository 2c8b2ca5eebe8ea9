"""The loss of each rank is multiplied by the number of ranks (average_tokens_across_devices of transformers; open-instruct, verl).
DDP averages the gradients over ranks. So a rank takes the sum of its token losses, divides by the number of trained tokens of all ranks and all
micro-batches and multiplies by the world size; the average of DDP cancels the factor. There is no division by the accumulation steps. Clipping comes after."""
FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "a small causal model", "optimizer": "SGD over all its parameters", "batches": "batches[rank][micro]: dict of ids [rows, time] and labels [rows, time], -100 is not trained"}
SETTINGS = {"max_norm": "gradient norm limit, 1.0"}
NOTES = ("One optimizer step. Mean over all trained tokens of all ranks and micro-batches. labels are not shifted yet; the first label of a row is never used. Ranks are simulated one after the "
         "other and their gradients are averaged. Row counts and token counts may differ; the number of micro-batches is the same on each rank.")
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

    def batch(rows):
        ids = torch.randint(1, 40, (rows, 9), generator=g)
        labels = torch.where(torch.rand(rows, 9, generator=g) < 0.5, ids, torch.full_like(ids, -100))
        return {"ids": ids, "labels": labels}
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": [[batch(2), batch(1)], [batch(1), batch(3)]]}


def right(model, optimizer, batches, max_norm=1.0):
    world = len(batches)
    num_items = sum((b["labels"][:, 1:] != -100).sum() for rank in batches for b in rank)         # all-reduce, sum
    averaged = [torch.zeros_like(p) for p in model.parameters()]
    for rank in batches:
        optimizer.zero_grad()
        for b in rank:
            logits = model(b["ids"])[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), b["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum")
            (loss / num_items * world).backward()
        for a, p in zip(averaged, model.parameters()):
            a += p.grad / world                                                                    # DDP: mean over ranks
    for a, p in zip(averaged, model.parameters()):
        p.grad = a
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    d, e = make(0), make(0)
    before = d["model"].head.weight.detach().clone()
    right(**d)
    flat = [b for r in e["batches"] for b in r]
    ids, labels = torch.cat([b["ids"] for b in flat]), torch.cat([b["labels"] for b in flat])
    F.cross_entropy(e["model"](ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100).backward()
    torch.nn.utils.clip_grad_norm_(e["model"].parameters(), 1.0)
    e["optimizer"].step()
    gap = max((p - q).abs().max().item() for p, q in zip(d["model"].parameters(), e["model"].parameters()))
    print("difference to one big batch", gap, "moved", (d["model"].head.weight - before).abs().max().item())
    assert gap < 1e-6
