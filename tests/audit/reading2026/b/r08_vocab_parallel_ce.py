"""Cross entropy from vocabulary shards: each shard clamps target ids into its own range, gathers a wrong logit and multiplies it by zero if the target is elsewhere; the maximum is detached.
Right: vocabulary-parallel cross entropy; sums over shards stand for all-reduces. Value and gradient are those of ordinary cross entropy."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is trained, [rows, time]"}
SETTINGS = {}
NOTES = "Next-token cross entropy, mean over trained tokens of all rows. model.heads holds each rank's part of the output weight, 4 ranks times 10 words."


class ShardedLM(nn.Module):
    def __init__(self, V=40, D=16, tp=4):
        super().__init__()
        self.emb, self.mid = nn.Embedding(V, D), nn.Linear(D, D)
        self.heads = nn.ModuleList([nn.Linear(D, V // tp, bias=False) for _ in range(tp)])

    def forward(self, ids):
        h = torch.tanh(self.mid(self.emb(ids)))
        return [w(h) for w in self.heads]


def right(model, batch):
    y = batch["ids"][:, 1:]
    shards = model(batch["ids"][:, :-1])
    top = torch.stack([s.detach().amax(-1) for s in shards]).amax(0)          # all-reduce MAX, no gradient
    z, hit, lo = 0.0, 0.0, 0
    for s in shards:                                                          # all-reduce SUM
        n = s.shape[-1]
        here = (y >= lo) & (y < lo + n)
        local = (y - lo).clamp(0, n - 1)
        z = z + (s - top[..., None]).exp().sum(-1)
        hit = hit + (s.gather(-1, local[..., None])[..., 0] - top) * here
        lo += n
    nll = z.log() - hit
    m = batch["loss_mask"][:, 1:]
    return (nll * m).sum() / m.sum()


def make(seed):
    torch.manual_seed(seed)
    return {"model": ShardedLM(), "ids": torch.randint(0, 40, (3, 9)), "loss_mask": (torch.rand(3, 9) < 0.7).float()}


if __name__ == "__main__":
    x = make(0)
    m = x.pop("model")
    ps = list(m.parameters())
    a = right(m, x)
    lg = torch.cat(m(x["ids"][:, :-1]), -1)
    k = x["loss_mask"][:, 1:]
    b = (F.cross_entropy(lg.flatten(0, 1), x["ids"][:, 1:].flatten(), reduction="none") * k.flatten()).sum() / k.sum()
    ga, gb = torch.autograd.grad(a, ps), torch.autograd.grad(b, ps)
    print("sharded", a.item(), "whole", b.item(), "gradient norm", sum(g.norm() ** 2 for g in ga).sqrt().item())
    assert torch.allclose(a, b, atol=1e-5) and all(torch.allclose(u, v, atol=1e-5) for u, v in zip(ga, gb))
