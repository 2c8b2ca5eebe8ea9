"""Zigzag sequence shards (ring attention, Llama 3, TransformerEngine load balancing). With N ranks the sequence is cut in 2N chunks and rank r holds chunks r and 2N-1-r, so its tokens are not contiguous and its order is not that of the text. Causality is decided by positions; labels are shifted before the split, since the next token of a chunk's end lives on another rank."""
import math
import torch

FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time + 1]", "loss_mask": "1 where the target is trained, [rows, time]"}
SETTINGS = {"ranks": "context-parallel ranks, 2"}
NOTES = "Next-token cross-entropy, sum over the shards of all ranks divided by the number of trained targets of all rows. time must be a multiple of 2 * ranks (16 here). All ranks are simulated in one process: keys and values are those of all ranks."

class TinyLM(torch.nn.Module):
    """One causal attention layer with fixed sinusoidal positions; every parameter is used by every forward."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, vocab)

    def hidden(self, ids, positions=None, mask=None):
        b, t = ids.shape
        w = self.emb.embedding_dim
        if positions is None:
            positions = torch.arange(t).expand(b, t)
        if mask is None:
            mask = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)
        freq = torch.exp(-torch.arange(0, w, 2).float() / w * math.log(100.0))
        ang = positions.float().unsqueeze(-1) * freq
        x = self.emb(ids) + torch.cat([ang.sin(), ang.cos()], -1)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(-1, -2) / math.sqrt(w)
        score = score.masked_fill(~mask, -1e9)
        return x + self.out(score.softmax(-1) @ v)

    def forward(self, ids, positions=None, mask=None):
        return self.head(self.hidden(ids, positions, mask))


def make(seed):
    torch.manual_seed(seed)
    return {"model": TinyLM(), "ids": torch.randint(0, 32, (3, 17)), "loss_mask": (torch.rand(3, 16) > 0.4).float()}


def right(model, batch, ranks=2):
    x, y, keep = batch["ids"][:, :-1], batch["ids"][:, 1:], batch["loss_mask"]
    rows, time = x.shape
    chunk = torch.arange(time).chunk(2 * ranks)
    shard = [torch.cat([chunk[r], chunk[2 * ranks - 1 - r]]) for r in range(ranks)]
    order = torch.cat(shard)                              # tokens as they lie over the ranks
    pos = order.expand(rows, time)
    mask = (order[:, None] >= order[None, :]).expand(rows, time, time)
    logits = model(x[:, order], pos, mask)
    total, at = 0.0, 0
    for r in range(ranks):
        n = len(shard[r])
        nll = torch.nn.functional.cross_entropy(logits[:, at:at + n].flatten(0, 1), y[:, shard[r]].flatten(), reduction="none").view(rows, n)
        total = total + (nll * keep[:, shard[r]]).sum()
        at += n
    return total / keep.sum()


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    loss = right(m, b); loss.backward()
    nll = torch.nn.functional.cross_entropy(m(b["ids"][:, :-1]).flatten(0, 1), b["ids"][:, 1:].flatten(), reduction="none")
    want = (nll * b["loss_mask"].flatten()).sum() / b["loss_mask"].sum()
    print(loss.item(), want.item()); assert abs(loss - want) < 1e-5 and abs(right(m, b, ranks=4) - want) < 1e-5
