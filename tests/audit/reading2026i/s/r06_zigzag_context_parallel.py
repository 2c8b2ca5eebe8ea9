"""Zigzag split of a sequence over context-parallel ranks (Megatron-LM, ring-flash-attention): rank r gets chunk r and chunk 2P-1-r, so its tokens are not contiguous and its positions jump. The labels are shifted before the split, so that the last token of a chunk is
still supervised with the first token of the next chunk, which another rank holds. The rank sums are added and divided by the global count."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is trained as a target, [rows, time]"}
SETTINGS = {"ranks": "number of context-parallel ranks, 2 (simulated)"}
NOTES = "Next-token cross-entropy, mean over trained targets of all rows and ranks. time must be divisible by 2 * ranks. Keys and values of all ranks are visible to each rank (ring), the causal mask uses true positions. All parameters are used."


class Attn(nn.Module):
    def __init__(self, vocab=40, width=16, longest=32):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(longest, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, vocab)

    def project(self, ids, pos):
        x = self.emb(ids) + self.pos(pos)
        return (x, *self.qkv(x).chunk(3, -1))

    def finish(self, x, q, k, v, allowed):
        s = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~allowed, -1e9)
        return self.head(x + s.softmax(-1) @ v)


def make(seed):
    torch.manual_seed(seed)
    mask = (torch.rand(3, 16) < 0.7).float()
    mask[:, :2] = 0
    return {"model": Attn(longest=16), "ids": torch.randint(0, 40, (3, 16)), "loss_mask": mask}


def right(model, batch, ranks=2):
    ids = batch["ids"]
    labels = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
    weight = torch.cat([batch["loss_mask"][:, 1:], torch.zeros_like(batch["loss_mask"][:, :1])], dim=1)
    chunks = torch.arange(ids.shape[1]).chunk(2 * ranks)
    where = [torch.cat([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks)]
    parts = [model.project(ids[:, w], w.expand(len(ids), -1)) for w in where]
    k, v, kpos = torch.cat([p[2] for p in parts], 1), torch.cat([p[3] for p in parts], 1), torch.cat(where)     # the ring
    total, count = 0.0, 0.0
    for w, (x, q, _, _) in zip(where, parts):
        logits = model.finish(x, q, k, v, (w[:, None] >= kpos[None, :])[None])
        ce = F.cross_entropy(logits.flatten(0, 1), labels[:, w].flatten(), reduction="none").view(len(ids), -1)
        total, count = total + (ce * weight[:, w]).sum(), count + weight[:, w].sum()
    return total / count


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss = right(model, d)
    loss.backward()
    pos = torch.arange(16).expand(3, -1)
    lp = model.finish(*model.project(d["ids"], pos), torch.ones(1, 16, 16, dtype=torch.bool).tril()).log_softmax(-1)
    want = torch.stack([-lp[i, t - 1, d["ids"][i, t]] for i in range(3) for t in range(1, 16) if d["loss_mask"][i, t]]).mean()
    print("zigzag", loss.item(), "plain", want.item(), "gradient", model.head.weight.grad.norm().item())
    assert abs(loss.item() - want.item()) < 1e-5 and abs(right(model, d, ranks=4).item() - want.item()) < 1e-5
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())
