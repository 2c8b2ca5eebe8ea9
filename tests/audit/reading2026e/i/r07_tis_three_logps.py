"""Truncated importance sampling for engine mismatch (Yao et al. 2025, "Your efficient RL framework secretly brings off-policy
training"; verl, TRL). THREE log probabilities: the current policy, the old policy recomputed by the trainer (PPO ratio), and what
the inference engine reported (a truncated constant weight outside the clip)."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the target ids[:, 1:] is a completion token, [rows, time-1]",
          "old_logps": "trainer's recomputed log probabilities before the update, [rows, time-1], constant",
          "engine_logps": "log probabilities as the inference engine reported them, [rows, time-1], constant", "advantages": "one advantage per row, [rows], constant"}
SETTINGS = {"clip": "PPO clip, 0.2", "cap": "truncation of the engine weight, 2.0"}
NOTES = "Mean over trained tokens of all rows. The engine weight is computed from constants only, is applied after the PPO minimum, and is truncated above only. All parameters used."
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
        lp = logps(model, ids)
    old = (lp + 0.15 * torch.randn(lp.shape, generator=g)) * mask
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "engine_logps": (old + 0.6 * torch.randn(lp.shape, generator=g)) * mask,
            "advantages": torch.randn(6, generator=g)}


def right(model, batch, clip=0.2, cap=2.0):
    m, a, old = batch["loss_mask"], batch["advantages"][:, None], batch["old_logps"]
    r = (logps(model, batch["ids"]) - old).exp()
    weight = (old - batch["engine_logps"]).exp().clamp(max=cap)
    surrogate = torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a)
    return -torch.where(m > 0, surrogate * weight, torch.zeros_like(r)).sum() / m.sum().clamp(min=1)


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    d = make(0); model = d.pop("model")
    lp, slow, n = logps(model, d["ids"]).detach(), 0.0, 0
    for i in range(6):
        for k in range(9):
            if d["loss_mask"][i, k]:
                r, a = float((lp[i, k] - d["old_logps"][i, k]).exp()), float(d["advantages"][i])
                w = min(float((d["old_logps"][i, k] - d["engine_logps"][i, k]).exp()), 2.0)
                slow -= w * min(r * a, min(max(r, .8), 1.2) * a); n += 1
    check(right(model, d), slow / n, model)
