"""SigLIP: pairwise sigmoid loss, summed over ALL pairs but divided by the rows only (not rows squared), with learned log-temperature log 10 and bias -10 (Zhai et al. 2023)."""
FAMILY = 'contrastive'
KIND = "loss"
INPUTS = {'ids': 'token ids of side a [rows,time]', 'ids_b': 'side b, row i matches row i'}
SETTINGS = {}
NOTES = 'Sum over pairs / rows. Rows are coupled. Duplicated rows would be false negatives.'
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
    torch.manual_seed(seed); m = LM().double(); m.t = nn.Parameter(torch.tensor(10., dtype=torch.float64).log()); m.b = nn.Parameter(torch.tensor(-10.).double()); return {"model": m, "ids": torch.randint(0, 20, (5, 6)), "ids_b": torch.randint(0, 20, (5, 6))}
def right(model, batch):
    x, y = (F.normalize(model(batch[k])[:, -1], dim=-1) for k in ("ids", "ids_b"))
    lg = x @ y.T * model.t.exp() + model.b
    return -F.logsigmoid((2 * torch.eye(len(x), dtype=x.dtype) - 1) * lg).sum() / len(x)
def slow(m, d):
    x, y = (m(d[k])[:, -1].detach() for k in ("ids", "ids_b")); t = 0
    for i in range(5):
        for j in range(5): z = 10 * F.cosine_similarity(x[i], y[j], 0) - 10; t += torch.log1p(torch.exp(-z if i == j else z)) / 5
    return t

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(); gn = [(n, p.grad.norm().item()) for n, p in m.named_parameters()]
    want = slow(m, d); print("loss", loss.item(), "slow", float(want), "smallest grad", min(g for _, g in gn)); assert abs(loss.item() - float(want)) < 1e-9 and all(g > 0 for _, g in gn)
