"""Generalized Jensen-Shannon distillation on the student's own samples (GKD, Agarwal et al., arXiv 2306.13649; TRL GKDTrainer).
Both networks are mixed, beta of the teacher and 1 - beta of the student, in log space. Both divergences go to the mixture; the gradient flows through the student in its own term and in the
mixture. The temperature divides both logits; there is no factor T squared. Tokens of the prompt and padding are left out."""
FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids sampled by the student, [rows, time]", "teacher_logits": "teacher logits, position i for token i+1, [rows, time, vocabulary]", "labels": "ids on completion tokens, -100 elsewhere, [rows, time]"}
SETTINGS = {"beta": "share of the teacher in the mixture, 0.3", "temperature": "temperature of both, 0.9"}
NOTES = ("Distillation. beta KL(teacher | mixture) + (1 - beta) KL(student | mixture), sum over the vocabulary, mean over the completion tokens of all rows. teacher_logits are constants. Every parameter is used.")
import math
import torch
import torch.nn.functional as F
from torch import nn


class Tiny(nn.Module):
    """One causal attention layer: ids [rows, time] -> logits [rows, time, vocabulary]."""
    def __init__(self, vocab=40, width=16, length=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, allow=None):
        t = torch.arange(ids.shape[1])
        x = self.embed(ids) + self.pos(t if positions is None else positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        allow = (t[:, None] >= t[None]) if allow is None else allow
        return self.head(x + score.masked_fill(~allow, float("-inf")).softmax(-1) @ v)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids = torch.randint(0, 40, (4, 11), generator=g)
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1, 8:] = -100
    return {"model": Tiny(), "ids": ids, "teacher_logits": torch.randn(4, 11, 40, generator=g) * 1.5, "labels": labels}


def right(model, batch, beta=0.3, temperature=0.9):
    student = (model(batch["ids"])[:, :-1] / temperature).log_softmax(-1)
    teacher = (batch["teacher_logits"][:, :-1] / temperature).log_softmax(-1)
    mixture = torch.logsumexp(torch.stack([student + math.log1p(-beta), teacher + math.log(beta)]), dim=0)
    kl_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    kl_student = F.kl_div(mixture, student, reduction="none", log_target=True)
    jsd = beta * kl_teacher + (1 - beta) * kl_student
    keep = batch["labels"][:, 1:] != -100
    return jsd[keep].sum() / keep.sum()


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    loss = right(m, d)
    loss.backward()
    p = (m(d["ids"]) / 0.9).softmax(-1).detach().double()
    q = (d["teacher_logits"] / 0.9).softmax(-1).double()
    tot = n = 0
    for i in range(4):
        for t in range(1, 11):
            if d["labels"][i, t] != -100:
                a, b = p[i, t - 1], q[i, t - 1]
                mix = 0.3 * b + 0.7 * a
                tot += (0.3 * (b * (b / mix).log()).sum() + 0.7 * (a * (a / mix).log()).sum()).item()
                n += 1
    print(loss.item(), tot / n, m.head.weight.grad.norm().item())
    assert abs(loss.item() - tot / n) < 1e-5
