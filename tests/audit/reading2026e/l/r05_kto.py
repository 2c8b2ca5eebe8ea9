"""KTO. Unpaired preference rows; the reference point z is a batch estimate of the KL taken on MISMATCHED
prompt-completion rows, clamped at zero and detached. The mean over rows mixes two sign conventions."""
FAMILY = "preference"
KIND = "loss"
INPUTS = {
    "ids": "prompt and its own completion, padded with 0, [rows, time]",
    "mask": "1 on the completion tokens, [rows, time]",
    "ref_logps": "summed completion log-probability under the reference model, [rows]",
    "kl_ids": "prompt with the completion of another row (for the KL only), [rows, time]",
    "kl_mask": "1 on the completion tokens of kl_ids, [rows, time]",
    "kl_ref_logps": "summed log-probability of the kl completions under the reference model, [rows]",
    "desirable": "True where the completion is good, [rows]",
}
SETTINGS = {"beta": "temperature, 0.1", "w_good": "weight of desirable rows, 1.0", "w_bad": "weight of undesirable rows, 1.33"}
NOTES = ("Reduction: mean over all rows (weights are not renormalised). Preference loss; log-probabilities are sums over "
         "tokens. The KL term z is one number of the whole batch, computed without gradient, so rows do depend on one "
         "another; reference log-probabilities are constants.")
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


def sum_logp(model, ids, mask):
    return (token_logps(model, ids) * mask[:, 1:]).sum(1)


def make(seed):
    torch.manual_seed(seed)
    model = LM()
    ids, mask = random_rows(6)
    kl_ids, kl_mask = random_rows(6)
    with torch.no_grad():
        ref = sum_logp(model, ids, mask) + torch.randn(6)
        kl_ref = sum_logp(model, kl_ids, kl_mask) - 1.0 + torch.randn(6)
    return {"ids": ids, "mask": mask, "ref_logps": ref, "kl_ids": kl_ids, "kl_mask": kl_mask, "kl_ref_logps": kl_ref,
            "desirable": torch.tensor([True, False, True, True, False, True]), "model": model}


def right(model, batch, beta=0.1, w_good=1.0, w_bad=1.33):
    with torch.no_grad():
        z = (sum_logp(model, batch["kl_ids"], batch["kl_mask"]) - batch["kl_ref_logps"]).mean().clamp(min=0.0)
    reward = sum_logp(model, batch["ids"], batch["mask"]) - batch["ref_logps"]
    good = w_good * (1.0 - torch.sigmoid(beta * (reward - z)))
    bad = w_bad * (1.0 - torch.sigmoid(beta * (z - reward)))
    return torch.where(batch["desirable"], good, bad).mean()


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

    def one(ids, mask):
        lp = token_logps(m, ids[None])[0]
        return sum(float(lp[t]) for t in range(len(lp)) if mask[t + 1] > 0)
    z = max(0.0, sum(one(d["kl_ids"][i], d["kl_mask"][i]) - float(d["kl_ref_logps"][i]) for i in range(6)) / 6)
    tot = 0.0
    for i in range(6):
        r = one(d["ids"][i], d["mask"][i]) - float(d["ref_logps"][i])
        good = bool(d["desirable"][i])
        x = 0.1 * (r - z) * (1 if good else -1)
        tot += (1.0 if good else 1.33) * (1 - 1 / (1 + math.exp(-x)))
    print("z", z)
    check(right(m, d), m, tot / 6)
