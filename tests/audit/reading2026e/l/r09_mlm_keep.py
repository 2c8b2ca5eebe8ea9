"""BERT masked language modelling with 80/10/10. A tenth of the selected positions shows the TRUE token to the model and
is trained all the same, which looks like a leak; another tenth shows a random token. No shift; attention is two-sided."""
FAMILY = "masked"
KIND = "loss"
INPUTS = {"ids": "original token ids, padding 0, [rows, time]", "selected": "True where the position is to be predicted, [rows, time]",
          "draw": "uniform numbers that choose mask / random / keep, [rows, time]", "random_ids": "replacement ids, [rows, time]"}
SETTINGS = {"mask_id": "id of [MASK], 23", "p_mask": "share shown as [MASK], 0.8", "p_random": "share shown as a random token, 0.1"}
NOTES = ("Reduction: mean over selected positions of all rows. Masked language modelling, bidirectional attention, targets are "
         "the original ids at the same position; padding (id 0) is neither selected nor attended to.")
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


def make(seed):
    torch.manual_seed(seed)
    n, t = 6, 14
    ids = torch.randint(1, 23, (n, t))
    for i in range(n):
        ids[i, int(torch.randint(8, t + 1, ())):] = 0
    sel = (torch.rand(n, t) < 0.4) & (ids != 0)
    sel[:, 1] = True
    return {"ids": ids, "selected": sel, "draw": torch.rand(n, t), "random_ids": torch.randint(1, 23, (n, t)), "model": Attn()}


def right(model, batch, mask_id=23, p_mask=0.8, p_random=0.1):
    ids, sel, draw = batch["ids"], batch["selected"], batch["draw"]
    shown = torch.where(sel & (draw < p_mask), torch.full_like(ids, mask_id), ids)
    shown = torch.where(sel & (draw >= p_mask) & (draw < p_mask + p_random), batch["random_ids"], shown)
    labels = ids.masked_fill(~sel, -100)
    n, t = ids.shape
    allowed = (ids != 0)[:, None, :].expand(n, t, t)
    logits = model(shown, torch.arange(t).expand(n, t), allowed)
    return F.cross_entropy(logits.reshape(n * t, -1), labels.reshape(-1), ignore_index=-100)


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
    tot, n, kept = 0.0, 0, 0
    for i in range(6):
        real = int((d["ids"][i] != 0).sum())
        row = d["ids"][i, :real].clone()
        for t in range(real):
            if d["selected"][i, t]:
                u = float(d["draw"][i, t])
                kept += u >= 0.9
                row[t] = 23 if u < 0.8 else (d["random_ids"][i, t] if u < 0.9 else row[t])
        lp = m(row[None], torch.arange(real)[None], torch.ones(1, real, real, dtype=torch.bool))[0].log_softmax(-1)
        for t in range(real):
            if d["selected"][i, t]:
                tot -= float(lp[t, d["ids"][i, t]])
                n += 1
    print("trained though shown unchanged:", int(kept))
    check(right(m, d), m, tot / n)
