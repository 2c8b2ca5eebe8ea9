"""DPO-Positive (Smaug, Pal et al. 2024). A penalty lambda * max(0, ref - policy) of the CHOSEN row alone sits inside the sigmoid, so the chosen
answer's gradient is (1 + lambda) times larger while it is less likely than under the reference. Looks like an asymmetric DPO bug."""
FAMILY = "preference"
KIND = "loss"
INPUTS = {"chosen_ids": "[pairs, time]", "chosen_mask": "[pairs, time-1]", "rejected_ids": "[pairs, time]", "rejected_mask": "[pairs, time-1]",
          "ref_chosen": "summed reference log probability, [pairs], constant", "ref_rejected": "same for rejected, [pairs], constant"}
SETTINGS = {"beta": "0.3", "lam": "penalty weight, 5.0"}
NOTES = "Mean over pairs; completion log probabilities summed. Reference values constant. Penalty inside the sigmoid, within beta. All parameters used."
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
    ci, cm = fake_rows(g, 5); ri, rm = fake_rows(g, 5); ri[:, :3] = ci[:, :3]
    with torch.no_grad():
        return {"model": model, "chosen_ids": ci, "chosen_mask": cm, "rejected_ids": ri, "rejected_mask": rm, "ref_chosen": row_sum(ref, ci, cm), "ref_rejected": row_sum(ref, ri, rm)}


def right(model, batch, beta=0.3, lam=5.0):
    c = row_sum(model, batch["chosen_ids"], batch["chosen_mask"]) - batch["ref_chosen"]
    r = row_sum(model, batch["rejected_ids"], batch["rejected_mask"]) - batch["ref_rejected"]
    return -F.logsigmoid(beta * (c - r - lam * F.relu(-c))).mean()


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    import math
    d = make(0); model = d.pop("model"); slow = 0.0
    for i in range(5):
        h = {s: sum(float(x) for x, k in zip(logps(model, d[s + "_ids"][i:i + 1])[0].detach(), d[s + "_mask"][i]) if k) - float(d["ref_" + s][i]) for s in ("chosen", "rejected")}
        slow += math.log(1 + math.exp(-0.3 * (h["chosen"] - h["rejected"] - 5 * max(0.0, -h["chosen"])))) / 5
    check(right(model, d), slow, model)
