"""Cross entropy over a vocabulary that is split over ranks.
Megatron-LM vocab_parallel_cross_entropy. No rank sees all logits: the largest logit is max-reduced (and detached), the sums of exponentials are add-reduced, and a target that lies in another shard is looked up at index 0 and set
to zero before the add-reduce. There is no softmax and no call of a loss function; the token ids are clamped to a wrong id on most ranks on purpose."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is trained, [rows, time]"}
SETTINGS = {"tp": "shards of the vocabulary, 4"}
NOTES = "Cross entropy, mean over trained tokens. The vocabulary (32) divides by tp. Shards simulated in one process. All parameters used."

class TinyLM(nn.Module):
    """One causal attention layer; `allowed` [.., q, k] replaces the causal mask when given."""
    def __init__(self, vocab=29, width=16, out=None):
        super().__init__()
        self.width = width
        self.emb = nn.Embedding(vocab, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, out or vocab)

    def forward(self, ids, positions=None, allowed=None):
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T).expand_as(ids)
        freq = torch.exp(-0.7 * torch.arange(self.width // 2))
        ang = positions[..., None].float() * freq
        h = self.emb(ids) + torch.cat([ang.sin(), ang.cos()], -1)
        if allowed is None:
            allowed = torch.ones(T, T, dtype=torch.bool).tril()
        att = self.q(h) @ self.k(h).transpose(1, 2) / math.sqrt(self.width)
        h = h + self.o(att.masked_fill(~allowed, float("-inf")).softmax(-1) @ self.v(h))
        return self.head(torch.tanh(h))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return {"model": TinyLM(vocab=32), "ids": torch.randint(0, 32, (4, 12), generator=g), "loss_mask": (torch.rand(4, 12, generator=g) < 0.6).float()}


def right(model, batch, tp=4):
    target, mask = batch["ids"][:, 1:], batch["loss_mask"][:, 1:]
    shards = model(batch["ids"])[:, :-1].chunk(tp, -1)
    size = shards[0].shape[-1]
    top = torch.stack([s.detach().amax(-1) for s in shards]).amax(0)
    sum_exp = predicted = 0.0
    for rank, s in enumerate(shards):
        s = s - top[..., None]
        outside = (target < rank * size) | (target >= (rank + 1) * size)
        local = (target - rank * size).masked_fill(outside, 0)
        predicted = predicted + s.gather(-1, local[..., None]).squeeze(-1).masked_fill(outside, 0.0)
        sum_exp = sum_exp + s.exp().sum(-1)
    return ((sum_exp.log() - predicted) * mask).sum() / mask.sum()


if __name__ == "__main__":
    d = make(0); m = d.pop("model")
    loss = right(m, d); loss.backward(); got = m.head.weight.grad.clone(); m.zero_grad()
    nll = F.cross_entropy(m(d["ids"])[:, :-1].transpose(1, 2), d["ids"][:, 1:], reduction="none")
    plain = (nll * d["loss_mask"][:, 1:]).sum() / d["loss_mask"][:, 1:].sum(); plain.backward()
    print("split", loss.item(), "plain", plain.item(), "gradient difference", (got - m.head.weight.grad).abs().max().item(), "gradient", got.norm().item())
    assert torch.allclose(loss, plain, atol=1e-5) and torch.allclose(got, m.head.weight.grad, atol=1e-6)
