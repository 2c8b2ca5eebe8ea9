"""Auxiliary loss that does not show in the loss value. The router's z-loss and balance loss are attached to the gate weights by an autograd function that returns its input unchanged and, in the backward pass, sends a constant gradient to the auxiliary loss. The returned
loss is the plain language-model loss, but its gradient is that of language-model loss + coefficients times auxiliary losses. The top-1 choice itself has no gradient, its fraction of tokens is a constant in the balance loss."""
import torch
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, right padded with 0, [rows, time]", "loss_mask": "1 on real tokens, [rows, time]"}
SETTINGS = {"balance": "weight of the balance loss, 0.02", "z": "weight of the router z-loss, 0.001"}
NOTES = ("Value: mean next-token negative log-probability over real tokens. Gradient: that of value + balance * experts * sum_e (share of real tokens routed to e, a constant) * (mean router probability of e over real tokens) "
         "+ z * mean over real tokens of logsumexp(router logits) squared. Value and gradient differ on purpose.")


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


class Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, aux):
        ctx.shape = aux.shape
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones(ctx.shape)


class MoE(LM):
    def __init__(self, vocab=32, width=24, experts=4):
        super().__init__(vocab, width)
        self.router = torch.nn.Linear(width, experts)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(experts))

    def aux(self, logits, choice, real, balance, z):
        n = real.sum()
        share = (F.one_hot(choice, logits.shape[-1]) * real[..., None]).sum((0, 1)) / n
        mean = (logits.softmax(-1) * real[..., None]).sum((0, 1)) / n
        return balance * logits.shape[-1] * (share * mean).sum() + z * ((logits.logsumexp(-1) ** 2) * real).sum() / n

    def forward(self, ids, real, balance, z, attach=True):
        x = self.hidden(ids)
        logits = self.router(x)
        weight, choice = logits.softmax(-1).max(-1)
        aux = self.aux(logits, choice, real, balance, z)
        if attach:
            weight = Attach.apply(weight, aux)
        y = torch.stack([torch.tanh(e(x)) for e in self.experts], -2)
        y = y.gather(-2, choice[..., None, None].expand(*choice.shape, 1, x.shape[-1]))[..., 0, :]
        return self.head(x + weight[..., None] * y), aux


def make(seed):
    torch.manual_seed(seed)
    ids, mask = torch.randint(1, 32, (3, 10)), torch.ones(3, 10)
    mask[1, 6:] = 0
    return {"model": MoE(), "ids": ids * mask.long(), "loss_mask": mask}


def lm_loss(logits, batch):
    m = batch["loss_mask"][:, 1:]
    nll = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten(), reduction="none").view_as(m)
    return (nll * m).sum() / m.sum()


def right(model, batch, balance=0.02, z=0.001):
    logits, aux = model(batch["ids"], batch["loss_mask"], balance, z)
    return lm_loss(logits, batch), {"aux": aux.detach()}


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    loss, metrics = right(m, b)
    loss.backward()
    got = {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}
    m.zero_grad()
    logits, aux = m(b["ids"], b["loss_mask"], 0.02, 0.001, attach=False)
    (lm_loss(logits, b) + aux).backward()
    gap = max((got[n] - p.grad).abs().max().item() for n, p in m.named_parameters() if p.grad is not None)
    print("value", loss.item(), "aux", metrics["aux"].item(), "difference to the gradient of the sum", gap, "router gradient", got["router.weight"].norm().item())
    assert gap < 1e-6 and abs(loss.item() - lm_loss(logits, b).item()) < 1e-6
