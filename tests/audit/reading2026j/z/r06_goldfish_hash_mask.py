"""Goldfish loss (Hans et al. 2024): about 1 token in k is left out of the loss, chosen by a fixed pseudo-random table indexed with a hash of the h tokens BEFORE it.
The model never learns those tokens in that context, so it cannot recite; a repeated passage loses the same tokens each time, which a random mask would not give."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "sft and pre-training losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]"}
SETTINGS = {"k": "one in k tokens is dropped, 4", "h": "width of the hashed context in tokens, 3"}
NOTES = ("Next-token cross-entropy, mean over the KEPT tokens of all rows. Every token of a row stays in the input; only targets are dropped. The drop is a deterministic function of the h previous tokens, "
         "independent of step, row and position; the first h targets of a row are always kept (no full context). The table has its own generator and leaves the global random state alone. All parameters are used.")
_TABLE = torch.rand(10007, generator=torch.Generator().manual_seed(2971215073 % 2**31))

class LM(nn.Module):
    def __init__(self, V=37, d=16):
        super().__init__()
        self.emb = nn.Embedding(V, d); self.rnn = nn.GRU(d, d, batch_first=True); self.head = nn.Linear(d, V)
    def forward(self, ids): return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 37, (4, 24)); ids[1, 10:18] = ids[0, 3:11]             # a repeated passage at another offset
    return {"model": LM(), "ids": ids}

def keep_mask(ids, k, h):
    """[rows, time] bool: is ids[:, t] a trained target?"""
    keep = torch.ones_like(ids, dtype=torch.bool)
    if ids.shape[1] > h:
        win = ids[:, :-1].unfold(1, h, 1)                                         # win[:, j] = ids[j .. j+h-1], decides target j+h
        key = torch.zeros_like(win[..., 0])
        for j in range(h): key = (key * 1009 + win[..., j] + 1) % 10007
        keep[:, h:] = _TABLE.to(ids.device)[key] >= 1.0 / k
    return keep

def right(model, batch, k=4, h=3):
    ids = batch["ids"]
    y = ids[:, 1:].masked_fill(~keep_mask(ids, k, h)[:, 1:], -100)
    return F.cross_entropy(model(ids)[:, :-1].float().flatten(0, 1), y.flatten(), ignore_index=-100)

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); l = right(m, b); l.backward(); ids = b["ids"]
    lp = m(ids).log_softmax(-1); s = n = 0
    for i in range(4):
        for t in range(1, 24):
            if t >= 3:
                key = 0
                for j in range(t - 3, t): key = (key * 1009 + int(ids[i, j]) + 1) % 10007
                if _TABLE[key] < 0.25: continue
            s += -lp[i, t - 1, ids[i, t]].item(); n += 1
    km = keep_mask(ids, 4, 3)
    big = keep_mask(torch.randint(0, 37, (64, 64)), 4, 3)[:, 3:].float().mean().item()
    print(l.item(), s / n, "kept", n, "of", 4 * 23, "kept share at large", big, "repeat agrees", torch.equal(km[1, 13:18], km[0, 6:11]))
    assert abs(l.item() - s / n) < 1e-5 and n < 92 and abs(big - 0.75) < 0.04 and torch.equal(km[1, 13:18], km[0, 6:11]) and all(p.grad.norm() > 0 for p in m.parameters())
