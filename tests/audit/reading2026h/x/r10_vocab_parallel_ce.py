"""Cross entropy over a vocabulary that is split over ranks (Megatron-LM vocab_parallel_cross_entropy).
Each rank holds a slice of the logits. The largest logit is reduced without gradient and subtracted. A target outside of the slice is set to index 0 and its logit
to zero, so that the sum over ranks has just the one true logit. The sums of exponentials are added over ranks before the logarithm."""
FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is a trained target, [rows, time]"}
SETTINGS = {"ranks": "tensor parallel ranks, simulated in one process, 4; divides the vocabulary (40)"}
NOTES = ("Next-token cross entropy, mean over the trained tokens of all rows. Same value and gradient as the plain cross entropy. The subtracted maximum is a constant. The output weight is split "
         "by rows over ranks. Every parameter is used. The vocabulary must be divisible by ranks.")
import torch
import torch.nn.functional as F
from torch import nn


class Tiny(nn.Module):
    """One causal attention layer: ids [rows, time] -> logits [rows, time, vocabulary]."""
    def __init__(self, vocab=40, width=16, length=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, allow=None):
        t = torch.arange(ids.shape[1])
        x = self.embed(ids) + self.pos(t if positions is None else positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        allow = (t[:, None] >= t[None]) if allow is None else allow
        return self.head(x + score.masked_fill(~allow, float("-inf")).softmax(-1) @ v)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return {"model": Tiny(), "ids": torch.randint(0, 40, (3, 10), generator=g), "loss_mask": (torch.rand(3, 10, generator=g) < 0.7).float()}


def right(model, batch, ranks=4):
    logits = model(batch["ids"])[:, :-1]
    target = batch["ids"][:, 1:]
    shards = logits.chunk(ranks, -1)
    top = torch.stack([s.detach().max(-1).values for s in shards]).max(0).values             # all-reduce, max
    per = logits.shape[-1] // ranks
    sum_exp, true_logit = 0, 0
    for r, shard in enumerate(shards):
        shard = shard - top.unsqueeze(-1)
        outside = (target < r * per) | (target >= (r + 1) * per)
        local = (target - r * per).masked_fill(outside, 0)
        picked = shard.gather(-1, local.unsqueeze(-1)).squeeze(-1)
        true_logit = true_logit + picked.masked_fill(outside, 0.0)                          # all-reduce, sum
        sum_exp = sum_exp + shard.exp().sum(-1)                                             # all-reduce, sum
    nll = sum_exp.log() - true_logit
    mask = batch["loss_mask"][:, 1:]
    return (nll * mask).sum() / mask.sum()


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    loss = right(m, d)
    g = torch.autograd.grad(loss, list(m.parameters()))
    mask = d["loss_mask"][:, 1:]
    nll = F.cross_entropy(m(d["ids"])[:, :-1].transpose(1, 2), d["ids"][:, 1:], reduction="none")
    plain = (nll * mask).sum() / mask.sum()
    h = torch.autograd.grad(plain, list(m.parameters()))
    gap = max((a - b).abs().max().item() for a, b in zip(g, h))
    print(loss.item(), plain.item(), "gradient difference", gap)
    assert abs(loss - plain) < 1e-5 and gap < 1e-6
