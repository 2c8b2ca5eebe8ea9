"""GSPO-token: the clipped ratio is sequence-wise (length-normalised) and detached, times pi/pi.detach() which is 1 in value; gradient flows per token (Zheng et al. 2025). The clip is tiny, 3e-4, on purpose."""
FAMILY = 'policy gradient'
KIND = "loss"
INPUTS = {'ids': 'token ids [rows,time]', 'mask': '1 where the predicted token is trained [rows,time-1]', 'old_logp': 'log-probability of the taken token when sampled [rows,time-1]', 'adv': 'advantage per row [rows]'}
SETTINGS = {'eps': 'clip, 3e-4'}
NOTES = 'Mean over tokens of a row, then mean over rows. old_logp and adv constants. Every row needs a trained token.'
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
    d = base(seed)
    with torch.no_grad(): d["old_logp"] = logp(d["model"], d["ids"]) + 1e-4 * torch.randn(4, 6).double()
    return d
def right(model, batch, eps=3e-4):
    lp = logp(model, batch["ids"]); k = batch["mask"]; n = k.sum(1)
    s = (((lp - batch["old_logp"]) * k).sum(1) / n).exp().detach()
    r = s[:, None] * (lp - lp.detach()).exp(); a = batch["adv"][:, None]
    return -((torch.minimum(r * a, r.clamp(1 - eps, 1 + eps) * a) * k).sum(1) / n).mean()
def slow(m, d):
    lp = logp(m, d["ids"]).detach(); t = 0
    for i in range(4):
        j = d["mask"][i].bool(); s = (lp[i] - d["old_logp"][i])[j].mean().exp(); a = d["adv"][i]; t -= min(s * a, s.clamp(1 - 3e-4, 1 + 3e-4) * a) / 4
    return t

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(); gn = [(n, p.grad.norm().item()) for n, p in m.named_parameters()]
    want = slow(m, d); print("loss", loss.item(), "slow", float(want), "smallest grad", min(g for _, g in gn)); assert abs(loss.item() - float(want)) < 1e-9 and all(g > 0 for _, g in gn)
