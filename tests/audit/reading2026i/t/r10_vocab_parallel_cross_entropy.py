"""Cross-entropy over a vocabulary that is split over ranks. Megatron-LM vocab_parallel_cross_entropy.
Each rank sees a part of the logits only. The maximum is taken over ranks and detached, labels that live elsewhere are set to index 0 and the picked logit is then zeroed, and the parts are summed. For most labels a rank picks nothing; it is not a lost target."""
import torch
import torch.nn as nn
import torch.nn.functional as F
FAMILY = "sharding and reductions"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "labels": "next token (pre-shifted), -100 where not trained, [rows, time]"}
SETTINGS = {"tp": "tensor-parallel ranks, 3"}
NOTES = "Equals mean cross-entropy over trained tokens. The vocabulary (30) must be divisible by tp. Rank sums are simulated by Python sums. The maximum has no gradient by design (it cancels). All parameters are used."

class Tiny(nn.Module):
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    torch.manual_seed(seed); lab = torch.randint(0, 30, (3, 9)); lab[torch.rand(3, 9) < 0.3] = -100
    return {"model": Tiny(vocab=30), "ids": torch.randint(0, 30, (3, 9)), "labels": lab}

def right(model, batch, tp=3):
    logits, labels = model(batch["ids"]), batch["labels"]
    shards = logits.chunk(tp, -1); size = shards[0].shape[-1]
    top = torch.stack([s.detach().max(-1).values for s in shards]).max(0).values      # all-reduce MAX
    z, picked = 0.0, 0.0
    for r, s in enumerate(shards):
        s = s - top[..., None]
        local = labels - r * size
        outside = (local < 0) | (local >= size)
        p = s.gather(-1, local.masked_fill(outside, 0)[..., None])[..., 0]
        picked = picked + p.masked_fill(outside, 0.0)                                  # all-reduce SUM
        z = z + s.exp().sum(-1)                                                        # all-reduce SUM
    keep = labels != -100
    return ((z.log() - picked) * keep).sum() / keep.sum()

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); l = right(m, b); l.backward(); g = m.head.weight.grad.clone(); m.zero_grad()
    ref = F.cross_entropy(m(b["ids"]).flatten(0, 1), b["labels"].flatten(), ignore_index=-100); ref.backward()
    print(l.item(), ref.item(), (g - m.head.weight.grad).abs().max().item())
    assert torch.allclose(l, ref, atol=1e-6) and torch.allclose(g, m.head.weight.grad, atol=1e-6)
