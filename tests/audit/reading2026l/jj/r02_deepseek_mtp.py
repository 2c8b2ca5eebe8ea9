"""DeepSeek-V3 multi-token prediction (arXiv 2412.19437, eq. 21-25): sequential depths, shared embedding and head, two RMS norms before the projection; the loss of every depth is divided by
the same T although depth k has only T-k terms."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "multi-token prediction"
KIND = "loss"
INPUTS = {"tokens": "token ids of full rows without padding, [rows, T+1]"}
SETTINGS = {"lam": "weight of the MTP loss, 0.3"}
NOTES = ("tokens has T+1 entries; the main model reads the first T and its loss is the mean over T targets. Depth k = 1..D combines the state of depth k-1 at position i (i = 1..T-k) with the embedding of token i+k, "
         "and predicts token i+k+1. The loss of a depth is the sum of its T-k cross entropies divided by T (not by T-k; eq. 24 of the DeepSeek-V3 report), then the mean over rows. "
         "Total = main + lam * (sum over depths) / D. Embedding and output head are those of the main model and get gradient from all depths. Everything is causal. All parameters are used.")

class LM(nn.Module):
    def __init__(self, vocab=33, width=20, depths=2):
        super().__init__()
        self.emb, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.main = nn.GRU(width, width, batch_first=True)
        self.nh, self.ne = nn.ModuleList(nn.RMSNorm(width) for _ in range(depths)), nn.ModuleList(nn.RMSNorm(width) for _ in range(depths))
        self.proj = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(depths))
        self.block = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(depths))

def make(seed):
    torch.manual_seed(seed)
    return {"tokens": torch.randint(0, 33, (3, 10)), "model": LM()}

def right(model, batch, lam=0.3):
    tok = batch["tokens"]
    R, T = tok.shape[0], tok.shape[1] - 1
    h = model.main(model.emb(tok[:, :T]))[0]
    main = F.cross_entropy(model.head(h).flatten(0, 1), tok[:, 1:].flatten())
    D = len(model.proj)
    extra = 0.0
    for k in range(1, D + 1):
        e = model.emb(tok[:, k:T])                     # token i+k for i = 1..T-k
        h = torch.cat([model.nh[k - 1](h[:, : T - k]), model.ne[k - 1](e)], -1)
        h = model.block[k - 1](model.proj[k - 1](h))[0]
        target = tok[:, k + 1:]
        extra = extra + F.cross_entropy(model.head(h).flatten(0, 1), target.flatten(), reduction="sum") / (R * T)
    return main + lam * extra / D

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); l = right(m, d); l.backward()
    tok, T, tot = d["tokens"], 9, 0.0
    for row in tok:
        h = m.main(m.emb(row[:T])[None])[0][0]
        s = sum(F.cross_entropy(m.head(h[i]), row[i + 1]).item() for i in range(T)) / T
        for k in (1, 2):
            x = torch.stack([m.proj[k - 1](torch.cat([m.nh[k - 1](h[i]), m.ne[k - 1](m.emb(row[i + k]))])) for i in range(T - k)])
            h = m.block[k - 1](x[None])[0][0]
            s += 0.3 / 2 * sum(F.cross_entropy(m.head(h[i]), row[i + k + 1]).item() for i in range(T - k)) / T
        tot += s / 3
    print(l.item(), tot, [n for n, p in m.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]); assert abs(l.item() - tot) < 1e-4
