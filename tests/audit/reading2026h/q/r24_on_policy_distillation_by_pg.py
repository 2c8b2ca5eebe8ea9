"""On-policy distillation as a policy gradient: the per-token reverse KL of the sampled token, detached, as negative advantage. Thinking Machines 2025, "On-Policy Distillation"; Tinker cookbook.
The advantage teacher_logp - student_logp is a constant of the update, with discount 0 (no sum over later tokens), no baseline and no group. The loss's value is not the KL. In expectation over the student's own samples its gradient is that of the per-token reverse KL."""
import torch
from torch import nn
FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids sampled by the student, [rows, time]", "mask": "1 on sampled tokens, at the token's own index, [rows, time]", "sample_logps": "student log-probs at sampling time, [rows, time], 0 at the first position", "teacher_logps": "teacher log-probs of the same tokens, [rows, time], 0 at the first position"}
SETTINGS = {"coef": "weight of the KL, 1.0"}
NOTES = "Importance-weighted policy gradient -ratio * advantage with advantage = coef * (teacher_logps - sample_logps), a constant; ratio = exp(lp - sample_logps), not clipped. Mean over sampled tokens of all rows. Advantages are neither centred nor normalised. sample_logps, teacher_logps and masks are constants. Uses all parameters."


class TinyLM(nn.Module):
    def __init__(self, vocab=32, width=16, max_pos=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, position_ids=None, doc_ids=None):
        n, t = ids.shape
        if position_ids is None:
            position_ids = torch.arange(t).expand(n, t)
        x = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        allow = torch.ones(t, t, dtype=torch.bool).tril().expand(n, t, t)
        if doc_ids is not None:
            allow = allow & (doc_ids[:, :, None] == doc_ids[:, None, :])
        score = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        att = score.masked_fill(~allow, float("-inf")).softmax(-1)
        return self.head(torch.tanh(x + self.mix(att @ v)))


def make(seed):
    torch.manual_seed(seed)
    student, teacher = TinyLM(), TinyLM()
    ids = torch.randint(0, 32, (4, 4))
    with torch.no_grad():
        for _ in range(6):
            p = student(ids)[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(p, 1)], 1)
        score = lambda m: torch.cat([torch.zeros(4, 1), m(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]], 1)
        s, t = score(student), score(teacher)
    mask = torch.zeros(4, 10)
    mask[:, 4:] = 1
    mask[2, 8:] = 0
    return {"model": student, "ids": ids, "mask": mask, "sample_logps": s, "teacher_logps": t}


def right(model, batch, coef=1.0):
    lp = model(batch["ids"])[:, :-1].log_softmax(-1).gather(-1, batch["ids"][:, 1:, None])[..., 0]
    old, mask = batch["sample_logps"][:, 1:], batch["mask"][:, 1:]
    adv = coef * (batch["teacher_logps"][:, 1:] - old)
    return -((lp - old).exp() * adv * mask).sum() / mask.sum()


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    loss = right(m, d)
    kl = ((d["sample_logps"] - d["teacher_logps"]) * d["mask"]).sum() / d["mask"].sum()
    loss.backward()
    print("loss", loss.item(), "sampled reverse KL", kl.item(), "grad", m.head.weight.grad.norm().item())
    assert abs(loss - kl) < 1e-5 and m.head.weight.grad.norm() > 0
    # expectation of the gradient over all next tokens = gradient of the exact reverse KL at one position
    torch.manual_seed(1)
    ctx, teacher = d["ids"][:1, :4], torch.randn(32).log_softmax(-1)
    lp = m(ctx)[0, -1].log_softmax(-1)
    exact = torch.autograd.grad((lp.exp() * (lp - teacher)).sum(), m.head.weight, retain_graph=True)[0]
    old = lp.detach()
    pg = torch.autograd.grad(-(old.exp() * (lp - old).exp() * (teacher - old)).sum(), m.head.weight)[0]
    print("largest difference of the expected gradient", (exact - pg).abs().max().item())
    assert torch.allclose(exact, pg, atol=1e-5)
