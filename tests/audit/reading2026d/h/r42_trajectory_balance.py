"""Trajectory balance (GFlowNet): squared (logZ + log pi - log R/temp) with a LEARNED scalar logZ; there is no advantage and no sign of a policy gradient, and off-policy rows need no ratio (Malkin et al. 2022)."""
FAMILY = 'policy gradient'
KIND = "loss"
INPUTS = {'ids': 'token ids [rows,time]', 'mask': '1 where the predicted token is trained [rows,time-1]', 'logr': 'log reward per row, unnormalised'}
SETTINGS = {'temp': '0.5'}
NOTES = 'Mean over rows of squares of SUMS over tokens (no length normalisation). logZ belongs to the model.'
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
def make(seed): d = base(seed); d["logr"] = d.pop("adv"); d.pop("old_logp"); d["model"].logz = nn.Parameter(torch.tensor(0.7, dtype=torch.float64)); return d
def right(model, batch, temp=0.5):
    s = (logp(model, batch["ids"]) * batch["mask"]).sum(1)
    return (model.logz + s - batch["logr"] / temp).square().mean()
def slow(m, d):
    lp = logp(m, d["ids"]).detach(); return sum((0.7 + sum(lp[i, j] for j in range(6) if d["mask"][i, j]) - d["logr"][i] / 0.5) ** 2 for i in range(4)) / 4

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(); gn = [(n, p.grad.norm().item()) for n, p in m.named_parameters()]
    want = slow(m, d); print("loss", loss.item(), "slow", float(want), "smallest grad", min(g for _, g in gn)); assert abs(loss.item() - float(want)) < 1e-9 and all(g > 0 for _, g in gn)
