"""Top-k teacher log probabilities with a remainder bucket (as in offline distillation with stored top-k). The teacher's k log probabilities do NOT
sum to one and are not renormalised: the rest of the mass is one extra class, for teacher and student alike, through log1p(-sum)."""
FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "[rows, time]", "loss_mask": "completion targets, [rows, time-1]", "top_ids": "teacher's k best tokens, [rows, time-1, k]", "top_logps": "their log probabilities under the teacher's full softmax, [rows, time-1, k], constant"}
SETTINGS = {}
NOTES = "Forward KL over k+1 classes, mean over trained tokens of all rows. It is a lower bound of the full KL. The sampled next token is not used as a label, only through the context. All parameters used."
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
    lp, idx = (2 * torch.randn(4, 9, 31, generator=g)).log_softmax(-1).topk(5, -1)
    return {"model": Tiny(), "ids": ids, "loss_mask": m, "top_ids": idx, "top_logps": lp}


def with_rest(lp):
    rest = torch.log1p(-lp.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
    return torch.cat([lp, rest], -1)


def right(model, batch):
    lq = with_rest(model(batch["ids"])[:, :-1].log_softmax(-1).gather(-1, batch["top_ids"]))
    lp, m = with_rest(batch["top_logps"]), batch["loss_mask"]
    per_token = (lp.exp() * (lp - lq)).sum(-1)
    return (per_token * m).sum() / m.sum().clamp(min=1)


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
                p, q = [math.exp(x) for x in d["top_logps"][i, k].tolist()], [float(Q[i, k, j]) for j in d["top_ids"][i, k]]
                p.append(1 - sum(p)); q.append(1 - sum(q))
                slow += sum(a * math.log(a / b) for a, b in zip(p, q))
    check(right(model, d), slow / n, model)
