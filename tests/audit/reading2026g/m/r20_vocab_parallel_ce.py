"""Vocabulary-parallel cross-entropy (Megatron). No rank sees all logits: the maxima are all-reduced (without gradient), the sums of exponentials are added up, and each rank looks up the target with an out-of-range target replaced by 0 and its logit then zeroed, so only the owner contributes."""
FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "[rows, time], 1 where the token is trained"}
SETTINGS = {"world": "number of tensor-parallel ranks, 4"}
NOTES = "Supervised. Reduction: mean over trained tokens of all rows (token 0 of a row is no target). The result does not depend on world; the shards may be uneven (torch.tensor_split), the vocabulary need not be a multiple. No parameter unused."
import torch
from torch import nn


class TinyTP(nn.Module):
    def __init__(self, vocab=30, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab, bias=False)

    def hidden(self, ids):
        return self.rnn(self.emb(ids))[0]

    def forward(self, ids):
        return self.head(self.hidden(ids))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return {"model": TinyTP(), "ids": torch.randint(0, 30, (3, 11), generator=g), "loss_mask": (torch.rand(3, 11, generator=g) < 0.7).long()}


def right(model, batch, world=4):
    h, target = model.hidden(batch["ids"])[:, :-1], batch["ids"][:, 1:]
    shards = torch.tensor_split(model.head.weight, world)                       # rank r holds rows [start, end)
    local = [h @ w.T for w in shards if len(w)]
    top = torch.stack([x.detach().amax(-1) for x in local]).amax(0)              # all_reduce(MAX)
    denom, picked, start = 0, 0, 0
    for x in local:
        x = x - top[..., None]
        outside = (target < start) | (target >= start + x.shape[-1])
        index = (target - start).masked_fill(outside, 0)
        picked = picked + x.gather(-1, index[..., None])[..., 0].masked_fill(outside, 0.0)    # all_reduce(SUM)
        denom = denom + x.exp().sum(-1)                                                    # all_reduce(SUM)
        start += x.shape[-1]
    m = batch["loss_mask"][:, 1:]
    return ((denom.log() - picked) * m).sum() / m.sum().clamp(min=1)


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    loss = right(m, b)
    grads = torch.autograd.grad(loss, list(m.parameters()))
    lp = m(b["ids"])[:, :-1].log_softmax(-1).gather(-1, b["ids"][:, 1:, None])[..., 0]
    on = b["loss_mask"][:, 1:]
    ref = -(lp * on).sum() / on.sum()
    refg = torch.autograd.grad(ref, list(m.parameters()))
    gap = max((x - y).abs().max().item() for x, y in zip(grads, refg))
    print(loss.item(), ref.item(), "grad", sum(x.norm() for x in grads).item(), "gap", gap)
    assert torch.allclose(loss, ref, atol=1e-5) and gap < 1e-5
