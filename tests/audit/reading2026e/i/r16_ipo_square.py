"""IPO (Azar et al. 2023), in the form of TRL: a squared error that pulls the AVERAGE-per-token log-ratio margin to 1/(2 beta). A pair that
is already preferred too strongly is pushed back, and a smaller beta asks for a larger margin."""
FAMILY = "preference"
KIND = "loss"
INPUTS = {"chosen_ids": "[pairs, time]", "chosen_mask": "completion targets, [pairs, time-1]", "rejected_ids": "[pairs, time]", "rejected_mask": "[pairs, time-1]",
          "ref_chosen": "reference's mean log probability per token of the chosen completion, [pairs], constant", "ref_rejected": "the same for the rejected one, constant"}
SETTINGS = {"beta": "regularisation, 0.5; 1/(2 beta) is the target margin"}
NOTES = "Mean over pairs. Log probabilities are averaged over the tokens of each completion (as the IPO authors confirmed for TRL). The loss is not monotone in the margin. All parameters used."
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

def row_mean(model, ids, m):
    return (logps(model, ids) * m).sum(1) / m.sum(1).clamp(min=1)


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    model, ref = Tiny(), Tiny()
    ci, cm = fake_rows(g, 4); ri, rm = fake_rows(g, 4)
    with torch.no_grad():
        return {"model": model, "chosen_ids": ci, "chosen_mask": cm, "rejected_ids": ri, "rejected_mask": rm, "ref_chosen": row_mean(ref, ci, cm), "ref_rejected": row_mean(ref, ri, rm)}


def right(model, batch, beta=0.5):
    c = row_mean(model, batch["chosen_ids"], batch["chosen_mask"]) - batch["ref_chosen"]
    r = row_mean(model, batch["rejected_ids"], batch["rejected_mask"]) - batch["ref_rejected"]
    return (c - r - 1 / (2 * beta)).square().mean(), {"margin": (c - r).mean().item()}


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    d = make(0); model = d.pop("model")
    slow = 0.0
    for i in range(4):
        h = []
        for s in ("chosen", "rejected"):
            lp = logps(model, d[s + "_ids"][i:i + 1])[0].detach()
            v = [float(x) for x, m in zip(lp, d[s + "_mask"][i]) if m]
            h.append(sum(v) / len(v) - float(d["ref_" + s][i]))
        slow += (h[0] - h[1] - 1.0) ** 2 / 4
    check(right(model, d)[0], slow, model)
