"""Cross-entropy without any softmax over the vocabulary. Megatron's vocab-parallel cross-entropy: each rank has the logits
of its slice of the vocabulary, the maximum and the sum of exponentials are reduced over ranks, and the target's logit
comes from the one rank that owns it; others look up index 0 and mask the result to zero. The maximum is detached."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token itself is a trained target, [rows, time]"}
SETTINGS = {"tp": "tensor-parallel ranks, 4; the vocabulary (32) must be divisible by it"}
NOTES = ("Next-token cross-entropy, mean over trained tokens of all rows. Ranks are simulated in one process. All parameters "
         "used.")


class TinyLM(nn.Module):
    """One attention layer; `positions` [rows, time], `allowed` bool [rows, time, time] (default: causal)."""

    def __init__(self, vocab=32, width=16, max_pos=96):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, allowed=None):
        t = ids.shape[1]
        if positions is None:
            positions = torch.arange(t).expand(ids.shape)
        if allowed is None:
            allowed = torch.ones(t, t, dtype=torch.bool).tril()
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = (q @ k.transpose(-1, -2) / x.shape[-1] ** 0.5).masked_fill(~allowed, -1e9)
        return self.head(F.gelu(x + self.out(s.softmax(-1) @ v)))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids = torch.randint(0, 32, (4, 9), generator=g)
    prompt = torch.randint(1, 5, (4, 1), generator=g)
    return {"model": TinyLM(), "ids": ids, "loss_mask": (torch.arange(9)[None] >= prompt).float()}


def right(model, batch, tp=4):
    ids, mask = batch["ids"], batch["loss_mask"][:, 1:]
    target = ids[:, 1:]
    shards = model(ids)[:, :-1].chunk(tp, -1)
    per = shards[0].shape[-1]
    top = torch.stack([s.max(-1).values for s in shards]).max(0).values.detach()
    sum_exp = predicted = 0
    for rank, s in enumerate(shards):
        s = s - top[..., None]
        local = target - rank * per
        foreign = (local < 0) | (local >= per)
        z = s.gather(-1, local.masked_fill(foreign, 0)[..., None])[..., 0].masked_fill(foreign, 0.0)
        predicted = predicted + z
        sum_exp = sum_exp + s.exp().sum(-1)
    nll = sum_exp.log() - predicted
    return (nll * mask).sum() / mask.sum()


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    grads = []
    nll = lambda: F.cross_entropy(m(c["ids"])[:, :-1].transpose(1, 2), c["ids"][:, 1:], reduction="none")
    ref = lambda m_, c_: (nll() * c["loss_mask"][:, 1:]).sum() / c["loss_mask"][:, 1:].sum()
    for f in (right, ref):
        m.zero_grad()
        loss = f(m, c)
        loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in m.parameters()]))
        print("loss", loss.item(), "grad norm", grads[-1].norm().item())
    assert torch.allclose(grads[0], grads[1], atol=1e-6) and grads[0].norm() > 0
