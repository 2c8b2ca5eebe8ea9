"""MoE balancing loss counts padding tokens. NVIDIA/Megatron-LM#4776, https://github.com/NVIDIA/Megatron-LM/pull/4776, 2026.
The multimodal wrapper called the language model without padding_mask. The router then computed the load-balancing loss, the z-loss and the expert-bias statistics over all positions, padding included.
Padding tokens are all alike and go to the same experts, so the balance term pushes real tokens away from them. The fix passes the padding mask down."""
import torch
from torch import nn
FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], pad id 0", "padding_mask": "1 on real tokens, 0 on padding, [rows, time]", "targets": "next-token ids, -100 where nothing is predicted, [rows, time]"}
SETTINGS = {"coeff": "weight of the balancing loss, 0.1", "zcoeff": "weight of the router z-loss, 0.01"}
NOTES = "Cross entropy, mean over tokens with a target, plus coeff * Switch balancing loss (experts * sum_e f_e * P_e, f_e the share of routed slots among real tokens, no gradient; P_e the mean full-softmax probability over real tokens) plus zcoeff * mean over real tokens of logsumexp(router logits)^2. Top-1 routing of 4 experts. An expert that gets no token has no gradient through its weights."


class TinyMoE(nn.Module):
    def __init__(self, vocab=32, width=12, experts=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.emb(ids)
        r = self.router(x)
        p = r.softmax(-1)
        top = p.argmax(-1)
        y = torch.stack([e(x) for e in self.experts], -2)
        y = y.gather(-2, top[..., None, None].expand(*top.shape, 1, y.shape[-1])).squeeze(-2)
        return self.head(x + torch.tanh(y) * p.gather(-1, top[..., None])), r, top


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(1, 32, (3, 10))
    pad = torch.ones(3, 10)
    for i, n in enumerate((10, 6, 4)):
        pad[i, n:] = 0
    ids = ids * pad.long()
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = torch.where(pad[:, 1:] > 0, ids[:, 1:], targets[:, :-1])
    return {"model": TinyMoE(), "ids": ids, "padding_mask": pad, "targets": targets}


def _loss(model, batch, padding_mask, coeff, zcoeff):
    logits, r, top = model(batch["ids"])
    ce = nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)
    r, top = r.flatten(0, 1), top.flatten()
    w = torch.ones(len(top)) if padding_mask is None else padding_mask.flatten()
    n = r.shape[-1]
    f = (nn.functional.one_hot(top, n) * w[:, None]).sum(0) / w.sum()
    P = (r.softmax(-1) * w[:, None]).sum(0) / w.sum()
    z = (r.logsumexp(-1).pow(2) * w).sum() / w.sum()
    return ce + coeff * n * (f * P).sum() + zcoeff * z


def broken(model, batch, coeff=0.1, zcoeff=0.01):
    return _loss(model, batch, None, coeff, zcoeff)


def right(model, batch, coeff=0.1, zcoeff=0.01):
    return _loss(model, batch, batch["padding_mask"], coeff, zcoeff)


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    g = {}
    for f in (broken, right):
        m.zero_grad()
        loss = f(m, d)
        loss.backward()
        g[f.__name__] = m.router.weight.grad.clone()
        print(f.__name__, "loss", loss.item())
    print("difference of the router gradient", (g["broken"] - g["right"]).norm().item())
    assert (g["broken"] - g["right"]).norm() > 1e-3
