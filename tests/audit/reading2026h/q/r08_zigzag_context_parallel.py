"""Context parallel with the zigzag split: rank i holds chunks i and 2*cp-1-i. Megatron-LM / Transformer Engine's load balancing for causal attention.
The tokens on a rank are not contiguous and the order of the gathered row is restored at the end; targets are shifted before the split, since a shift after it would cross the wrong borders. Each rank gives a sum; the sums are added and divided once."""
import torch
from torch import nn
FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], time divisible by 2 * cp", "loss_mask": "1 where the token is trained, at the token's own index, [rows, time]"}
SETTINGS = {"cp": "context-parallel ranks, simulated in one process, 2"}
NOTES = "Cross entropy of the next token, mean over trained tokens of all rows. The first token is never a target. Time must be divisible by 2 * cp. The forward is done whole here (attention gathers keys in reality); loss terms are computed per rank on zigzag chunks and summed. Same value for every cp. Uses all parameters."


class TinyLM(nn.Module):
    def __init__(self, vocab=32, width=16, max_pos=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, position_ids=None, doc_ids=None):
        n, t = ids.shape
        if position_ids is None:
            position_ids = torch.arange(t).expand(n, t)
        x = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        allow = torch.ones(t, t, dtype=torch.bool).tril().expand(n, t, t)
        if doc_ids is not None:
            allow = allow & (doc_ids[:, :, None] == doc_ids[:, None, :])
        score = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        att = score.masked_fill(~allow, float("-inf")).softmax(-1)
        return self.head(torch.tanh(x + self.mix(att @ v)))


def make(seed):
    torch.manual_seed(seed)
    return {"model": TinyLM(), "ids": torch.randint(0, 32, (3, 16)), "loss_mask": (torch.rand(3, 16) > 0.3).float()}


def right(model, batch, cp=2):
    ids = batch["ids"]
    logits = model(ids)
    targets = torch.roll(ids, -1, 1)
    mask = torch.roll(batch["loss_mask"], -1, 1)
    mask[:, -1] = 0
    chunk = lambda x: x.chunk(2 * cp, 1)
    L, T, M = chunk(logits), chunk(targets), chunk(mask)
    num = den = 0
    for rank in range(cp):
        pick = (rank, 2 * cp - 1 - rank)
        lo, ta, ma = (torch.cat([c[k] for k in pick], 1) for c in (L, T, M))
        ce = nn.functional.cross_entropy(lo.flatten(0, 1), ta.flatten(), reduction="none")
        num = num + (ce * ma.flatten()).sum()
        den = den + ma.sum()
    return num / den


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    loss = right(m, d)
    loss.backward()
    ce = nn.functional.cross_entropy(m(d["ids"])[:, :-1].flatten(0, 1), d["ids"][:, 1:].flatten(), reduction="none")
    w = d["loss_mask"][:, 1:].flatten()
    want = (ce * w).sum() / w.sum()
    print(loss.item(), want.item(), right(m, d, cp=4).item())
    assert abs(loss - want) < 1e-5 and abs(right(m, d, cp=4) - want) < 1e-5 and m.qkv.weight.grad.norm() > 0
