"""HL-Gauss: a value is learnt by CROSS ENTROPY against a Gaussian histogram over bins in symlog space, targets renormalised inside the range (Farebrother et al. 2024). Regression by classification is intended, and the loss floor is the target's entropy, not 0."""
FAMILY = 'value'
KIND = "loss"
INPUTS = {'ids': 'token ids [rows,time]', 'ret': 'return per position [rows,time]', 'vmask': '1 where used [rows,time]'}
SETTINGS = {'sigma': '0.75 bin widths'}
NOTES = 'Mean over used positions of all rows. 21 bins from -5 to 5 in symlog space. Targets constants.'
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
    torch.manual_seed(seed); return {"model": LM(out=21).double(), "ids": torch.randint(0, 20, (3, 6)), "ret": 20 * torch.randn(3, 6).double(), "vmask": (torch.rand(3, 6) < 0.8).double()}
def right(model, batch, sigma=0.75):
    y = batch["ret"].sign() * batch["ret"].abs().log1p(); e = torch.linspace(-5.25, 5.25, 22, dtype=y.dtype)
    c = torch.erf((e - y.clamp(-5, 5)[..., None]) / (2 ** 0.5 * sigma * 0.5)); p = (c[..., 1:] - c[..., :-1]) / (c[..., -1:] - c[..., :1])
    return -((p * model(batch["ids"]).log_softmax(-1)).sum(-1) * batch["vmask"]).sum() / batch["vmask"].sum()
def slow(m, d):
    import math; L = m(d["ids"]).log_softmax(-1).detach(); t = n = 0
    for i in range(3):
        for j in range(6):
            if d["vmask"][i, j]:
                r = d["ret"][i, j].item(); y = max(-5, min(5, math.copysign(math.log1p(abs(r)), r))); cdf = lambda x: 0.5 * (1 + math.erf((x - y) / (2 ** .5 * .375)))
                p = [cdf(-5.25 + .5 * (b + 1)) - cdf(-5.25 + .5 * b) for b in range(21)]; n += 1; t -= sum(x * L[i, j, b].item() for b, x in enumerate(p)) / sum(p)
    return t / n

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(); gn = [(n, p.grad.norm().item()) for n, p in m.named_parameters()]
    want = slow(m, d); print("loss", loss.item(), "slow", float(want), "smallest grad", min(g for _, g in gn)); assert abs(loss.item() - float(want)) < 1e-9 and all(g > 0 for _, g in gn)
