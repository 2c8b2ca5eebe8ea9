"""Gradient divided once more by the number of micro-batches. areal-project/AReaL#1273, https://github.com/areal-project/AReaL/pull/1273, 2026.
The engine weights the loss of each micro-batch by its share of the trained tokens, so the sum over micro-batches is already the mean of the batch.
The pipeline schedule divides each returned loss by the number of micro-batches as well. Every gradient, the reported norm and the update were smaller
by that factor, and changed with the way the batch was split. The fix multiplies by the number of micro-batches to cancel it."""
import torch
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "a tiny language model", "optimizer": "SGD with learning rate 0.5", "batches": "micro-batches of one optimizer step: dicts with ids [rows, time] and loss_mask [rows, time], 1 where the token is trained"}
SETTINGS = {}
NOTES = ("One optimizer step on the mean negative log-probability over the trained tokens of all micro-batches together; the result must not depend on how rows are split "
         "into micro-batches. The schedule (run_schedule) belongs to a library and divides the loss by the number of micro-batches.")


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
    for rows, n in ((2, 9), (1, 6), (3, 8)):
        mask = (torch.rand(rows, n) < 0.7).float()
        mask[:, 0], mask[:, -1] = 0, 1
        batches.append({"ids": torch.randint(1, 32, (rows, n)), "loss_mask": mask})
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}


def mean_nll(model, b):
    lp = model(b["ids"]).log_softmax(-1)[:, :-1].gather(-1, b["ids"][:, 1:, None])[..., 0]
    m = b["loss_mask"][:, 1:]
    return -(lp * m).sum() / m.sum()


def run_schedule(model, batches, loss_fn):
    for b in batches:
        (loss_fn(b, mean_nll(model, b)) / len(batches)).backward()


def step(model, optimizer, batches, multiplier):
    weights = [float(b["loss_mask"][:, 1:].sum()) for b in batches]
    shares = {id(b): w / sum(weights) for b, w in zip(batches, weights)}
    optimizer.zero_grad()
    run_schedule(model, batches, lambda b, loss: loss * shares[id(b)] * multiplier)
    optimizer.step()


def broken(model, optimizer, batches):
    step(model, optimizer, batches, 1.0)


def right(model, optimizer, batches):
    step(model, optimizer, batches, float(len(batches)))


if __name__ == "__main__":
    norm = {}
    for f in (broken, right):
        d = make(0)
        f(**d)
        norm[f.__name__] = float(torch.cat([p.grad.flatten() for p in d["model"].parameters()]).norm())
    d = make(0)
    total = sum(b["loss_mask"][:, 1:].sum() for b in d["batches"])
    sum(mean_nll(d["model"], b) * b["loss_mask"][:, 1:].sum() / total for b in d["batches"]).backward()
    want = float(torch.cat([p.grad.flatten() for p in d["model"].parameters()]).norm())
    print(norm, "one batch", want)
    assert abs(norm["right"] - want) < 1e-4 and abs(norm["broken"] * 3 - want) < 1e-4
