"""Padding positions take part in every distillation loss term. peremartra/optipfair#34,
https://github.com/peremartra/optipfair/issues/34, 2026. The distillation loop built the labels as a verbatim copy of
input_ids and averaged the task, logit and hidden-state terms over all positions of the rectangular batch. Rows shorter than
the batch length therefore trained the student on padding, diluted the real signal in proportion to the padding, and shifted
the relative weight of the terms."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "supervised and distillation losses"
KIND = "loss"
INPUTS = {
    "ids": "token ids, [rows, time], right padded with the id 0 (0 is also a legal token)",
    "attention_mask": "1 for a real token, 0 for padding, [rows, time]; real tokens stand at the start of each row",
    "teacher_logits": "logits of the frozen teacher for the same ids, [rows, time, vocab]; entry t is the prediction after reading token t",
    "teacher_hidden": "last hidden states of the frozen teacher for the same ids, [rows, time, width]",
}
SETTINGS = {"task_weight": "weight of the cross-entropy term, 0.5", "kd_weight": "weight of the skewed KL term, 0.4",
            "hidden_weight": "weight of the hidden-state term, 0.1", "temperature": "softmax temperature of teacher and student in the KL, 2.0",
            "skew": "share of the teacher in the mixture of the skewed KL, 0.1"}
VALUES = {"task_weight": 0.5, "kd_weight": 0.4, "hidden_weight": 0.1, "temperature": 2.0, "skew": 0.1}
NOTES = """Supervised distillation; all real tokens of a row are trained (no prompt mask). Three terms, summed with their weights.
Task term: next-token cross-entropy (student logits at t predict token t+1), mean over all positions of all rows whose TARGET
token t+1 is real. KL term: KL(p || skew*p + (1-skew)*q) with p teacher and q student, both at the temperature, multiplied by
temperature^2; position t counts when token t is real; mean over these positions of all rows. Hidden term: 1 - cosine similarity
of student and teacher hidden states, mean over the same real positions. All means are pooled over tokens of the whole batch
(not row by row). Padding contributes nothing to any term, numerator or denominator, so the value does not depend on how far
the batch is padded. Teacher tensors are constants. Every parameter of the model is used. Any number of rows."""


class Student(nn.Module):
    def __init__(self, vocab=23, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.head(h), h


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    rows, time, vocab, width = 4, 10, 23, 16
    length = torch.tensor([10, 6, 4, 8])
    mask = (torch.arange(time)[None] < length[:, None]).long()
    ids = torch.randint(0, vocab, (rows, time), generator=g) * mask
    return {"model": Student(vocab, width), "ids": ids, "attention_mask": mask,
            "teacher_logits": torch.randn(rows, time, vocab, generator=g) * 2,
            "teacher_hidden": torch.randn(rows, time, width, generator=g)}


def _terms(logits, hidden, batch, temperature, skew):
    log_p = F.log_softmax(batch["teacher_logits"] / temperature, -1)
    log_q = F.log_softmax(logits / temperature, -1)
    mix = torch.log(skew * log_p.exp() + (1 - skew) * log_q.exp())
    kl = (log_p.exp() * (log_p - mix)).sum(-1) * temperature ** 2
    cos = 1 - F.cosine_similarity(hidden, batch["teacher_hidden"], dim=-1)
    return kl, cos


def broken(model, batch, task_weight=0.5, kd_weight=0.4, hidden_weight=0.1, temperature=2.0, skew=0.1):
    logits, hidden = model(batch["ids"])
    labels = batch["ids"].clone()
    task = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    kl, cos = _terms(logits, hidden, batch, temperature, skew)
    loss = task_weight * task + kd_weight * kl.mean() + hidden_weight * cos.mean()
    return loss, {"task": task.detach(), "kd": kl.mean().detach()}


def right(model, batch, task_weight=0.5, kd_weight=0.4, hidden_weight=0.1, temperature=2.0, skew=0.1):
    logits, hidden = model(batch["ids"])
    labels = batch["ids"].masked_fill(batch["attention_mask"] == 0, -100)
    task = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    kl, cos = _terms(logits, hidden, batch, temperature, skew)
    m = batch["attention_mask"].to(kl.dtype)
    kl, cos = (kl * m).sum() / m.sum(), (cos * m).sum() / m.sum()
    loss = task_weight * task + kd_weight * kl + hidden_weight * cos
    return loss, {"task": task.detach(), "kd": kl.detach()}


if __name__ == "__main__":
    for f in (broken, right):
        b = make(0); m = b.pop("model")
        loss, met = f(m, b, **VALUES); loss.backward()
        print(f.__name__, loss.item(), {k: float(v) for k, v in met.items()}, float(m.head.weight.grad.norm()))
    b = make(0); m = b.pop("model")
    one = right(m, b, **VALUES)[0]
    pad = {k: torch.cat([v, torch.zeros_like(v[:, :3])], 1) for k, v in b.items()}
    pad["teacher_logits"][:, -3:] = 1.0
    print("more padding: right unchanged", bool(torch.allclose(one, right(m, pad, **VALUES)[0])),
          "| broken changes", (broken(m, b, **VALUES)[0] - broken(m, pad, **VALUES)[0]).item())
