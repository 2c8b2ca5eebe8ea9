"""Packed rows whose documents start at arbitrary positions. The model has rotary positions only, which depend on
differences, so each document may start at a random offset (here it does, so that long positions are trained too). The
positions neither start at 0 nor increase along the row; the loss equals that of the documents run alone from 0."""
FAMILY = "packing"
KIND = "loss"
import torch
import torch.nn as nn
import torch.nn.functional as F
INPUTS = {"ids": "several documents in one row, [rows, time]", "doc": "document index of each token, -1 on padding, [rows, time]",
          "position_ids": "position of each token, consecutive inside a document from a random start, [rows, time]"}
SETTINGS = {}
NOTES = ("Next-token cross entropy, mean over all targets that lie in the same document as the token before them. Attention "
         "is causal inside a document. Rotary positions: only differences matter.")


class RotaryLM(nn.Module):
    def __init__(self, vocab=29, width=16):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocab)

    def _rotate(self, x, pos):
        half = x.shape[-1] // 2
        angle = pos[..., None].double() * (0.1 ** (torch.arange(half).double() / half))
        c, s = angle.cos().float(), angle.sin().float()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * c - b * s, a * s + b * c], -1)

    def forward(self, ids, pos, see):
        x = self.tok(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = self._rotate(q, pos) @ self._rotate(k, pos).transpose(1, 2) / x.shape[-1] ** 0.5
        return self.head(x + score.masked_fill(~see, -1e9).softmax(-1) @ v)


def make(seed):
    torch.manual_seed(seed)
    lengths = [[5, 8, 4], [9, 6]]
    time = 18
    ids = torch.randint(0, 29, (2, time))
    doc, pos = torch.full((2, time), -1), torch.zeros(2, time, dtype=torch.long)
    for r, row in enumerate(lengths):
        at = 0
        for d, n in enumerate(row):
            doc[r, at:at + n] = d
            pos[r, at:at + n] = torch.arange(n) + torch.randint(0, 500, (1,))
            at += n
    return {"model": RotaryLM(), "ids": ids, "doc": doc, "position_ids": pos}


def right(model, batch):
    ids, doc = batch["ids"], batch["doc"]
    time = ids.shape[1]
    see = (doc[:, :, None] == doc[:, None, :]) & torch.ones(time, time, dtype=torch.bool).tril()
    logits = model(ids, batch["position_ids"], see)
    keep = (doc[:, 1:] == doc[:, :-1]) & (doc[:, 1:] >= 0)
    return F.cross_entropy(logits[:, :-1][keep], ids[:, 1:][keep])


if __name__ == "__main__":
    data = make(0)
    model = data.pop("model")
    loss = right(model, data)
    loss.backward()
    total, n = 0.0, 0
    for r in range(2):
        for d in data["doc"][r].unique():
            if d < 0:
                continue
            ids = data["ids"][r][data["doc"][r] == d][None]
            t = ids.shape[1]
            logits = model(ids, torch.arange(t)[None], torch.ones(1, t, t, dtype=torch.bool).tril())
            total, n = total + F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item(), n + t - 1
    print(loss.item(), total / n, "grad", sum(p.grad.norm() for p in model.parameters()).item())
    assert abs(loss.item() - total / n) < 1e-4
