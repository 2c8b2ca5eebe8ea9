"""Token-level unlikelihood training (Welleck et al. 2019): besides the nll, -log(1 - p(c)) for every token c that already occurred in the row's context, except the current target.
It pushes DOWN probabilities of real tokens; each distinct candidate counts once, and the candidates come from the input, so they are constants."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "auxiliary losses and regularisers"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], 0 = right padding"}
SETTINGS = {"alpha": "weight of the unlikelihood term, 1.0"}
NOTES = ("Both terms: sum over the candidates of a step, then mean over the real target tokens of all rows. Candidates at target t: distinct tokens of ids[0..t-1] (input included), without the target and without padding 0. "
         "The unlikelihood grows with the number of distinct earlier tokens. 1 - p is clamped at 1e-5, as in fairseq's code. All parameters are used.")

class LM(nn.Module):
    def __init__(self, V=17, d=16):
        super().__init__()
        self.emb = nn.Embedding(V, d); self.rnn = nn.GRU(d, d, batch_first=True); self.head = nn.Linear(d, V)
    def forward(self, ids): return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    torch.manual_seed(seed); ids = torch.randint(1, 17, (3, 12)); ids[1, 8:] = 0; ids[2, 5:] = 0
    return {"model": LM(), "ids": ids}

def right(model, batch, alpha=1.0):
    ids = batch["ids"]; x, y = ids[:, :-1], ids[:, 1:]; T = x.shape[1]
    logits = model(x).float(); lp = logits.log_softmax(-1); real = (y != 0).float()
    with torch.no_grad():
        ctx = x[:, None, :].expand(-1, T, -1).masked_fill(torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1), 0)   # what step t has seen, 0 elsewhere
        ctx = ctx.masked_fill(ctx == y[..., None], 0)
        neg = torch.zeros_like(lp).scatter_(-1, ctx, 1.0); neg[..., 0] = 0        # a set: a repeated token counts once
    ul = -(torch.clamp(1.0 - lp.exp(), min=1e-5).log() * neg).sum(-1)
    nll = -lp.gather(-1, y[..., None])[..., 0]
    n = real.sum()
    return ((nll + alpha * ul) * real).sum() / n, {"nll": ((nll * real).sum() / n).item(), "ul": ((ul * real).sum() / n).item()}

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); l, met = right(m, b); l.backward(); g = [p.grad.clone() for p in m.parameters()]; m.zero_grad()
    pr = m(b["ids"]).softmax(-1); s = n = 0
    for i in range(3):
        r = b["ids"][i].tolist()
        for t in range(1, 12):
            if r[t] == 0: continue
            s = s - torch.log(pr[i, t - 1, r[t]]); n += 1
            for c in set(r[:t]) - {r[t]}: s = s - torch.log(1 - pr[i, t - 1, c])
    (s / n).backward(); err = max((x - p.grad).abs().max().item() for x, p in zip(g, m.parameters()))
    print(l.item(), (s / n).item(), met, "gradient difference", err); assert err < 1e-5 and abs(l - s / n) < 1e-5 and min(x.norm() for x in g) > 0
