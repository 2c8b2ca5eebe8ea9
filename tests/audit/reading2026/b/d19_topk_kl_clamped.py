"""Truncated top-k forward KL is clamped at zero and loses the gradient there. verl-project/verl#7856 (PR #7855; the clamp is also discussed in #7806),
https://github.com/verl-project/verl/issues/7856, 2026.
Only the teacher's top-k terms are summed, so the value can be negative when the student puts more mass on them than the teacher; clamp_min(0) then removes the token's gradient (active in
89% of the reporter's steps), and mass outside the top-k is not compared at all. The fix puts all other tokens into one tail class, which makes it a real KL."""
import torch
import torch.nn as nn

FAMILY = "losses"
KIND = "loss"
INPUTS = {
    "ids": "token ids, prompt and the student's own answer, [rows, time]",
    "teacher_topk_ids": "the teacher's k likeliest next tokens at each position, [rows, time, k]",
    "teacher_topk_logprobs": "their log probabilities, [rows, time, k]",
    "loss_mask": "1 where the next token is part of the answer, [rows, time]",
}
SETTINGS = {}
NOTES = ("On-policy distillation: forward KL(teacher || student) for each position, known on the teacher's top-k tokens; mean over trained positions. Teacher values are constants.")


class Student(nn.Module):
    def __init__(self, V=40, D=16):
        super().__init__()
        self.emb, self.out = nn.Embedding(V, D), nn.Linear(D, V)

    def forward(self, ids):
        return self.out(torch.tanh(self.emb(ids)))


def _mean(x, m):
    return (x * m).sum() / m.sum()


def broken(model, batch):
    q = model(batch["ids"]).log_softmax(-1).gather(-1, batch["teacher_topk_ids"])
    p = batch["teacher_topk_logprobs"]
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0.0)
    return _mean(kl, batch["loss_mask"])


def right(model, batch):
    q = model(batch["ids"]).log_softmax(-1).gather(-1, batch["teacher_topk_ids"])
    p = batch["teacher_topk_logprobs"]
    tail = lambda x: torch.log1p(-x.exp().sum(-1).clamp(max=1 - 1e-6))
    pt, qt = tail(p), tail(q)
    kl = (p.exp() * (p - q)).sum(-1) + pt.exp() * (pt - qt)
    return _mean(kl, batch["loss_mask"])


def make(seed):
    torch.manual_seed(seed)
    model = Student()
    with torch.no_grad():
        model.out.weight.mul_(4)          # a student that is already trained: peaked
    ids = torch.randint(0, 40, (3, 10))
    with torch.no_grad():
        teacher = (model(ids) * 0.8 + 0.5 * torch.randn(3, 10, 40)).log_softmax(-1)
    v, i = teacher.topk(4, -1)
    mask = (torch.arange(10)[None] >= torch.tensor([[3], [5], [2]])).float()
    return {"model": model, "ids": ids, "teacher_topk_ids": i, "teacher_topk_logprobs": v, "loss_mask": mask}


if __name__ == "__main__":
    x = make(0)
    m = x.pop("model")
    g = {}
    for n, f in (("broken", broken), ("right", right)):
        m.zero_grad()
        loss = f(m, x)
        loss.backward()
        g[n] = torch.cat([p.grad.flatten() for p in m.parameters()]).clone()
        print(n, loss.item(), "gradient norm", g[n].norm().item())
    q = m(x["ids"]).log_softmax(-1).gather(-1, x["teacher_topk_ids"])
    raw = (x["teacher_topk_logprobs"].exp() * (x["teacher_topk_logprobs"] - q)).sum(-1)
    print("trained positions", int(x["loss_mask"].sum()), "clamped", int(((raw < 0) * x["loss_mask"]).sum()))
    assert not torch.allclose(g["broken"], g["right"], atol=1e-4)
