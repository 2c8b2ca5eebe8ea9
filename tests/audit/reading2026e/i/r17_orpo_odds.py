"""ORPO (Hong et al. 2024). No reference model: supervised loss on the chosen answer plus a log-odds-ratio term of mean-per-token
probabilities, log p - log(1-p), with log1p(-exp) for safety. The supervised part also covers the PROMPT tokens (as in TRL)."""
FAMILY = "preference"
KIND = "loss"
INPUTS = {"chosen_ids": "[pairs, time], right-padded with 0", "chosen_mask": "completion targets, [pairs, time-1]", "rejected_ids": "[pairs, time]", "rejected_mask": "[pairs, time-1]",
          "chosen_attention": "1 on every real target (prompt and completion) of the chosen rows, [pairs, time-1]"}
SETTINGS = {"lam": "weight of the odds-ratio term, 0.1"}
NOTES = "Supervised part: mean over all real tokens of all chosen rows, prompt included on purpose. Odds part: mean over pairs of length-averaged terms. Needs no reference. All parameters used."
import torch
import torch.nn as nn
import torch.nn.functional as F


class Tiny(nn.Module):
    """Causal language model: ids [rows, time] -> logits [rows, time, vocabulary]."""
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]): [rows, time-1]."""
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def fake_rows(g, rows, time=10, prompt=3, vocab=31):
    """Right-padded ids (pad = 0) and the mask [rows, time-1] of the targets ids[:, 1:] that belong to the completion."""
    ids = torch.randint(1, vocab, (rows, time), generator=g)
    n = torch.randint(2, time - prompt + 1, (rows,), generator=g)
    pos = torch.arange(time)
    ids[pos >= (prompt + n)[:, None]] = 0
    mask = ((pos >= prompt) & (pos < (prompt + n)[:, None])).float()
    return ids, mask[:, 1:]

def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    ci, cm = fake_rows(g, 4); ri, rm = fake_rows(g, 4)
    ri[:, :3] = ci[:, :3]
    return {"model": Tiny(), "chosen_ids": ci, "chosen_mask": cm, "rejected_ids": ri, "rejected_mask": rm, "chosen_attention": (ci[:, 1:] != 0).float()}


def right(model, batch, lam=0.1):
    lc, lr = logps(model, batch["chosen_ids"]), logps(model, batch["rejected_ids"])
    mean = lambda x, m: (x * m).sum(1) / m.sum(1).clamp(min=1)
    c, r = mean(lc, batch["chosen_mask"]), mean(lr, batch["rejected_mask"])
    log_odds = (c - r) - (torch.log1p(-c.exp()) - torch.log1p(-r.exp()))
    att = batch["chosen_attention"]
    nll = -(lc * att).sum() / att.sum()
    return nll - lam * F.logsigmoid(log_odds).mean(), {"log_odds": log_odds.mean().item()}


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    import math
    d = make(0); model = d.pop("model")
    tot, n, odds = 0.0, 0, 0.0
    for i in range(4):
        p = []
        for s in ("chosen", "rejected"):
            lp = logps(model, d[s + "_ids"][i:i + 1])[0].detach().tolist()
            v = [x for x, m in zip(lp, d[s + "_mask"][i]) if m]; p.append(math.exp(sum(v) / len(v)))
            if s == "chosen":
                w = [x for x, t in zip(lp, d["chosen_ids"][i, 1:]) if t]; tot -= sum(w); n += len(w)
        ratio = p[0] / (1 - p[0]) / (p[1] / (1 - p[1]))
        odds += math.log(1 + 1 / ratio) / 4
    check(right(model, d)[0], tot / n + 0.1 * odds, model)
