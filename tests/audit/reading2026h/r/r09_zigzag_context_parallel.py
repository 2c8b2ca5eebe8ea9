"""Tokens out of order. Context parallelism with zigzag slices (Megatron, ring attention): time is cut in 2*cp chunks and
rank i holds chunks i and 2*cp-1-i, which balances causal attention. The concatenation of the ranks is therefore a
permuted row; labels are shifted before the cut, positions and the causal mask come from the true positions, and the last
token of a chunk is trained on a label that lies on another rank."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token itself is a trained target, [rows, time]"}
SETTINGS = {"cp": "context-parallel ranks, 2; time must be divisible by 2*cp"}
NOTES = ("Next-token cross-entropy, mean over trained tokens of all rows and ranks; each rank contributes its sum, the count "
         "is reduced over ranks. Keys and values are gathered, ranks are simulated in one process. Equal to the plain causal "
         "loss. All parameters used.")


class TinyLM(nn.Module):
    """One attention layer; `positions` [rows, time], `allowed` bool [rows, time, time] (default: causal)."""

    def __init__(self, vocab=32, width=16, max_pos=96):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, allowed=None):
        t = ids.shape[1]
        if positions is None:
            positions = torch.arange(t).expand(ids.shape)
        if allowed is None:
            allowed = torch.ones(t, t, dtype=torch.bool).tril()
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = (q @ k.transpose(-1, -2) / x.shape[-1] ** 0.5).masked_fill(~allowed, -1e9)
        return self.head(F.gelu(x + self.out(s.softmax(-1) @ v)))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids = torch.randint(1, 32, (3, 16), generator=g)
    prompt = torch.randint(1, 6, (3, 1), generator=g)
    return {"model": TinyLM(), "ids": ids, "loss_mask": (torch.arange(16)[None] >= prompt).float()}


def right(model, batch, cp=2):
    ids, mask = batch["ids"], batch["loss_mask"]
    t = ids.shape[1]
    labels = F.pad(ids[:, 1:], (0, 1))
    lmask = F.pad(mask[:, 1:], (0, 1))
    chunks = torch.arange(t).chunk(2 * cp)
    held = [torch.cat([chunks[r], chunks[2 * cp - 1 - r]]) for r in range(cp)]
    order = torch.cat(held)
    allowed = order[None] <= order[:, None]
    logits = model(ids[:, order], order.expand(ids.shape), allowed)
    sums, counts = [], []
    for own, lg in zip(held, logits.chunk(cp, 1)):
        nll = F.cross_entropy(lg.transpose(1, 2), labels[:, own], reduction="none")
        sums.append((nll * lmask[:, own]).sum())
        counts.append(lmask[:, own].sum())
    return sum(sums) / sum(counts)


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    loss = right(m, c)
    nll = F.cross_entropy(m(c["ids"])[:, :-1].transpose(1, 2), c["ids"][:, 1:], reduction="none")
    ref = (nll * c["loss_mask"][:, 1:]).sum() / c["loss_mask"][:, 1:].sum()
    loss.backward()
    print("loss", loss.item(), "plain", ref.item(), "cp=4", right(m, c, cp=4).item())
    assert abs(loss - ref) < 1e-5 and all(p.grad.abs().sum() > 0 for p in m.parameters())
