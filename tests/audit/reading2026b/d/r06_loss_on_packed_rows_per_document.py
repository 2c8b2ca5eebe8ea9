"""A packed row is averaged per document: short documents weigh as much as long ones.
The sum of token losses is weighted by 1 / (tokens of the document), then divided by the number of documents of
the whole batch. The loss weights are no 0/1 mask, they do not sum to the number of trained tokens as for a token
mean, and documents of different rows share one denominator."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'packing'
KIND = 'loss'
INPUTS = {
    'ids': 'packed rows, [rows, time]',
    'documents': 'document number within the row, -1 = padding, [rows, time]',
}
SETTINGS = {}
NOTES = (
    'Mean over all documents of the batch of the mean next-token cross-entropy of the document '
    '(targets inside the document only; a document of one token has no target and does not count). '
    'Documents do not see each other; positions restart. '
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
    docs = torch.full((2, 16), -1)
    for i in range(2):
        at, n = 0, 0
        while at < 13:
            length = int(torch.randint(1, 8, (1,), generator=g))
            docs[i, at:min(at + length, 14)] = n
            at, n = at + length, n + 1
    return {"model": Tiny(), "ids": torch.randint(0, 20, (2, 16), generator=g), "documents": docs}


def right(model, batch):
    ids, docs = batch["ids"], batch["documents"]
    t = ids.shape[1]
    same = docs[:, :, None] == docs[:, None, :]
    allowed = same & torch.ones(t, t, dtype=torch.bool).tril()
    positions = allowed.sum(-1) - 1
    ce = F.cross_entropy(model(ids, positions, allowed)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    target = (docs[:, 1:] == docs[:, :-1]) & (docs[:, 1:] >= 0)
    size = (same[:, 1:, 1:] & target[:, None, :]).sum(-1)          # trained targets of the token's document
    weight = torch.where(target, 1.0 / size.clamp(min=1), torch.zeros(()))
    return (ce * weight).sum() / weight.sum().round().clamp(min=1)


if __name__ == "__main__":
    b = make(0)
    model = b.pop("model")
    means = []
    for ids, docs in zip(b["ids"], b["documents"]):
        for k in sorted(set(docs.tolist()) - {-1}):
            d = ids[docs == k][None]
            if d.shape[1] > 1:
                means.append(F.cross_entropy(model(d)[0, :-1], d[0, 1:]))
    loss = right(model, b)
    loss.backward()
    print("loss", loss.item(), "document by document", (sum(means) / len(means)).item())
    assert torch.allclose(loss, sum(means) / len(means), atol=1e-5) and model.head.weight.grad.norm() > 0
