"""Packed pre-training without document isolation, on purpose.
Documents are joined by an end-of-text token and cut into rows of equal length. Attention is plainly causal over
the whole row, positions run on, the end-of-text and the first token after it are trained, and a
document may start in the middle. That is the GPT-3 recipe; the separator tells the model to forget."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'packing'
KIND = 'loss'
INPUTS = {
    'ids': 'rows cut from the joined stream, end-of-text id 0, [rows, time + 1]',
}
SETTINGS = {}
NOTES = (
    'Next-token cross-entropy, mean over all rows * time targets, none masked. Context crosses '
    'documents by design. '
)


class Tiny(nn.Module):
    """Embedding + learned positions, one causal self-attention layer, MLP, head."""
    def __init__(self, vocab=20, width=16, heads=2, length=64):
        super().__init__()
        self.heads = heads
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def hidden(self, ids, positions=None, allowed=None):
        b, t = ids.shape
        if positions is None:
            positions = torch.arange(t).expand(b, t)
        ok = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)
        if allowed is not None:               # [b, t, t] bool, replaces the causal mask
            ok = allowed
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        s = s.masked_fill(~ok[:, None], float("-inf"))
        x = x + self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))
        return self.norm(x + self.down(F.gelu(self.up(x))))

    def forward(self, ids, positions=None, allowed=None):
        return self.head(self.hidden(ids, positions, allowed))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    stream = []
    while len(stream) < 3 * 12 + 1:
        stream += torch.randint(1, 20, (int(torch.randint(3, 9, (1,), generator=g)),), generator=g).tolist() + [0]
    return {"model": Tiny(), "ids": torch.stack([torch.tensor(stream[i * 12:i * 12 + 13]) for i in range(3)])}


def right(model, batch):
    x, y = batch["ids"][:, :-1], batch["ids"][:, 1:]
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


if __name__ == "__main__":
    b = make(0)
    model = b.pop("model")
    total = 0.0
    for row in b["ids"]:
        for t in range(12):                                # each prefix on its own
            total = total + F.cross_entropy(model(row[None, :t + 1])[0, -1:], row[t + 1:t + 2])
    loss = right(model, b)
    loss.backward()
    print("loss", loss.item(), "prefix by prefix", (total / 36).item(), "rows overlap by one token:", bool((b["ids"][0, -1] == b["ids"][1, 0])))
    assert torch.allclose(loss, total / 36, atol=1e-5) and model.pos.weight.grad.norm() > 0
