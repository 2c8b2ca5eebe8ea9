"""Skew KL of DistiLLM (Ko et al. 2024, arXiv:2402.03898). The student is not compared with the teacher but with a mixture of
the two: KL(p || alpha p + (1-alpha) q). The teacher stands on both sides, the gradient goes through the logarithm of the
mixture, and the loss cannot reach large values (it is bounded by -log alpha). The mixture is formed of probabilities, not of
logits or log-probabilities. Looks like a leak of the target in the prediction; it is the definition."""
import torch
import torch.nn as nn

FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "token ids, right padded with 0, [rows, time]",
          "loss_mask": "1 on completion tokens, never at the first token, [rows, time]",
          "teacher_logits": "the teacher's logits on the same ids (entry t predicts token t+1, like the student's), [rows, time, vocabulary]"}
SETTINGS = {"alpha": "share of the teacher in the mixture, 0.1"}
NOTES = ("Skew forward KL distillation: per token sum over the vocabulary of p * (log p - log(alpha p + (1-alpha) q)), p teacher and "
         "q student, temperature 1; mean over completion tokens of all rows. The teacher's logits are constants. Student and "
         "teacher predict token t at position t-1. What stands at positions that predict no completion token has no effect. "
         "All parameters of the student are used; no exact number of rows is needed.")


class TinyLM(nn.Module):
    """One causal attention layer with learned positions; logits [rows, time, vocabulary]."""

    def __init__(self, vocabulary=24, width=16, positions=64):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocabulary)

    def hidden(self, ids, position_ids=None):
        rows, time = ids.shape
        if position_ids is None:
            position_ids = torch.arange(time).expand(rows, time)
        x = self.embed(ids) + self.position(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        document = (position_ids == 0).cumsum(-1)
        allowed = torch.ones(time, time, dtype=torch.bool).tril() & (document[:, :, None] == document[:, None, :])
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~allowed, float("-inf"))
        return x + scores.softmax(-1) @ v

    def forward(self, ids, position_ids=None):
        return self.head(self.hidden(ids, position_ids))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    rows, time, prompt = 4, 10, 3
    at = torch.arange(time).expand(rows, time)
    ends = torch.randint(prompt + 1, time + 1, (rows, 1), generator=g)
    ids = torch.randint(1, 24, (rows, time), generator=g).masked_fill(at >= ends, 0)
    mask = ((at >= prompt) & (at < ends)).float()
    return {"model": TinyLM(), "ids": ids, "loss_mask": mask, "teacher_logits": 2 * torch.randn(rows, time, 24, generator=g)}


def right(model, batch, alpha=0.1):
    p = batch["teacher_logits"][:, :-1].softmax(-1)
    q = model(batch["ids"])[:, :-1].softmax(-1)
    mixture = alpha * p + (1 - alpha) * q
    per_token = (p * (p.log() - mixture.log())).sum(-1)
    mask = batch["loss_mask"][:, 1:]
    return (per_token * mask).sum() / mask.sum()


if __name__ == "__main__":
    import math
    batch = make(0)
    model = batch.pop("model")
    loss = right(model, batch)
    loss.backward()
    q, p, total, count = model(batch["ids"]).softmax(-1), batch["teacher_logits"].softmax(-1), 0.0, 0
    for r in range(4):
        for t in range(1, 10):
            if batch["loss_mask"][r, t]:
                total += sum(a * math.log(a / (0.1 * a + 0.9 * b)) for a, b in zip(p[r, t - 1].tolist(), q[r, t - 1].tolist()))
                count += 1
    print(loss.item(), total / count, "gradient", model.head.weight.grad.norm().item())
    assert abs(loss.item() - total / count) < 1e-4 and model.head.weight.grad.norm() > 0
