"""Dual-clip PPO (Ye et al. 2020, verl's clip_ratio_c). For negative advantages the pessimistic surrogate is bounded a second time
by c*A, so a token with a huge ratio and A < 0 has NO gradient; looks like a min/max mix-up."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the target ids[:, 1:] is a completion token, [rows, time-1]",
          "old_logps": "log probabilities of the targets under the sampling policy, [rows, time-1], constant", "advantages": "advantage per token, [rows, time-1], constant"}
SETTINGS = {"clip": "PPO clip, 0.2", "c": "second bound for negative advantages, 3.0 (must exceed 1)"}
NOTES = "Mean over the trained tokens of each row, then mean over rows. Clipped surrogate with per-token advantages. old_logps and advantages are constants. All parameters used."
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
    model = Tiny()
    ids, mask = fake_rows(g, 6)
    with torch.no_grad():
        old = logps(model, ids)
    old = (old + 0.9 * torch.randn(old.shape, generator=g)) * mask
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "advantages": torch.randn(old.shape, generator=g) * mask}


def right(model, batch, clip=0.2, c=3.0):
    m, a = batch["loss_mask"], batch["advantages"]
    r = ((logps(model, batch["ids"]) - batch["old_logps"]) * m).exp()
    upper = torch.maximum(-a * r, -a * r.clamp(1 - clip, 1 + clip))
    per_token = torch.where(a < 0, torch.minimum(upper, -a * c), upper)
    return ((per_token * m).sum(1) / m.sum(1).clamp(min=1)).mean()


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    d = make(0); model = d.pop("model")
    lp, slow = logps(model, d["ids"]).detach(), 0.0
    for i in range(6):
        row = []
        for k in range(9):
            if d["loss_mask"][i, k]:
                r, a = float((lp[i, k] - d["old_logps"][i, k]).exp()), float(d["advantages"][i, k])
                obj = min(r * a, min(max(r, 0.8), 1.2) * a)
                row.append(-(max(obj, 3.0 * a) if a < 0 else obj))
        slow += sum(row) / len(row) / 6
    check(right(model, d), slow, model)
