"""Unlikelihood: tokens that already occurred in the row's context are pushed DOWN by -log(1-p), but never the true next token (Welleck et al. 2020); each distinct candidate counts once."""
FAMILY = 'auxiliary'
KIND = "loss"
INPUTS = {'ids': 'token ids [rows,time]', 'mask': '1 where the predicted token is trained [rows,time-1]'}
SETTINGS = {'alpha': '1.0'}
NOTES = "Likelihood and unlikelihood terms, each a sum over trained tokens / trained tokens. Candidates are the row's tokens before the target, including untrained ones."
import torch, torch.nn as nn, torch.nn.functional as F
class LM(nn.Module):
    def __init__(self, out=20, vocab=20, width=12):
        super().__init__(); self.emb = nn.Embedding(vocab, width); self.gru = nn.GRU(width, width, batch_first=True); self.head = nn.Linear(width, out)
    def forward(self, ids): return self.head(self.gru(self.emb(ids))[0])
def logp(model, ids): return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
def base(seed, rows=4, time=7):
    torch.manual_seed(seed); m = LM().double(); ids = torch.randint(0, 20, (rows, time)); mask = torch.ones(rows, time - 1).double(); mask[:, 0] = 0; mask[1, 4:] = 0
    with torch.no_grad(): lp = logp(m, ids)
    return {"model": m, "ids": ids, "mask": mask, "old_logp": lp + 0.3 * torch.randn_like(lp), "adv": torch.randn(rows).double()}
def make(seed): d = base(seed); d.pop("adv"); d.pop("old_logp"); d["ids"] = d["ids"] % 6; return d
def right(model, batch, alpha=1.0):
    ids, k = batch["ids"], batch["mask"]; ls = model(ids[:, :-1]).log_softmax(-1)
    seen = F.one_hot(ids[:, :-1], ls.shape[-1]).cumsum(1).clamp(max=1) * (1 - F.one_hot(ids[:, 1:], ls.shape[-1]))
    ul = -(torch.log1p(-ls.exp().clamp(max=1 - 1e-6)) * seen).sum(-1); nll = -ls.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return ((nll + alpha * ul) * k).sum() / k.sum()
def slow(m, d):
    P = m(d["ids"][:, :-1]).softmax(-1).detach(); t = n = 0
    for i in range(4):
        for j in range(6):
            if d["mask"][i, j]:
                y = d["ids"][i, j + 1].item(); n += 1; t -= P[i, j, y].log() + sum((1 - P[i, j, c]).log() for c in set(d["ids"][i, :j + 1].tolist()) - {y})
    return t / n

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(); gn = [(n, p.grad.norm().item()) for n, p in m.named_parameters()]
    want = slow(m, d); print("loss", loss.item(), "slow", float(want), "smallest grad", min(g for _, g in gn)); assert abs(loss.item() - float(want)) < 1e-9 and all(g > 0 for _, g in gn)
