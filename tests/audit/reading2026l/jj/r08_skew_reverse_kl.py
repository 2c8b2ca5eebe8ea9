"""Skew reverse KL (DistiLLM, Ko et al. 2024, arXiv 2402.03898): KL(student || (1-lam) teacher + lam student). The student stands on both sides and gradient flows through both."""
import torch, torch.nn as nn
FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "labels": "next-token targets already shifted (labels[t] = ids[t+1]); -100 where not trained, [rows, time]", "teacher_logits": "logits of the teacher at ids, [rows, time, vocab]"}
SETTINGS = {"lam": "share of the student in the mixture, 0.1"}
NOTES = ("At each position with labels != -100: KL(q || m) over the full vocabulary with q the student's distribution at this position and m = (1-lam) * p + lam * q, p the teacher's distribution at the same position (no further shift). "
         "The q inside m is NOT detached: the gradient of the mixture belongs to the objective. The teacher is constant. The sum is divided by the number of trained positions of all rows. labels only choose positions, their values are not used. All parameters are used.")

class LM(nn.Module):
    def __init__(self, vocab=31, width=20):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab)
    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    torch.manual_seed(seed)
    n = torch.tensor([10, 7, 9, 5]); t = torch.arange(10)
    ids = torch.randint(1, 31, (4, 10)) * (t < n[:, None])
    labels = torch.cat([ids[:, 1:], torch.zeros(4, 1, dtype=torch.long)], 1)
    labels[(t < 2).expand(4, 10) | (t >= n[:, None] - 1)] = -100
    return {"ids": ids, "labels": labels, "teacher_logits": 2 * torch.randn(4, 10, 31), "model": LM()}

def right(model, batch, lam=0.1):
    logq = model(batch["ids"]).log_softmax(-1)
    q = logq.exp()
    p = batch["teacher_logits"].softmax(-1)
    mix = (1 - lam) * p + lam * q
    kl = (q * (logq - mix.log())).sum(-1)
    m = batch["labels"] != -100
    return kl[m].sum() / m.sum()

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); m.double(); d["teacher_logits"] = d["teacher_logits"].double(); l = right(m, d); l.backward()
    s, n = 0.0, 0
    for r in range(4):
        for t in range(10):
            if d["labels"][r, t] != -100:
                q = m(d["ids"])[r, t].softmax(-1).tolist(); p = d["teacher_logits"][r, t].softmax(-1).tolist(); n += 1
                import math
                s += sum(a * math.log(a / (0.9 * b + 0.1 * a)) for a, b in zip(q, p))
    w = m.head.weight; e = 1e-5; g = w.grad[3, 2].item()
    with torch.no_grad():
        w[3, 2] += e; a = right(m, d).item(); w[3, 2] -= 2 * e; b = right(m, d).item()
    print(l.item(), s / n, "gradient", g, "finite difference", (a - b) / (2 * e)); assert abs(l.item() - s / n) < 1e-8 and abs(g - (a - b) / 2 / e) < 1e-7
