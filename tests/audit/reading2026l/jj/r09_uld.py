"""Universal logit distillation (Boizard et al. 2024, arXiv 2402.12030; GOLD in TRL): teacher and student have different vocabularies. Both distributions are sorted by size, and the L1 distance
between the sorted vectors is the loss: token identities are thrown away on purpose."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "student token ids, prompt and answer, right-padded with 0, [rows, time]", "answer_mask": "1 for answer tokens of ids (not shifted)", "teacher_logits": "teacher logits that predict its own answer tokens, in order, [rows, teacher answer length, teacher vocab]", "teacher_len": "number of valid answer tokens of the teacher, [rows]"}
SETTINGS = {"w": "weight of the ULD term, 1.5"}
NOTES = ("Cross entropy of the answer tokens (logits at t-1 for the token at t; mean over all answer tokens of all rows) + w * ULD. The j-th answer step of the student is paired with the j-th answer step of the teacher; each row uses min(student answer length, teacher_len) steps, the rest has no ULD term. "
         "ULD of a step: sort both probability vectors in descending order, fill the shorter vocabulary with zeros, sum of absolute differences. Mean over all paired steps of all rows. The vocabularies differ in size (student 31, teacher 43), so entries are matched by rank and not by token. The teacher is constant; gradient flows through the sort. All parameters are used.")

class LM(nn.Module):
    def __init__(self, vocab=31, width=20):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab)
    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    torch.manual_seed(seed)
    t = torch.arange(11); end = torch.tensor([11, 8, 9])[:, None]; start = torch.tensor([3, 4, 2])[:, None]
    return {"ids": torch.randint(1, 31, (3, 11)) * (t < end), "answer_mask": ((t >= start) & (t < end)).float(),
            "teacher_logits": 2 * torch.randn(3, 7, 43), "teacher_len": torch.tensor([6, 7, 5]), "model": LM()}

def right(model, batch, w=1.5):
    logits = model(batch["ids"])[:, :-1]
    y, m = batch["ids"][:, 1:], batch["answer_mask"][:, 1:].bool()
    ce = F.cross_entropy(logits[m], y[m])
    dist, steps = 0.0, 0
    for r in range(len(y)):
        s = logits[r][m[r]].softmax(-1)
        n = min(len(s), int(batch["teacher_len"][r]))
        t = batch["teacher_logits"][r, :n].softmax(-1)
        s = s[:n].sort(-1, descending=True).values
        t = t.sort(-1, descending=True).values
        size = max(s.shape[-1], t.shape[-1])
        s, t = F.pad(s, (0, size - s.shape[-1])), F.pad(t, (0, size - t.shape[-1]))
        dist = dist + (s - t).abs().sum()
        steps += n
    return ce + w * dist / steps

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); l = right(m, d); l.backward()
    lg, ce, n, u, k = m(d["ids"]), 0.0, 0, 0.0, 0
    for r in range(3):
        pos = [t for t in range(11) if d["answer_mask"][r, t]]
        for t in pos: ce += F.cross_entropy(lg[r, t - 1], d["ids"][r, t]).item(); n += 1
        for j, t in enumerate(pos[: int(d["teacher_len"][r])]):
            a = sorted(lg[r, t - 1].softmax(-1).tolist(), reverse=True) + [0.0] * 12; b = sorted(d["teacher_logits"][r, j].softmax(-1).tolist(), reverse=True)
            u += sum(abs(x - z) for x, z in zip(a, b)); k += 1
    print(l.item(), ce / n + 1.5 * u / k, "grad", sum(p.grad.norm() for p in m.parameters()).item()); assert abs(l.item() - ce / n - 1.5 * u / k) < 1e-4
