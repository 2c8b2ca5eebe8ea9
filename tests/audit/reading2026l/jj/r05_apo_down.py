"""APO-down (D'Oosterlinck et al. 2024, arXiv 2408.06266; loss_type apo_down in TRL): the loss lowers the likelihood of the chosen answer, and that of the rejected one more.
Meant for data whose chosen answers are worse than what the model says by itself."""
import torch, torch.nn as nn
FAMILY = "preference losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [2*pairs, time]; the first half are the chosen answers, the second half the rejected ones in the same order", "mask": "1 for answer tokens, [2*pairs, time]", "ref_logp": "summed reference log-probability of the answer, [2*pairs]"}
SETTINGS = {"beta": "0.2"}
NOTES = ("APO-down. c and r are log pi - log ref (sum over answer tokens, logits at t-1 for the token at t) of chosen and rejected. Loss of a pair = sigmoid(beta*c) + (1 - sigmoid(beta*(c - r))); mean over pairs. "
         "The first term has a plus sign on purpose: minimising it makes the chosen answer less likely (the model is taken to be better than the data); the second term keeps the chosen answer above the rejected one. "
         "Reference values are constants. All parameters are used. Needs an even number of rows.")

class LM(nn.Module):
    def __init__(self, vocab=27, width=20):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab)
    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def _logp(model, ids, mask):
    lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (lp * mask[:, 1:]).sum(-1)

def make(seed):
    torch.manual_seed(seed)
    n, T = 4, 10
    ids = torch.randint(1, 27, (2 * n, T)); ids[n:, :4] = ids[:n, :4]
    t = torch.arange(T)
    mask = ((t >= 4) & (t < torch.randint(6, T + 1, (2 * n, 1)))).float()
    model = LM()
    with torch.no_grad():
        ref = _logp(model, ids, mask) + torch.randn(2 * n)
    return {"ids": ids, "mask": mask, "ref_logp": ref, "model": model}

def right(model, batch, beta=0.2):
    c, r = (_logp(model, batch["ids"], batch["mask"]) - batch["ref_logp"]).chunk(2)
    return (torch.sigmoid(beta * c) + 1 - torch.sigmoid(beta * (c - r))).mean()

if __name__ == "__main__":
    import math
    d = make(0); m = d.pop("model"); l = right(m, d); l.backward()
    with torch.no_grad():
        v = [sum(m(d["ids"][i:i + 1])[0, t - 1].log_softmax(-1)[d["ids"][i, t]].item() for t in range(1, 10) if d["mask"][i, t]) - d["ref_logp"][i].item() for i in range(8)]
    s = lambda x: 1 / (1 + math.exp(-x))
    ref = sum(s(0.2 * v[i]) + 1 - s(0.2 * (v[i] - v[i + 4])) for i in range(4)) / 4
    print(l.item(), ref, "grad", sum(p.grad.norm() for p in m.parameters()).item()); assert abs(l.item() - ref) < 1e-5
