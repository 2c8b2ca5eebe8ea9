"""A collator that pads on the left with the end-of-text id and gives the first token position 0 wherever it stands.
Positions come from the running sum of the attention mask, so they differ from column numbers and padding shares
position 0 with the first token. The end-of-text id is both padding (label -100) and a trained
target at the end of each row. The prompt is masked by its length."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'data'
KIND = 'collator'
INPUTS = {
    'rows': "list of {'prompt': ids, 'completion': ids without end}",
}
SETTINGS = {
    'eos': 'end-of-text id, also used to pad, 0',
    'multiple': 'pad the length to a multiple of this, 4',
}
NOTES = (
    'ids, attention_mask, position_ids and labels (not shifted; the model shifts). Labels: -100 on '
    'padding and prompt, the completion and its end-of-text are trained. '
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
    draw = lambda lo, hi: torch.randint(1, 20, (int(torch.randint(lo, hi, (1,), generator=g)),), generator=g).tolist()
    return {"rows": [{"prompt": draw(2, 7), "completion": draw(1, 6)} for _ in range(4)]}


def right(rows, eos=0, multiple=4):
    seqs = [r["prompt"] + r["completion"] + [eos] for r in rows]
    width = -(-max(map(len, seqs)) // multiple) * multiple
    ids = torch.full((len(rows), width), eos)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    for i, (r, s) in enumerate(zip(rows, seqs)):
        ids[i, width - len(s):] = torch.tensor(s)
        mask[i, width - len(s):] = 1
        labels[i, width - len(s) + len(r["prompt"]):] = torch.tensor(s[len(r["prompt"]):])
    return {"ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0), "labels": labels}


def batch_loss(model, b):
    t = b["ids"].shape[1]
    allowed = (b["attention_mask"].bool()[:, None] & torch.ones(t, t, dtype=torch.bool).tril()) | torch.eye(t, dtype=torch.bool)
    logits = model(b["ids"], b["position_ids"], allowed)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), b["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum")


if __name__ == "__main__":
    torch.manual_seed(0)
    model, rows = Tiny(), make(0)["rows"]
    b = right(rows)
    ref = 0.0
    for r in rows:                                          # row by row, no padding
        s = torch.tensor([r["prompt"] + r["completion"] + [0]])
        k = len(r["prompt"])
        ref = ref + F.cross_entropy(model(s)[0, k - 1:-1], s[0, k:], reduction="sum")
    loss = batch_loss(model, b)
    print(b["ids"][0].tolist(), b["labels"][0].tolist(), b["position_ids"][0].tolist())
    print("loss of the batch", loss.item(), "row by row", ref.item())
    assert torch.allclose(loss, ref, atol=1e-4)
    assert int((b["labels"] == 0).sum()) == len(rows)
