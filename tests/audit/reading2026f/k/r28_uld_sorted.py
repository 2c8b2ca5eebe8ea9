"""ULD, universal logit distillation (Boizard et al. 2024). Teacher and student have different tokenizers: both probability vectors are SORTED in
descending order, the smaller vocabulary is padded with zeros, and answers are aligned by position and cut to the shorter one."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "student token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the student token is trained, [rows, time]",
          "teacher_probs": "teacher probabilities over its own vocabulary at its answer positions, from the first answer token on, [rows, answer, teacher vocab], constant", "teacher_mask": "1 where the teacher's answer position is real, [rows, answer]"}
SETTINGS = {"lam": "weight of the sorted L1 distance, 1.5"}
NOTES = ("Cross-entropy (mean over trained student tokens) + lam * mean over aligned positions of all rows of the L1 distance of sorted probabilities (1-D Wasserstein). Which token a probability belongs to is ignored on purpose. All parameters are used.")


class TinyLM(nn.Module):
    """embedding -> GRU (causal by nature) -> vocabulary"""
    def __init__(self, vocab=23, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])          # [rows, time, vocab]


def token_logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]), [rows, time-1]"""
    logp = F.log_softmax(model(ids[:, :-1]).float(), -1)
    return logp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def make_ids(g, rows, time, vocab=23, prompt=3):
    """prompts of 3 tokens, completions of random length, 0 = padding on the right"""
    lengths = torch.randint(prompt + 2, time + 1, (rows,), generator=g)
    pos = torch.arange(time)[None]
    ids = torch.randint(1, vocab, (rows, time), generator=g) * (pos < lengths[:, None])
    mask = ((pos >= prompt) & (pos < lengths[:, None])).float()
    return ids, mask


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    model = TinyLM()
    ids, mask = make_ids(g, 5, 10)
    probs = torch.softmax(2 * torch.randn(5, 6, 31, generator=g), -1)
    lengths = torch.randint(2, 7, (5,), generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "teacher_probs": probs, "teacher_mask": (torch.arange(6)[None] < lengths[:, None]).float()}


def right(model, batch, lam=1.5):
    logits = model(batch["ids"][:, :-1])
    keep = batch["loss_mask"][:, 1:].bool()
    ce = F.cross_entropy(logits[keep], batch["ids"][:, 1:][keep])
    distances = []
    for row, k, teacher, tk in zip(logits, keep, batch["teacher_probs"], batch["teacher_mask"].bool()):
        s, t = torch.softmax(row[k], -1).sort(-1, descending=True).values, teacher[tk].sort(-1, descending=True).values
        n, width = min(len(s), len(t)), max(s.shape[-1], t.shape[-1])
        s, t = (F.pad(x[:n], (0, width - x.shape[-1])) for x in (s, t))
        distances.append((s - t).abs().sum(-1))
    return ce + lam * torch.cat(distances).mean()


def check(loss, slow, model, tol=2e-5):
    """same value and same gradient as the explicit version; every parameter is used"""
    params = list(model.parameters())
    a = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    b = torch.autograd.grad(slow, params, retain_graph=True, allow_unused=True)
    assert all(x is not None for x in a), "unused parameter"
    b = [torch.zeros_like(p) if x is None else x for x, p in zip(b, params)]
    norm = torch.sqrt(sum((x ** 2).sum() for x in a)).item()
    diff = max((x - y).abs().max().item() for x, y in zip(a, b))
    print(f"loss {loss.item():.6f}  slow {slow.item():.6f}  grad norm {norm:.5f}  max grad diff {diff:.1e}")
    assert abs(loss.item() - slow.item()) < tol * max(1, abs(slow.item())) and diff < tol * max(1, norm) and norm > 1e-4


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    S = m(b["ids"][:, :-1]); ce = n = w1 = k = 0.0
    for i in range(5):
        pos = [t for t in range(9) if b["loss_mask"][i, t + 1]]
        for t in pos:
            ce, n = ce - torch.log_softmax(S[i, t], 0)[b["ids"][i, t + 1]], n + 1
        for j in range(min(len(pos), int(b["teacher_mask"][i].sum()))):
            q = sorted(torch.softmax(S[i, pos[j]], 0), key=lambda x: -x.item()) + [torch.tensor(0.0)] * 8
            p = sorted(b["teacher_probs"][i, j].tolist(), reverse=True)
            w1, k = w1 + sum(abs(x - y) for x, y in zip(q, p)), k + 1
    check(right(m, b), ce / n + 1.5 * w1 / k, m)
