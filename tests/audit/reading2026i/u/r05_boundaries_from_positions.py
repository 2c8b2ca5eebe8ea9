"""Packed rows without an attention mask. As HF flash-attention and torchtitan do: document boundaries are read only from position_ids that return to 0, the attention is block-diagonal, and the label that would predict the first token of the next document is ignored. No mask is in the batch, positions repeat, and the last token of each document has no loss."""
import math
import torch

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids of several documents in a row, [rows, time]", "position_ids": "position within the document, starts again at 0, [rows, time]"}
SETTINGS = {}
NOTES = "Next-token cross-entropy, mean over all predicted tokens of all rows; first tokens of documents are never predicted. Rows are full, no padding."

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
    ids = torch.randint(0, 32, (3, 15))
    pos = torch.tensor([list(range(5)) + list(range(7)) + list(range(3)), list(range(15)), list(range(2)) + list(range(12)) + [0]])
    return {"model": TinyLM(), "ids": ids, "position_ids": pos}


def right(model, batch):
    ids, pos = batch["ids"], batch["position_ids"]
    doc = (pos == 0).long().cumsum(1)
    t = ids.shape[1]
    mask = (doc[:, :, None] == doc[:, None, :]) & torch.ones(t, t, dtype=torch.bool).tril()
    labels = ids.masked_fill(pos == 0, -100)
    logits = model(ids, pos, mask)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    loss = right(m, b); loss.backward()
    tot = n = 0
    for i in range(3):
        starts = (b["position_ids"][i] == 0).nonzero().flatten().tolist() + [15]
        for a, e in zip(starts, starts[1:]):
            x = b["ids"][i, a:e][None]
            if e - a > 1:
                tot += torch.nn.functional.cross_entropy(m(x)[0, :-1], x[0, 1:], reduction="sum").item(); n += e - a - 1
    print(loss.item(), tot / n); assert abs(loss.item() - tot / n) < 1e-5
