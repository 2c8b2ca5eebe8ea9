"""Left-padded rows with positions from the mask; padding has position 1. As in generate() of transformers and most RLHF
code: position_ids = cumsum(attention_mask) - 1, and entries under padding are set to 1 (any legal value would do). A
token in column 7 of a row with 4 pads has position 3. Padding columns attend to nothing real and are never trained."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "left-padded ids (pad = 0), [rows, time]", "attention_mask": "1 = real token, zeros on the left, [rows, "
          "time]", "loss_mask": "1 = trained token (a response at the right end), [rows, time]"}
SETTINGS = {}
NOTES = ("Next-token cross-entropy, mean over trained tokens of all rows. The amount of left padding must not matter. The "
         "first real token is never trained. Uses all parameters.")


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
    lens = torch.tensor([10, 6, 8, 4])
    col = torch.arange(10)[None]
    att = (col >= 10 - lens[:, None]).long()
    ids = torch.randint(1, 32, (4, 10), generator=g) * att
    n = torch.tensor([4, 3, 5, 2])
    return {"model": TinyLM(), "ids": ids, "attention_mask": att, "loss_mask": (col >= 10 - n[:, None]).float()}


def right(model, batch):
    ids, att = batch["ids"], batch["attention_mask"]
    pos = (att.cumsum(-1) - 1).masked_fill(att == 0, 1)
    allowed = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril() & att[:, None, :].bool()
    logits = model(ids, pos, allowed)[:, :-1]
    mask = batch["loss_mask"][:, 1:]
    nll = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return (nll * mask).sum() / mask.sum()


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    loss = right(m, c)
    tot = n = 0
    for i in range(4):
        keep = c["attention_mask"][i].bool()
        x, k = c["ids"][i][keep], c["loss_mask"][i][keep][1:]
        tot, n = tot + (F.cross_entropy(m(x[None])[0, :-1], x[1:], reduction="none") * k).sum(), n + k.sum()
    loss.backward()
    print("loss", loss.item(), "rows without padding", (tot / n).item())
    assert abs(loss - tot / n) < 1e-5 and all(p.grad.abs().sum() > 0 for p in m.parameters())
