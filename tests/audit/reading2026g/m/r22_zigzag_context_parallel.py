"""Context parallelism with zigzag shards: rank r holds the chunks r and 2W-1-r of each sequence, so its tokens are not contiguous (balanced causal work; Megatron-LM, ring-flash-attention, Llama 3). The labels are shifted before the cut, because a shard's right neighbour is not its next token; causality is decided by the global positions."""
FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "[rows, time], 1 where the token is trained"}
SETTINGS = {"world": "context-parallel ranks, 2; the sequence is padded to a multiple of 2 x world inside"}
NOTES = "Supervised. Reduction: sum of all ranks' token losses / number of trained tokens of all rows and ranks. Result does not depend on world. Token 0 of a row is no target. Keys and values are all-gathered. No parameter unused."
import torch
from torch import nn


class TinyLM(nn.Module):
    def __init__(self, vocab=32, width=16, max_len=96):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_len, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, mask=None):
        """ids [B, T]; positions [B, T]; mask [B, T, T], True where query may see key. Returns logits [B, T, V]."""
        B, T = ids.shape
        if positions is None:
            positions = torch.arange(T).expand(B, T)
        if mask is None:
            mask = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        a = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        a = a.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.out(a @ v)
        return self.head(torch.tanh(x))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return {"model": TinyLM(), "ids": torch.randint(1, 32, (3, 14), generator=g), "loss_mask": (torch.rand(3, 14, generator=g) < 0.7).long()}


def right(model, batch, world=2):
    ids = batch["ids"]
    labels = torch.where(batch["loss_mask"].bool(), ids, -100)
    labels = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)               # shifted on the whole sequence
    extra = -ids.shape[1] % (2 * world)
    ids, labels = nn.functional.pad(ids, (0, extra)), nn.functional.pad(labels, (0, extra), value=-100)
    chunks = torch.arange(ids.shape[1]).chunk(2 * world)
    where = [torch.cat([chunks[r], chunks[2 * world - 1 - r]]) for r in range(world)]
    xs = [model.emb(ids[:, p]) + model.pos(p) for p in where]
    qkv = [model.qkv(x).chunk(3, -1) for x in xs]
    k, v, kpos = torch.cat([a[1] for a in qkv], 1), torch.cat([a[2] for a in qkv], 1), torch.cat(where)   # all_gather
    total, count = 0.0, 0
    for x, (q, _, _), p in zip(xs, qkv, where):
        a = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        a = a.masked_fill(kpos[None, :] > p[:, None], float("-inf")).softmax(-1)
        logits = model.head(torch.tanh(x + model.out(a @ v)))
        y = labels[:, p]
        total = total + nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
        count = count + (y != -100).sum()
    return total / count.clamp(min=1)


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    loss = right(m, b)
    gs = torch.autograd.grad(loss, list(m.parameters()))
    lp = m(b["ids"])[:, :-1].log_softmax(-1).gather(-1, b["ids"][:, 1:, None])[..., 0]
    on = b["loss_mask"][:, 1:]
    ref = -(lp * on).sum() / on.sum()
    gr = torch.autograd.grad(ref, list(m.parameters()))
    gap = max((x - y).abs().max().item() for x, y in zip(gs, gr))
    print(loss.item(), ref.item(), right(m, b, world=3).item(), "grad", sum(x.norm() for x in gs).item(), "gap", gap)
    assert torch.allclose(loss, ref, atol=1e-5) and torch.allclose(right(m, b, world=3), ref, atol=1e-5) and gap < 1e-5
