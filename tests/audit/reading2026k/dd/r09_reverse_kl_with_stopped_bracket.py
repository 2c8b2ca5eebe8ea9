"""Analytic reverse KL on the teacher's top-k with the bracket detached. thinking-machines-lab/tinker-cookbook, sdft
(PR 677, 2026). loss = sum_k p_k * stopgrad(log p_k - log q_k), p and q renormalized over the teacher's top-k. The gradient
through log p is missing - and its expectation under p is zero, because the p_k sum to one over the set, so the gradient is
exactly that of KL(p || q)."""
import torch
import torch.nn as nn

FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]",
          "loss_mask": "1 on completion tokens, never at the first token, [rows, time]",
          "teacher_ids": "the teacher's top-k token ids for the token at this place (in the same alignment as ids: entry t is about token t), [rows, time, k]",
          "teacher_logps": "the teacher's log-probabilities of those ids, same shape"}
SETTINGS = {}
NOTES = ("Self-distillation with reverse KL(student || teacher) on the teacher's top-k: both distributions are renormalized over "
         "the k ids; loss per token = sum over k of p_k * (log p_k - log q_k) with the bracket as a constant, sum over k; mean over "
         "completion tokens of all rows. Value and gradient equal those of the full reverse KL. The student's distribution of "
         "token t comes from the logits at t-1. Teacher entries are constants. All parameters are used.")


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
    rows, time, k = 3, 9, 4
    ids = torch.randint(1, 24, (rows, time), generator=g)
    full = torch.randn(rows, time, 24, generator=g).mul(2).log_softmax(-1)
    top = full.topk(k, dim=-1)
    mask = (torch.arange(time) >= torch.randint(1, 5, (rows, 1), generator=g)).float()
    return {"model": TinyLM(), "ids": ids, "loss_mask": mask, "teacher_ids": top.indices, "teacher_logps": top.values}


def right(model, batch):
    logits = model(batch["ids"])[:, :-1]
    log_p = logits.gather(-1, batch["teacher_ids"][:, 1:]).log_softmax(-1)
    log_q = batch["teacher_logps"][:, 1:].log_softmax(-1)
    mask = batch["loss_mask"][:, 1:]
    per_token = (log_p.exp() * (log_p - log_q).detach()).sum(-1)
    return (per_token * mask).sum() / mask.sum()


if __name__ == "__main__":
    batch = make(0)
    model = batch.pop("model")
    loss = right(model, batch)
    got = torch.autograd.grad(loss, list(model.parameters()))
    logits, total, count = model(batch["ids"]), 0.0, 0
    for r in range(3):
        for t in range(1, 9):
            if batch["loss_mask"][r, t]:
                p = logits[r, t - 1, batch["teacher_ids"][r, t]].softmax(-1)
                q = batch["teacher_logps"][r, t].softmax(-1)
                total, count = total + (p * (p / q).log()).sum(), count + 1
    want = torch.autograd.grad(total / count, list(model.parameters()))
    far = max((a - b).abs().max().item() for a, b in zip(got, want))
    print(loss.item(), (total / count).item(), "largest difference of the gradients", far, "size", got[0].norm().item())
    assert abs(loss - total / count) < 1e-5 and far < 1e-5 and got[0].norm() > 1e-4
