"""Distillation from the teacher's top-k log-probabilities with one TAIL bucket for the rest of the mass in both models, so that it is a true KL over k+1 outcomes and not a renormalised one."""
FAMILY = 'distillation'
KIND = "loss"
INPUTS = {'ids': 'token ids [rows,time]', 'mask': '1 where the predicted token is trained [rows,time-1]', 'top_idx': "teacher's top ids [rows,time-1,k]", 'top_lp': 'their log-probabilities, not summing to one'}
SETTINGS = {}
NOTES = 'Forward KL, mean over trained tokens of all rows. Teacher entries constants. No temperature.'
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
def make(seed):
    d = base(seed); d.pop("adv"); d.pop("old_logp"); v, i = (2 * torch.randn(4, 6, 20).double()).log_softmax(-1).topk(4, -1); d["top_lp"], d["top_idx"] = v, i; return d
def tail(lp): return torch.log(-torch.expm1(lp.logsumexp(-1, keepdim=True)))
def right(model, batch):
    q = model(batch["ids"][:, :-1]).log_softmax(-1).gather(-1, batch["top_idx"]); p = batch["top_lp"]
    q, p = torch.cat([q, tail(q)], -1), torch.cat([p, tail(p)], -1); k = batch["mask"]
    return ((p.exp() * (p - q)).sum(-1) * k).sum() / k.sum()
def slow(m, d):
    Q = m(d["ids"][:, :-1]).softmax(-1).detach(); t = n = 0
    for i in range(4):
        for j in range(6):
            if d["mask"][i, j]:
                p = d["top_lp"][i, j].exp(); q = Q[i, j][d["top_idx"][i, j]]; n += 1; t += (p * (p / q).log()).sum() + (1 - p.sum()) * ((1 - p.sum()) / (1 - q.sum())).log()
    return t / n

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(); gn = [(n, p.grad.norm().item()) for n, p in m.named_parameters()]
    want = slow(m, d); print("loss", loss.item(), "slow", float(want), "smallest grad", min(g for _, g in gn)); assert abs(loss.item() - float(want)) < 1e-9 and all(g > 0 for _, g in gn)
