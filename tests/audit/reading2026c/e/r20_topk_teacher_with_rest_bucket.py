"""Distillation from a teacher of which only the top-k log-probs are stored. The rest of the vocabulary is one bucket on both
sides: the teacher's bucket has 1 - sum(top-k), the student's is computed as logsumexp over everything outside the set. The
loss is the KL of (k + 1)-way distributions, a lower bound of the full KL, with the teacher's entropy left in so that it is 0
at equality. The student's log-probs are not renormalised over the k tokens."""
FAMILY = "losses"
KIND = "loss"
import torch
import torch.nn as nn
import torch.nn.functional as F
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the next-token distribution is distilled, [rows, time]",
          "teacher_ids": "ids of the k most likely tokens, [rows, time, k]", "teacher_logps": "their log-probs under the teacher, over the full vocabulary, [rows, time, k], constant"}
SETTINGS = {}
NOTES = ("Forward KL(teacher || student) over k + 1 buckets, mean over distilled places of all rows. Logits at a place are compared "
         "with the teacher at the same place: no shift.")


class TinyLM(nn.Module):
    """One causal attention layer; positions are learned."""

    def __init__(self, vocab=29, width=16, length=48):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, attention_mask=None, position_ids=None, allowed=None):
        rows, time = ids.shape
        if position_ids is None:
            position_ids = torch.arange(time).expand(rows, time)
        x = self.tok(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        see = torch.ones(time, time, dtype=torch.bool).tril().expand(rows, time, time)
        if allowed is not None:
            see = allowed
        if attention_mask is not None:
            see = see & attention_mask.bool()[:, None, :]
        score = score.masked_fill(~see, -1e9)
        return self.head(x + self.out(torch.tanh(score.softmax(-1) @ v)))


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 29, (3, 9))
    teacher = TinyLM()
    with torch.no_grad():
        teacher.head.weight.mul_(3.0)
        logps, top = teacher(ids).log_softmax(-1).topk(5, -1)
    mask = torch.ones_like(ids)
    mask[:, :2] = 0
    mask[2, 6:] = 0
    return {"model": TinyLM(), "ids": ids, "loss_mask": mask, "teacher_ids": top, "teacher_logps": logps}


def right(model, batch):
    logp = model(batch["ids"]).log_softmax(-1)
    student = logp.gather(-1, batch["teacher_ids"])
    outside = torch.ones_like(logp, dtype=torch.bool).scatter(-1, batch["teacher_ids"], False)
    rest = logp.masked_fill(~outside, float("-inf")).logsumexp(-1, keepdim=True)
    t_top = batch["teacher_logps"]
    t_rest = torch.log1p(-t_top.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
    s, t = torch.cat([student, rest], -1), torch.cat([t_top, t_rest], -1)
    kl = (t.exp() * (t - s)).sum(-1)
    mask = batch["loss_mask"].float()
    return (kl * mask).sum() / mask.sum()


if __name__ == "__main__":
    data = make(0)
    model = data.pop("model")
    loss = right(model, data)
    loss.backward()
    probs = model(data["ids"]).softmax(-1)
    total, n = 0.0, 0
    for r in range(3):
        for t in range(9):
            if data["loss_mask"][r, t]:
                keep = data["teacher_ids"][r, t].tolist()
                p = [x.exp().item() for x in data["teacher_logps"][r, t]]
                q = [probs[r, t, i].item() for i in keep]
                rest_q = sum(probs[r, t, i].item() for i in range(29) if i not in keep)
                terms = list(zip(p + [1 - sum(p)], q + [rest_q]))
                import math
                total, n = total + sum(a * math.log(a / b) for a, b in terms), n + 1
    grad = sum(p.grad.norm() for p in model.parameters()).item()
    print(loss.item(), total / n, "grad", grad)
    assert abs(loss.item() - total / n) < 1e-4 and grad > 1e-3 and all(torch.isfinite(p.grad).all() for p in model.parameters())
