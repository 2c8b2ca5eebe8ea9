"""SimPO. A preference loss with no reference model at all: the reward is the MEAN log-probability of the
completion times a large beta, and a target margin gamma is subtracted inside the sigmoid."""
FAMILY = "preference"
KIND = "loss"
INPUTS = {
    "chosen_ids": "prompt and preferred completion, padded with 0, [pairs, time]",
    "chosen_mask": "1 on the tokens of the preferred completion, [pairs, time]",
    "rejected_ids": "prompt and rejected completion, padded with 0, [pairs, time2]",
    "rejected_mask": "1 on the tokens of the rejected completion, [pairs, time2]",
}
SETTINGS = {"beta": "scale of the mean log-probability, 2.0", "gamma": "target margin, 1.0"}
NOTES = ("Reduction: mean over pairs; log-probabilities are averaged over the tokens of a completion on purpose (length "
         "normalised). Preference loss, reference free; no constants. All parameters are used.")
import torch
import torch.nn as nn
import torch.nn.functional as F


class LM(nn.Module):
    """Tiny causal language model."""
    def __init__(self, vocab=24, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def hidden(self, ids):
        return self.rnn(self.emb(ids))[0]

    def forward(self, ids):
        return self.head(self.hidden(ids))


def token_logps(model, ids):
    """log-probability of ids[:, 1:], shape [rows, time - 1]."""
    lp = model(ids[:, :-1]).log_softmax(-1)
    return lp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def random_rows(n=6, t=12, vocab=24):
    """Right-padded rows: a prompt, trained tokens, then padding (id 0)."""
    ids = torch.randint(1, vocab, (n, t))
    mask = torch.zeros(n, t)
    for i in range(n):
        start, end = int(torch.randint(2, 5, ())), int(torch.randint(6, t + 1, ()))
        mask[i, start:end] = 1.0
        ids[i, end:] = 0
    return ids, mask


def make(seed):
    torch.manual_seed(seed)
    model = LM()
    c, cm = random_rows(5, 12)
    r, rm = random_rows(5, 14)
    return {"chosen_ids": c, "chosen_mask": cm, "rejected_ids": r, "rejected_mask": rm, "model": model}


def mean_logp(model, ids, mask):
    mask = mask[:, 1:]
    return (token_logps(model, ids) * mask).sum(1) / mask.sum(1)


def right(model, batch, beta=2.0, gamma=1.0):
    good = mean_logp(model, batch["chosen_ids"], batch["chosen_mask"])
    bad = mean_logp(model, batch["rejected_ids"], batch["rejected_mask"])
    loss = -F.logsigmoid(beta * (good - bad) - gamma).mean()
    return loss, {"accuracy": (good > bad).float().mean().item()}


def check(loss, model, want, tol=1e-4):
    model.zero_grad()
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    for n, g in grads.items():
        assert g is not None and float(g.abs().sum()) > 0, n
    norm = sum(float(g.pow(2).sum()) for g in grads.values()) ** 0.5
    print("loss %.6f  slow loop %.6f  grad norm %.5f" % (loss.item(), float(want), norm))
    assert abs(loss.item() - float(want)) < tol


if __name__ == "__main__":
    import math
    d = make(0)
    m = d.pop("model")
    tot = 0.0
    for i in range(5):
        s = []
        for k in ("chosen", "rejected"):
            lp = token_logps(m, d[k + "_ids"][i:i + 1])[0]
            on = [t for t in range(len(lp)) if d[k + "_mask"][i, t + 1] > 0]
            s.append(sum(float(lp[t]) for t in on) / len(on))
        tot += math.log(1 + math.exp(-(2.0 * (s[0] - s[1]) - 1.0)))
    check(right(m, d)[0], m, tot / 5)
