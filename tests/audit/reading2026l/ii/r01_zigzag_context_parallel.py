"""Zigzag (load-balanced) context parallelism: rank r holds chunks r and 2R-1-r of the sequence, as in Megatron-LM, TransformerEngine and zigzag ring attention. The
shards are not contiguous; labels must be shifted before the split and each token keeps its global position. Every rank divides its sum by the global token count."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]; time is a multiple of 2*ranks", "loss_mask": "1 where the token is trained (as a target), [rows, time]; the first token of a row is never a target"}
SETTINGS = {"ranks": "context-parallel ranks, simulated in one process, 2"}
NOTES = ("Next-token cross-entropy, sum over trained tokens of all rows divided by the number of trained tokens of all rows. The token at position t is predicted from the logits at t-1. Labels and mask are shifted on the full "
         "sequence first; then time is cut into 2*ranks chunks and rank r takes chunks r and 2*ranks-1-r (balances causal attention), with the global position of each token as its position id. The sums of the ranks are added. "
         "The last position has no target. All parameters are used. Identical to the loss without sharding, for any number of ranks that divides time/2.")


class LM(nn.Module):
    def __init__(self, v=30, d=16, t=64):
        super().__init__()
        self.e, self.p, self.o = nn.Embedding(v, d), nn.Embedding(t, d), nn.Linear(d, v)

    def forward(self, ids, pos):
        return self.o(torch.tanh(self.e(ids) + self.p(pos)))


def make(seed):
    torch.manual_seed(seed)
    m = (torch.rand(3, 16) < 0.6).float()
    m[:, 0] = 0
    m[:, 5] = 1
    return {"model": LM(t=16), "ids": torch.randint(0, 30, (3, 16)), "loss_mask": m}


def right(model, batch, ranks=2):
    ids, mask = batch["ids"], batch["loss_mask"]
    T = ids.shape[1]
    labels = torch.cat([ids[:, 1:], ids[:, :1]], 1)                      # the last column is masked
    weight = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], 1)
    pos = torch.arange(T).expand_as(ids)
    n = weight.sum()
    total = 0.0
    for r in range(ranks):
        def shard(x):
            c = x.chunk(2 * ranks, dim=1)
            return torch.cat([c[r], c[2 * ranks - 1 - r]], 1)
        logits = model(shard(ids), shard(pos))
        nll = F.cross_entropy(logits.flatten(0, 1), shard(labels).flatten(), reduction="none")
        total = total + (nll * shard(weight).flatten()).sum() / n
    return total


if __name__ == "__main__":
    i = make(0); m = i.pop("model")
    l = right(m, i); l.backward()
    s = c = 0
    for b in range(3):
        for t in range(1, 16):
            if i["loss_mask"][b, t]:
                s += -F.log_softmax(m(i["ids"][b, t - 1], torch.tensor(t - 1)), -1)[i["ids"][b, t]].item(); c += 1
    print(l.item(), s / c, "grad", [round(p.grad.norm().item(), 4) for p in m.parameters()])
