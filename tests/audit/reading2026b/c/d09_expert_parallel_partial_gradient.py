"""Partial gradients of the expert-parallel block are never summed. huggingface/transformers#48205 (its second defect), https://github.com/huggingface/transformers/pull/48205, 2026.
Each rank of the expert-parallel group runs its own experts on the same tokens with the other score slots zeroed, and the outputs are summed. In the backward pass a rank
only has the gradient through its local experts; the partial gradients of the block's input and scores were not summed over ranks. The router and everything
before the block trained on a part of the gradient, while the loss itself was right."""
import torch
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "one attention layer, then a mixture of four experts (top two) in two ranks of two experts", "optimizer": "SGD with learning rate 0.1", "batches": "a list with one dict: ids [rows, time] (the same on both ranks)"}
SETTINGS = {"ranks": "expert-parallel ranks, 2, simulated in one process"}
NOTES = ("One optimizer step on the mean next-token negative log-probability of all tokens. Experts live on one rank each, all other parameters are replicated; expert parallelism must give "
         "the same update as one process with all experts.")


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


class MoE(LM):
    def __init__(self, vocab=32, width=24, experts=4):
        super().__init__(vocab, width)
        self.router = torch.nn.Linear(width, experts)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(experts))

    def rank_output(self, x, scores, local):
        return sum(scores[..., e:e + 1] * torch.tanh(self.experts[e](x)) for e in local)

    def forward(self, ids, rank=None, ranks=2):
        x = self.hidden(ids)
        p = self.router(x).softmax(-1)
        top = p.topk(2, -1).indices
        scores = p * torch.zeros_like(p).scatter(-1, top, 1.0)
        per = len(self.experts) // ranks
        outs = [self.rank_output(x, scores, range(r * per, (r + 1) * per)) for r in range(ranks)]
        if rank is not None:
            outs = [o if r == rank else o.detach() for r, o in enumerate(outs)]
        return self.head(x + sum(outs))


def make(seed):
    torch.manual_seed(seed)
    model = MoE()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "batches": [{"ids": torch.randint(1, 32, (3, 10))}]}


def loss_of(model, b, rank, ranks):
    return F.cross_entropy(model(b["ids"], rank, ranks)[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten())


def broken(model, optimizer, batches, ranks=2):
    names, kept = dict(model.named_parameters()), {}
    per = len(model.experts) // ranks
    for rank in range(ranks):          # what each process computes; an output of another rank arrives as a value
        model.zero_grad()
        sum(loss_of(model, b, rank, ranks) for b in batches).backward()
        for n, p in names.items():
            owner = int(n.split(".")[1]) // per if n.startswith("experts.") else 0
            if owner == rank:
                kept[n] = p.grad.clone()
    for n, p in names.items():
        p.grad = kept[n]
    optimizer.step()


def right(model, optimizer, batches, ranks=2):
    model.zero_grad()
    # the copy into the block sums the gradients of all ranks in the backward pass, as one graph over all ranks does
    sum(loss_of(model, b, None, ranks) for b in batches).backward()
    optimizer.step()


if __name__ == "__main__":
    g = {}
    for f in (broken, right):
        d = make(0)
        f(**d)
        g[f.__name__] = {n: p.grad for n, p in d["model"].named_parameters()}
    for n in ("experts.0.weight", "experts.3.weight", "router.weight", "emb.weight"):
        print(n, "broken", round(float(g["broken"][n].norm()), 5), "right", round(float(g["right"][n].norm()), 5))
    assert torch.allclose(g["broken"]["experts.3.weight"], g["right"]["experts.3.weight"], atol=1e-6)
    assert (g["broken"]["router.weight"] - g["right"]["router.weight"]).abs().max() > 1e-4
