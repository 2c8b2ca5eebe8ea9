"""Distillation from stored top-k teacher log-probabilities that do NOT sum to 1: the missing mass is one extra 'tail' bucket, for the student as well (log(1 - sum of its probabilities on these k tokens)). Nothing is renormalised; renormalising to the top k would
teach an overconfident student. It is the exact KL of the coarsened distributions; the 'ghost token' / tail term of sparse logit distillation and self-distillation code."""
import torch
from torch import nn

FAMILY = "distillation and value losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right padded with 0",
          "teacher_top_ids": "the k = 4 likeliest next tokens of the teacher at each position, [rows, time, 4]; all different",
          "teacher_top_logprobs": "their log-probabilities under the full teacher softmax, [rows, time, 4], constant; exp of them sums to less than 1",
          "distill_mask": "1 at positions whose NEXT token belongs to the answer (aligned with logits, not with tokens), [rows, time]"}
SETTINGS = {}
NOTES = ("Distillation, forward KL on k + 1 buckets. Reduction: sum over buckets, mean over positions with distill_mask 1 of all rows. No labels are used: ids only condition. teacher_* are constants. Position t of the teacher goes with position t of the logits (no shift inside; the mask is at t-1 of the answer token). "
         "The value is a lower bound of the full KL. All parameters are used. Any number of rows.")

class TinyLM(nn.Module):
    """Causal by construction; right padding after a row's end cannot change earlier logits."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def random_rows(g, rows, time, vocab):
    """Right-padded rows; mask is 1 on the completion (never on position 0, which nothing predicts)."""
    ids, mask = torch.zeros(rows, time, dtype=torch.long), torch.zeros(rows, time)
    for i in range(rows):
        prompt = int(torch.randint(2, 4, (1,), generator=g))
        end = int(torch.randint(prompt + 2, time + 1, (1,), generator=g))
        ids[i, :end] = torch.randint(1, vocab, (end,), generator=g)
        mask[i, prompt:end] = 1.0
    return ids, mask

def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids, mask = random_rows(g, 6, 10, 32)
    teacher = (1.5 * torch.randn(6, 10, 32, generator=g)).log_softmax(-1)
    top, top_ids = teacher.topk(4, -1)
    position = torch.cat([mask[:, 1:], torch.zeros(6, 1)], 1)
    return {"model": TinyLM(), "ids": ids, "teacher_top_ids": top_ids, "teacher_top_logprobs": top, "distill_mask": position}


def _log_tail(top):
    """log(1 - sum exp(top)), stable when the sum is close to 1."""
    head = torch.logsumexp(top, -1, keepdim=True).clamp(max=-1e-6)
    return torch.log(-torch.expm1(head))


def right(model, batch):
    teacher, mask = batch["teacher_top_logprobs"], batch["distill_mask"]
    student = model(batch["ids"]).log_softmax(-1).gather(-1, batch["teacher_top_ids"])
    q = torch.cat([teacher, _log_tail(teacher)], -1)
    p = torch.cat([student, _log_tail(student)], -1)
    kl = (q.exp() * (q - p)).sum(-1)
    return (kl * mask).sum() / mask.sum(), {"tail_mass": ((q[..., -1].exp() * mask).sum() / mask.sum()).item()}


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, metrics = right(model, d)
    slow, n = 0.0, 0
    for i in range(6):
        for t in range(10):
            if d["distill_mask"][i, t] == 1:
                p = model(d["ids"][i:i + 1, :t + 1])[0, -1].softmax(-1)
                top = [int(v) for v in d["teacher_top_ids"][i, t]]
                q = [x.exp() for x in d["teacher_top_logprobs"][i, t]]
                term = sum(a * torch.log(a / p[v]) for a, v in zip(q, top))
                rest = sum(p[v] for v in range(32) if v not in top)
                term = term + (1 - sum(q)) * torch.log((1 - sum(q)) / rest)
                slow, n = slow + term, n + 1
    g1, g2 = grads(loss, model), grads(slow / n, model)
    print("loss", loss.item(), "explicit", (slow / n).item(), metrics)
    print("gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2))
    assert abs(loss.item() - (slow / n).item()) < 1e-5 and close(g1, g2)
