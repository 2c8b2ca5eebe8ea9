"""Boundaries of a padding-free row are read from a strict decrease of the positions, which merges one-token sequences.
modelscope/ms-swift#9904, https://github.com/modelscope/ms-swift/pull/9904, 2026 (August).
A one-token sequence followed by another one gives positions 0 -> 0, which is no decrease, so both
become one sequence. For embedding training fewer sentence embeddings come out and the anchor /
positive pairs of InfoNCE shift."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'packing'
KIND = 'loss'
INPUTS = {
    'ids': 'token ids of one padding-free row, [1, time]',
    'position_ids': 'position within the sequence, 0 at each start, [1, time]',
    'cu_seq_lens': 'boundaries of the sequences, [sequences + 1]',
}
SETTINGS = {
    'temperature': 'InfoNCE temperature, 0.1',
}
NOTES = (
    'Sentence embedding = normalised last hidden state of each sequence; sequences come as (anchor, '
    'positive) pairs in order; InfoNCE with the other positives of the row as negatives, mean over '
    'the pairs. Sequences do not see each other. '
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


def document_mask(cu, t):
    """causal and within one document; [1, t, t] bool"""
    doc = torch.bucketize(torch.arange(t), cu[1:], right=True)
    return ((doc[:, None] == doc[None, :]) & torch.ones(t, t, dtype=torch.bool).tril())[None]


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    lengths = torch.randint(2, 7, (8,), generator=g)
    single = torch.randperm(7, generator=g)[:2]             # two short queries, never the last
    lengths[single] = 1
    cu = F.pad(lengths.cumsum(0), (1, 0))
    return {"model": Tiny(), "ids": torch.randint(0, 20, (1, int(cu[-1])), generator=g),
            "position_ids": torch.cat([torch.arange(int(n)) for n in lengths])[None], "cu_seq_lens": cu}


def _info_nce(model, batch, last, temperature):
    t = batch["ids"].shape[1]
    h = model.hidden(batch["ids"], batch["position_ids"], document_mask(batch["cu_seq_lens"], t))[0]
    emb = F.normalize(h[last], dim=-1)
    sims = emb[0::2] @ emb[1::2].T / temperature
    return F.cross_entropy(sims, torch.arange(len(sims)))


def broken(model, batch, temperature=0.1):
    p = batch["position_ids"][0]
    last = torch.cat([(p[1:] < p[:-1]).nonzero()[:, 0], torch.tensor([len(p) - 1])])
    return _info_nce(model, batch, last, temperature)


def right(model, batch, temperature=0.1):
    return _info_nce(model, batch, batch["cu_seq_lens"][1:] - 1, temperature)


if __name__ == "__main__":
    b = make(0)
    model = b.pop("model")
    emb = []
    for s, e in zip(b["cu_seq_lens"][:-1].tolist(), b["cu_seq_lens"][1:].tolist()):
        emb.append(F.normalize(model.hidden(b["ids"][:, s:e])[0, -1], dim=-1))
    emb = torch.stack(emb)
    ref = F.cross_entropy(emb[0::2] @ emb[1::2].T / 0.1, torch.arange(4))
    print("broken", broken(model, b).item(), "right", right(model, b).item(), "one by one", ref.item())
    assert torch.allclose(right(model, b), ref, atol=1e-4)
    assert (broken(model, b) - ref).abs() > 1e-3
