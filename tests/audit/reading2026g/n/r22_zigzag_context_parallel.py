"""Zigzag context parallelism (ring-flash-attention, Llama 3). Rank r holds chunks r and 2W-1-r, so its positions jump and the causal work is even; the labels are shifted before the split, and the attention over foreign chunks is merged by log-sum-exp."""
import torch
from torch import nn
FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], time a multiple of 2*world", "loss_mask": "1 where the token is trained, [rows, time]"}
SETTINGS = {"world": "context-parallel ranks, 4; 2*world divides the time"}
NOTES = "Cross entropy: sum over all ranks / trained tokens of all ranks. Target of the last position of a row is none (-100), not a rolled first token. Every parameter is used."
class Tiny(nn.Module):
    """One attention layer and an MLP-free head; position_ids and allowed ([B,T,T] bool) are optional."""
    def __init__(self, vocab=40, width=16, places=64):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(places, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids, position_ids=None, allowed=None):
        T = ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(T).expand_as(ids)
        if allowed is None:
            allowed = torch.ones(T, T, dtype=torch.bool).tril().expand(ids.shape[0], T, T)
        h = self.emb(ids) + self.pos(position_ids)
        s = self.q(h) @ self.k(h).transpose(1, 2) / h.shape[-1] ** 0.5
        a = s.masked_fill(~allowed, float("-inf")).softmax(-1)
        return self.head(h + self.o(a @ self.v(h)))

def make(seed):
    torch.manual_seed(seed); mask = (torch.rand(2, 24) < .8).float(); mask[:, 0] = 0; mask[:, 7] = 1
    return {"model": Tiny(), "ids": torch.randint(0, 40, (2, 24)), "loss_mask": mask}

def right(model, batch, world=4):
    ids = batch["ids"]; B, T = ids.shape; assert T % (2 * world) == 0
    labels = torch.full_like(ids, -100); labels[:, :-1] = ids[:, 1:].masked_fill(batch["loss_mask"][:, 1:] == 0, -100)
    chunks = torch.arange(T).chunk(2 * world)
    places = [torch.cat([chunks[r], chunks[2 * world - 1 - r]]) for r in range(world)]
    hs = [model.emb(ids[:, p]) + model.pos(p) for p in places]
    kv = [(model.k(h), model.v(h)) for h in hs]
    total, count = 0.0, 0
    for r in range(world):
        q, out, lse = model.q(hs[r]), 0.0, None
        for hop in range(world):                                       # ring: own block first, so lse is finite
            s = (r - hop) % world; k, v = kv[s]
            score = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(places[s][None] > places[r][:, None], -1e30)
            new = score.logsumexp(-1, keepdim=True); part = score.softmax(-1) @ v
            both = new if lse is None else torch.logaddexp(lse, new)
            out = part if lse is None else out * (lse - both).exp() + part * (new - both).exp()
            lse = both
        y = labels[:, places[r]]
        total = total + nn.functional.cross_entropy(model.head(hs[r] + model.o(out)).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
        count += int((y != -100).sum())
    return total / count

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); g1 = torch.autograd.grad(loss, list(m.parameters()))
    ce = nn.functional.cross_entropy(m(d["ids"])[:, :-1].transpose(1, 2), d["ids"][:, 1:], reduction="none"); k = d["loss_mask"][:, 1:]
    ref = (ce * k).sum() / k.sum(); g2 = torch.autograd.grad(ref, list(m.parameters()))
    print(loss.item(), ref.item()); assert abs(loss - ref) < 1e-5 and all(torch.allclose(a, b, atol=1e-5) and a.abs().sum() > 0 for a, b in zip(g1, g2))
