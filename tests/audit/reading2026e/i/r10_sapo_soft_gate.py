"""SAPO (Gao et al. 2025, soft adaptive policy optimisation). The clip is replaced by sigmoid(tau (r-1)) * 4/tau: at r = 1 its slope is
exactly 1, and negative advantages use a LARGER temperature so that they fade faster. The value at r = 1 is 2/tau, not 1."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the target ids[:, 1:] is a completion token, [rows, time-1]",
          "old_logps": "log probabilities under the sampling policy, [rows, time-1], constant", "advantages": "one advantage per row, [rows], constant"}
SETTINGS = {"tau_pos": "temperature for positive advantages, 1.0", "tau_neg": "temperature for the others, 1.05"}
NOTES = "Mean over the tokens of a row, then mean over rows. Ratio-based, no hard clip; the constant 4/tau makes the on-policy gradient equal to plain policy gradient. All parameters used."
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
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": (old + 0.3 * torch.randn(old.shape, generator=g)) * mask, "advantages": torch.randn(6, generator=g)}


def right(model, batch, tau_pos=1.0, tau_neg=1.05):
    m, a = batch["loss_mask"], batch["advantages"][:, None]
    r = ((logps(model, batch["ids"]) - batch["old_logps"]) * m).exp()
    tau = torch.where(a > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (r - 1)) * 4 / tau
    return -((gate * a * m).sum(1) / m.sum(1).clamp(min=1)).mean()


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
    for i in range(6):
        a, row = float(d["advantages"][i]), []
        t = 1.0 if a > 0 else 1.05
        for k in range(9):
            if d["loss_mask"][i, k]:
                r = float((lp[i, k] - d["old_logps"][i, k]).exp())
                row.append(-a * 4 / t / (1 + math.exp(-t * (r - 1))))
        slow += sum(row) / len(row) / 6
    check(right(model, d), slow, model)
    # on-policy: same gradient as plain policy gradient
    d["old_logps"] = logps(model, d["ids"]).detach()
    m = d["loss_mask"]
    plain = -((logps(model, d["ids"]) * d["advantages"][:, None] * m).sum(1) / m.sum(1)).mean()
    for x, y in zip(torch.autograd.grad(right(model, d), model.parameters()), torch.autograd.grad(plain, model.parameters())):
        assert torch.allclose(x, y, atol=1e-6)
