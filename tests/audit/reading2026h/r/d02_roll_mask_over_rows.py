"""Loss mask of packed rows is rolled as one flat vector. verl-project/verl#5797,
https://github.com/verl-project/verl/pull/5797, 2026.
The no-padding SFT loss shifted labels and loss mask by torch.roll over the concatenation of all rows. The last token of
a row then took the mask (and the label) of the first token of the next row, and the last row that of the first one. The
model was trained to predict the start of an unrelated row wherever that row starts with a trained token."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids of all rows one after the other, [tokens]",
          "loss_mask": "1 where the token itself is a trained target, [tokens]; plain-text rows are trained from their "
                       "first token on, chat rows start with an untrained prompt",
          "cu_seqlens": "row boundaries, [rows + 1], from 0 to tokens"}
SETTINGS = {}
NOTES = ("Next-token cross-entropy, mean over trained tokens of all rows. The first token of a row is never predicted. "
         "Rows do not attend to each other; positions restart per row. Uses all parameters.")


class TinyLM(nn.Module):
    """One attention layer; `positions` [rows, time], `allowed` bool [rows, time, time] (default: causal)."""

    def __init__(self, vocab=32, width=16, max_pos=96):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, allowed=None):
        t = ids.shape[1]
        if positions is None:
            positions = torch.arange(t).expand(ids.shape)
        if allowed is None:
            allowed = torch.ones(t, t, dtype=torch.bool).tril()
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = (q @ k.transpose(-1, -2) / x.shape[-1] ** 0.5).masked_fill(~allowed, -1e9)
        return self.head(F.gelu(x + self.out(s.softmax(-1) @ v)))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    lens = torch.randint(4, 11, (5,), generator=g).tolist()
    mask = []
    for i, n in enumerate(lens):
        prompt = 0 if i % 2 else int(torch.randint(1, 3, (1,), generator=g))
        mask += [0] * prompt + [1] * (n - prompt)
    cu = torch.tensor([0] + lens).cumsum(0)
    ids = torch.randint(1, 32, (sum(lens),), generator=g)
    return {"model": TinyLM(), "ids": ids, "loss_mask": torch.tensor(mask), "cu_seqlens": cu}


def _token_nll(model, batch):
    ids, cu = batch["ids"], batch["cu_seqlens"]
    doc = torch.repeat_interleave(torch.arange(len(cu) - 1), cu.diff())
    pos = torch.arange(len(ids)) - cu[doc]
    allowed = (doc[:, None] == doc[None]) & (pos[:, None] >= pos[None])
    logits = model(ids[None], pos[None], allowed[None])[0]
    return F.cross_entropy(logits, torch.roll(ids, -1), reduction="none")


def broken(model, batch):
    nll = _token_nll(model, batch)
    mask = torch.roll(batch["loss_mask"], shifts=-1, dims=0)
    return (nll * mask).sum() / mask.sum()


def right(model, batch):
    nll = _token_nll(model, batch)
    mask = torch.roll(batch["loss_mask"], shifts=-1, dims=0)
    mask[batch["cu_seqlens"][1:] - 1] = 0
    return (nll * mask).sum() / mask.sum()


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    b, r = broken(m, c), right(m, c)
    tot = n = 0
    for i in range(5):
        s = slice(c["cu_seqlens"][i], c["cu_seqlens"][i + 1])
        x, k = c["ids"][s], c["loss_mask"][s][1:]
        tot = tot + (F.cross_entropy(m(x[None])[0, :-1], x[1:], reduction="none") * k).sum()
        n = n + k.sum()
    print("broken", b.item(), "right", r.item(), "row by row", (tot / n).item())
    assert abs(r - tot / n) < 1e-5 and abs(b - r) > 1e-3
