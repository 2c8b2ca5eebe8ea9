"""Masked diffusion language model: cross-entropy on the masked places only, each divided by its row's masking rate t, but the sum is divided by ALL answer tokens, masked or not. Dividing by the number of masked ones would count t twice (LLaDA, Nie et al. 2025, algorithm 2; MDLM). No shift: the model predicts the token at its own place and sees both sides."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "masked"
KIND = "loss"
INPUTS = {"ids": "clean token ids below 30, [rows, time]", "noisy": "ids with 30 (MASK) at masked places", "answer_mask": "1 on answer tokens, which alone may be masked", "t": "masking rate of the row in (0, 1], [rows]"}
SETTINGS = {"mask_id": "token id of MASK, 30"}
NOTES = "Sum over masked tokens of ce / t, divided by the number of answer tokens of all rows. t is a constant. Bidirectional model, no shift. All parameters used; a batch with nothing masked gives zero."


class Bidirectional(nn.Module):
    def __init__(self, vocab=31, width=16, max_len=32):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(max_len, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(x + (q @ k.transpose(1, 2) / 4).softmax(-1) @ v)


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 30, (4, 12))
    a = torch.zeros(4, 12)
    for i in range(4):
        a[i, 3:int(torch.randint(7, 13, (1,)))] = 1
    t = torch.rand(4) * 0.8 + 0.2
    hide = (torch.rand(4, 12) < t[:, None]) & (a > 0)
    hide[:, 3] = True
    return {"model": Bidirectional(), "ids": ids, "noisy": ids.masked_fill(hide, 30), "answer_mask": a, "t": t}


def right(model, batch, mask_id=30):
    hidden = batch["noisy"] == mask_id
    ce = F.cross_entropy(model(batch["noisy"]).transpose(1, 2), batch["ids"], reduction="none")
    return (ce * hidden / batch["t"][:, None]).sum() / batch["answer_mask"].sum()


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    lp = model(d["noisy"]).log_softmax(-1).detach()
    tot = 0.0
    for i in range(4):
        for t in range(12):
            if d["noisy"][i, t] == 30:
                tot -= float(lp[i, t, d["ids"][i, t]]) / float(d["t"][i])
    want = tot / float(d["answer_mask"].sum())
    assert abs(float(loss) - want) < 1e-4 and not dead, dead
    print("ok", float(loss), want)
