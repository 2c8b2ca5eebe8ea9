"""LongCE (LongPPL, Fang et al. 2024). Each token's cross-entropy is weighed by how much the long context helped: exp(logp with full
context - logp with the last K tokens only), capped and detached. The model is run twice, once without gradient on sliding windows."""
FAMILY = "long context"
KIND = "loss"
INPUTS = {"ids": "token ids, padding 0, [rows, time]", "loss_mask": "1 where the token is trained, [rows, time]"}
SETTINGS = {"window": "tokens of short context, 4", "cap": "largest weight, 5.0"}
NOTES = ("Reduction: sum of weighted losses over the number of trained tokens of all rows (weights are not normalised). Supervised; the weight is "
         "a constant and is exactly 1 where the whole past fits in the window. Time must be larger than window.")
import torch
import torch.nn as nn
import torch.nn.functional as F


class LM(nn.Module):
    """Tiny causal language model."""
    def __init__(self, vocab=24, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def hidden(self, ids):
        return self.rnn(self.emb(ids))[0]

    def forward(self, ids):
        return self.head(self.hidden(ids))


def token_logps(model, ids):
    """log-probability of ids[:, 1:], shape [rows, time - 1]."""
    lp = model(ids[:, :-1]).log_softmax(-1)
    return lp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def random_rows(n=6, t=12, vocab=24):
    """Right-padded rows: a prompt, trained tokens, then padding (id 0)."""
    ids = torch.randint(1, vocab, (n, t))
    mask = torch.zeros(n, t)
    for i in range(n):
        start, end = int(torch.randint(2, 5, ())), int(torch.randint(6, t + 1, ()))
        mask[i, start:end] = 1.0
        ids[i, end:] = 0
    return ids, mask


def make(seed):
    torch.manual_seed(seed)
    ids, mask = random_rows(5, 16)
    model = LM()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)                      # make context matter
    return {"ids": ids, "loss_mask": mask, "model": model}


def right(model, batch, window=4, cap=5.0):
    ids = batch["ids"]
    n, t = ids.shape
    long = token_logps(model, ids)
    with torch.no_grad():
        short = long.detach().clone()
        win = ids[:, 1:-1].unfold(1, window, 1)                  # windows that lack at least one token of the past
        logits = model(win.reshape(-1, window))[:, -1].reshape(n, -1, model.head.out_features)
        gold = ids[:, window + 1:, None]
        short[:, window:] = logits.log_softmax(-1).gather(-1, gold).squeeze(-1)
        weight = (long.detach() - short).exp().clamp(max=cap)
    mask = batch["loss_mask"][:, 1:]
    return -(weight * long * mask).sum() / mask.sum().clamp(min=1.0)


def check(loss, model, want, tol=1e-4):
    model.zero_grad()
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    for n, g in grads.items():
        assert g is not None and float(g.abs().sum()) > 0, n
    norm = sum(float(g.pow(2).sum()) for g in grads.values()) ** 0.5
    print("loss %.6f  slow loop %.6f  grad norm %.5f" % (loss.item(), float(want), norm))
    assert abs(loss.item() - float(want)) < tol


if __name__ == "__main__":
    import math
    d = make(0)
    m = d.pop("model")
    tot, n, ws = 0.0, 0, []
    for i in range(5):
        for j in range(1, 16):
            if d["loss_mask"][i, j] > 0:
                y = d["ids"][i, j]
                full = float(m(d["ids"][i:i + 1, :j])[0, -1].log_softmax(-1)[y])
                near = float(m(d["ids"][i:i + 1, max(0, j - 4):j])[0, -1].log_softmax(-1)[y])
                w = min(5.0, math.exp(full - near))
                ws.append(w)
                tot -= w * full
                n += 1
    print("weights from %.3f to %.3f" % (min(ws), max(ws)))
    check(right(m, d), m, tot / n)
