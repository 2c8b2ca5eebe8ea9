"""Dynamic Fine-Tuning: every token's cross-entropy is multiplied by the model's own DETACHED probability of that token, so that the gradient is
that of -p (Wu et al. 2025, 'On the Generalization of SFT'; TRL loss_type='dft'). The value -p log p is not monotone in p, yet the gradient always raises p."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "sft and pre-training losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token (as a target) is trained, [rows, time]"}
SETTINGS = {}
NOTES = ("Token mean over the trained tokens of all rows. The weight exp(-nll) is a constant (stop-gradient) by design: finite differences of the value do not agree with the gradient, "
         "the gradient equals that of minus the mean probability. The column 0 of loss_mask is never used (no target). All parameters are used.")

class LM(nn.Module):
    def __init__(self, V=19, d=16):
        super().__init__()
        self.emb = nn.Embedding(V, d); self.rnn = nn.GRU(d, d, batch_first=True); self.head = nn.Linear(d, V)
    def forward(self, ids): return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 19, (4, 8)); mask = torch.ones(4, 8)
    for i in range(4): mask[i, : 1 + i] = 0
    return {"model": LM(), "ids": ids, "loss_mask": mask}

def right(model, batch):
    logits = model(batch["ids"])[:, :-1].float()
    y, w = batch["ids"][:, 1:], batch["loss_mask"][:, 1:]
    nll = F.cross_entropy(logits.transpose(1, 2), y, reduction="none")
    p = torch.exp(-nll).detach()
    return (p * nll * w).sum() / w.sum()

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); l = right(m, b); l.backward(); g = [p.grad.clone() for p in m.parameters()]; m.zero_grad()
    pr = m(b["ids"]).softmax(-1); s = v = n = 0
    for i in range(4):
        for t in range(7):
            if b["loss_mask"][i, t + 1]:
                p = pr[i, t, b["ids"][i, t + 1]]; s = s - p; v = v - p.item() * torch.log(p).item(); n += 1
    (s / n).backward()
    err = max((a - p.grad).abs().max().item() for a, p in zip(g, m.parameters()))
    print("value", l.item(), v / n, "gradient vs minus mean p:", err, "norm", sum(x.norm().item() for x in g))
    assert err < 1e-6 and abs(l.item() - v / n) < 1e-5 and min(x.norm() for x in g) > 0
