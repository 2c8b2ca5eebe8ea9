"""On-policy distillation as a policy gradient (Thinking Machines 2025, tinker-cookbook, slime, verl): the advantage of each sampled token is teacher log-probability minus student log-probability at THAT token, a constant, with discount 0 (no sum over the future), no baseline and no normalization. On policy the ratio is 1 everywhere, so the loss
value is the estimated reverse KL and its gradient comes through the ratio alone. With other words: the reward contains the sampling log-probability of the very policy that is trained."""
import torch
from torch import nn

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "prompt and answer sampled from the student, [rows, time]", "mask": "1 on sampled tokens, [rows, time], first column 0", "sample_logp": "student's log-probability when it was sampled, [rows, time] (constant)", "teacher_logp": "teacher's log-probability of the same tokens, [rows, time] (constant)"}
SETTINGS = {"coef": "scale of the advantage, 1.0"}
NOTES = "Importance-sampling policy gradient, not clipped: minus ratio * advantage, mean over sampled tokens of all rows. Advantage = -coef * (sample_logp - teacher_logp), constant. ratio = exp(logp - sample_logp). Estimates the gradient of the reverse KL per token. All parameters are used."


class Tiny(nn.Module):
    def __init__(self, vocab=8, width=8):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def _logp(model, ids):
    lp = model(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.cat([torch.zeros_like(lp[:, :1]), lp], dim=1)


def make(seed, rows=8, time=6):
    torch.manual_seed(seed)
    student, teacher = Tiny(), Tiny()
    ids = torch.randint(0, 8, (rows, 2))
    with torch.no_grad():
        for _ in range(time - 2):
            ids = torch.cat([ids, torch.multinomial(student(ids)[:, -1].softmax(-1), 1)], dim=1)
        mask = torch.ones(rows, time)
        mask[:, :2] = 0
        own, other = _logp(student, ids) * mask, _logp(teacher, ids) * mask
    return {"model": student, "ids": ids, "mask": mask, "sample_logp": own, "teacher_logp": other}


def right(model, batch, coef=1.0):
    advantage = -coef * (batch["sample_logp"] - batch["teacher_logp"])
    ratio = torch.exp(_logp(model, batch["ids"]) - batch["sample_logp"])
    return -(ratio * advantage * batch["mask"]).sum() / batch["mask"].sum()


if __name__ == "__main__":
    d = make(0, rows=40000, time=3)                       # one sampled token: the exact reverse KL is known
    model = d.pop("model")
    torch.manual_seed(0)
    _, teacher = Tiny(), Tiny()
    got = torch.autograd.grad(right(model, d), list(model.parameters()))
    s, t = model(d["ids"][:, :2])[:, -1].log_softmax(-1), teacher(d["ids"][:, :2])[:, -1].log_softmax(-1).detach()
    kl = (s.exp() * (s - t)).sum(-1).mean()
    want = torch.autograd.grad(kl, list(model.parameters()))
    a, b = torch.cat([g.flatten() for g in got]), torch.cat([g.flatten() for g in want])
    print("estimate", right(model, d).item(), "exact reverse KL", kl.item(), "cosine of the gradients", torch.cosine_similarity(a, b, 0).item())
    assert torch.cosine_similarity(a, b, 0) > 0.97 and abs(right(model, d).item() - kl.item()) < 0.02
    small = make(0)
    model = small.pop("model")
    right(model, small).backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())
