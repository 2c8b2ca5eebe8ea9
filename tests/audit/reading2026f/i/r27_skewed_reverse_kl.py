"""DistiLLM's skewed reverse KL (Ko et al. 2024): KL(student || alpha*student + (1-alpha)*teacher). The student stands on BOTH sides and takes gradient
on both; the mixture keeps the ratio finite (bounded by 1/alpha) even where the teacher is zero."""
FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "[rows, time]", "loss_mask": "completion targets, [rows, time-1]", "teacher_probs": "teacher probabilities, some exactly 0, [rows, time-1, vocabulary], constant"}
SETTINGS = {"alpha": "share of the student in the mixture, 0.1"}
NOTES = "Mean over trained tokens of all rows. The mixture is formed in probability space, not on logits. No temperature. Teacher constant. All parameters used."
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
    p = torch.randn(4, 9, 31, generator=g).exp() * (torch.rand(4, 9, 31, generator=g) > 0.3)
    return {"model": Tiny(), "ids": ids, "loss_mask": m, "teacher_probs": p / p.sum(-1, keepdim=True)}


def right(model, batch, alpha=0.1):
    lq = model(batch["ids"])[:, :-1].log_softmax(-1)
    q, m = lq.exp(), batch["loss_mask"]
    mix = alpha * q + (1 - alpha) * batch["teacher_probs"]
    per_token = (q * (lq - mix.log())).sum(-1)
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
    Q, slow, n = model(d["ids"])[:, :-1].softmax(-1).detach().tolist(), 0.0, 0
    for i in range(4):
        for k in range(9):
            if d["loss_mask"][i, k]:
                n += 1
                slow += sum(q * math.log(q / (0.1 * q + 0.9 * p)) for q, p in zip(Q[i][k], d["teacher_probs"][i, k].tolist()))
    check(right(model, d), slow / n, model)
