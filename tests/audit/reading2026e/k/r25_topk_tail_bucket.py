"""Distillation from stored top-k teacher log-probabilities with a tail bucket. The k stored probabilities do not sum to one; the rest of the vocabulary
is one bucket on both sides (log(1 - sum)), so the loss is a true KL of k + 1 outcomes. The student is NOT renormalised over the k tokens."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the token is trained, [rows, time]",
          "top_ids": "the teacher's k most probable tokens at each position that predicts ids[:, 1:], [rows, time-1, k]", "top_logps": "their teacher log-probabilities (full softmax), same shape, constant"}
SETTINGS = {}
NOTES = ("Forward KL over k + 1 buckets, mean over trained tokens of all rows. Bounded below by 0 and at most the full-vocabulary KL. The number k is read from the data and must be below the vocabulary. All parameters are used.")


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
    top = F.log_softmax(1.5 * torch.randn(6, 9, 23, generator=g), -1).topk(5, -1)
    return {"model": model, "ids": ids, "loss_mask": mask, "top_ids": top.indices, "top_logps": top.values}


def with_tail(logps):
    """append log(1 - sum of the given probabilities)"""
    tail = torch.log1p(-torch.exp(torch.logsumexp(logps, -1, keepdim=True)).clamp(max=1 - 1e-6))
    return torch.cat([logps, tail], -1)


def right(model, batch):
    mask = batch["loss_mask"][:, 1:]
    student = F.log_softmax(model(batch["ids"][:, :-1]), -1).gather(-1, batch["top_ids"])
    s, t = with_tail(student), with_tail(batch["top_logps"])
    per_token = (t.exp() * (t - s)).sum(-1)
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
        q = torch.softmax(S[i, t], 0); top = b["top_ids"][i, t].tolist(); p = b["top_logps"][i, t].exp()
        tot = tot + sum(p[j] * torch.log(p[j] / q[k]) for j, k in enumerate(top))
        rest = sum(q[k] for k in range(23) if k not in top)
        tot = tot + (1 - p.sum()) * torch.log((1 - p.sum()) / rest)
    check(right(m, b), tot / len(where), m)
