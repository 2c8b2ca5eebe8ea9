"""kl_div with the teacher as target and with the student as target, both against a mixture. Generalised Jensen-Shannon
distillation (GKD, arXiv 2306.13649, as in TRL): beta * KL(teacher || M) + (1 - beta) * KL(student || M) with M = beta *
teacher + (1 - beta) * student. F.kl_div(input, target) is KL(target || input), so M stands first although the formula has
it last; the mixture is made by logsumexp and keeps its gradient to the student."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is a trained target, [rows, time]",
          "teacher_logits": "logits of the teacher at each position, [rows, time, vocabulary]"}
SETTINGS = {"beta": "weight of the teacher in the mixture, 0.3, strictly between 0 and 1", "temperature": "0.9, for both"}
NOTES = ("Distillation family; divergence summed over the vocabulary, mean over trained tokens of all rows. teacher_logits are "
         "constants. The gradient runs through the mixture as well. No factor temperature squared. All parameters used. Only "
         "positions before a trained token count; the teacher's logits of the last column are unused.")


class TinyLM(nn.Module):
    """One attention layer; `positions` [rows, time], `allowed` bool [rows, time, time] (default: causal)."""

    def __init__(self, vocab=32, width=16, max_pos=96):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, allowed=None):
        t = ids.shape[1]
        if positions is None:
            positions = torch.arange(t).expand(ids.shape)
        if allowed is None:
            allowed = torch.ones(t, t, dtype=torch.bool).tril()
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = (q @ k.transpose(-1, -2) / x.shape[-1] ** 0.5).masked_fill(~allowed, -1e9)
        return self.head(F.gelu(x + self.out(s.softmax(-1) @ v)))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids = torch.randint(1, 32, (4, 9), generator=g)
    prompt = torch.randint(1, 5, (4, 1), generator=g)
    return {"model": TinyLM(), "ids": ids, "loss_mask": (torch.arange(9)[None] >= prompt).float(),
            "teacher_logits": 2 * torch.randn(4, 9, 32, generator=g)}


def right(model, batch, beta=0.3, temperature=0.9):
    student = (model(batch["ids"])[:, :-1] / temperature).log_softmax(-1)
    teacher = (batch["teacher_logits"][:, :-1] / temperature).log_softmax(-1)
    mix = torch.logsumexp(torch.stack([student + math.log(1 - beta), teacher + math.log(beta)]), 0)
    kl_teacher = F.kl_div(mix, teacher, reduction="none", log_target=True)
    kl_student = F.kl_div(mix, student, reduction="none", log_target=True)
    jsd = (beta * kl_teacher + (1 - beta) * kl_student).sum(-1)
    mask = batch["loss_mask"][:, 1:]
    return (jsd * mask).sum() / mask.sum()


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    loss = right(m, c)
    loss.backward()
    s = (m(c["ids"]) / 0.9).softmax(-1)
    t = (c["teacher_logits"] / 0.9).softmax(-1)
    tot = n = 0
    for i in range(4):
        for k in range(1, 9):
            if c["loss_mask"][i, k]:
                p, q = t[i, k - 1], s[i, k - 1]
                mm = 0.3 * p + 0.7 * q
                tot = tot + 0.3 * (p * (p / mm).log()).sum() + 0.7 * (q * (q / mm).log()).sum()
                n += 1
    print("loss", loss.item(), "loop", (tot / n).item())
    same = right(m, {**c, "teacher_logits": m(c["ids"]).detach()})
    print("teacher = student:", same.item())
    assert abs(loss - tot / n) < 1e-5 and abs(same) < 1e-6 and all(p.grad.abs().sum() > 0 for p in m.parameters())
