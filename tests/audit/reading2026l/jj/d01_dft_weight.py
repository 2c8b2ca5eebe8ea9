"""DFT: the probability weight is part of the graph. modelscope/twinkle#291, https://github.com/modelscope/twinkle/pull/291, 2026.
Dynamic fine-tuning (arXiv 2508.05629, eq. 9) weights each token's negative log-likelihood by the probability of the token,
with a stop-gradient on the weight. The loss left the weight differentiable in all four expressions, so the intended gradient was
multiplied by 1 + log p and turned round for every token with p < 1/e; the value of the loss was unchanged."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "supervised loss"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "labels": "a copy of ids, not shifted; -100 where the token is not trained (prompt and padding)"}
SETTINGS = {}
NOTES = ("Dynamic fine-tuning loss: sum over trained tokens of sg(p(y_t)) * (-log p(y_t)), divided by the number of trained tokens of all rows. "
         "The token at time t is predicted from the logits at t-1 (the shift is done here, so labels[:, 0] is never used). "
         "p(y_t) is the model's own probability of the token at the current parameters and is a constant weight: no gradient flows through it. "
         "The model is causal. All parameters are used.")

class LM(nn.Module):
    def __init__(self, vocab=31, width=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)
    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = LM()
    ids = torch.randint(1, 31, (4, 12), generator=g)
    labels = ids.clone()
    for r, (p, n) in enumerate([(3, 12), (2, 9), (5, 11), (1, 7)]):
        labels[r, :p] = -100
        labels[r, n:] = -100
        ids[r, n:] = 0
    return {"ids": ids, "labels": labels, "model": model}

def _nll(model, batch):
    logits = model(batch["ids"])[:, :-1]
    target = batch["labels"][:, 1:]
    mask = target != -100
    nll = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.clamp_min(0).reshape(-1), reduction="none").view(target.shape)
    return nll, mask

def broken(model, batch):
    nll, mask = _nll(model, batch)
    loss = torch.exp(-nll) * nll
    return (loss * mask).sum() / mask.sum().clamp_min(1)

def right(model, batch):
    nll, mask = _nll(model, batch)
    loss = torch.exp(-nll.detach()) * nll
    return (loss * mask).sum() / mask.sum().clamp_min(1)

if __name__ == "__main__":
    d = make(0); m = d.pop("model")
    gs = []
    for f in (broken, right):
        m.zero_grad(); l = f(m, d); l.backward()
        gs.append(torch.cat([p.grad.flatten() for p in m.parameters()])); print(f.__name__, l.item(), gs[-1].norm().item())
    cos = F.cosine_similarity(gs[0], gs[1], dim=0).item(); print("cosine", cos); assert cos < 0.9
