"""Long-context cross-entropy in time chunks, each recomputed in backward (torch checkpoint), plus the z-loss of PaLM.
Full logits never exist; chunks are SUMMED and divided once by the trained tokens of the batch, so a chunk size that does not divide
the length is fine and a chunk with no trained token adds zero."""
FAMILY = "long context"
KIND = "loss"
INPUTS = {"ids": "token ids, padding 0, [rows, time]", "loss_mask": "1 where the token is trained, [rows, time]"}
SETTINGS = {"chunk": "time steps per chunk, 5 (changes memory only, never the result)", "z": "weight of the squared log-partition, 1e-4"}
NOTES = ("Reduction: mean over trained tokens of all rows, z-loss included. Supervised. chunk is a memory setting and needs not "
         "divide the length; the result does not depend on it.")
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


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
    ids, mask = random_rows(4, 24)
    return {"ids": ids, "loss_mask": mask, "model": LM()}


def right(model, batch, chunk=5, z=1e-4):
    hidden = model.hidden(batch["ids"][:, :-1])
    gold, mask = batch["ids"][:, 1:], batch["loss_mask"][:, 1:]

    def piece(h, y, m):
        logits = model.head(h).float()
        lse = logits.logsumexp(-1)
        nll = lse - logits.gather(-1, y[..., None]).squeeze(-1)
        return ((nll + z * lse.pow(2)) * m).sum()

    total = hidden.new_zeros(())
    for a in range(0, gold.shape[1], chunk):
        b = a + chunk
        total = total + checkpoint(piece, hidden[:, a:b], gold[:, a:b], mask[:, a:b], use_reentrant=False)
    return total / mask.sum().clamp(min=1.0)


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
    d = make(0)
    m = d.pop("model")
    lo = m(d["ids"][:, :-1]).detach()
    tot, n = 0.0, 0
    for i in range(lo.shape[0]):
        for t in range(lo.shape[1]):
            if d["loss_mask"][i, t + 1] > 0:
                l = float(lo[i, t].logsumexp(0))
                tot += l - float(lo[i, t, d["ids"][i, t + 1]]) + 1e-4 * l * l
                n += 1
    check(right(m, d), m, tot / n)
    for c in (1, 7, 100):
        assert abs(right(m, d, chunk=c).item() - tot / n) < 1e-4
