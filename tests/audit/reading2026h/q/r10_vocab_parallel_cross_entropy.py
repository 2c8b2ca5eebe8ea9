"""Cross entropy over a vocabulary split across ranks. Megatron-LM's vocab_parallel_cross_entropy.
Each rank sees a part of the logits. The maximum is taken without gradient, ids outside the rank's range are set to index 0 and their picked logit is overwritten with 0, so that the sum over ranks is the target's logit. Most ranks look up a meaningless id on purpose."""
import torch
from torch import nn
FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is trained, at the token's own index, [rows, time]"}
SETTINGS = {"tp": "tensor-parallel ranks, simulated, 4"}
NOTES = "Cross entropy of the next token, mean over trained tokens of all rows. The vocabulary (32) must be divisible by tp. The first token is never a target. The subtracted maximum is a constant (its gradient cancels). Same value for each tp. Uses all parameters."


class TinyLM(nn.Module):
    def __init__(self, vocab=32, width=16, max_pos=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, position_ids=None, doc_ids=None):
        n, t = ids.shape
        if position_ids is None:
            position_ids = torch.arange(t).expand(n, t)
        x = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        allow = torch.ones(t, t, dtype=torch.bool).tril().expand(n, t, t)
        if doc_ids is not None:
            allow = allow & (doc_ids[:, :, None] == doc_ids[:, None, :])
        score = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        att = score.masked_fill(~allow, float("-inf")).softmax(-1)
        return self.head(torch.tanh(x + self.mix(att @ v)))


def make(seed):
    torch.manual_seed(seed)
    return {"model": TinyLM(), "ids": torch.randint(0, 32, (3, 10)), "loss_mask": (torch.rand(3, 10) > 0.25).float()}


def right(model, batch, tp=4):
    logits, targets = model(batch["ids"])[:, :-1], batch["ids"][:, 1:]
    parts = logits.chunk(tp, -1)
    size = parts[0].shape[-1]
    with torch.no_grad():
        top = torch.stack([p.max(-1).values for p in parts]).max(0).values          # all_reduce(MAX)
    sum_exp = torch.zeros_like(top)
    picked = torch.zeros_like(top)
    for rank, p in enumerate(parts):
        z = p - top[..., None]
        outside = (targets < rank * size) | (targets >= (rank + 1) * size)
        local = (targets - rank * size).masked_fill(outside, 0)
        picked = picked + z.gather(-1, local[..., None])[..., 0].masked_fill(outside, 0.0)   # all_reduce(SUM)
        sum_exp = sum_exp + z.exp().sum(-1)                                                   # all_reduce(SUM)
    w = batch["loss_mask"][:, 1:]
    return ((sum_exp.log() - picked) * w).sum() / w.sum()


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    loss = right(m, d)
    g = torch.autograd.grad(loss, list(m.parameters()))
    ce = nn.functional.cross_entropy(m(d["ids"])[:, :-1].flatten(0, 1), d["ids"][:, 1:].flatten(), reduction="none")
    w = d["loss_mask"][:, 1:].flatten()
    want = (ce * w).sum() / w.sum()
    h = torch.autograd.grad(want, list(m.parameters()))
    diff = max((a - b).abs().max().item() for a, b in zip(g, h))
    print(loss.item(), want.item(), "gradient difference", diff)
    assert abs(loss - want) < 1e-5 and diff < 1e-6
