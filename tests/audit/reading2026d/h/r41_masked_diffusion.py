"""Masked diffusion language model (LLaDA): the SAME position is predicted (no shift), only masked positions count, weighted 1/t, divided by ALL tokens and not by the masked ones (Nie et al. 2025); so it is an upper bound of the NLL."""
FAMILY = 'diffusion'
KIND = "loss"
INPUTS = {'ids': 'token ids [rows,time]', 't': 'mask rate per row', 'hit': '1 where masked [rows,time]'}
SETTINGS = {'mask_id': '19'}
NOTES = 'Sum of CE/t over masked positions / (rows*time). No shift by design. At least one position masked. The model sees left context only here, which does not matter to the loss.'
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
    torch.manual_seed(seed); t = 0.2 + 0.8 * torch.rand(4).double(); h = (torch.rand(4, 7).double() < t[:, None]).double(); h[0, 0] = 1
    return {"model": LM().double(), "ids": torch.randint(0, 19, (4, 7)), "t": t, "hit": h}
def right(model, batch, mask_id=19):
    ids, h = batch["ids"], batch["hit"]; lg = model(torch.where(h.bool(), torch.full_like(ids, mask_id), ids))
    ce = F.cross_entropy(lg.transpose(1, 2), ids, reduction="none")
    return (ce * h / batch["t"][:, None]).sum() / ids.numel()
def slow(m, d):
    x = d["ids"].clone(); x[d["hit"].bool()] = 19; L = m(x).log_softmax(-1).detach()
    return -sum(L[i, j, d["ids"][i, j]] / d["t"][i] for i in range(4) for j in range(7) if d["hit"][i, j]) / 28

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(); gn = [(n, p.grad.norm().item()) for n, p in m.named_parameters()]
    want = slow(m, d); print("loss", loss.item(), "slow", float(want), "smallest grad", min(g for _, g in gn)); assert abs(loss.item() - float(want)) < 1e-9 and all(g > 0 for _, g in gn)
