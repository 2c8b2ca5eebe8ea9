"""Packed rows with block-diagonal attention and positions that restart: the first token of every document inside the row is not a target (it has no context of its own), though it sits in the middle of the row. Segment 0 is padding (Krell et al. 2021; HF DataCollatorWithFlattening; FlashAttention varlen)."""
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

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "packed token ids, [rows, time]", "segment": "document number 1.. inside the row, 0 on padding, [rows, time]"}
SETTINGS = {}
NOTES = "Mean over trained tokens of all rows; equal to the unpacked documents in one padded batch. Padding queries see only padding and are not trained. All parameters used; any number of rows."


def make(seed):
    torch.manual_seed(seed)
    seg = torch.zeros(2, 16, dtype=torch.long)
    for i, lens in enumerate([[5, 4, 6], [7, 2, 4]]):
        seg[i, :sum(lens)] = torch.repeat_interleave(torch.arange(1, 4), torch.tensor(lens))
    return {"model": TinyLM(), "ids": torch.randint(0, 31, (2, 16)), "segment": seg}


def right(model, batch):
    ids, seg = batch["ids"], batch["segment"]
    T = ids.shape[1]
    t = torch.arange(T).expand_as(ids)
    first = torch.ones_like(seg, dtype=torch.bool)
    first[:, 1:] = seg[:, 1:] != seg[:, :-1]
    positions = t - torch.where(first, t, 0).cummax(1).values
    mask = seg[:, :, None] == seg[:, None, :]
    lp = model(ids, positions, mask)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    train = (~first[:, 1:] & (seg[:, 1:] > 0)).to(lp.dtype)
    return -(lp * train).sum() / train.sum()


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    tot = n = 0.0
    for i in range(2):
        for s in (1, 2, 3):
            x = d["ids"][i][d["segment"][i] == s][None]              # the document alone
            lp = model(x)[:, :-1].log_softmax(-1).gather(-1, x[:, 1:, None])
            tot, n = tot - float(lp.detach().sum()), n + lp.numel()
    assert abs(float(loss) - tot / n) < 1e-4 and not dead
    print("ok", float(loss), tot / n)
