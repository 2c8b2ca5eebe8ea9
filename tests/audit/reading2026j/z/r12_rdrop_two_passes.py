"""R-Drop (Wu/Liang et al. 2021): every row goes through the model TWICE in one call (the batch concatenated with itself), dropout makes the two differ, and a symmetric KL pulls them together.
Neither side of the KL is detached, the rows are duplicated on purpose, and in eval mode the KL is exactly 0."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "auxiliary losses and regularisers"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token (as a target) is trained, [rows, time]"}
SETTINGS = {"alpha": "weight of the symmetric KL, 1.0"}
NOTES = ("loss = CE1 + CE2 + alpha * (KL(p1||p2) + KL(p2||p1)) / 2, each a mean over the trained tokens of all (original) rows; so the CE part is twice an ordinary CE, as in the paper. The forward batch has 2 * rows rows. "
         "Random in train mode (dropout). Both KL directions carry gradient on both sides. All parameters are used.")

class LM(nn.Module):
    def __init__(self, V=19, d=16, p=0.2):
        super().__init__()
        self.emb = nn.Embedding(V, d); self.rnn = nn.GRU(d, d, batch_first=True); self.drop = nn.Dropout(p); self.head = nn.Linear(d, V)
    def forward(self, ids): return self.head(self.drop(self.rnn(self.drop(self.emb(ids)))[0]))

def make(seed):
    torch.manual_seed(seed)
    mask = torch.ones(3, 8); mask[0, :3] = 0; mask[2, 6:] = 0
    return {"model": LM(), "ids": torch.randint(0, 19, (3, 8)), "loss_mask": mask}

def right(model, batch, alpha=1.0):
    ids, w = batch["ids"], batch["loss_mask"][:, 1:]
    lp = model(torch.cat([ids, ids], 0))[:, :-1].float().log_softmax(-1)
    a, b = lp.chunk(2, 0); y = ids[:, 1:, None]
    mean = lambda x: (x * w).sum() / w.sum()
    ce = mean(-a.gather(-1, y)[..., 0]) + mean(-b.gather(-1, y)[..., 0])
    kl = 0.5 * mean(((a.exp() - b.exp()) * (a - b)).sum(-1))          # KL(a||b) + KL(b||a) in one expression
    return ce + alpha * kl, {"ce": ce.item(), "kl": kl.item()}

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); m.train(); torch.manual_seed(3); l, met = right(m, b); l.backward(); g = [p.grad.clone() for p in m.parameters()]; m.zero_grad()
    torch.manual_seed(3); lp = m(b["ids"].repeat(2, 1)).log_softmax(-1); n = 0; ce = kl = 0
    for i in range(3):
        for t in range(7):
            if b["loss_mask"][i, t + 1]:
                n += 1; p, q = lp[i, t], lp[i + 3, t]; y = b["ids"][i, t + 1]; ce = ce - p[y] - q[y]
                kl = kl + 0.5 * sum(p[v].exp() * (p[v] - q[v]) + q[v].exp() * (q[v] - p[v]) for v in range(19))
    ((ce + kl) / n).backward(); err = max((x - p.grad).abs().max().item() for x, p in zip(g, m.parameters()))
    m.eval(); _, e = right(m, b)
    print(l.item(), ((ce + kl) / n).item(), met, "eval kl", e["kl"], "gradient difference", err)
    assert err < 1e-5 and abs(l - (ce + kl) / n) < 1e-5 and met["kl"] > 0 and abs(e["kl"]) < 1e-9 and min(x.norm() for x in g) > 0
