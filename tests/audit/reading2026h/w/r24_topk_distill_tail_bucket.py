"""Distillation from the teacher's top-k log-probs, with all other tokens put into one tail bucket.
Used where a teacher server gives only top-k log-probs (for example Anshumann et al. 2025, Sparse Logit Sampling, arXiv 2503.16870, treats the biased plain top-k; TRL and verl have tail forms). The k + 1 masses are compared by forward KL; the top-k
are neither renormalized nor cut, so they sum to less than 1. The student's tail is log(1 - sum), and has a gradient that pushes mass out of or into all other tokens."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is trained, [rows, time]", "teacher_ids": "top-k ids for the token after each position, [rows, time-1, k]", "teacher_logps": "their log-probs, unnormalized over k, constants"}
SETTINGS = {"eps": "least tail mass, 1e-6"}
NOTES = "Forward KL(teacher || student) over k + 1 buckets, mean over trained tokens of all rows; temperature 1. teacher_* are constants for the position that predicts the next token (already aligned). All parameters used. The loss is 0 when the student gives the k tokens the teacher's masses, whatever it does within the tail."

class TinyLM(nn.Module):
    """One causal attention layer; `allowed` [.., q, k] replaces the causal mask when given."""
    def __init__(self, vocab=29, width=16, out=None):
        super().__init__()
        self.width = width
        self.emb = nn.Embedding(vocab, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, out or vocab)

    def forward(self, ids, positions=None, allowed=None):
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T).expand_as(ids)
        freq = torch.exp(-0.7 * torch.arange(self.width // 2))
        ang = positions[..., None].float() * freq
        h = self.emb(ids) + torch.cat([ang.sin(), ang.cos()], -1)
        if allowed is None:
            allowed = torch.ones(T, T, dtype=torch.bool).tril()
        att = self.q(h) @ self.k(h).transpose(1, 2) / math.sqrt(self.width)
        h = h + self.o(att.masked_fill(~allowed, float("-inf")).softmax(-1) @ self.v(h))
        return self.head(torch.tanh(h))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model, teacher = TinyLM(), TinyLM()
    ids = torch.randint(0, 29, (3, 12), generator=g)
    with torch.no_grad():
        top = (2 * teacher(ids)[:, :-1]).log_softmax(-1).topk(5, -1)
    return {"model": model, "ids": ids, "loss_mask": (torch.rand(3, 12, generator=g) < 0.7).float(), "teacher_ids": top.indices, "teacher_logps": top.values}


def right(model, batch, eps=1e-6):
    student = model(batch["ids"])[:, :-1].log_softmax(-1).gather(-1, batch["teacher_ids"])
    t = batch["teacher_logps"]
    tail = lambda lp: torch.log1p(-lp.exp().sum(-1, keepdim=True).clamp(max=1 - eps))
    t, s = torch.cat([t, tail(t)], -1), torch.cat([student, tail(student)], -1)
    kl = (t.exp() * (t - s)).sum(-1)
    mask = batch["loss_mask"][:, 1:]
    return (kl * mask).sum() / mask.sum()


if __name__ == "__main__":
    d = make(0); m = d.pop("model")
    loss = right(m, d); loss.backward()
    p, mask, slow = m(d["ids"]).softmax(-1).detach(), d["loss_mask"][:, 1:], 0.0
    for r in range(3):
        for i in range(11):
            if mask[r, i]:
                top = d["teacher_ids"][r, i].tolist()
                q = d["teacher_logps"][r, i].exp().tolist()
                rest = sum(float(p[r, i, v]) for v in range(29) if v not in top)
                slow += (sum(a * math.log(a / float(p[r, i, v])) for a, v in zip(q, top)) + (1 - sum(q)) * math.log((1 - sum(q)) / rest)) / float(mask.sum())
    print("loss", loss.item(), "loop", slow, "gradient", m.head.weight.grad.norm().item())
    assert abs(loss.item() - slow) < 1e-4 and m.head.weight.grad.norm() > 0
