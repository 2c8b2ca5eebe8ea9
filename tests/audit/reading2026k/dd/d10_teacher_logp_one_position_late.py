"""Teacher log-probs are written at the response tokens, everything else at the prediction positions.
areal-project/AReaL#1729, https://github.com/areal-project/AReaL/pull/1729, 2026 (reported as #1728).
The training forward pass predicts token k+1 at position k, and mask and rollout log-probs are shifted by -1 to match; the
teacher's log-probs were scattered at the response tokens themselves. So each token is judged with the teacher's score
of the token before, the last score is dropped, and a one-token response gets no teacher signal at all."""
import torch
import torch.nn as nn

FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "prompt and response token ids, right padded with 0, [rows, time]",
          "loss_mask": "1 on response tokens, [rows, time]",
          "rollout_logp": "log-probability of each token under the policy that sampled it, entry k belongs to token k, 0 outside the response, [rows, time]",
          "teacher_scores": "the teacher's log-probabilities of the response tokens, first response token first, padded with 0, [rows, longest response]"}
SETTINGS = {}
NOTES = ("On-policy distillation: advantage of a response token = teacher log-prob - rollout log-prob of that same token; loss = "
         "mean over all response tokens of all rows of -(advantage * exp(log-prob - rollout log-prob)). The advantage and the "
         "rollout log-probs are constants. The log-prob of token k comes from the logits at k-1. No clip. Prompts have at "
         "least two tokens; responses are contiguous. All parameters of the model are used.")


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
    rows, time = 4, 11
    start = torch.randint(2, 4, (rows,), generator=g)
    length = torch.randint(2, 8, (rows,), generator=g)
    length[0] = 1
    at = torch.arange(time).expand(rows, time)
    mask = ((at >= start[:, None]) & (at < (start + length)[:, None])).float()
    ids = torch.randint(1, 24, (rows, time), generator=g).masked_fill(at >= (start + length)[:, None], 0)
    model = TinyLM()
    with torch.no_grad():
        lp = model(ids).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    rollout = torch.cat([torch.zeros(rows, 1), lp + 0.1 * torch.randn(lp.shape, generator=g)], 1) * mask
    teacher = -3 * torch.rand(rows, int(length.max()), generator=g) * (torch.arange(int(length.max())) < length[:, None])
    return {"model": model, "ids": ids, "loss_mask": mask, "rollout_logp": rollout, "teacher_scores": teacher}


def _loss(model, batch, teacher_logp):
    ids = batch["ids"]
    next_ids = ids.roll(-1, 1)
    logp = model(ids).log_softmax(-1).gather(-1, next_ids[..., None]).squeeze(-1)
    mask = batch["loss_mask"].roll(-1, 1)
    rollout = batch["rollout_logp"].roll(-1, 1)
    advantage = (teacher_logp - rollout).detach()
    return -(advantage * (logp - rollout).exp() * mask).sum() / mask.sum()


def broken(model, batch):
    teacher_logp = torch.zeros_like(batch["rollout_logp"])
    for row in range(len(teacher_logp)):
        index = batch["loss_mask"][row].nonzero().squeeze(-1)
        teacher_logp[row, index] = batch["teacher_scores"][row, :len(index)]
    return _loss(model, batch, teacher_logp)


def right(model, batch):
    teacher_logp = torch.zeros_like(batch["rollout_logp"])
    for row in range(len(teacher_logp)):
        index = batch["loss_mask"][row].nonzero().squeeze(-1)
        teacher_logp[row, index - 1] = batch["teacher_scores"][row, :len(index)]
    return _loss(model, batch, teacher_logp)


if __name__ == "__main__":
    batch = make(0)
    model = batch.pop("model")
    b, r = broken(model, batch), right(model, batch)
    print("broken", b.item(), "right", r.item())
    assert abs(b - r) > 1e-3
