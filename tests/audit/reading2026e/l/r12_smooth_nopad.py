"""Label smoothing as in the Annotated Transformer. The smoothing mass is spread over vocabulary - 2 entries (neither the
gold token nor padding), and the loss is a KL divergence, so it is zero at the optimum and smaller than cross-entropy by a constant."""
FAMILY = "supervised"
KIND = "loss"
INPUTS = {"ids": "token ids, padding 0, [rows, time]", "loss_mask": "1 where the token is trained, [rows, time]"}
SETTINGS = {"smoothing": "label smoothing, 0.1", "pad_id": "padding id, 0"}
NOTES = ("Reduction: sum over trained tokens divided by their number in the batch. Supervised; KL(target || model), which "
         "equals smoothed cross-entropy minus the constant entropy of the target. Padding never receives target mass, "
         "but the softmax runs over the full vocabulary.")
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
    ids, mask = random_rows()
    return {"ids": ids, "loss_mask": mask, "model": LM()}


def right(model, batch, smoothing=0.1, pad_id=0):
    lp = model(batch["ids"][:, :-1]).log_softmax(-1)
    gold = batch["ids"][:, 1:]
    target = torch.full_like(lp, smoothing / (lp.shape[-1] - 2))
    target.scatter_(-1, gold[..., None], 1.0 - smoothing)
    target[..., pad_id] = 0.0
    kl = F.kl_div(lp, target, reduction="none").sum(-1)
    mask = batch["loss_mask"][:, 1:]
    return (kl * mask).sum() / mask.sum().clamp(min=1.0)


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
    lp = m(d["ids"][:, :-1]).log_softmax(-1).detach()
    tot, n = 0.0, 0
    for i in range(lp.shape[0]):
        for t in range(lp.shape[1]):
            if d["loss_mask"][i, t + 1] > 0:
                n += 1
                for v in range(1, 24):
                    q = 0.9 if v == int(d["ids"][i, t + 1]) else 0.1 / 22
                    tot += q * (math.log(q) - float(lp[i, t, v]))
    check(right(m, d), m, tot / n)
