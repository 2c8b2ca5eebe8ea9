"""On-policy surrogate exp(lp - lp.detach()) with Dr. GRPO's constant normaliser rows*max_len: the ratio is exactly 1 in value, but has the policy gradient; division by a constant and not by the token count is intended (Liu et al. 2025)."""
FAMILY = 'policy gradient'
KIND = "loss"
INPUTS = {'ids': 'token ids [rows,time]', 'mask': '1 where the predicted token is trained [rows,time-1]', 'adv': 'advantage per row [rows]'}
SETTINGS = {'max_len': 'generation limit, 10'}
NOTES = 'Sum over trained tokens / (rows * max_len). Longer rows weigh more by design. Independent of padding.'
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
def make(seed): d = base(seed); d.pop("old_logp"); return d
def right(model, batch, max_len=10):
    lp = logp(model, batch["ids"])
    return -((lp - lp.detach()).exp() * batch["adv"][:, None] * batch["mask"]).sum() / (len(lp) * max_len)
def slow(m, d): return -sum(d["adv"][i] * d["mask"][i].sum() for i in range(4)) / 40

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(); gn = [(n, p.grad.norm().item()) for n, p in m.named_parameters()]
    want = slow(m, d); print("loss", loss.item(), "slow", float(want), "smallest grad", min(g for _, g in gn)); assert abs(loss.item() - float(want)) < 1e-9 and all(g > 0 for _, g in gn)
