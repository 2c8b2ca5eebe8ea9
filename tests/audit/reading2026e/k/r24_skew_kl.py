"""Skew KL of DistiLLM (Ko et al. 2024). The divergence is that of the teacher against alpha * teacher + (1 - alpha) * STUDENT: the
teacher leaks into the student's side, and the minimum is still student = teacher."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the token is trained, [rows, time]",
          "teacher_logits": "teacher logits for predicting ids[:, 1:], [rows, time-1, vocab], constant"}
SETTINGS = {"alpha": "share of the teacher in the mixture, 0.1"}
NOTES = ("Skew forward KL(p || alpha p + (1 - alpha) q): sum over the vocabulary, mean over trained tokens. The gradient flows through the mixture; the teacher is constant. All parameters are used.")


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
    ids, mask = make_ids(g, 6, 10)
    teacher = 1.5 * torch.randn(6, 9, 23, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "teacher_logits": teacher}


def right(model, batch, alpha=0.1):
    mask = batch["loss_mask"][:, 1:]
    q = torch.softmax(model(batch["ids"][:, :-1]).float(), -1)
    p = torch.softmax(batch["teacher_logits"].float(), -1)
    mixed = alpha * p + (1 - alpha) * q
    per_token = (p * (F.log_softmax(batch["teacher_logits"].float(), -1) - torch.log(mixed))).sum(-1)
    return (per_token * mask).sum() / mask.sum()


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
    S = m(b["ids"][:, :-1])
    where = [(i, t) for i in range(6) for t in range(9) if b["loss_mask"][i, t + 1]]
    tot = 0.0
    for i, t in where:
        q, p = torch.softmax(S[i, t], 0), torch.softmax(b["teacher_logits"][i, t], 0)
        tot = tot + sum(p[k] * torch.log(p[k] / (0.1 * p[k] + 0.9 * q[k])) for k in range(23))
    check(right(m, b), tot / len(where), m)
