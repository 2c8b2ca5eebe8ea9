"""Robust DPO (Chowdhury et al. 2024, arXiv 2403.00409; loss_type robust in TRL): an unbiased estimate of the clean DPO loss if a known share of the labels is flipped. One term has a negative weight
and the loss can be negative."""
import torch, torch.nn as nn
FAMILY = "preference losses"
KIND = "loss"
INPUTS = {"chosen": "token ids, [pairs, time]", "chosen_mask": "1 for answer tokens", "rejected": "token ids, [pairs, time]", "rejected_mask": "1 for answer tokens", "ref_chosen": "summed reference log-probability, [pairs]", "ref_rejected": "the same for rejected"}
SETTINGS = {"beta": "0.5", "eps": "share of flipped preference labels in the data, 0.2 (below 0.5)"}
NOTES = ("h = (log pi - log ref)(chosen) - (log pi - log ref)(rejected), sums over answer tokens (logits at t-1 for the token at t). Loss of a pair = [-(1-eps) log sigmoid(beta h) + eps log sigmoid(-beta h)] / (1 - 2 eps), mean over pairs. "
         "The second term is added with a plus, i.e. the loss of the flipped pair is subtracted, and the whole is divided by 1-2 eps: so the expectation over labels flipped with probability eps is the DPO loss of the clean labels. The loss may be negative. "
         "Reference values are constants; all parameters are used.")

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
    n, T, model, d = 5, 10, LM(), {}
    t = torch.arange(T)
    for k in ("chosen", "rejected"):
        d[k] = torch.randint(1, 27, (n, T))
        d[k + "_mask"] = ((t >= 3) & (t < torch.randint(5, T + 1, (n, 1)))).float()
    d["rejected"][:, :3] = d["chosen"][:, :3]
    with torch.no_grad():
        for k in ("chosen", "rejected"):
            d["ref_" + k] = _logp(model, d[k], d[k + "_mask"]) + torch.randn(n)
    return {**d, "model": model}

def _h(model, b):
    return (_logp(model, b["chosen"], b["chosen_mask"]) - b["ref_chosen"]) - (_logp(model, b["rejected"], b["rejected_mask"]) - b["ref_rejected"])

def right(model, batch, beta=0.5, eps=0.2):
    h = beta * _h(model, batch)
    ls = nn.functional.logsigmoid
    return ((-(1 - eps) * ls(h) + eps * ls(-h)) / (1 - 2 * eps)).mean()

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); l = right(m, d); l.backward()
    # expectation over flips equals plain DPO on the clean pair
    sw = {k.replace("chosen", "#").replace("rejected", "chosen").replace("#", "rejected"): v for k, v in d.items()}
    e = 0.8 * right(m, d) + 0.2 * right(m, sw)
    dpo = -nn.functional.logsigmoid(0.5 * _h(m, d)).mean()
    print(l.item(), "expected over flips", e.item(), "clean DPO", dpo.item(), "grad", sum(p.grad.norm() for p in m.parameters()).item()); assert abs(e - dpo) < 1e-5
