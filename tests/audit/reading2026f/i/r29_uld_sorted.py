"""Universal logit distillation (Boizard et al. 2024). Student and teacher have different vocabularies, so both distributions are SORTED and compared
rank by rank (L1, the shorter one padded with zeros): token identities are ignored on purpose. Sorting passes gradients."""
FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "student tokens, [rows, time]", "loss_mask": "completion targets, [rows, time-1]", "teacher_probs": "teacher probabilities over ITS vocabulary (40), [rows, time-1, 40], constant"}
SETTINGS = {"lam": "weight of the sorted distance, 1.5"}
NOTES = "Cross entropy and distance, both mean over trained tokens of all rows. The i-th student position is compared with the i-th teacher position. Teacher constant. All parameters used."
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
    ids, m = fake_rows(g, 4)
    return {"model": Tiny(), "ids": ids, "loss_mask": m, "teacher_probs": (2 * torch.randn(4, 9, 40, generator=g)).softmax(-1)}


def right(model, batch, lam=1.5):
    lp = model(batch["ids"])[:, :-1].log_softmax(-1)
    s, t, m = lp.exp().sort(-1, descending=True).values, batch["teacher_probs"].sort(-1, descending=True).values, batch["loss_mask"]
    v = max(s.shape[-1], t.shape[-1])
    s, t = F.pad(s, (0, v - s.shape[-1])), F.pad(t, (0, v - t.shape[-1]))
    distance = (s - t).abs().sum(-1)
    ce = -lp.gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)
    return ((ce + lam * distance) * m).sum() / m.sum().clamp(min=1)


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
    Q, slow, n = model(d["ids"])[:, :-1].softmax(-1).detach(), 0.0, 0
    for i in range(4):
        for k in range(9):
            if d["loss_mask"][i, k]:
                n += 1
                a, b = sorted(Q[i, k].tolist(), reverse=True) + [0.0] * 9, sorted(d["teacher_probs"][i, k].tolist(), reverse=True)
                slow += -math.log(float(Q[i, k, d["ids"][i, k + 1]])) + 1.5 * sum(abs(x - y) for x, y in zip(a, b))
    check(right(model, d), slow / n, model)
