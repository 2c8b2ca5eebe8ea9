"""Vocabulary-parallel cross entropy (Megatron). The head is split over 4 ranks with the vocabulary padded to a multiple of 4; each rank gives a partial maximum, sum of exponentials and target logit (0 where the target lives elsewhere), and only these are reduced. The maximum is detached on purpose."""
import torch
from torch import nn
FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is trained, [rows, time]"}
SETTINGS = {"ranks": "tensor-parallel ranks, 4; need not divide the vocabulary of 37"}
NOTES = "Cross entropy, mean over trained tokens of all rows. Padded vocabulary entries are -inf and get no probability. Ranks are simulated in a loop. Every parameter is used."
class Tiny(nn.Module):
    """One attention layer and an MLP-free head; position_ids and allowed ([B,T,T] bool) are optional."""
    def __init__(self, vocab=40, width=16, places=64):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(places, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids, position_ids=None, allowed=None):
        T = ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(T).expand_as(ids)
        if allowed is None:
            allowed = torch.ones(T, T, dtype=torch.bool).tril().expand(ids.shape[0], T, T)
        h = self.emb(ids) + self.pos(position_ids)
        s = self.q(h) @ self.k(h).transpose(1, 2) / h.shape[-1] ** 0.5
        a = s.masked_fill(~allowed, float("-inf")).softmax(-1)
        return self.head(h + self.o(a @ self.v(h)))

def make(seed):
    torch.manual_seed(seed); mask = (torch.rand(3, 12) < .7).float(); mask[:, 0] = 0; mask[:, 5] = 1
    return {"model": Tiny(37), "ids": torch.randint(0, 37, (3, 12)), "loss_mask": mask}

def right(model, batch, ranks=4):
    ids, mask = batch["ids"], batch["loss_mask"][:, 1:]
    logits, target = model(ids)[:, :-1], ids[:, 1:]
    per = -(-logits.shape[-1] // ranks)
    shards = nn.functional.pad(logits, (0, per * ranks - logits.shape[-1]), value=float("-inf")).split(per, -1)
    top = torch.stack([s.detach().amax(-1) for s in shards]).amax(0)               # all-reduce MAX
    total, hit = 0.0, 0.0
    for r, s in enumerate(shards):
        s = s - top[..., None]
        local = target - r * per
        mine = (local >= 0) & (local < per)
        picked = s.gather(-1, local.masked_fill(~mine, 0)[..., None])[..., 0]
        hit = hit + torch.where(mine, picked, torch.zeros_like(picked))            # all-reduce SUM
        total = total + s.exp().sum(-1)                                            # all-reduce SUM
    return ((total.log() - hit) * mask).sum() / mask.sum()

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); g1 = torch.autograd.grad(loss, list(m.parameters()))
    ref = nn.functional.cross_entropy(m(d["ids"])[:, :-1].flatten(0, 1), d["ids"][:, 1:].flatten(), reduction="none")
    k = d["loss_mask"][:, 1:].flatten(); ref = (ref * k).sum() / k.sum(); g2 = torch.autograd.grad(ref, list(m.parameters()))
    print(loss.item(), ref.item()); assert abs(loss - ref) < 1e-5 and all(torch.isfinite(a).all() and torch.allclose(a, b, atol=1e-5) and a.abs().sum() > 0 for a, b in zip(g1, g2))
