"""CISPO: the importance weight is clipped above only AND detached, multiplying log pi; clipped tokens keep their gradient, unlike PPO (MiniMax-M1)."""
FAMILY = 'policy gradient'
KIND = "loss"
INPUTS = {'ids': 'token ids [rows,time]', 'mask': '1 where the predicted token is trained [rows,time-1]', 'old_logp': 'log-probability of the taken token when sampled [rows,time-1]', 'adv': 'advantage per row [rows]'}
SETTINGS = {'high': 'upper bound of the weight, 1.2'}
NOTES = 'Mean over trained tokens of all rows. The weight is a constant. No lower clip by design. The value itself is not a bound of anything.'
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
make = base
def right(model, batch, high=1.2):
    lp = logp(model, batch["ids"]); k = batch["mask"]
    wgt = (lp - batch["old_logp"]).exp().clamp(max=high).detach()
    return -(wgt * batch["adv"][:, None] * lp * k).sum() / k.sum()
def slow(m, d):
    lp = logp(m, d["ids"]).detach(); t = n = 0
    for i in range(4):
        for j in range(6):
            if d["mask"][i, j]: n += 1; t -= min((lp[i, j] - d["old_logp"][i, j]).exp().item(), 1.2) * d["adv"][i] * lp[i, j]
    return t / n

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(); gn = [(n, p.grad.norm().item()) for n, p in m.named_parameters()]
    want = slow(m, d); print("loss", loss.item(), "slow", float(want), "smallest grad", min(g for _, g in gn)); assert abs(loss.item() - float(want)) < 1e-9 and all(g > 0 for _, g in gn)
