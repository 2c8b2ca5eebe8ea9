"""KTO: the KL reference point is the mean log-ratio of MISMATCHED prompt-completion rows, clamped at zero and detached; desirable and undesirable rows need not be paired (Ethayarajh et al. 2024)."""
FAMILY = 'preference'
KIND = "loss"
INPUTS = {'ids': 'token ids [rows,time]', 'mask': '1 where the predicted token is trained [rows,time-1]', 'ref_logp': 'summed reference log-probability per row', 'kl_ids': 'mismatched rows [rows,time], same mask', 'kl_ref': 'their reference log-probability', 'good': '1 desirable, 0 undesirable [rows]'}
SETTINGS = {'beta': '0.1'}
NOTES = 'Mean over rows; sums over tokens, no length normalisation. The KL term is a constant across the batch, so rows are coupled through it. Log-probabilities are sums.'
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
    d = base(seed); torch.manual_seed(seed + 1); d["kl_ids"] = torch.randint(0, 20, (4, 7)); d.pop("adv"); d.pop("old_logp")
    with torch.no_grad(): d["ref_logp"] = (logp(d["model"], d["ids"]) * d["mask"]).sum(1) + torch.randn(4).double(); d["kl_ref"] = (logp(d["model"], d["kl_ids"]) * d["mask"]).sum(1) - 1
    d["good"] = torch.tensor([1., 0, 0, 1]).double(); return d
def right(model, batch, beta=0.1):
    r = (logp(model, batch["ids"]) * batch["mask"]).sum(1) - batch["ref_logp"]
    with torch.no_grad(): z = ((logp(model, batch["kl_ids"]) * batch["mask"]).sum(1) - batch["kl_ref"]).mean().clamp(min=0)
    g = batch["good"]
    return (g * (1 - torch.sigmoid(beta * (r - z))) + (1 - g) * (1 - torch.sigmoid(beta * (z - r)))).mean()
def slow(m, d):
    S = lambda i: (logp(m, i) * d["mask"]).sum(1).detach(); r = S(d["ids"]) - d["ref_logp"]; z = max(0, (S(d["kl_ids"]) - d["kl_ref"]).mean().item()); t = 0
    for i in range(4): s = 1 if d["good"][i] else -1; t += (1 - torch.sigmoid(0.1 * s * (r[i] - z))) / 4
    return t

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(); gn = [(n, p.grad.norm().item()) for n, p in m.named_parameters()]
    want = slow(m, d); print("loss", loss.item(), "slow", float(want), "smallest grad", min(g for _, g in gn)); assert abs(loss.item() - float(want)) < 1e-9 and all(g > 0 for _, g in gn)
