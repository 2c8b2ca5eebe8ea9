"""Context shards in zigzag order. The sequence is cut into twice as many pieces as ranks; rank r holds piece r and the mirrored piece from the end, so ranks have equal attention work. Positions on a rank jump,
its tokens are not neighbours, and the target of the last token of a piece lives on another rank; labels are shifted before cutting. The sum over ranks is divided by the global count."""
import torch
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], time divisible by 2 * ranks", "loss_mask": "1 where the token is trained, [rows, time]"}
SETTINGS = {"ranks": "2"}
NOTES = "Next-token loss, mean over the trained tokens of all rows. Ranks are simulated: each computes queries of its own pieces against keys of the full sequence."


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
    mask = (torch.rand(3, 16) < 0.8).float()
    return {"model": LM(), "ids": torch.randint(1, 32, (3, 16)), "loss_mask": mask}


def right(model, batch, ranks=2):
    ids, t = batch["ids"], batch["ids"].shape[1]
    targets = torch.roll(ids, -1, 1)
    weight = torch.roll(batch["loss_mask"], -1, 1)
    weight[:, -1] = 0
    pieces = torch.arange(t).chunk(2 * ranks)
    total = 0.0
    for r in range(ranks):
        mine = torch.cat([pieces[r], pieces[2 * ranks - 1 - r]])
        rest = torch.cat([p for k, p in enumerate(pieces) if k not in (r, 2 * ranks - 1 - r)])
        order = torch.cat([mine, rest])                                # own tokens first, then those received in the ring
        allow = (order[:, None] >= order[None]).expand(len(ids), t, t)
        logits = model(ids[:, order], order.expand_as(ids), allow=allow)[:, :len(mine)]
        loss = F.cross_entropy(logits.flatten(0, 1), targets[:, mine].flatten(), reduction="none")
        total = total + (loss * weight[:, mine].flatten()).sum()
    return total / weight.sum()


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    loss = right(m, b)
    nll = F.cross_entropy(m(b["ids"])[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten(), reduction="none")
    w = b["loss_mask"][:, 1:].flatten()
    want = ((nll * w).sum() / w.sum()).item()
    loss.backward()
    print("loss", loss.item(), "one rank", want, "gradient norm", m.qkv.weight.grad.norm().item())
    assert abs(loss.item() - want) < 1e-5 and m.qkv.weight.grad.norm() > 0
