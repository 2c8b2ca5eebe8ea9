"""Token-level unlikelihood training (Welleck et al. 2019, arXiv 1908.04319): lowers the probability of tokens that occurred before in the context, beside the usual likelihood."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "supervised loss"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "mask": "1 for real tokens, [rows, time]"}
SETTINGS = {"alpha": "weight of the unlikelihood term, 1.0"}
NOTES = ("For each target y_t (t >= 1, predicted from the logits at t-1): -log p(y_t) - alpha * sum over candidates c of log(1 - p(c)). The candidates are the different tokens among the earlier targets y_1 .. y_{t-1} of the row "
         "(the first token of the row is no target and so no candidate), without y_t itself; a token that occurred several times counts once. 1 - p is clamped at 1e-5. The sum is divided by the number of real targets of all rows (not by the number of candidates). "
         "Padding is neither target nor candidate. Gradient flows through p(c): it is meant to go down. Causal model; all parameters are used.")

class LM(nn.Module):
    def __init__(self, vocab=21, width=20):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab)
    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    torch.manual_seed(seed)
    mask = (torch.arange(12) < torch.tensor([12, 9, 7, 10])[:, None]).float()
    return {"ids": torch.randint(1, 9, (4, 12)) * mask.long(), "mask": mask, "model": LM()}

def right(model, batch, alpha=1.0):
    logp = model(batch["ids"])[:, :-1].log_softmax(-1)
    y, m = batch["ids"][:, 1:], batch["mask"][:, 1:]
    V = logp.shape[-1]
    seen = F.one_hot(y, V).cumsum(1) - F.one_hot(y, V)          # strictly before t
    cand = (seen > 0) & ~F.one_hot(y, V).bool()
    nll = -logp.gather(-1, y[..., None]).squeeze(-1)
    ul = -(torch.log((1 - logp.exp()).clamp_min(1e-5)) * cand).sum(-1)
    return ((nll + alpha * ul) * m).sum() / m.sum()

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); l = right(m, d); l.backward()
    p = m(d["ids"]).softmax(-1); s, n = 0.0, 0
    for r in range(4):
        ids = d["ids"][r].tolist()
        for t in range(1, int(d["mask"][r].sum())):
            n += 1; s -= p[r, t - 1, ids[t]].log().item()
            for c in set(ids[1:t]) - {ids[t]}: s -= (1 - p[r, t - 1, c]).log().item()
    print(l.item(), s / n); assert abs(l.item() - s / n) < 1e-4
