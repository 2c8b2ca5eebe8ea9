"""On-policy update with the ratio exp(logp - logp.detach()): its value is 1 everywhere, so the loss is a number that does
not depend on the model (minus the mean advantage, here about 0 when all completions have the same length), and clipping never
acts; the gradient is the plain policy gradient. The baseline leaves the own reward out, so the advantage is
k / (k - 1) times the centred reward."""
FAMILY = "losses"
KIND = "loss"
import torch
import torch.nn as nn
import torch.nn.functional as F
INPUTS = {"ids": "prompt and completion, [rows, time]; rows of a prompt follow each other", "completion_mask": "1 on sampled tokens, [rows, time]",
          "rewards": "one per row, [rows], constant"}
SETTINGS = {"k": "completions per prompt, 4 (rows must divide by it)", "clip": "PPO clip, 0.2"}
NOTES = ("RLOO. Mean over sampled tokens of all rows. The value of the loss carries no information; its gradient is "
         "-mean(advantage * grad logp). The old log-probs are the current ones (one update per sample).")


class TinyLM(nn.Module):
    """One causal attention layer; positions are learned."""

    def __init__(self, vocab=29, width=16, length=48):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, attention_mask=None, position_ids=None, allowed=None):
        rows, time = ids.shape
        if position_ids is None:
            position_ids = torch.arange(time).expand(rows, time)
        x = self.tok(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        see = torch.ones(time, time, dtype=torch.bool).tril().expand(rows, time, time)
        if allowed is not None:
            see = allowed
        if attention_mask is not None:
            see = see & attention_mask.bool()[:, None, :]
        score = score.masked_fill(~see, -1e9)
        return self.head(x + self.out(torch.tanh(score.softmax(-1) @ v)))


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 29, (8, 12))
    mask = torch.zeros_like(ids)
    for r in range(8):
        mask[r, 4:8 + r % 4] = 1
    return {"model": TinyLM(), "ids": ids, "completion_mask": mask, "rewards": torch.randn(8)}


def right(model, batch, k=4, clip=0.2):
    ids, mask = batch["ids"], batch["completion_mask"][:, 1:].float()
    rewards = batch["rewards"].view(-1, k)
    baseline = (rewards.sum(1, keepdim=True) - rewards) / (k - 1)
    advantage = (rewards - baseline).view(-1, 1)
    logp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    ratio = (logp - logp.detach()).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -(surrogate * mask).sum() / mask.sum()


if __name__ == "__main__":
    grads = []
    for slow in (False, True):
        data = make(0)
        model = data.pop("model")
        if slow:
            logp, total, n = model(data["ids"]).log_softmax(-1), 0.0, 0
            for r in range(8):
                others = [data["rewards"][j].item() for j in range(r // 4 * 4, r // 4 * 4 + 4) if j != r]
                adv = data["rewards"][r].item() - sum(others) / 3
                for t in range(1, 12):
                    if data["completion_mask"][r, t]:
                        total, n = total - adv * logp[r, t - 1, data["ids"][r, t]], n + 1
            loss = total / n
        else:
            loss = right(model, data)
        loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        print("slow" if slow else "right", loss.item(), grads[-1].norm().item())
    assert (grads[0] - grads[1]).abs().max() < 1e-6 and grads[0].norm() > 1e-3
