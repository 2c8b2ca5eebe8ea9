"""On-policy distillation (Thinking Machines 2025; Gu et al. 2023). The per-token reverse KL, teacher minus student log probability of the student's OWN
token, is used as a constant advantage in an unclipped importance-sampling loss: no reward, no baseline, no discount (discount zero)."""
FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "sampled by the student, [rows, time]", "loss_mask": "completion targets, [rows, time-1]", "sampler_logps": "student log probabilities at sampling, [rows, time-1], constant", "teacher_logps": "teacher log probabilities of the same tokens, [rows, time-1], constant"}
SETTINGS = {}
NOTES = "SUM over trained tokens of all rows (as the Tinker importance_sampling loss), not a mean: doubling the rows doubles the loss. The advantage is a constant from sampler_logps, not from the current policy. All parameters used."
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
    model = Tiny(); ids, m = fake_rows(g, 5)
    with torch.no_grad():
        lp, tp = logps(model, ids), logps(Tiny(), ids)
    return {"model": model, "ids": ids, "loss_mask": m, "sampler_logps": (lp + 0.1 * torch.randn(lp.shape, generator=g)) * m, "teacher_logps": tp * m}


def right(model, batch):
    m = batch["loss_mask"]
    advantage = batch["teacher_logps"] - batch["sampler_logps"]
    ratio = ((logps(model, batch["ids"]) - batch["sampler_logps"]) * m).exp()
    return -(ratio * advantage * m).sum()


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
    lp, slow = logps(model, d["ids"]).detach(), 0.0
    for i in range(5):
        for k in range(9):
            if d["loss_mask"][i, k]:
                s = float(d["sampler_logps"][i, k])
                slow -= math.exp(float(lp[i, k]) - s) * (float(d["teacher_logps"][i, k]) - s)
    check(right(model, d), slow, model)
