"""Context parallelism with a zigzag cut: rank i holds the pieces i and 2n-1-i of the sequence, so its time axis is not in order.
Labels are shifted before the cut (the successor of a piece's last token lives on another rank), positions travel with the
tokens, and causality is decided by positions, not by storage order."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids in natural order, [rows, time]", "labels": "not shifted, -100 where not trained, [rows, time]"}
SETTINGS = {"ranks": "context-parallel ranks, 3; time is a multiple of 2*ranks"}
NOTES = "Cross entropy, mean over the trained tokens of all ranks. Ranks are simulated; keys and values are gathered in storage order."

class PositionLM(nn.Module):
    """Attention is causal in position_ids, whatever the order of the tokens in memory."""
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, dim), nn.Embedding(64, dim)
        self.q, self.k, self.v, self.head = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, vocab)

    def forward(self, ids, position_ids):
        x = self.emb(ids) + self.pos(position_ids)
        allowed = position_ids[:, :, None] >= position_ids[:, None, :]
        scores = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        return self.head(x + scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ self.v(x))

def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 32, (2, 18))
    labels = ids.clone()
    labels[:, :5] = -100
    return {"model": PositionLM(), "ids": ids, "labels": labels}

def right(model, batch, ranks=3):
    rows, time = batch["ids"].shape
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    pieces = torch.arange(time).chunk(2 * ranks)
    owned = [torch.cat([pieces[i], pieces[2 * ranks - 1 - i]]) for i in range(ranks)]
    order = torch.cat(owned)                               # how the ranks store the sequence
    logits = model(batch["ids"][:, order], order.expand(rows, time))
    total, count, start = 0.0, 0, 0
    for mine in owned:
        local = logits[:, start:start + len(mine)]
        target = labels[:, mine]
        total = total + F.cross_entropy(local.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
        count, start = count + (target != -100).sum(), start + len(mine)
    return total / count

def grads(fn):
    d = make(0)
    model = d.pop("model")
    out = fn(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

if __name__ == "__main__":
    loss, grad = grads(right)
    def plain(model, batch):
        logits = model(batch["ids"], torch.arange(18).expand(2, 18))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
    loss2, grad2 = grads(plain)
    print("loss", loss, loss2, "gradient difference", (grad - grad2).norm().item())
    assert abs(loss - loss2) < 1e-5 and (grad - grad2).norm() < 1e-4 and grad.norm() > 0
