"""Only the 20% of trained tokens with the highest entropy get a policy gradient, the threshold is taken over the batch and detached, and the divisor is the number of SELECTED tokens (Wang et al. 2025, 'Beyond the 80/20 rule')."""
FAMILY = 'policy gradient'
KIND = "loss"
INPUTS = {'ids': 'token ids [rows,time]', 'mask': '1 where the predicted token is trained [rows,time-1]', 'old_logp': 'log-probability of the taken token when sampled [rows,time-1]', 'adv': 'advantage per row [rows]'}
SETTINGS = {'top': 'share of tokens, 0.2 (at least one)'}
NOTES = 'Mean over selected tokens. Rows are coupled through the batch threshold. No clip (plain ratio). Choice has no gradient.'
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
make = base
def right(model, batch, top=0.2):
    ls = model(batch["ids"][:, :-1]).log_softmax(-1); lp = ls.gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)
    h = -(ls.exp() * ls).sum(-1).detach().masked_fill(batch["mask"] == 0, -1.0)
    n = max(1, int(top * batch["mask"].sum().item())); sel = (h >= h.flatten().topk(n).values[-1]).to(lp.dtype)
    return -((lp - batch["old_logp"]).exp() * batch["adv"][:, None] * sel).sum() / sel.sum()
def slow(m, d):
    ls = m(d["ids"][:, :-1]).log_softmax(-1).detach(); c = sorted(((torch.distributions.Categorical(logits=ls[i, j]).entropy().item(), i, j) for i in range(4) for j in range(6) if d["mask"][i, j]), reverse=True)
    c = c[:int(0.2 * len(c))]; return -sum((ls[i, j, d["ids"][i, j + 1]] - d["old_logp"][i, j]).exp() * d["adv"][i] for _, i, j in c) / len(c)

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(); gn = [(n, p.grad.norm().item()) for n, p in m.named_parameters()]
    want = slow(m, d); print("loss", loss.item(), "slow", float(want), "smallest grad", min(g for _, g in gn)); assert abs(loss.item() - float(want)) < 1e-9 and all(g > 0 for _, g in gn)
