"""IPO: the log-ratio margin is regressed on 1/(2 beta) by a SQUARE, with length-averaged log-probabilities, so a larger margin is punished too (Azar et al. 2023; TRL averages)."""
FAMILY = 'preference'
KIND = "loss"
INPUTS = {'ids': 'token ids [rows,time]', 'mask': '1 where the predicted token is trained [rows,time-1]', 'ref': 'length-averaged reference log-probability [rows]'}
SETTINGS = {'beta': '0.5'}
NOTES = 'First half chosen, second half rejected (even number of rows). Mean over pairs.'
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
def make(seed): d = base(seed); d["ref"] = -3 + 0.2 * d.pop("adv"); d.pop("old_logp"); return d
def right(model, batch, beta=0.5):
    k = batch["mask"]; r = (logp(model, batch["ids"]) * k).sum(1) / k.sum(1) - batch["ref"]; n = len(r) // 2
    return (r[:n] - r[n:] - 1 / (2 * beta)).square().mean()
def slow(m, d):
    lp = logp(m, d["ids"]).detach(); r = [lp[i][d["mask"][i].bool()].mean() - d["ref"][i] for i in range(4)]; return sum((r[i] - r[i + 2] - 1) ** 2 for i in range(2)) / 2

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(); gn = [(n, p.grad.norm().item()) for n, p in m.named_parameters()]
    want = slow(m, d); print("loss", loss.item(), "slow", float(want), "smallest grad", min(g for _, g in gn)); assert abs(loss.item() - float(want)) < 1e-9 and all(g > 0 for _, g in gn)
