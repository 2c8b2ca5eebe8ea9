"""Listwise DPO with the Plackett-Luce model (Rafailov et al. 2023, appendix). K ranked answers per prompt; the denominators are a REVERSED
logcumsumexp over the ranking, and the last place contributes exactly zero."""
FAMILY = "preference"
KIND = "loss"
INPUTS = {"ids": "[prompts, K, time], best answer first", "loss_mask": "completion targets, [prompts, K, time-1]", "ref_logps": "summed reference log probability, [prompts, K], constant"}
SETTINGS = {"beta": "0.2"}
NOTES = "Sum over the K places, mean over prompts. The order of the K answers is the label. K is read from the shape; K=2 is ordinary DPO. All parameters used."
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

def scores(model, ids, m):
    p, k, t = ids.shape
    return (logps(model, ids.reshape(p * k, t)) * m.reshape(p * k, t - 1)).sum(1).view(p, k)


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    model, ref = Tiny(), Tiny()
    ids, m = fake_rows(g, 12)
    ids, m = ids.view(3, 4, 10).clone(), m.view(3, 4, 9)
    ids[:, :, :3] = ids[:, :1, :3]
    with torch.no_grad():
        return {"model": model, "ids": ids, "loss_mask": m, "ref_logps": scores(ref, ids, m)}


def right(model, batch, beta=0.2):
    h = beta * (scores(model, batch["ids"], batch["loss_mask"]) - batch["ref_logps"])
    tail = h.flip(-1).logcumsumexp(-1).flip(-1)          # log sum of the answers ranked k or worse
    return (tail - h).sum(-1).mean()


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
    h = (0.2 * (scores(model, d["ids"], d["loss_mask"]) - d["ref_logps"])).detach().tolist()
    slow = -sum(math.log(math.exp(row[k]) / sum(math.exp(x) for x in row[k:])) for row in h for k in range(4)) / 3
    check(right(model, d), slow, model)
    two = {k: v[:, :2] for k, v in d.items()}
    x = torch.tensor([r[0] - r[1] for r in h]); assert abs(float(right(model, two)) + float(F.logsigmoid(x).mean())) < 1e-5
