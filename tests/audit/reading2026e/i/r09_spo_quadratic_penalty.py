"""Simple Policy Optimization (Xie et al. 2024). No clip: the surrogate carries |A|/(2 eps) (r-1)^2, a parabola whose top lies exactly
on r = 1 + sign(A) eps, so outside the trust region the gradient turns BACK. The penalty uses |A|, which looks like a missing sign."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the target ids[:, 1:] is a completion token, [rows, time-1]",
          "old_logps": "log probabilities under the sampling policy, [rows, time-1], constant", "advantages": "one advantage per row, [rows], constant"}
SETTINGS = {"eps": "trust region half width, 0.2 (it divides the penalty)"}
NOTES = "Mean over trained tokens of all rows. Ratio-based surrogate without any clip or minimum. old_logps and advantages are constants. All parameters used."
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
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": (old + 0.2 * torch.randn(old.shape, generator=g)) * mask, "advantages": torch.randn(6, generator=g)}


def right(model, batch, eps=0.2):
    m, a = batch["loss_mask"], batch["advantages"][:, None]
    gap = torch.expm1((logps(model, batch["ids"]) - batch["old_logps"]) * m)      # r - 1
    per_token = -(1 + gap) * a + a.abs() / (2 * eps) * gap.square()
    return (per_token * m).sum() / m.sum().clamp(min=1)


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
                slow += -r * a + abs(a) / 0.4 * (r - 1) ** 2; n += 1
    check(right(model, d), slow / n, model)
    for a in (2.0, -3.0):      # the gradient is zero exactly on the edge of the trust region
        r = torch.tensor(1 + 0.2 * (1 if a > 0 else -1), requires_grad=True)
        (-r * a + abs(a) / 0.4 * (r - 1) ** 2).backward(); assert abs(float(r.grad)) < 1e-5
