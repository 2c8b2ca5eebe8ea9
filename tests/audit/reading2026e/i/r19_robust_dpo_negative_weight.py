"""Robust DPO (Chowdhury et al. 2024). The flipped-label loss is SUBTRACTED and the whole divided by 1-2 eps: an unbiased estimate of the
noise-free DPO loss when labels are flipped with probability eps. The loss may be negative; cDPO, by contrast, adds."""
FAMILY = "preference"
KIND = "loss"
INPUTS = {"chosen_ids": "[pairs, time]", "chosen_mask": "[pairs, time-1]", "rejected_ids": "[pairs, time]", "rejected_mask": "[pairs, time-1]",
          "ref_margin": "reference's summed log probability of chosen minus rejected, [pairs], constant"}
SETTINGS = {"beta": "0.1", "eps": "probability that a label is flipped, 0.2 (below 0.5; 1-2*eps divides)"}
NOTES = "Mean over pairs, completion log probabilities summed. May be negative. In expectation over the flips it equals DPO on the true labels. All parameters used."
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

def margin(model, b):
    return (logps(model, b["chosen_ids"]) * b["chosen_mask"]).sum(1) - (logps(model, b["rejected_ids"]) * b["rejected_mask"]).sum(1)


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    model, ref = Tiny(), Tiny()
    ci, cm = fake_rows(g, 5); ri, rm = fake_rows(g, 5); ri[:, :3] = ci[:, :3]
    b = {"chosen_ids": ci, "chosen_mask": cm, "rejected_ids": ri, "rejected_mask": rm}
    with torch.no_grad():
        return {"model": model, **b, "ref_margin": margin(ref, b)}


def right(model, batch, beta=0.1, eps=0.2):
    x = beta * (margin(model, batch) - batch["ref_margin"])
    return ((-(1 - eps) * F.logsigmoid(x) + eps * F.logsigmoid(-x)) / (1 - 2 * eps)).mean()


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
    x = (0.1 * (margin(model, d) - d["ref_margin"])).detach().tolist()
    L = lambda v: math.log(1 + math.exp(-v))
    check(right(model, d), sum((0.8 * L(v) - 0.2 * L(-v)) / 0.6 for v in x) / 5, model)
    for v in x:   # unbiased: 0.8 * loss(true label) + 0.2 * loss(flipped label) = DPO
        est = lambda s: (0.8 * L(s) - 0.2 * L(-s)) / 0.6
        assert abs(0.8 * est(v) + 0.2 * est(-v) - L(v)) < 1e-6
