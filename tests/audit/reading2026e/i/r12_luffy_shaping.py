"""LUFFY (Yan et al. 2025). A mixed batch: rows sampled by the policy get a clipped ratio against old_logps; rows written by a stronger
model have no log probability at all and get the shaped probability p/(p+0.1), without clip and without denominator."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the target ids[:, 1:] is a completion token, [rows, time-1]",
          "off_policy": "1 for rows written by another model, [rows]", "old_logps": "log probabilities under the sampling policy, [rows, time-1]; zeros (unused) in off-policy rows, constant",
          "advantages": "one advantage per row over the mixed group, [rows], constant"}
SETTINGS = {"clip": "PPO clip of the on-policy rows, 0.2", "gamma": "shaping constant of the off-policy rows, 0.1"}
NOTES = "Mean over all trained tokens of both sorts of rows together. old_logps of off-policy rows are never read, by torch.where on a safe input. Advantages are constants. All parameters used."
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
    off = torch.tensor([0., 0., 0., 0., 1., 1.])
    with torch.no_grad():
        old = logps(model, ids)
    old = (old + 0.2 * torch.randn(old.shape, generator=g)) * mask * (1 - off)[:, None]
    return {"model": model, "ids": ids, "loss_mask": mask, "off_policy": off, "old_logps": old, "advantages": torch.randn(6, generator=g)}


def right(model, batch, clip=0.2, gamma=0.1):
    m, a = batch["loss_mask"], batch["advantages"][:, None]
    off = batch["off_policy"][:, None] > 0
    lp = logps(model, batch["ids"])
    r = (lp - torch.where(off, lp.detach(), batch["old_logps"])).exp()
    on = torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a)
    p = lp.exp()
    objective = torch.where(off, p / (p + gamma) * a, on)
    return -(objective * m).sum() / m.sum().clamp(min=1)


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
        a = float(d["advantages"][i])
        for k in range(9):
            if d["loss_mask"][i, k]:
                n += 1
                if d["off_policy"][i]:
                    p = float(lp[i, k].exp()); slow -= a * p / (p + 0.1)
                else:
                    r = float((lp[i, k] - d["old_logps"][i, k]).exp()); slow -= min(r * a, min(max(r, .8), 1.2) * a)
    check(right(model, d), slow / n, model)
