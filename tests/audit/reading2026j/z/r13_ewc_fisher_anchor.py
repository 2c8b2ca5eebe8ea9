"""Elastic weight consolidation (Kirkpatrick et al. 2017): plus lambda/2 * sum_i F_i (theta_i - theta*_i)^2 with the old weights theta* and their diagonal Fisher F as constants. The penalty is summed, not averaged, over parameters;
it is zero with zero gradient on the first step, and it ignores the batch."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "auxiliary losses and regularisers"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token (as a target) is trained, [rows, time]"}
SETTINGS = {"lam": "EWC strength lambda, 50.0"}
NOTES = ("Next-token CE, mean over trained tokens of all rows, plus the penalty, a sum over all parameters that does not depend on the batch (so it must not be scaled with rows; under accumulation it is divided with the loss). "
         "anchor_* and fisher_* are buffers of the model, constants, saved with it. The output matrix is tied to the embedding and counted once. All parameters are used.")

class LM(nn.Module):
    def __init__(self, V=23, d=16):
        super().__init__()
        self.emb = nn.Embedding(V, d); self.rnn = nn.GRU(d, d, batch_first=True); self.bias = nn.Parameter(torch.zeros(V))
        for n, p in list(self.named_parameters()):
            k = n.replace(".", "__"); self.register_buffer("anchor_" + k, p.detach().clone()); self.register_buffer("fisher_" + k, torch.zeros_like(p))
    def forward(self, ids): return self.rnn(self.emb(ids))[0] @ self.emb.weight.T + self.bias
    def consolidate(self, rows):
        """Diagonal Fisher: mean over rows of the square of the row's own gradient (targets from the old data)."""
        buf = dict(self.named_buffers())
        for n, p in self.named_parameters(): buf["fisher_" + n.replace(".", "__")].zero_(); buf["anchor_" + n.replace(".", "__")].copy_(p.detach())
        for r in rows:
            ll = F.cross_entropy(self(r[None])[0, :-1], r[1:], reduction="sum")
            for (n, p), g in zip(self.named_parameters(), torch.autograd.grad(ll, list(self.parameters()))):
                buf["fisher_" + n.replace(".", "__")].add_(g.square() / len(rows))

def make(seed):
    torch.manual_seed(seed); m = LM(); m.consolidate(torch.randint(0, 23, (5, 8)))
    with torch.no_grad():
        for p in m.parameters(): p += 0.02 * torch.randn_like(p)          # some training on the new task has happened
    mask = torch.ones(3, 8); mask[1, :4] = 0
    return {"model": m, "ids": torch.randint(0, 23, (3, 8)), "loss_mask": mask}

def right(model, batch, lam=50.0):
    ids, w = batch["ids"], batch["loss_mask"][:, 1:]
    nll = F.cross_entropy(model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    ce = (nll * w).sum() / w.sum()
    buf = dict(model.named_buffers()); pen = 0.0
    for n, p in model.named_parameters():
        k = n.replace(".", "__"); pen = pen + (buf["fisher_" + k] * (p - buf["anchor_" + k]).square()).sum()
    return ce + 0.5 * lam * pen, {"ce": ce.item(), "penalty": (0.5 * lam * pen).item()}

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); l, met = right(m, b); l.backward(); g = {n: p.grad.clone() for n, p in m.named_parameters()}; m.zero_grad()
    lp = m(b["ids"]).log_softmax(-1); ce = n = 0
    for i in range(3):
        for t in range(7):
            if b["loss_mask"][i, t + 1]: ce = ce - lp[i, t, b["ids"][i, t + 1]]; n += 1
    (ce / n).backward(); err = 0; pen = 0
    for k, p in m.named_parameters():
        Fi, A = getattr(m, "fisher_" + k.replace(".", "__")), getattr(m, "anchor_" + k.replace(".", "__"))
        err = max(err, (g[k] - (p.grad + 50.0 * Fi * (p.detach() - A))).abs().max().item()); pen += 25.0 * (Fi.double() * (p.detach() - A).double() ** 2).sum().item()
    with torch.no_grad():
        for k, p in m.named_parameters(): p.copy_(getattr(m, "anchor_" + k.replace(".", "__")))
    z = right(m, b)[1]["penalty"]
    print(met, "slow", (ce / n).item(), pen, "gradient difference", err, "penalty at the anchor", z)
    assert err < 1e-4 and abs(met["penalty"] - pen) < 1e-3 and abs(met["ce"] - (ce / n).item()) < 1e-5 and z == 0 and all(x.norm() > 0 for x in g.values())
