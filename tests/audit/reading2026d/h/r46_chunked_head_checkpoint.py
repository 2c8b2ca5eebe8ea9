"""Cross entropy in chunks of tokens with the head recomputed in the backward pass (checkpoint), float sums divided ONCE by the global count; the full logits never exist (Liger, torchtune)."""
FAMILY = 'memory-saving loss'
KIND = "loss"
INPUTS = {'ids': 'token ids [rows,time]', 'mask': '1 where the predicted token is trained [rows,time-1]'}
SETTINGS = {'chunk': 'tokens per chunk, 5'}
NOTES = 'Mean over trained tokens of all rows. chunk divides nothing: any chunk size gives the same result.'
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
from torch.utils.checkpoint import checkpoint
def make(seed): d = base(seed); d.pop("adv"); d.pop("old_logp"); return d
def right(model, batch, chunk=5):
    h = model.gru(model.emb(batch["ids"][:, :-1]))[0].flatten(0, 1); y = batch["ids"][:, 1:].flatten(); k = batch["mask"].flatten()
    part = lambda a, b, c: (F.cross_entropy(model.head(a), b, reduction="none") * c).sum()
    return sum(checkpoint(part, *t, use_reentrant=False) for t in zip(h.split(chunk), y.split(chunk), k.split(chunk))) / k.sum()
def slow(m, d): return -(logp(m, d["ids"]).detach() * d["mask"]).sum() / d["mask"].sum()

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); loss = right(m, d); loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(); gn = [(n, p.grad.norm().item()) for n, p in m.named_parameters()]
    want = slow(m, d); print("loss", loss.item(), "slow", float(want), "smallest grad", min(g for _, g in gn)); assert abs(loss.item() - float(want)) < 1e-9 and all(g > 0 for _, g in gn)
