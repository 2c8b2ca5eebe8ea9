"""Goldfish loss: one token in k is dropped from the loss, chosen by a hash of the preceding h tokens and not at random, so the same passage always loses the same tokens in every epoch and document and cannot be memorised (Hans et al. 2024). A loss mask that depends on the ids is intended."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class TinyLM(nn.Module):
    """One causal attention layer; every parameter is used by the logits."""
    def __init__(self, vocab=31, width=16, max_len=64, out=None):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_len, width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, out or vocab)

    def hidden(self, ids, positions=None, mask=None):
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T, device=ids.device).expand_as(ids)
        x = self.emb(ids) + self.pos(positions)
        ok = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        if mask is not None:
            ok = ok & mask
        s = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        return x + s.masked_fill(~ok, -1e9).softmax(-1) @ self.v(x)

    def forward(self, ids, positions=None, mask=None):
        return self.head(self.hidden(ids, positions, mask))

FAMILY = "masked"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "labels": "ids or -100, [rows, time]"}
SETTINGS = {"k": "drop one in k, 4", "h": "width of the hashed context, 3 tokens"}
NOTES = "Mean over the kept trained tokens of all rows (dropped ones leave the normaliser too). The first h tokens of a row are never dropped. Deterministic. All parameters used."


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 31, (4, 16))
    labels = ids.clone()
    labels[:, :2], labels[3, 12:] = -100, -100
    return {"model": TinyLM(), "ids": ids, "labels": labels}


def keep_mask(ids, k, h):
    keep = torch.ones_like(ids, dtype=torch.bool)
    if ids.shape[1] > h:
        win = ids.unfold(1, h, 1)[:, :-1]                               # window before token t = h, h+1, ...
        key = torch.zeros_like(win[..., 0])
        for j in range(h):
            key = (key * 1000003 + win[..., j] + 1) % 2147483647
        key = (key ^ (key >> 7)) * 48271 % 2147483647
        keep[:, h:] = key % k != 0
    return keep


def right(model, batch, k=4, h=3):
    y = batch["labels"].masked_fill(~keep_mask(batch["ids"], k, h), -100)[:, 1:]
    return F.cross_entropy(model(batch["ids"])[:, :-1].transpose(1, 2), y, ignore_index=-100)


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    def drop(ctx):
        key = 0
        for c in ctx:
            key = (key * 1000003 + c + 1) % 2147483647
        return ((key ^ (key >> 7)) * 48271 % 2147483647) % 4 == 0
    lp = model(d["ids"]).log_softmax(-1).detach()
    tot = n = dropped = 0
    for i in range(4):
        r = d["ids"][i].tolist()
        for t in range(1, 16):
            if d["labels"][i, t] != -100:
                if t >= 3 and drop(r[t - 3:t]):
                    dropped += 1
                else:
                    tot, n = tot - float(lp[i, t - 1, r[t]]), n + 1
    rate = 1 - float(keep_mask(torch.randint(0, 31, (50, 200)), 4, 3).float().mean())
    assert abs(float(loss) - tot / n) < 1e-4 and not dead and dropped > 0 and abs(rate - 0.25) < 0.03
    print("ok", float(loss), tot / n, "dropped", dropped, "rate", rate)
