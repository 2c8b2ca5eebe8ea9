"""Linear-attention state restarts on every sequence shard. huggingface/accelerate#4177,
https://github.com/huggingface/accelerate/pull/4177, 2026. Sequence parallelism wraps the attention interface, but a
linear-attention layer computes its recurrence inside the layer, so each rank starts it from zero on its own piece of
the sequence. The first shard's forward stays right while its gradient lacks what later shards would send back; the
accelerate change refuses such models. The right version here hands the state to the next shard."""
FAMILY = "sharding"
KIND = "loss"
import torch
import torch.nn as nn
import torch.nn.functional as F
INPUTS = {"ids": "token ids, [rows, time]", "targets": "already shifted next tokens, -100 = not trained, [rows, time]"}
SETTINGS = {"shards": "sequence shards (ranks simulated in one process), 2; time must divide by it"}
NOTES = ("Cross entropy, mean over trained tokens of all rows and shards. The result must not depend on `shards`.")


class RecurrentLM(nn.Module):
    def __init__(self, vocab=23, width=12):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.gate = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, state=None):
        x = self.tok(ids)
        keep, add = torch.sigmoid(self.gate(x) + 2), self.value(x)
        state = torch.zeros_like(x[:, 0]) if state is None else state
        out = []
        for t in range(x.shape[1]):
            state = keep[:, t] * state + add[:, t]
            out.append(x[:, t] + torch.tanh(state))
        return self.head(torch.stack(out, 1)), state


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 23, (3, 12))
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    targets[1, :4] = -100
    return {"model": RecurrentLM(), "ids": ids, "targets": targets}


def _run(model, batch, shards, carry):
    total, state = 0.0, None
    for ids, targets in zip(batch["ids"].chunk(shards, 1), batch["targets"].chunk(shards, 1)):
        logits, last = model(ids, state if carry else None)
        state = last
        total = total + F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total / (batch["targets"] != -100).sum()


def broken(model, batch, shards=2):
    return _run(model, batch, shards, carry=False)


def right(model, batch, shards=2):
    return _run(model, batch, shards, carry=True)


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
    data = make(0)
    model = data.pop("model")
    print("one shard", right(model, data, shards=1).item())
