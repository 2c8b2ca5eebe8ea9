"""Padding of a pack attends to itself and goes on counting positions. As torchtune's PackedDataset: the mask of a pack is
block-diagonal and causal per document, and identity on the padding at the end (a softmax row without any allowed entry
would be undefined); positions restart per document but continue through the padding, which looks like a longer last
document. Padding has the label -100 and no document sees it."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "packed ids, padding (0) at the end, [packs, time]", "labels": "already shifted: the target of each position, "
          "-100 where there is none (last token of a document, prompts, padding), [packs, time]",
          "seq_lens": "lengths of the documents of each pack, 0 = no document, [packs, documents]"}
SETTINGS = {}
NOTES = ("Cross-entropy with labels shifted in the data, not here; mean over trained positions of all packs. Documents do not "
         "see each other. Uses all parameters.")


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
    t = 16
    ids, labels = torch.zeros(3, t, dtype=torch.long), torch.full((3, t), -100)
    lens = torch.tensor([[5, 4, 3], [9, 6, 0], [2, 3, 6]])
    for i in range(3):
        start = 0
        for n in lens[i].tolist():
            doc = torch.randint(1, 32, (n,), generator=g)
            ids[i, start:start + n] = doc
            prompt = int(torch.randint(0, 2, (1,), generator=g))
            labels[i, start + prompt:start + max(n - 1, 0)] = doc[1 + prompt:]
            start += n
    return {"model": TinyLM(), "ids": ids, "labels": labels, "seq_lens": lens}


def right(model, batch):
    ids, t = batch["ids"], batch["ids"].shape[1]
    masks, positions = [], []
    for lens in batch["seq_lens"].tolist():
        lens = [n for n in lens if n]
        pad = t - sum(lens)
        blocks = [torch.ones(n, n, dtype=torch.bool).tril() for n in lens] + [torch.eye(pad, dtype=torch.bool)]
        masks.append(torch.block_diag(*blocks))
        pos = [torch.arange(n) for n in lens] + [torch.arange(lens[-1], lens[-1] + pad).clamp(max=t - 1)]
        positions.append(torch.cat(pos))
    logits = model(ids, torch.stack(positions), torch.stack(masks).bool())
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    loss = right(m, c)
    tot = n = 0
    for i in range(3):
        start = 0
        for k in c["seq_lens"][i].tolist():
            x, y = c["ids"][i, start:start + k], c["labels"][i, start:start + k]
            if k:
                tot = tot + F.cross_entropy(m(x[None])[0], y, ignore_index=-100, reduction="sum")
                n = n + (y != -100).sum()
            start += k
    loss.backward()
    print("loss", loss.item(), "document by document", (tot / n).item(), "trained positions", int(n))
    assert abs(loss - tot / n) < 1e-5 and all(p.grad.abs().sum() > 0 for p in m.parameters())
