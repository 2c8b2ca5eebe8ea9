"""ZeRO-style update: the optimizer does not hold the model's parameters. It holds W flat shards (master copies, the last one zero-padded); gradients are reduce-scattered into shard.grad, the norm is put together from the shards' squares, and the stepped shards are gathered and copied back into the model (DeepSpeed ZeRO-1/2). Flat shards cut through the middle of tensors, fine for an elementwise optimizer such as AdamW."""
FAMILY = "sharding"
KIND = "update"
INPUTS = {"batches": "list over W ranks of dicts: ids [rows, time]; the same number of rows on all ranks",
          "optimizer": "optimizer over the W flat shards, in rank order, in one parameter group"}
SETTINGS = {"max_norm": "global gradient clipping, 0.5"}
NOTES = "len(batches) must be the number of shards. Elementwise optimizer required; no per-parameter weight-decay groups. Rank loss is the mean over its tokens and gradients are averaged over ranks, which is the global mean as ranks have equal token counts. Equals AdamW on the whole model with clipping. Model gradients are None afterwards."
import copy
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


W = 4


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = TinyLM(vocab=31)
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    flat = nn.functional.pad(flat, (0, -len(flat) % W))
    shards = [nn.Parameter(s.clone()) for s in flat.chunk(W)]
    return {"model": model, "optimizer": torch.optim.AdamW(shards, lr=1e-2, weight_decay=0.1),
            "batches": [{"ids": torch.randint(0, 31, (2, 9), generator=g)} for _ in range(W)]}


def token_mean(model, ids):
    return nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def right(model, optimizer, batches, max_norm=0.5):
    shards = optimizer.param_groups[0]["params"]
    assert len(shards) == len(batches)
    params = list(model.parameters())
    size = sum(s.numel() for s in shards)
    total = torch.zeros(size)
    for b in batches:
        gs = torch.autograd.grad(token_mean(model, b["ids"]), params)
        gs = torch.cat([x.flatten() for x in gs])
        total += nn.functional.pad(gs, (0, size - len(gs)))
    for s, gr in zip(shards, (total / len(batches)).chunk(len(shards))):        # reduce_scatter(AVG)
        s.grad = gr.clone()
    norm = sum(s.grad.pow(2).sum() for s in shards).sqrt()                      # all_reduce of squares
    for s in shards:
        s.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        flat, at = torch.cat([s.detach() for s in shards]), 0                    # all_gather
        for p in params:
            p.copy_(flat[at:at + p.numel()].view_as(p))
            at += p.numel()


if __name__ == "__main__":
    b = make(0)
    start, ref = copy.deepcopy(b["model"]), copy.deepcopy(b["model"])
    opt = torch.optim.AdamW(ref.parameters(), lr=1e-2, weight_decay=0.1)
    ids = torch.cat([x["ids"] for x in b["batches"]])
    for k in range(5):
        before = token_mean(ref, ids).item()
        right(**b)
        opt.zero_grad()
        token_mean(ref, ids).backward()
        nn.utils.clip_grad_norm_(ref.parameters(), 0.5)
        opt.step()
    gap = max((p - q).abs().max().item() for p, q in zip(b["model"].parameters(), ref.parameters()))
    moved = max((p - q).abs().max().item() for p, q in zip(b["model"].parameters(), start.parameters()))
    print("loss", before, token_mean(b["model"], ids).item(), "gap", gap, "moved", moved)
    assert gap < 2e-3 and moved > 1e-2
