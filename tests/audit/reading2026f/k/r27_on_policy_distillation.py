"""On-policy distillation as policy gradient (Thinking Machines / Tinker, 2025). The advantage of each sampled token is minus its reverse-KL sample, from the
SAMPLER's log-probability; no baseline, no discount, no clip; the teacher sees only the student's own tokens and there is no vocabulary sum."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "token ids sampled by the student, [rows, time], right-padded with 0", "loss_mask": "1 where the token was sampled, [rows, time]",
          "sampler_logps": "log-probabilities of ids[:, 1:] when they were sampled, [rows, time-1], constant", "teacher_logps": "teacher log-probabilities of the same tokens, [rows, time-1], constant"}
SETTINGS = {"kl_coef": "scale of the advantage, 1.0"}
NOTES = ("Importance-sampled policy gradient: mean over all trained tokens of -ratio * advantage, advantage = -kl_coef * (sampler_logp - teacher_logp), a constant; ratio = exp(logp - sampler_logp) carries the gradient. The value of the loss is an estimate of the reverse KL at the start. All parameters are used.")


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
    base = token_logps(model, ids).detach()
    return {"model": model, "ids": ids, "loss_mask": mask, "sampler_logps": base + 0.05 * torch.randn(base.shape, generator=g),
            "teacher_logps": -torch.rand(base.shape, generator=g) * 5}


def right(model, batch, kl_coef=1.0):
    mask = batch["loss_mask"][:, 1:]
    advantage = -kl_coef * (batch["sampler_logps"] - batch["teacher_logps"])
    ratio = torch.exp(token_logps(model, batch["ids"]) - batch["sampler_logps"])
    return -(ratio * advantage * mask).sum() / mask.sum()


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
    lp = token_logps(m, b["ids"])
    where = [(i, t) for i in range(6) for t in range(9) if b["loss_mask"][i, t + 1]]
    tot = sum(torch.exp(lp[i, t]) / b["sampler_logps"][i, t].exp().item() * (b["sampler_logps"][i, t] - b["teacher_logps"][i, t]).item() for i, t in where)
    check(right(m, b), tot / len(where), m)
