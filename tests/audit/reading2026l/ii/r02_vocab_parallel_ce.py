"""Vocabulary-parallel cross-entropy (Megatron-LM): the logits of a token are never gathered. Each rank has a slice of the vocabulary; targets outside the slice are mapped to entry 0 and the picked logit is zeroed, which looks like training on a wrong token."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is trained (as a target), [rows, time]; column 0 is 0"}
SETTINGS = {"ranks": "tensor-parallel ranks, simulated, 4 (vocabulary 40 is a multiple)"}
NOTES = ("Next-token cross-entropy, mean over the trained tokens of all rows (token t is predicted by the hidden state at t-1). The output layer is split over `ranks` along the vocabulary. Per token: the maximum over all ranks is subtracted "
         "(a constant, no gradient: it cancels); sum-of-exponentials and the logit of the target are each summed over ranks, where a rank that does not own the target contributes 0. loss = log(sum exp) - target logit. "
         "Equal to the ordinary cross-entropy on the full logits, in value and gradient. All parameters are used.")


class LM(nn.Module):
    def __init__(self, v=40, d=16):
        super().__init__()
        self.e, self.h, self.o = nn.Embedding(v, d), nn.Linear(d, d), nn.Linear(d, v, bias=False)

    def hidden(self, ids):
        return torch.tanh(self.h(self.e(ids)))

    def forward(self, ids):
        return self.o(self.hidden(ids))


def make(seed):
    torch.manual_seed(seed)
    m = (torch.rand(2, 10) < 0.6).float()
    m[:, 0] = 0
    m[:, 4] = 1
    return {"model": LM(), "ids": torch.randint(0, 40, (2, 10)), "loss_mask": m}


def right(model, batch, ranks=4):
    h = model.hidden(batch["ids"][:, :-1])
    target, mask = batch["ids"][:, 1:], batch["loss_mask"][:, 1:]
    shards = [h @ w.t() for w in model.o.weight.chunk(ranks, 0)]
    top = torch.stack([s.detach().amax(-1) for s in shards]).amax(0)              # all-reduce max
    sum_exp, picked = 0.0, 0.0
    for r, s in enumerate(shards):
        n = s.shape[-1]
        s = s - top[..., None]
        outside = (target < r * n) | (target >= (r + 1) * n)
        local = (target - r * n).masked_fill(outside, 0)
        picked = picked + s.gather(-1, local[..., None])[..., 0].masked_fill(outside, 0.0)   # all-reduce sum
        sum_exp = sum_exp + s.exp().sum(-1)                                                   # all-reduce sum
    nll = sum_exp.log() - picked
    return (nll * mask).sum() / mask.sum()


if __name__ == "__main__":
    i = make(0); m = i.pop("model")
    l = right(m, i); l.backward(); g = [p.grad.clone() for p in m.parameters()]
    m.zero_grad()
    mk = i["loss_mask"][:, 1:].bool()
    r = F.cross_entropy(m(i["ids"])[:, :-1][mk], i["ids"][:, 1:][mk]); r.backward()
    print(l.item(), r.item(), "grad error", max((a - p.grad).abs().max().item() for a, p in zip(g, m.parameters())))
