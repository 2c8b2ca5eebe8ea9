"""Universal logit distillation between DIFFERENT vocabularies: both distributions are sorted by probability, the smaller one is padded with zeros, and their L1 distance is the loss. Token identity is thrown away, and teacher and student positions are matched
by order up to the shorter answer. Boizard et al. 2024 (ULD): this is the closed form of a Wasserstein distance with uniform cost."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "distillation and value losses"
KIND = "loss"
INPUTS = {"ids": "student token ids, [rows, time], right padded with 0", "answer_start": "position of the first answer token in ids, [rows], at least 1",
          "answer_len": "number of answer tokens in the student's tokenisation, [rows], at least 1",
          "teacher_probs": "teacher probabilities that predict its answer tokens, [rows, teacher answer time, 40], first answer token at index 0, constant; the teacher's vocabulary (40) is larger than the student's (32)",
          "teacher_len": "number of answer tokens in the teacher's tokenisation, [rows], at least 1"}
SETTINGS = {"ce_weight": "weight of the cross-entropy, 1.0", "uld_weight": "weight of the sorted distance, 1.5"}
NOTES = ("Distillation across tokenizers plus cross-entropy. Reduction: cross-entropy is the mean over answer tokens of all rows; the sorted L1 distance is summed over the vocabulary, averaged over the common answer positions of a row, then over rows. "
         "Student answer tokens beyond the teacher's answer get only cross-entropy. teacher_probs is constant. Sorting is differentiated through the values. All parameters are used. Any number of rows.")

class TinyLM(nn.Module):
    """Causal by construction; right padding after a row's end cannot change earlier logits."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    rows, time, t_time = 5, 12, 8
    ids, start, length = torch.zeros(rows, time, dtype=torch.long), torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
    for i in range(rows):
        p = int(torch.randint(1, 4, (1,), generator=g))
        n = int(torch.randint(2, time - p + 1, (1,), generator=g))
        ids[i, :p + n], start[i], length[i] = torch.randint(1, 32, (p + n,), generator=g), p, n
    teacher_len = torch.randint(2, t_time + 1, (rows,), generator=g)
    probs = (2.0 * torch.randn(rows, t_time, 40, generator=g)).softmax(-1)
    return {"model": TinyLM(), "ids": ids, "answer_start": start, "answer_len": length, "teacher_probs": probs, "teacher_len": teacher_len}


def right(model, batch, ce_weight=1.0, uld_weight=1.5):
    ids, start, teacher = batch["ids"], batch["answer_start"], batch["teacher_probs"]
    lp = model(ids).log_softmax(-1)
    where = torch.arange(ids.shape[1])
    is_answer = (where >= start[:, None]) & (where < (start + batch["answer_len"])[:, None])
    ce = -(lp[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1) * is_answer[:, 1:]).sum() / batch["answer_len"].sum()
    k = torch.arange(teacher.shape[1])
    common = (k < torch.minimum(batch["answer_len"], batch["teacher_len"])[:, None])
    at = (start[:, None] - 1 + k).clamp(max=ids.shape[1] - 1)                       # student logits that predict answer token k
    student = lp.exp().gather(1, at.unsqueeze(-1).expand(-1, -1, lp.shape[-1]))
    student = F.pad(student.sort(-1, descending=True).values, (0, teacher.shape[-1] - student.shape[-1]))
    distance = (student - teacher.sort(-1, descending=True).values).abs().sum(-1)
    uld = ((distance * common).sum(1) / common.sum(1)).mean()
    return ce_weight * ce + uld_weight * uld, {"ce": ce.item(), "uld": uld.item()}


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, metrics = right(model, d)
    ce, n, uld = 0.0, 0, 0.0
    for i in range(5):
        s, row = int(d["answer_start"][i]), []
        for k in range(int(d["answer_len"][i])):
            p = model(d["ids"][i:i + 1, :s + k])[0, -1].softmax(-1)
            ce, n = ce - torch.log(p[d["ids"][i, s + k]]), n + 1
            if k < int(d["teacher_len"][i]):
                a = list(sorted(p, key=lambda x: -x.item())) + [0.0] * 8
                b = sorted(d["teacher_probs"][i, k].tolist(), reverse=True)
                row.append(sum(abs(x - y) for x, y in zip(a, b)))
        uld = uld + sum(row) / len(row) / 5
    slow = ce / n + 1.5 * uld
    g1, g2 = grads(loss, model), grads(slow, model)
    print("answer lengths", d["answer_len"].tolist(), "teacher", d["teacher_len"].tolist(), metrics)
    print("loss", loss.item(), "explicit", slow.item(), "gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2))
    assert abs(loss.item() - slow.item()) < 1e-5 and close(g1, g2)
