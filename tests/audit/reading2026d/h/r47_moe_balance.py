"""Switch load-balance loss: the share of tokens per expert f comes from an argmax without gradient, only the mean probability P is differentiable; N*sum(f*P) is 1 at balance, not 0 (Fedus et al. 2022)."""
FAMILY = 'auxiliary'
KIND = "loss"
INPUTS = {'ids': 'token ids [rows,time]', 'mask': '1 where the predicted token is trained [rows,time-1]'}
SETTINGS = {'coef': '0.01'}
NOTES = 'Mean cross entropy over trained tokens + coef * balance over ALL input tokens of all rows. Routing is computed on embeddings by model.router with 4 experts. Balance couples the rows.'
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
def make(seed): d = base(seed); d.pop("adv"); d.pop("old_logp"); d["model"].router = nn.Linear(12, 4).double(); return d
def right(model, batch, coef=0.01):
    p = model.router(model.emb(batch["ids"][:, :-1])).softmax(-1).flatten(0, 1)
    f = F.one_hot(p.argmax(-1), 4).to(p.dtype).mean(0)
    return -(logp(model, batch["ids"]) * batch["mask"]).sum() / batch["mask"].sum() + coef * 4 * (f * p.mean(0)).sum()
def slow(m, d):
    p = m.router(m.emb(d["ids"][:, :-1])).softmax(-1).detach().reshape(-1, 4); a = p.argmax(1).tolist()
    return -(logp(m, d["ids"]).detach() * d["mask"]).sum() / d["mask"].sum() + 0.01 * 4 * sum(a.count(e) / len(a) * p[:, e].mean() for e in range(4))

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(); gn = [(n, p.grad.norm().item()) for n, p in m.named_parameters()]
    want = slow(m, d); print("loss", loss.item(), "slow", float(want), "smallest grad", min(g for _, g in gn)); assert abs(loss.item() - float(want)) < 1e-9 and all(g > 0 for _, g in gn)
