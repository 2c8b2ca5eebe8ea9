"""KTO (Ethayarajh et al. 2024). Unpaired rows with a thumbs-up or thumbs-down; the reference point z0 is a KL estimate from MISMATCHED
prompt-completion rows (each prompt with its neighbour's completion), detached and clamped at zero, and shared by the whole batch."""
FAMILY = "preference"
KIND = "loss"
INPUTS = {"ids": "[rows, time]", "loss_mask": "completion targets, [rows, time-1]", "ref_logps": "summed reference log probability per row, [rows], constant", "label": "1 desirable, 0 undesirable, [rows]",
          "kl_ids": "prompt of row i with the completion of row i-1 (cyclic), [rows, time]", "kl_mask": "[rows, time-1]", "kl_ref_logps": "summed reference log probability of these, [rows], constant"}
SETTINGS = {"beta": "0.1", "w_pos": "weight of desirable rows, 1.0", "w_neg": "weight of undesirable rows, 1.33"}
NOTES = "Sum of weighted row losses divided by the number of rows (not by the sum of weights), as in TRL. The mismatched rows carry no gradient, on purpose. The loss of a row depends on the others of the batch through z0. At least two rows. All parameters used."
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

def row_sum(model, ids, m):
    return (logps(model, ids) * m).sum(1)


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    model, ref = Tiny(), Tiny()
    ids, m = fake_rows(g, 6)
    kid = torch.cat([ids[:, :3], ids.roll(1, 0)[:, 3:]], 1); km = m.roll(1, 0)
    with torch.no_grad():
        return {"model": model, "ids": ids, "loss_mask": m, "ref_logps": row_sum(ref, ids, m), "label": torch.tensor([1, 0, 1, 0, 0, 1])[torch.randperm(6, generator=g)],
                "kl_ids": kid, "kl_mask": km, "kl_ref_logps": row_sum(ref, kid, km)}


def right(model, batch, beta=0.1, w_pos=1.0, w_neg=1.33):
    h = row_sum(model, batch["ids"], batch["loss_mask"]) - batch["ref_logps"]
    with torch.no_grad():
        z0 = (row_sum(model, batch["kl_ids"], batch["kl_mask"]) - batch["kl_ref_logps"]).mean().clamp(min=0)
    good = batch["label"] > 0
    loss = torch.where(good, w_pos * (1 - torch.sigmoid(beta * (h - z0))), w_neg * (1 - torch.sigmoid(beta * (z0 - h))))
    return loss.mean(), {"z0": z0.item()}


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
    S = lambda ids, m, i: sum(float(x) for x, k in zip(logps(model, ids[i:i + 1])[0].detach(), m[i]) if k)
    z0 = max(0.0, sum(S(d["kl_ids"], d["kl_mask"], i) - float(d["kl_ref_logps"][i]) for i in range(6)) / 6)
    slow = 0.0
    for i in range(6):
        h = S(d["ids"], d["loss_mask"], i) - float(d["ref_logps"][i])
        sg = lambda x: 1 / (1 + math.exp(-x))
        slow += (1 - sg(0.1 * (h - z0)) if d["label"][i] else 1.33 * (1 - sg(0.1 * (z0 - h)))) / 6
    check(right(model, d)[0], slow, model)
