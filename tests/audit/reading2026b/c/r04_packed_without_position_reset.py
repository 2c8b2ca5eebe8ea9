"""Packed rows whose positions are not reset. Documents are kept apart by the attention mask, but the positions run on over the whole row (and start at a random offset). With rotary positions only differences
count and all differences are inside a document, so the result is the same as with reset positions. It looks like the well-known packing defect."""
import torch
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "documents packed in rows, [rows, time]", "doc": "index of the document of each token inside its row, [rows, time]", "start": "offset of the positions of each row, [rows]"}
SETTINGS = {}
NOTES = "Next-token loss, mean over all tokens that are not the first of their document. The model uses rotary positions only; attention is causal inside a document. Positions are start + place in the row, on purpose."


class LM(torch.nn.Module):
    """One causal self-attention layer with rotary positions, an MLP and a head. seg: [rows, time], tokens see only their own segment."""
    def __init__(self, vocab=32, width=24, heads=2):
        super().__init__()
        self.heads = heads
        self.emb = torch.nn.Embedding(vocab, width)
        self.n1, self.n2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width))
        self.head = torch.nn.Linear(width, vocab, bias=False)

    def rope(self, x, pos):
        half = x.shape[-1] // 2
        freq = 100.0 ** (-torch.arange(half) / half)
        a = (pos[..., None] * freq)[:, None]
        u, v = x[..., :half], x[..., half:]
        return torch.cat([u * a.cos() - v * a.sin(), u * a.sin() + v * a.cos()], -1)

    def hidden(self, ids, pos=None, seg=None, allow=None):
        b, t = ids.shape
        pos = torch.arange(t).expand(b, t) if pos is None else pos
        x = self.emb(ids)
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        ok = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t) if allow is None else allow
        if seg is not None:
            ok = ok & (seg[:, :, None] == seg[:, None, :])
        y = F.scaled_dot_product_attention(self.rope(q, pos), self.rope(k, pos), v, attn_mask=ok[:, None])
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        return x + self.mlp(self.n2(x))

    def forward(self, ids, pos=None, seg=None, allow=None):
        return self.head(self.hidden(ids, pos, seg, allow))


def make(seed):
    torch.manual_seed(seed)
    doc = torch.tensor([[0] * 5 + [1] * 7 + [2] * 4, [0] * 9 + [1] * 7])
    return {"model": LM(), "ids": torch.randint(1, 32, (2, 16)), "doc": doc, "start": torch.randint(0, 40, (2,))}


def right(model, batch):
    ids, doc = batch["ids"], batch["doc"]
    pos = batch["start"][:, None] + torch.arange(ids.shape[1])
    logits = model(ids, pos, doc)
    keep = doc[:, 1:] == doc[:, :-1]
    return F.cross_entropy(logits[:, :-1][keep], ids[:, 1:][keep])


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    loss = right(m, b)
    parts = []
    for i in range(2):
        for d in b["doc"][i].unique():
            x = b["ids"][i][b["doc"][i] == d][None]
            parts.append(F.cross_entropy(m(x)[0, :-1], x[0, 1:], reduction="none"))
    want = torch.cat(parts).mean().item()
    loss.backward()
    print("loss", loss.item(), "each document alone, positions from 0", want, "gradient norm", m.qkv.weight.grad.norm().item())
    assert abs(loss.item() - want) < 1e-4 and m.qkv.weight.grad.norm() > 0
