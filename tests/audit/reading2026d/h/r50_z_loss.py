"""Cross entropy plus z-loss: the square of the log normaliser of the trained tokens is added, so shifting all logits by a constant changes the loss though not the probabilities (PaLM)."""
FAMILY = 'auxiliary'
KIND = "loss"
INPUTS = {'ids': 'token ids [rows,time]', 'mask': '1 where the predicted token is trained [rows,time-1]'}
SETTINGS = {'z': '1e-2'}
NOTES = 'Both terms means over trained tokens of all rows. Not invariant to a logit shift by design.'
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
def right(model, batch, z=1e-2):
    lg = model(batch["ids"][:, :-1]); n = lg.logsumexp(-1); k = batch["mask"]
    return ((n - lg.gather(-1, batch["ids"][:, 1:, None]).squeeze(-1) + z * n.square()) * k).sum() / k.sum()
def slow(m, d):
    L = m(d["ids"][:, :-1]).detach(); v = [(L[i, j].exp().sum().log(), L[i, j, d["ids"][i, j + 1]]) for i in range(4) for j in range(6) if d["mask"][i, j]]
    return sum(a - b + 0.01 * a * a for a, b in v) / len(v)

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(); gn = [(n, p.grad.norm().item()) for n, p in m.named_parameters()]
    want = slow(m, d); print("loss", loss.item(), "slow", float(want), "smallest grad", min(g for _, g in gn)); assert abs(loss.item() - float(want)) < 1e-9 and all(g > 0 for _, g in gn)
