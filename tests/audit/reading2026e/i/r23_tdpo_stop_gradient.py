"""TDPO-2 (Zeng et al. 2024, token-level DPO). The margin carries a difference of forward sequence KLs of the two answers; the KL of the CHOSEN
answer is detached, the one of the rejected answer is not. The half-detached difference is the method."""
FAMILY = "preference"
KIND = "loss"
INPUTS = {"chosen_ids": "[pairs, time]", "chosen_mask": "[pairs, time-1]", "rejected_ids": "[pairs, time]", "rejected_mask": "[pairs, time-1]",
          "ref_chosen": "reference log probabilities over the whole vocabulary, [pairs, time-1, vocabulary], constant", "ref_rejected": "same for rejected"}
SETTINGS = {"beta": "0.1", "alpha": "weight of the KL difference, 0.5"}
NOTES = "Mean over pairs; log ratios and per-position KL(ref || policy) are SUMMED over completion tokens. Reference constants. All parameters used."
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
    ci, cm = fake_rows(g, 4); ri, rm = fake_rows(g, 4); ri[:, :3] = ci[:, :3]
    full = lambda i: ref(i)[:, :-1].log_softmax(-1)
    with torch.no_grad():
        return {"model": model, "chosen_ids": ci, "chosen_mask": cm, "rejected_ids": ri, "rejected_mask": rm, "ref_chosen": full(ci), "ref_rejected": full(ri)}


def parts(model, ids, m, ref):
    lp = model(ids)[:, :-1].log_softmax(-1)
    t = ids[:, 1:, None]
    h = ((lp.gather(-1, t) - ref.gather(-1, t)).squeeze(-1) * m).sum(1)
    kl = ((ref.exp() * (ref - lp)).sum(-1) * m).sum(1)
    return h, kl


def right(model, batch, beta=0.1, alpha=0.5):
    hc, kc = parts(model, batch["chosen_ids"], batch["chosen_mask"], batch["ref_chosen"])
    hr, kr = parts(model, batch["rejected_ids"], batch["rejected_mask"], batch["ref_rejected"])
    return -F.logsigmoid(beta * (hc - hr - alpha * (kr - kc.detach()))).mean()


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
    for i in range(4):
        v = {}
        for s in ("chosen", "rejected"):
            lp = model(d[s + "_ids"][i:i + 1])[0, :-1].log_softmax(-1).detach(); h = k = 0.0
            for t in range(9):
                if d[s + "_mask"][i, t]:
                    y = d[s + "_ids"][i, t + 1]; rf = d["ref_" + s][i, t]
                    h += float(lp[t, y] - rf[y]); k += sum(math.exp(float(a)) * float(a - b) for a, b in zip(rf, lp[t]))
            v[s] = (h, k)
        slow += math.log(1 + math.exp(-0.1 * (v["chosen"][0] - v["rejected"][0] - 0.5 * (v["rejected"][1] - v["chosen"][1])))) / 4
    check(right(model, d), slow, model)
