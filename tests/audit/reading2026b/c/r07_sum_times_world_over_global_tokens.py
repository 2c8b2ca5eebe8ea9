"""Loss of a rank is its token sum times the number of ranks over the global token count. The wrapper averages gradients over ranks, so the factor cancels and each token of the global batch weighs the same. The loss
of one rank is not a mean of anything and a rank without a trained token contributes an exact zero that still takes part in the average."""
import torch
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "a tiny language model", "optimizer": "SGD, learning rate 0.1", "batches": "one dict per rank: ids [rows, time], loss_mask [rows, time]; the last rank has no trained token"}
SETTINGS = {}
NOTES = "One optimizer step on the mean negative log-probability over all trained tokens of all ranks; ranks simulated in one process, gradients averaged over ranks as DDP does."


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
    model = LM()
    batches = []
    for rows, n, p in ((2, 10, 0.8), (1, 7, 0.4), (2, 6, 0.0)):
        batches.append({"ids": torch.randint(1, 32, (rows, n)), "loss_mask": (torch.rand(rows, n) < p).float()})
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "batches": batches}


def nll_sum(model, b):
    lp = model(b["ids"]).log_softmax(-1)[:, :-1].gather(-1, b["ids"][:, 1:, None])[..., 0]
    return -(lp * b["loss_mask"][:, 1:]).sum()


def right(model, optimizer, batches):
    world = len(batches)
    tokens = sum(b["loss_mask"][:, 1:].sum() for b in batches)          # all_reduce of the counts
    mean = [torch.zeros_like(p) for p in model.parameters()]
    for b in batches:                                                     # what each rank does
        optimizer.zero_grad()
        (nll_sum(model, b) * world / tokens).backward()
        for g, p in zip(mean, model.parameters()):
            g += p.grad / world
    for g, p in zip(mean, model.parameters()):
        p.grad = g
    optimizer.step()


if __name__ == "__main__":
    d, e = make(0), make(0)
    right(**d)
    n = sum(b["loss_mask"][:, 1:].sum() for b in e["batches"])
    (sum(nll_sum(e["model"], b) for b in e["batches"]) / n).backward()
    e["optimizer"].step()
    gap = max((p - q).abs().max().item() for p, q in zip(d["model"].parameters(), e["model"].parameters()))
    moved = max((p - q).abs().max().item() for p, q in zip(d["model"].parameters(), make(0)["model"].parameters()))
    print("difference to one process", gap, "moved", moved)
    assert gap < 1e-6 < moved
