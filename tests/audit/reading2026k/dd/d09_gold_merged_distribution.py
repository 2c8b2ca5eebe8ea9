"""GOLD merges the distributions of several tokens from the wrong end.
huggingface/trl#5905, https://github.com/huggingface/trl/pull/5905, 2026 (reported as #5152).
In cross-tokenizer distillation a group of student tokens is aligned with one teacher token, and the group's distribution
is built by the chain rule. The code multiplied the full distribution at the FIRST position by the scalar probabilities of
the later actual tokens; that is right only for the actual first token. It has to be the scalar probabilities of the
earlier actual tokens times the full distribution at the LAST position."""
import torch
import torch.nn as nn

FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "student token ids, [rows, time]",
          "group_start": "index of the first student token of each aligned group (at least 1), [rows, groups]",
          "group_length": "number of student tokens of the group (1 or more), [rows, groups]",
          "teacher_probs": "teacher's distribution for the same piece of text, each sums to 1, [rows, groups, vocabulary]"}
SETTINGS = {}
NOTES = ("Universal logit distillation on aligned groups: the student's group distribution is P(first actual tokens | prefix) "
         "(a scalar: product over all tokens of the group but the last) times the full distribution at the group's last "
         "token given the actual prefix; it is not renormalized. Both distributions are sorted in falling order and the sum of "
         "absolute differences is taken. Mean over all groups of all rows. The distribution of token t comes from the logits "
         "at t-1. teacher_probs are constants. Gradients flow through the scalars too. All parameters are used.")


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
    rows, lengths = 3, torch.tensor([1, 2, 3, 1, 2])
    order = torch.stack([torch.randperm(5, generator=g) for _ in range(rows)])
    group_length = lengths[order]
    group_start = 2 + torch.cat([torch.zeros(rows, 1, dtype=torch.long), group_length.cumsum(1)[:, :-1]], 1)
    ids = torch.randint(1, 24, (rows, 2 + int(lengths.sum())), generator=g)
    teacher = torch.randn(rows, 5, 24, generator=g).mul(2).softmax(-1)
    return {"model": TinyLM(), "ids": ids, "group_start": group_start, "group_length": group_length, "teacher_probs": teacher}


def _uld(merged, teacher):
    return (merged.sort(-1, descending=True).values - teacher.sort(-1, descending=True).values).abs().sum(-1)


def broken(model, batch):
    probs = model(batch["ids"]).softmax(-1)[:, :-1]
    losses = []
    for row in range(len(batch["ids"])):
        for k, (start, length) in enumerate(zip(batch["group_start"][row].tolist(), batch["group_length"][row].tolist())):
            merged = probs[row, start - 1]
            for t in range(start + 1, start + length):
                merged = merged * probs[row, t - 1, batch["ids"][row, t]]
            losses.append(_uld(merged, batch["teacher_probs"][row, k]))
    return torch.stack(losses).mean()


def right(model, batch):
    probs = model(batch["ids"]).softmax(-1)[:, :-1]
    losses = []
    for row in range(len(batch["ids"])):
        for k, (start, length) in enumerate(zip(batch["group_start"][row].tolist(), batch["group_length"][row].tolist())):
            merged = probs[row, start + length - 2]
            for t in range(start, start + length - 1):
                merged = merged * probs[row, t - 1, batch["ids"][row, t]]
            losses.append(_uld(merged, batch["teacher_probs"][row, k]))
    return torch.stack(losses).mean()


if __name__ == "__main__":
    batch = make(0)
    model = batch.pop("model")
    grads = []
    for fn in (broken, right):
        model.zero_grad()
        loss = fn(model, batch)
        loss.backward()
        grads.append(model.head.weight.grad.clone())
        print(fn.__name__, loss.item())
    relative = ((grads[0] - grads[1]).norm() / grads[1].norm()).item()
    print("relative difference of the gradient", relative)
    assert relative > 0.05
