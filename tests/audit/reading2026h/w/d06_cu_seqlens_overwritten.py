"""A default attention mask overwrites the caller's packed boundaries. fla-org/flash-linear-attention#842 (issue #838), https://github.com/fla-org/flash-linear-attention/pull/842, 2026.
A layer that got cu_seqlens and an attention mask recomputed cu_seqlens from the mask. In packed training the mask is often the all-ones default, so the boundaries collapsed to [0, total].
The recurrent state then ran from one packed sample into the next one."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids of several samples laid end to end, [1, time]", "labels": "next token of the same sample, -100 at the last token of each sample, [1, time]",
          "cu_seqlens": "starts of the samples and the total length, [samples + 1]", "attention_mask": "all ones, [1, time]"}
SETTINGS = {}
NOTES = ("Cross entropy, mean over the labels that are not -100. The samples are independent: the state is zero at each start in cu_seqlens. The attention mask marks padding only (none here). "
         "Exactly one row. All parameters are used; the model takes cu_seqlens.")


class LinearRNN(nn.Module):
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb, self.v, self.gate, self.head = nn.Embedding(vocab, width), nn.Linear(width, width, bias=False), nn.Linear(width, width), nn.Linear(width, vocab)

    def forward(self, ids, cu_seqlens):
        h = self.emb(ids[0])
        v, decay = self.v(h), torch.sigmoid(self.gate(h) + 1)
        out = []
        for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
            s = torch.zeros_like(h[0])
            for t in range(a, b):
                s = decay[t] * s + v[t]
                out.append(s)
        return self.head(torch.tanh(h + torch.stack(out)))[None]


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    lengths = torch.randint(5, 9, (4,), generator=g)
    cu = F.pad(lengths.cumsum(0), (1, 0))
    ids = torch.randint(0, 31, (1, int(cu[-1])), generator=g)
    labels = ids.roll(-1, 1)
    labels[0, cu[1:] - 1] = -100
    return {"model": LinearRNN(), "ids": ids, "labels": labels, "cu_seqlens": cu, "attention_mask": torch.ones_like(ids)}


def _cu_from_mask(mask):
    return F.pad(mask.sum(-1).cumsum(0), (1, 0))


def broken(model, batch):
    cu_seqlens = batch.get("cu_seqlens")
    if batch.get("attention_mask") is not None:
        cu_seqlens = _cu_from_mask(batch["attention_mask"])
    return F.cross_entropy(model(batch["ids"], cu_seqlens)[0], batch["labels"][0], ignore_index=-100)


def right(model, batch):
    cu_seqlens = batch.get("cu_seqlens")
    if cu_seqlens is None and batch.get("attention_mask") is not None:
        cu_seqlens = _cu_from_mask(batch["attention_mask"])
    return F.cross_entropy(model(batch["ids"], cu_seqlens)[0], batch["labels"][0], ignore_index=-100)


if __name__ == "__main__":
    d = make(0); m = d.pop("model")
    total, count = 0.0, 0
    for a, b in zip(d["cu_seqlens"][:-1].tolist(), d["cu_seqlens"][1:].tolist()):
        x = d["ids"][:, a:b]
        total += F.cross_entropy(m(x[:, :-1], torch.tensor([0, b - a - 1]))[0], x[0, 1:], reduction="sum"); count += b - a - 1
    print("broken", broken(m, d).item(), "right", right(m, d).item(), "sample by sample", (total / count).item())
    assert torch.allclose(right(m, d), total / count, atol=1e-5) and abs(broken(m, d) - right(m, d)) > 1e-3
