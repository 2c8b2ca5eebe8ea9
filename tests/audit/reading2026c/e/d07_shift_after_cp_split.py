"""Labels shifted inside each context-parallel shard. NVIDIA-BioNeMo/bionemo-recipes#1449,
https://github.com/NVIDIA-BioNeMo/bionemo-recipes/pull/1449, 2026. For load balance rank 0 of two holds the pieces
[0,1,6,7] and rank 1 [2,3,4,5]; the loss function shifted the labels of the shard, so token 1 was trained to predict
token 6 and the last token of each shard got no target. The fix shifts the labels before the split and hands them over
as shift_labels."""
FAMILY = "sharding"
KIND = "loss"
import torch
import torch.nn as nn
import torch.nn.functional as F
INPUTS = {"ids": "token ids, [rows, time]", "labels": "targets aligned with ids, -100 = not trained, [rows, time]"}
SETTINGS = {"cp": "context-parallel ranks, 2 (time must divide by 2 * cp)"}
NOTES = ("Next-token cross entropy, sum over all ranks divided by the trained tokens of all ranks. Ranks are simulated in "
         "one process: attention is exact (ring attention), only logits and labels are split in the zigzag order. The "
         "result does not depend on cp.")


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
    ids = torch.randint(0, 29, (3, 16))
    labels = ids.clone()
    labels[:, :4] = -100
    return {"model": TinyLM(), "ids": ids, "labels": labels}


def _zigzag(x, rank, cp):
    pieces = x.chunk(2 * cp, 1)
    return torch.cat([pieces[rank], pieces[2 * cp - 1 - rank]], 1)


def _sum_nll(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"), \
        (targets != -100).sum()


def broken(model, batch, cp=2):
    logits = model(batch["ids"])
    total, count = 0.0, 0
    for rank in range(cp):
        mine, labels = _zigzag(logits, rank, cp), _zigzag(batch["labels"], rank, cp)
        targets = F.pad(labels[:, 1:], (0, 1), value=-100)
        s, n = _sum_nll(mine, targets)
        total, count = total + s, count + n
    return total / count


def right(model, batch, cp=2):
    logits = model(batch["ids"])
    shift_labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    total, count = 0.0, 0
    for rank in range(cp):
        s, n = _sum_nll(_zigzag(logits, rank, cp), _zigzag(shift_labels, rank, cp))
        total, count = total + s, count + n
    return total / count


if __name__ == "__main__":
    values, grads = {}, {}
    for name, fn in (("broken", broken), ("right", right)):
        data = make(0)
        model = data.pop("model")
        loss = fn(model, data)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        values[name] = loss.item()
        grads[name] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    print("loss", values)
    gap = (grads["broken"] - grads["right"]).norm() / grads["right"].norm()
    print("relative gradient gap", gap.item())
    assert gap > 1e-3
