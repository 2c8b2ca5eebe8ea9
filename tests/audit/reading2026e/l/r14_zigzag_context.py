"""Zigzag context parallelism (ring attention, Llama 3), simulated in one process. Time is cut into 2 * ranks chunks and rank r
owns chunks r and 2 * ranks - 1 - r, so tokens are NOT in time order; causality is decided by positions, and labels are shifted before
the cut. Each rank divides its sum by the count of the whole batch."""
FAMILY = "long context"
KIND = "loss"
INPUTS = {"ids": "token ids, padding 0, [rows, time]", "loss_mask": "1 where the token is trained, [rows, time]"}
SETTINGS = {"ranks": "context-parallel ranks, 3 (time is padded up to a multiple of 2 * ranks; the result does not depend on it)"}
NOTES = ("Reduction: mean over trained tokens of all rows and ranks. Supervised. Sequences are padded inside to a multiple of "
         "2 * ranks. Positions up to 64. The order of tokens inside is a permutation of time on purpose.")
import torch
import torch.nn as nn
import torch.nn.functional as F


class Attn(nn.Module):
    """One attention layer; `allowed` [rows, query, key] says what is visible."""
    def __init__(self, vocab=24, width=16, length=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions, allowed):
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        s = s.masked_fill(~allowed, -1e9)
        return self.head(x + s.softmax(-1) @ v)


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
    ids, mask = random_rows(4, 15)
    return {"ids": ids, "loss_mask": mask, "model": Attn()}


def right(model, batch, ranks=3):
    ids = batch["ids"]
    labels = ids.masked_fill(batch["loss_mask"] == 0, -100)
    labels = F.pad(labels[:, 1:], (0, 1), value=-100)            # shift while time is still whole
    extra = -ids.shape[1] % (2 * ranks)
    ids, labels = F.pad(ids, (0, extra)), F.pad(labels, (0, extra), value=-100)
    n, t = ids.shape
    chunks = torch.arange(t).reshape(2 * ranks, -1)
    owned = [torch.cat([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks)]
    order = torch.cat(owned)
    allowed = (order[None, :] <= order[:, None]).expand(n, t, t)  # query may see keys of earlier positions
    logits = model(ids[:, order], order.expand(n, t), allowed)
    labels = labels[:, order]
    count = (labels != -100).sum().clamp(min=1)
    width = t // ranks
    shares = []
    for r in range(ranks):
        part = slice(r * width, (r + 1) * width)
        shares.append(F.cross_entropy(logits[:, part].transpose(1, 2), labels[:, part], ignore_index=-100, reduction="sum") / count)
    return torch.stack(shares).sum()


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
    n, t = d["ids"].shape
    lp = m(d["ids"], torch.arange(t).expand(n, t), torch.ones(n, t, t, dtype=torch.bool).tril()).log_softmax(-1).detach()
    tot = [-float(lp[i, j - 1, d["ids"][i, j]]) for i in range(n) for j in range(1, t) if d["loss_mask"][i, j] > 0]
    check(right(m, d), m, sum(tot) / len(tot))
    assert abs(right(m, d, ranks=1).item() - right(m, d, ranks=4).item()) < 1e-5
