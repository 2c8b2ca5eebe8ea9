"""Zigzag context parallelism: rank r holds the chunks r and 2R-1-r of the sequence (Megatron-LM, ring-flash-attn, torchtitan).
The tokens of a rank are not contiguous and its positions jump; causal work is balanced that way. Labels are shifted before the split: the last token of a chunk is
predicted with a label from another rank. Each rank returns its sum divided by the number of trained tokens of all ranks; the gradients are summed."""
FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]; time a multiple of 2 * ranks", "loss_mask": "1 where the token is a trained target, [rows, time]"}
SETTINGS = {"ranks": "context parallel ranks, simulated in one process, 2"}
NOTES = ("Mean next-token cross entropy over the trained tokens of all rows (the sum of the rank losses). Needs time divisible by 4. Keys and values are gathered: each query sees the keys whose "
         "position is not larger. Every parameter is used.")
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
    mask = (torch.rand(3, 16, generator=g) < 0.6).float()
    return {"model": Tiny(), "ids": torch.randint(1, 40, (3, 16), generator=g), "loss_mask": mask}


def zigzag(x, rank, ranks):
    chunks = x.chunk(2 * ranks, dim=1)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], 1)


def right(model, batch, ranks=2):
    ids = batch["ids"]
    labels = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)
    weights = torch.cat([batch["loss_mask"][:, 1:], torch.zeros_like(batch["loss_mask"][:, :1])], 1)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    count = sum(zigzag(weights, r, ranks).sum() for r in range(ranks))               # all-reduce
    gathered = torch.cat([zigzag(ids, r, ranks) for r in range(ranks)], 1)           # the layout over ranks
    where = torch.cat([zigzag(positions, r, ranks) for r in range(ranks)], 1)
    loss = 0
    for r in range(ranks):
        mine = slice(r * ids.shape[1] // ranks, (r + 1) * ids.shape[1] // ranks)
        logits = model(gathered, positions=where, allow=where[:, :, None] >= where[:, None, :])[:, mine]
        nll = F.cross_entropy(logits.flatten(0, 1), zigzag(labels, r, ranks).flatten(), reduction="none")
        loss = loss + (nll * zigzag(weights, r, ranks).flatten()).sum() / count
    return loss


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    loss = right(m, d)
    loss.backward()
    lp = m(d["ids"]).log_softmax(-1)
    w = d["loss_mask"][:, 1:]
    plain = -(lp[:, :-1].gather(-1, d["ids"][:, 1:, None])[..., 0] * w).sum() / w.sum()
    print(loss.item(), plain.item(), m.head.weight.grad.norm().item())
    assert abs(loss - plain) < 1e-5
