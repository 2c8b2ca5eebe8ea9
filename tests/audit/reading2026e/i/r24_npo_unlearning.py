"""Negative preference optimisation for unlearning (Zhang et al. 2024). The forget rows enter as the rejected half of DPO with no chosen half:
2/beta * softplus(beta * log ratio) pushes their likelihood DOWN; the retain rows carry plain cross entropy. Ascent on data is the aim."""
FAMILY = "preference"
KIND = "loss"
INPUTS = {"forget_ids": "[rows, time]", "forget_mask": "[rows, time-1]", "forget_ref_logps": "summed log probability under the model before unlearning, [rows], constant",
          "retain_ids": "[rows, time]", "retain_mask": "[rows, time-1]"}
SETTINGS = {"beta": "0.1 (2/beta multiplies, so the gradient stays of order one)", "retain_weight": "1.0"}
NOTES = "Forget: mean over rows of sums over tokens. Retain: mean over trained tokens. For beta -> 0 this is gradient ascent (up to a constant). All parameters used."
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
    model, ref = Tiny(), Tiny()
    fi, fm = fake_rows(g, 4); ri, rm = fake_rows(g, 4)
    with torch.no_grad():
        return {"model": model, "forget_ids": fi, "forget_mask": fm, "forget_ref_logps": (logps(ref, fi) * fm).sum(1), "retain_ids": ri, "retain_mask": rm}


def right(model, batch, beta=0.1, retain_weight=1.0):
    h = (logps(model, batch["forget_ids"]) * batch["forget_mask"]).sum(1) - batch["forget_ref_logps"]
    forget = 2 / beta * F.softplus(beta * h).mean()
    m = batch["retain_mask"]
    retain = -(logps(model, batch["retain_ids"]) * m).sum() / m.sum().clamp(min=1)
    return forget + retain_weight * retain, {"forget": forget.item(), "retain": retain.item()}


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    import math
    d = make(0); model = d.pop("model"); slow, tot, n = 0.0, 0.0, 0
    for i in range(4):
        v = lambda s: [float(x) for x, k in zip(logps(model, d[s + "_ids"][i:i + 1])[0].detach(), d[s + "_mask"][i]) if k]
        slow += 20 * math.log(1 + math.exp(0.1 * (sum(v("forget")) - float(d["forget_ref_logps"][i])))) / 4
        tot -= sum(v("retain")); n += len(v("retain"))
    check(right(model, d)[0], slow + tot / n, model)
