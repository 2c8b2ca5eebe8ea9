"""Pre-shifted labels are dropped under context parallelism. huggingface/transformers#48493, https://github.com/huggingface/transformers/pull/48493, 2026.
With sequence or context parallelism the labels are shifted on the full sequence before it is cut into shards, and passed as shift_labels. Several model
heads did not hand shift_labels to the loss and shifted the shard's own labels instead. The last token of each shard then had no target:
it trained nothing, and the sum over the shards missed these tokens while the divisor still counted them."""
import torch
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]; the ranks of the context-parallel group hold consecutive slices of time", "labels": "token ids, -100 where not trained (prompt, padding), not shifted, [rows, time]"}
SETTINGS = {"cp": "context-parallel ranks, 4, simulated in one process: attention sees the full sequence, each rank has its slice of the logits"}
NOTES = ("Supervised next-token loss: mean of the negative log-probability over all trained targets of all rows and all shards (sum over ranks divided by the global count). "
         "It must not depend on the number of ranks.")


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
    ids = torch.randint(1, 32, (3, 16))
    labels = ids.clone()
    for i, p in enumerate((3, 5, 2)):
        labels[i, :p] = -100
    labels[2, 13:] = -100
    return {"model": LM(), "ids": ids, "labels": labels}


def head_loss(logits, labels=None, shift_labels=None, num_items=1):
    if shift_labels is None:
        logits, shift_labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), ignore_index=-100, reduction="sum") / num_items


def broken(model, batch, cp=4):
    shift = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    num_items = (shift != -100).sum()
    logits = model(batch["ids"]).chunk(cp, 1)
    return sum(head_loss(x, labels=y, num_items=num_items) for x, y in zip(logits, batch["labels"].chunk(cp, 1)))


def right(model, batch, cp=4):
    shift = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    num_items = (shift != -100).sum()
    logits = model(batch["ids"]).chunk(cp, 1)
    return sum(head_loss(x, shift_labels=y, num_items=num_items) for x, y in zip(logits, shift.chunk(cp, 1)))


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    full = F.cross_entropy(m(b["ids"])[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten(), ignore_index=-100)
    print("broken", broken(m, b).item(), "right", right(m, b).item(), "one rank", full.item())
    assert abs((right(m, b) - full).item()) < 1e-5 and abs((broken(m, b) - full).item()) > 1e-3
