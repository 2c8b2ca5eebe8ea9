"""Cross-entropy over a sharded vocabulary. Megatron's vocab-parallel cross-entropy: each rank holds a slice of the head. The
maximum is reduced over ranks without gradient, the target's logit is zero on all ranks but the owner and summed, and so
are the exponentials. The target id is clamped to 0 where the rank does not own it, then masked."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "loss"
INPUTS = {"ids": "[rows, time]", "labels": "next tokens, -100 is ignored [rows, time]"}
SETTINGS = {"tp": "tensor-parallel ranks, 4; must divide the vocabulary of 32"}
NOTES = ("Mean cross-entropy over labels that are not -100, all rows together. Ranks are simulated as slices of the head. "
         "The detached maximum only stabilises; its gradient cancels. All parameters are used.")


class TinyLM(nn.Module):
    """Embedding with learned positions, one attention layer, head."""
    def __init__(self, vocab=32, width=16, max_pos=64):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, vocab)

    def forward(self, ids, positions=None, mask=None):
        rows, time = ids.shape
        if positions is None:
            positions = torch.arange(time).expand(rows, time)
        if mask is None:
            mask = torch.ones(time, time, dtype=torch.bool).tril()
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.head(x + self.out(weights @ v))


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 32, (3, 12))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    labels[torch.rand(3, 12) < 0.3] = -100
    return {"model": TinyLM(), "batch": {"ids": ids, "labels": labels}}


def right(model, batch, tp=4):
    labels = batch["labels"]
    shards = model(batch["ids"]).chunk(tp, -1)                     # rank r owns shards[r]
    size = shards[0].shape[-1]
    top = torch.stack([s.detach().amax(-1) for s in shards]).amax(0)                    # all-reduce MAX
    target_logit, sum_exp = 0.0, 0.0
    for r, s in enumerate(shards):
        s = s - top[..., None]
        outside = (labels < r * size) | (labels >= (r + 1) * size)
        local = (labels - r * size).masked_fill(outside, 0)
        target_logit = target_logit + s.gather(-1, local[..., None]).squeeze(-1).masked_fill(outside, 0.0)   # SUM
        sum_exp = sum_exp + s.exp().sum(-1)                                                                  # SUM
    keep = (labels != -100).float()
    return ((sum_exp.log() - target_logit) * keep).sum() / keep.sum()


if __name__ == "__main__":
    d = make(0)
    loss = right(**d)
    g = torch.autograd.grad(loss, d["model"].head.weight)[0]
    plain = F.cross_entropy(d["model"](d["batch"]["ids"]).transpose(1, 2), d["batch"]["labels"])
    h = torch.autograd.grad(plain, d["model"].head.weight)[0]
    print(loss.item(), plain.item(), (g - h).abs().max().item())
    assert torch.allclose(loss, plain, atol=1e-5) and torch.allclose(g, h, atol=1e-6) and g.norm() > 0
