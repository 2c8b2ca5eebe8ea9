"""The fused distillation loss trains on hard labels too. huggingface/trl#5731, https://github.com/huggingface/trl/pull/5731,
2026. The fused JSD kernel was built with its default weights, half cross entropy on the true tokens and half JSD, and
with the temperature of generation (0.9) for the logits. The ordinary path computes the pure JSD at temperature 1, so
use_liger_kernel silently changed the objective."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "labels": "ids, -100 on prompt tokens, not shifted, [rows, time]",
          "teacher_logits": "logits of the teacher on ids, a constant, [rows, time, vocabulary]"}
SETTINGS = {"beta": "interpolation of the generalized JSD, 0.5", "temperature": "sampling temperature of generation, 0.9"}
NOTES = ("Generalized knowledge distillation: generalized Jensen-Shannon divergence between student and teacher, mean over the "
         "trained positions. The temperature belongs to generation; the divergence is taken at temperature 1. No label loss.")

class TinyLM(nn.Module):
    """One causal attention layer; returns logits [rows, time, vocabulary]."""
    def __init__(self, vocab=32, dim=16, max_pos=128):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_pos, dim)
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, attention_mask=None, position_ids=None, document_ids=None):
        rows, time = ids.shape
        if position_ids is None:
            position_ids = torch.arange(time).expand(rows, time)
        x = self.emb(ids) + self.pos(position_ids)
        allowed = torch.ones(time, time, dtype=torch.bool).tril()[None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, :]
        if document_ids is not None:
            allowed = allowed & (document_ids[:, :, None] == document_ids[:, None, :])
        allowed = allowed | torch.eye(time, dtype=torch.bool)[None]
        scores = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        x = x + scores.masked_fill(~allowed, -1e9).softmax(-1) @ self.v(x)
        return self.head(x)

class FusedJSD:
    def __init__(self, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, temperature=1.0, ignore_index=-100):
        self.hard, self.soft, self.beta, self.temperature, self.ignore = weight_hard_loss, weight_soft_loss, beta, temperature, ignore_index

    def __call__(self, student_logits, teacher_logits, labels):
        keep = labels != self.ignore
        s = (student_logits / self.temperature).log_softmax(-1)
        t = (teacher_logits / self.temperature).log_softmax(-1)
        m = (self.beta * t.exp() + (1 - self.beta) * s.exp()).log()
        jsd = self.beta * (t.exp() * (t - m)).sum(-1) + (1 - self.beta) * (s.exp() * (s - m)).sum(-1)
        soft = (jsd * keep).sum() / keep.sum()
        hard = F.cross_entropy(student_logits.flatten(0, 1), labels.flatten(), ignore_index=self.ignore)
        return self.hard * hard + self.soft * soft

def make(seed):
    torch.manual_seed(seed)
    teacher, model = TinyLM(), TinyLM()
    ids = torch.randint(0, 32, (4, 14))
    labels = ids.clone()
    labels[:, :5] = -100
    with torch.no_grad():
        teacher_logits = 2 * teacher(ids)
    return {"model": model, "ids": ids, "labels": labels, "teacher_logits": teacher_logits}

def broken(model, batch, beta=0.5, temperature=0.9):
    loss_fn = FusedJSD(beta=beta, temperature=temperature)
    return loss_fn(model(batch["ids"])[:, :-1], batch["teacher_logits"][:, :-1], batch["labels"][:, 1:])

def right(model, batch, beta=0.5, temperature=0.9):
    loss_fn = FusedJSD(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, temperature=1.0)
    return loss_fn(model(batch["ids"])[:, :-1], batch["teacher_logits"][:, :-1], batch["labels"][:, 1:])

def grads(fn):
    d = make(0)
    model = d.pop("model")
    out = fn(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

if __name__ == "__main__":
    (lb, gb), (lr, gr) = grads(broken), grads(right)
    print("loss", lb, lr, "gradient difference", ((gb - gr).norm() / gr.norm()).item())
    d = make(0)
    with torch.no_grad():
        d["teacher_logits"] = d["model"](d["ids"])       # student equals teacher: the divergence is 0
        print("student = teacher:", broken(d["model"], d).item(), right(d["model"], d).item())
    assert abs(lb - lr) > 0.1
