"""Unlikelihood training (Welleck et al. 2019). Every earlier token of the row (except the current target itself and padding) is a negative candidate, whose
probability is pushed down with -log(1-p). Training on "wrong" tokens with the opposite sign is the aim. Each candidate counts once."""
FAMILY = "auxiliary"
KIND = "loss"
INPUTS = {"ids": "[rows, time], right-padded with 0", "loss_mask": "1 on trained targets, [rows, time-1]"}
SETTINGS = {"alpha": "weight of the unlikelihood part, 1.0"}
NOTES = "Mean over trained tokens of all rows of (cross entropy + alpha * sum over the distinct candidates). Candidates of target t are the tokens ids[:, 0..t-1]. All parameters used."
import torch
import torch.nn as nn
import torch.nn.functional as F


class Tiny(nn.Module):
    """Causal language model: ids [rows, time] -> logits [rows, time, vocabulary]."""
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]): [rows, time-1]."""
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def fake_rows(g, rows, time=10, prompt=3, vocab=31):
    """Right-padded ids (pad = 0) and the mask [rows, time-1] of the targets ids[:, 1:] that belong to the completion."""
    ids = torch.randint(1, vocab, (rows, time), generator=g)
    n = torch.randint(2, time - prompt + 1, (rows,), generator=g)
    pos = torch.arange(time)
    ids[pos >= (prompt + n)[:, None]] = 0
    mask = ((pos >= prompt) & (pos < (prompt + n)[:, None])).float()
    return ids, mask[:, 1:]

def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    ids, m = fake_rows(g, 5, vocab=12)
    return {"model": Tiny(), "ids": ids, "loss_mask": m}


def right(model, batch, alpha=1.0):
    ids, m = batch["ids"], batch["loss_mask"]
    lp = model(ids)[:, :-1].log_softmax(-1)
    y = ids[:, 1:, None]
    seen = F.one_hot(ids[:, :-1], lp.shape[-1]).cumsum(1).clamp(max=1)       # tokens up to and including the input position
    seen = seen.scatter(-1, y, 0)
    seen[..., 0] = 0
    ul = -(torch.log((1 - lp.exp()).clamp(min=1e-5)) * seen).sum(-1)
    return ((-lp.gather(-1, y).squeeze(-1) + alpha * ul) * m).sum() / m.sum().clamp(min=1)


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    import math
    d = make(0); model = d.pop("model")
    P, slow, n = model(d["ids"])[:, :-1].softmax(-1).detach(), 0.0, 0
    for i in range(5):
        for k in range(9):
            if d["loss_mask"][i, k]:
                row, n = d["ids"][i].tolist(), n + 1
                slow += -math.log(float(P[i, k, row[k + 1]])) - sum(math.log(1 - float(P[i, k, c])) for c in set(row[:k + 1]) - {row[k + 1], 0})
    check(right(model, d), slow / n, model)
