"""ORPO: no reference model; the odds ratio uses length-AVERAGED log-probabilities and log1p(-exp(x)), plus the NLL on the chosen rows only (Hong et al. 2024)."""
FAMILY = 'preference'
KIND = "loss"
INPUTS = {'ids': 'token ids [rows,time]', 'mask': '1 where the predicted token is trained [rows,time-1]'}
SETTINGS = {'lam': '0.5'}
NOTES = 'Rows 0..n/2-1 are chosen, the second half the rejected partner in the same order (even number of rows needed). NLL is the mean over chosen tokens; odds term mean over pairs.'
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
def make(seed): d = base(seed); d.pop("adv"); d.pop("old_logp"); return d
def right(model, batch, lam=0.5):
    lp = logp(model, batch["ids"]); k = batch["mask"]; n = len(lp) // 2; a = (lp * k).sum(1) / k.sum(1)
    odds = a - torch.log1p(-a.exp())
    return -(lp[:n] * k[:n]).sum() / k[:n].sum() - lam * F.logsigmoid(odds[:n] - odds[n:]).mean()
def slow(m, d):
    lp = logp(m, d["ids"]).detach(); v = [lp[i][d["mask"][i].bool()] for i in range(4)]; o = [x.mean().exp() / (1 - x.mean().exp()) for x in v]
    return -torch.cat(v[:2]).mean() - 0.5 * sum(torch.log(1 / (1 + o[i + 2] / o[i])) for i in range(2)) / 2

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(); gn = [(n, p.grad.norm().item()) for n, p in m.named_parameters()]
    want = slow(m, d); print("loss", loss.item(), "slow", float(want), "smallest grad", min(g for _, g in gn)); assert abs(loss.item() - float(want)) < 1e-9 and all(g > 0 for _, g in gn)
