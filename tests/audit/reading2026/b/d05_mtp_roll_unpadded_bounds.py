"""Multi-token prediction rolls labels inside the wrong segments of a padded pack. NVIDIA/Megatron-LM#4495,
https://github.com/NVIDIA/Megatron-LM/pull/4495, 2026.
Each document of the pack is padded to a multiple (needed by context parallelism), so the layout follows cu_seqlens_padded. The roll that makes
the labels for token t+2 cut the row by the unpadded cu_seqlens: cuts fall inside documents, targets get lost there, the roll crosses document
borders, and the tail of the row is not rolled at all (the extra head is trained on t+1). One-process view of the bug."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {
    "ids": "packed token ids, each document padded with 0 to a multiple of 4, [time]",
    "labels": "next token of each position inside its document, 0 where there is none, [time]",
    "loss_mask": "1 where labels is a real target, [time]",
    "cu_seqlens": "cumulative real document lengths, [documents + 1]",
    "cu_seqlens_padded": "cumulative padded document lengths: the layout of the row, [documents + 1]",
}
SETTINGS = {"mtp_coef": "weight of the extra head, 0.3"}
NOTES = ("Cross entropy of the main head on token t+1 (mean over its targets) plus mtp_coef times cross entropy of the extra head on token t+2 "
         "(mean over its targets). Labels and mask for t+2 are those for t+1 rolled left by one inside each document; the last slot becomes 0.")


class TwoHeads(nn.Module):
    def __init__(self, V=40, D=16):
        super().__init__()
        self.emb, self.h, self.main, self.mtp = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V), nn.Linear(D, V)

    def forward(self, ids):
        h = torch.tanh(self.h(self.emb(ids)))
        return self.main(h), self.mtp(h)


def _roll(x, cu):
    out = x.clone()
    for s, e in zip(cu[:-1].tolist(), cu[1:].tolist()):
        seg = torch.roll(x[s:e], -1)
        seg[-1] = 0
        out[s:e] = seg
    return out


def _loss(model, batch, cu, mtp_coef):
    main, mtp = model(batch["ids"])
    mean = lambda lg, y, m: (F.cross_entropy(lg, y, reduction="none") * m).sum() / m.sum().clamp(min=1)
    y2, m2 = _roll(batch["labels"], cu), _roll(batch["loss_mask"], cu)
    return mean(main, batch["labels"], batch["loss_mask"]) + mtp_coef * mean(mtp, y2, m2)


def broken(model, batch, mtp_coef=0.3):
    return _loss(model, batch, batch["cu_seqlens"], mtp_coef)


def right(model, batch, mtp_coef=0.3):
    return _loss(model, batch, batch["cu_seqlens_padded"], mtp_coef)


def make(seed):
    torch.manual_seed(seed)
    lens = [5, 7, 9, 6]
    pad = [(n + 3) // 4 * 4 for n in lens]
    ids, labels, mask = [], [], []
    for n, p in zip(lens, pad):
        d = torch.randint(1, 40, (n,))
        z = lambda v: torch.cat([v, torch.zeros(p - len(v), dtype=v.dtype)])
        ids.append(z(d)), labels.append(z(d[1:])), mask.append(z(torch.ones(n - 1)))
    c = lambda v: torch.tensor([0] + v).cumsum(0)
    return {"model": TwoHeads(), "ids": torch.cat(ids), "labels": torch.cat(labels), "loss_mask": torch.cat(mask),
            "cu_seqlens": c(lens), "cu_seqlens_padded": c(pad)}


if __name__ == "__main__":
    x = make(0)
    m = x.pop("model")
    a, b = broken(m, x), right(m, x)
    y, k = _roll(x["labels"], x["cu_seqlens_padded"]), _roll(x["loss_mask"], x["cu_seqlens_padded"])
    for s, e in zip(x["cu_seqlens_padded"][:-1].tolist(), x["cu_seqlens_padded"][1:].tolist()):
        d = x["ids"][s:e]
        for t in range(e - s):
            has = t + 2 < e - s and d[t + 2] != 0
            assert bool(k[s + t]) == bool(has) and (not has or y[s + t] == d[t + 2])
    print("broken", a.item(), "right", b.item())
    assert abs((a - b).item()) > 1e-5
