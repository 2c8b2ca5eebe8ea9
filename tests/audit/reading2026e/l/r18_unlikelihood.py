"""Token-level unlikelihood (Welleck et al. 2019). Next to the usual likelihood, tokens already seen in the context are pushed DOWN by
-log(1 - p): negatives are each distinct earlier token except the present gold one, and the sum over negatives is not averaged."""
FAMILY = "supervised"
KIND = "loss"
INPUTS = {"ids": "token ids, padding 0, [rows, time]", "loss_mask": "1 where the token is trained, [rows, time]"}
SETTINGS = {"alpha": "weight of the unlikelihood term, 1.0"}
NOTES = ("Reduction: mean over trained tokens of all rows; per token the sum over negative candidates. Supervised. Candidates are "
         "distinct earlier ids of the same row (prompt included) minus the gold token.")
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
    ids, mask = random_rows(6, 14, 12)
    return {"ids": ids, "loss_mask": mask, "model": LM()}


def right(model, batch, alpha=1.0):
    ids = batch["ids"]
    context, gold = ids[:, :-1], ids[:, 1:]
    lp = model(context).log_softmax(-1)
    nll = -lp.gather(-1, gold[..., None]).squeeze(-1)
    seen = F.one_hot(context, lp.shape[-1]).cumsum(1) > 0
    negative = seen.scatter(-1, gold[..., None], False)
    one_minus = (1.0 - lp.exp()).clamp(min=1e-5)
    ul = -(one_minus.log() * negative).sum(-1)
    mask = batch["loss_mask"][:, 1:]
    return ((nll + alpha * ul) * mask).sum() / mask.sum().clamp(min=1.0)


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
    p = m(d["ids"][:, :-1]).softmax(-1).detach()
    tot, n = 0.0, 0
    for i in range(6):
        for j in range(1, 14):
            if d["loss_mask"][i, j] > 0:
                n += 1
                gold = int(d["ids"][i, j])
                tot -= math.log(float(p[i, j - 1, gold]))
                for c in set(d["ids"][i, :j].tolist()) - {gold}:
                    tot -= math.log(1 - float(p[i, j - 1, c]))
    check(right(m, d), m, tot / n)
