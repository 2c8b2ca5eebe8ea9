"""Token-level expectile value loss (IQL, ILQL). An asymmetric square: errors where Q exceeds V weigh tau, others
1 - tau, so V is regressed to an upper expectile and NOT to the mean of Q. The smaller of two target critics is used."""
FAMILY = "value"
KIND = "loss"
INPUTS = {"ids": "token ids, padding 0, [rows, time]", "action_mask": "1 where the next token is an action of the agent, [rows, time]",
          "q1": "first target critic at the token taken, [rows, time]", "q2": "second target critic at the token taken, [rows, time]"}
SETTINGS = {"tau": "expectile, 0.8"}
NOTES = ("Reduction: mean over action tokens of all rows. Value loss; q1 and q2 come from frozen target critics and are "
         "constants. No shift: all four tensors share the same time axis. All parameters are used.")
import torch
import torch.nn as nn
import torch.nn.functional as F


class Value(nn.Module):
    def __init__(self, vocab=24, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0]).squeeze(-1)


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
    return {"ids": ids, "action_mask": mask, "q1": torch.randn(ids.shape), "q2": torch.randn(ids.shape), "model": Value()}


def right(model, batch, tau=0.8):
    u = torch.minimum(batch["q1"], batch["q2"]).detach() - model(batch["ids"])
    weight = torch.abs(tau - (u.detach() < 0).float())
    mask = batch["action_mask"]
    return (weight * u.pow(2) * mask).sum() / mask.sum().clamp(min=1.0)


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
    d = make(0)
    m = d.pop("model")
    v = m(d["ids"]).detach()
    tot, n = 0.0, 0
    for i in range(v.shape[0]):
        for t in range(v.shape[1]):
            if d["action_mask"][i, t] > 0:
                u = min(float(d["q1"][i, t]), float(d["q2"][i, t])) - float(v[i, t])
                tot += (0.8 if u >= 0 else 0.2) * u * u
                n += 1
    check(right(m, d), m, tot / n)
