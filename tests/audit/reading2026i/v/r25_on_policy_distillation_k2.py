"""On-policy distillation with half the squared log-ratio. For tokens sampled from the student, the k2 estimator
0.5 * (log student - log teacher)^2 is used as a loss (Schulman's k2; OpenRLHF, verl and Thinking Machines' on-policy
distillation variants): its gradient (log-ratio * grad log student) is an unbiased gradient of the reverse KL, whereas
differentiating the plain log-ratio (k1) has expectation zero. Only the sampled token is scored, not the vocabulary."""
import torch
from torch import nn

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "prompt and the student's own sample [rows, time]", "response_mask": "1 on sampled tokens [rows, time]",
          "teacher_logprobs": "teacher's log-probability of ids[:, 1:], constant [rows, time-1]"}
SETTINGS = {}
NOTES = ("Mean over all sampled tokens of all rows of 0.5 * (student - teacher log-probability)^2. A regression in form, a reverse KL "
         "in gradient (on-policy, per token). Never negative. The teacher is a constant; the expected value of the loss is "
         "not the KL itself.")


class TinyLM(nn.Module):
    """Embedding with learned positions, one attention layer, head."""
    def __init__(self, vocab=32, width=16, max_pos=64):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, vocab)

    def forward(self, ids, positions=None, mask=None):
        rows, time = ids.shape
        if positions is None:
            positions = torch.arange(time).expand(rows, time)
        if mask is None:
            mask = torch.ones(time, time, dtype=torch.bool).tril()
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.head(x + self.out(weights @ v))


def make(seed):
    torch.manual_seed(seed)
    model, ids = TinyLM(), torch.randint(0, 32, (4, 12))
    mask = torch.zeros(4, 12)
    mask[:, 4:10] = 1
    mask[2, 7:] = 0
    return {"model": model, "batch": {"ids": ids, "response_mask": mask, "teacher_logprobs": torch.randn(4, 11, 32).log_softmax(-1)[..., 0]}}


def right(model, batch):
    ids, mask = batch["ids"], batch["response_mask"][:, 1:]
    logp = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    k2 = 0.5 * (logp - batch["teacher_logprobs"]).pow(2)
    return (k2 * mask).sum() / mask.sum()


if __name__ == "__main__":
    d = make(0)
    loss = right(**d)
    loss.backward()
    b = d["batch"]
    lp = d["model"](b["ids"]).log_softmax(-1)
    v = [0.5 * (lp[i, t - 1, b["ids"][i, t]] - b["teacher_logprobs"][i, t - 1]) ** 2 for i in range(4) for t in range(1, 12) if b["response_mask"][i, t]]
    print(loss.item(), (sum(v) / len(v)).item(), d["model"].head.weight.grad.norm().item())
    assert torch.allclose(loss, sum(v) / len(v), atol=1e-5) and d["model"].head.weight.grad.norm() > 0
    # expectation of the k2 gradient over the student's distribution equals the gradient of the reverse KL
    z = torch.randn(7, requires_grad=True)
    teacher = torch.randn(7).log_softmax(0)
    kl = torch.autograd.grad((z.softmax(0) * (z.log_softmax(0) - teacher)).sum(), z)[0]
    k2 = torch.autograd.grad((z.softmax(0).detach() * 0.5 * (z.log_softmax(0) - teacher) ** 2).sum(), z)[0]
    print("reverse KL gradient", kl[:3].tolist(), "k2", k2[:3].tolist())
    assert torch.allclose(kl, k2, atol=1e-6)
