"""IQL: the value is fitted by an asymmetric square (expectile 0.8) to a DETACHED Q, and Q to a detached next value, both in one loss; no maximum over actions anywhere (Kostrikov et al. 2022)."""
FAMILY = 'value'
KIND = "loss"
INPUTS = {'ids': 'token ids [rows,time]', 'mask': '1 where the predicted token is trained [rows,time-1]', 'rew': 'reward after each predicted token [rows,time-1]', 'done': '1 at the last step [rows,time-1]'}
SETTINGS = {'tau': '0.8', 'gamma': '0.9'}
NOTES = 'Sum of both losses, each a mean over trained positions of all rows. Head outputs: column 0 V(state), columns 1.. Q(state, token). Semi-gradients by design.'
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
    d = base(seed); d["model"] = LM(out=21).double(); d.pop("adv"); d.pop("old_logp"); d["rew"] = torch.randn(4, 6).double(); d["done"] = torch.zeros(4, 6).double(); d["done"][:, -1] = 1; d["done"][1, 3] = 1; return d
def right(model, batch, tau=0.8, gamma=0.9):
    o = model(batch["ids"]); v = o[..., 0]; q = o[:, :-1, 1:].gather(-1, batch["ids"][:, 1:, None]).squeeze(-1); k = batch["mask"]
    u = q.detach() - v[:, :-1]; lv = (tau - (u < 0).to(u.dtype)).abs() * u.square()
    lq = (q - batch["rew"] - gamma * (1 - batch["done"]) * v[:, 1:].detach()).square()
    return ((lv + lq) * k).sum() / k.sum()
def slow(m, d):
    o = m(d["ids"]).detach(); t = n = 0
    for i in range(4):
        for j in range(6):
            if d["mask"][i, j]:
                q = o[i, j, 1 + d["ids"][i, j + 1]].item(); u = q - o[i, j, 0].item(); n += 1; t += (0.8 if u > 0 else 0.2) * u * u + (q - d["rew"][i, j].item() - 0.9 * (0 if d["done"][i, j] else o[i, j + 1, 0].item())) ** 2
    return t / n

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(); gn = [(n, p.grad.norm().item()) for n, p in m.named_parameters()]
    want = slow(m, d); print("loss", loss.item(), "slow", float(want), "smallest grad", min(g for _, g in gn)); assert abs(loss.item() - float(want)) < 1e-9 and all(g > 0 for _, g in gn)
