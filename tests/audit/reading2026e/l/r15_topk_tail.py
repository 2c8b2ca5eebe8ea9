"""Distillation from stored top-k teacher log-probabilities with one more bucket for the tail (sparse logit distillation). The teacher's
k probabilities do not sum to one and are not renormalised: what is missing is compared with the student's mass outside the top k."""
FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "token ids, padding 0, [rows, time]", "loss_mask": "1 where the token is trained, [rows, time]",
          "top_ids": "teacher's k best ids for the token ids[:, 1:], distinct, [rows, time - 1, k]",
          "top_logps": "teacher's full-softmax log-probabilities of those, [rows, time - 1, k]"}
SETTINGS = {}
NOTES = ("Reduction: mean over trained tokens of all rows. Distillation, forward KL of k + 1 buckets (teacher || student); teacher "
         "entries are constants. k must be smaller than the vocabulary.")
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
    teacher = (2 * torch.randn(6, 11, 24)).log_softmax(-1)
    top = teacher.topk(4, -1)
    return {"ids": ids, "loss_mask": mask, "top_ids": top.indices, "top_logps": top.values, "model": LM()}


def right(model, batch):
    lp = model(batch["ids"][:, :-1]).log_softmax(-1)
    student_top = lp.gather(-1, batch["top_ids"])
    student_tail = lp.scatter(-1, batch["top_ids"], float("-inf")).logsumexp(-1)
    t_lp = batch["top_logps"]
    tail = (1.0 - t_lp.exp().sum(-1)).clamp(min=1e-7)
    kl = (t_lp.exp() * (t_lp - student_top)).sum(-1) + tail * (tail.log() - student_tail)
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
    p = m(d["ids"][:, :-1]).softmax(-1).detach().double()
    tot, n = 0.0, 0
    for i in range(6):
        for t in range(11):
            if d["loss_mask"][i, t + 1] > 0:
                n += 1
                q = [math.exp(float(x)) for x in d["top_logps"][i, t]]
                s = [float(p[i, t, k]) for k in d["top_ids"][i, t]]
                q.append(1 - sum(q)); s.append(1 - sum(s))
                tot += sum(a * math.log(a / b) for a, b in zip(q, s))
    check(right(m, d), m, tot / n)
