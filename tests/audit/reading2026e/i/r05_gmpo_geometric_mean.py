"""GMPO (Zhao et al. 2025, geometric-mean policy optimisation). Tokens are clipped one by one in LOG space, in the direction of the
advantage's sign, and then averaged in log space: the loss is A times a product of ratios to the power 1/length."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the target ids[:, 1:] is a completion token, [rows, time-1]",
          "old_logps": "log probabilities of the targets under the sampling policy, [rows, time-1], constant", "advantages": "one advantage per row, [rows], constant"}
SETTINGS = {"log_clip": "bound of the log ratio, 0.4 (so the ratio lies in exp(-0.4) .. exp(0.4))"}
NOTES = "Mean over rows of -A * geometric mean of clipped ratios. Only the pessimistic side is clipped: log ratios that hurt are kept whole. old_logps and advantages are constants. All parameters used."
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
    old = (old + 0.5 * torch.randn(old.shape, generator=g)) * mask
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "advantages": torch.randn(6, generator=g)}


def right(model, batch, log_clip=0.4):
    m, a = batch["loss_mask"], batch["advantages"]
    sign = torch.where(a >= 0, 1.0, -1.0)[:, None]
    signed = sign * (logps(model, batch["ids"]) - batch["old_logps"])
    kept = sign * torch.minimum(signed, signed.clamp(-log_clip, log_clip))
    ratio = ((kept * m).sum(1) / m.sum(1).clamp(min=1)).exp()
    return -(a * ratio).mean()


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
        a, prod, n = float(d["advantages"][i]), 1.0, 0
        for k in range(9):
            if d["loss_mask"][i, k]:
                r = float((lp[i, k] - d["old_logps"][i, k]).exp()); n += 1
                prod *= min(r, 2.718281828 ** 0.4) if a >= 0 else max(r, 2.718281828 ** -0.4)
        slow -= a * prod ** (1 / n) / 6
    check(right(model, d), slow, model)
