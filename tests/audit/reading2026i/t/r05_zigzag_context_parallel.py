"""Zigzag split of the sequence for context parallelism. Megatron-LM, ring-flash-attention, torchtitan: rank i holds chunk i and chunk 2n-1-i.
Tokens within a rank are not in order of time and their positions jump. Labels are shifted before the split, since the next token usually lives on another rank. Each rank sums its own token losses; the sum over ranks is divided by the global count. Attention compares positions, not indices."""
import torch
import torch.nn as nn
import torch.nn.functional as F
FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "labels": "the NEXT token (already shifted), -100 where not trained, [rows, time]"}
SETTINGS = {"cp": "context-parallel ranks, 2"}
NOTES = ("Cross-entropy, mean over trained labels of all rows and all ranks. time must be divisible by 2*cp. Labels are pre-shifted, so there is no shift in the loss. "
         "Keys and values of all ranks are gathered (simulated in one process). Position embeddings beyond the row length have no gradient.")

class Att(nn.Module):
    """one attention layer; `allowed` [rows, query, key] says who may look at whom"""
    def __init__(self, vocab=31, width=16, positions=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(positions, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, position_ids, allowed):
        x = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        s = s.masked_fill(~allowed, -1e9)
        return self.head(x + s.softmax(-1) @ v)

def make(seed):
    torch.manual_seed(seed)
    full = torch.randint(1, 31, (3, 17)); labels = full[:, 1:].clone(); labels[torch.rand(3, 16) < 0.3] = -100
    return {"model": Att(), "ids": full[:, :-1], "labels": labels}

def zigzag(x, rank, cp):
    c = x.chunk(2 * cp, 1)
    return torch.cat([c[rank], c[2 * cp - 1 - rank]], 1)

def right(model, batch, cp=2):
    ids, labels = batch["ids"], batch["labels"]
    pos = torch.arange(ids.shape[1]).expand_as(ids)
    ids, labels, pos = (torch.cat([zigzag(x, r, cp) for r in range(cp)], 1) for x in (ids, labels, pos))
    logits = model(ids, pos, pos[:, :, None] >= pos[:, None, :])
    local = ids.shape[1] // cp
    sums = [F.cross_entropy(logits[:, r * local:(r + 1) * local].reshape(-1, logits.shape[-1]), labels[:, r * local:(r + 1) * local].reshape(-1), reduction="sum", ignore_index=-100) for r in range(cp)]
    counts = [(labels[:, r * local:(r + 1) * local] != -100).sum() for r in range(cp)]
    return sum(sums) / sum(counts)

if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    l = right(m, b); l.backward()
    T = 16; pos = torch.arange(T)[None].expand(3, T)
    ref = F.cross_entropy(m(b["ids"], pos, torch.tril(torch.ones(T, T, dtype=torch.bool))[None]).reshape(-1, 31), b["labels"].reshape(-1), ignore_index=-100)
    print("zigzag", l.item(), "plain", ref.item(), "grad", m.qkv.weight.grad.norm().item())
    assert torch.allclose(l, ref, atol=1e-5)
