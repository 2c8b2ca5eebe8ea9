"""Ranks train apart and an outer optimizer steps on the difference of weights (DiLoCo). Each rank makes several local steps with its own optimizer and no gradient is exchanged. The 'gradient' of the outer Nesterov
optimizer is old weights minus the mean of the ranks' new weights, so its sign looks wrong; the ranks' weights are then overwritten by the outer result."""
import copy
import torch
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "a tiny language model", "optimizer": "outer optimizer: SGD, learning rate 0.7, Nesterov momentum 0.9", "batches": "one list of local batches per rank, each a tensor of ids [rows, time]"}
SETTINGS = {"inner_lr": "learning rate of the local plain SGD steps, 0.2"}
NOTES = "One outer round: local next-token training on each rank from the same weights, then one outer step. With outer learning rate 1 and no momentum the result would be the mean of the ranks' weights."


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
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return {"model": model, "optimizer": outer, "batches": [[torch.randint(1, 32, (2, 8)) for _ in range(3)] for _ in range(2)]}


def train_locally(model, batches, inner_lr):
    local = copy.deepcopy(model)
    opt = torch.optim.SGD(local.parameters(), lr=inner_lr)
    for ids in batches:
        opt.zero_grad()
        F.cross_entropy(local(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        opt.step()
    return local


def right(model, optimizer, batches, inner_lr=0.2):
    locals_ = [train_locally(model, b, inner_lr) for b in batches]
    optimizer.zero_grad()
    for p, *qs in zip(model.parameters(), *(x.parameters() for x in locals_)):
        p.grad = p.detach() - torch.stack([q.detach() for q in qs]).mean(0)
    optimizer.step()


if __name__ == "__main__":
    d, e = make(0), make(0)
    right(**d)
    means = [torch.stack(q).mean(0) for q in zip(*([p.detach() for p in train_locally(e["model"], b, 0.2).parameters()] for b in e["batches"]))]
    # first step with Nesterov momentum 0.9: the step is (1 + 0.9) times the difference
    want = [p.detach() + 0.7 * 1.9 * (m - p.detach()) for p, m in zip(e["model"].parameters(), means)]
    gap = max((p - w).abs().max().item() for p, w in zip(d["model"].parameters(), want))
    ids = torch.cat([x for b in e["batches"] for x in b])
    score = lambda model: F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
    print("difference to the formula", gap, "loss before", score(e["model"]), "after", score(d["model"]))
    assert gap < 1e-5 and score(d["model"]) < score(e["model"])
