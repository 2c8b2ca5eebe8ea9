"""Tokens of a row stand in zigzag order and the loss is computed rank by rank on shuffled chunks.
For balance, context-parallel rank r of R gets chunks r and 2R-1-r of the row. Labels are shifted before the
cut. A rank's tokens are not contiguous, its last label is not its next token, and the causal mask is
made from the positions, so it is not lower-triangular. The sums of the ranks are added."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'sharding'
KIND = 'loss'
INPUTS = {
    'ids': 'token ids, [rows, time], time divisible by 2 * ranks',
    'loss_mask': '1 where the token is trained as a target, [rows, time]',
}
SETTINGS = {
    'ranks': 'context-parallel ranks, 2',
}
NOTES = (
    'Mean next-token cross-entropy over the trained targets of all ranks and rows; equals the loss '
    'of the unsplit row. '
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
    mask = (torch.rand(2, 16, generator=g) < 0.7).float()
    mask[:, 1] = 1
    return {"model": Tiny(), "ids": torch.randint(0, 20, (2, 16), generator=g), "loss_mask": mask}


def right(model, batch, ranks=2):
    ids = batch["ids"]
    rows, t = ids.shape
    labels = F.pad(ids[:, 1:].masked_fill(batch["loss_mask"][:, 1:] == 0, -100), (0, 1), value=-100)
    chunks = torch.arange(t).chunk(2 * ranks)
    order = [torch.cat([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks)]
    where = torch.cat(order)                                      # gathered keys, in the order of the ranks
    allowed = (where[None, :] <= where[:, None]).expand(rows, t, t)
    logits = model(ids[:, where], where.expand(rows, t), allowed)
    total, count, at = 0.0, 0, 0
    for idx in order:                                             # each rank its own slice
        local = logits[:, at:at + len(idx)]
        total = total + F.cross_entropy(local.flatten(0, 1), labels[:, idx].flatten(), ignore_index=-100, reduction="sum")
        count, at = count + (labels[:, idx] != -100).sum(), at + len(idx)
    return total / count


if __name__ == "__main__":
    b = make(0)
    model = b.pop("model")
    ce = F.cross_entropy(model(b["ids"])[:, :-1].transpose(1, 2), b["ids"][:, 1:], reduction="none")
    ref = (ce * b["loss_mask"][:, 1:]).sum() / b["loss_mask"][:, 1:].sum()
    loss = right(model, b)
    loss.backward()
    print("loss", loss.item(), "unsplit", ref.item(), "gradient", model.qkv.weight.grad.norm().item())
    assert torch.allclose(loss, ref, atol=1e-5) and torch.allclose(right(model, b, ranks=4), ref, atol=1e-5)
