"""Padding is masked by its token id, and the id is also the end-of-text token.
NVIDIA-NeMo/Megatron-Bridge#4660, https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4660, 2026 (July).
The tokenizer has no padding token, so pad_token = eos_token. loss_mask[labels == pad_token_id] = 0
then removes every real end-of-text target as well, and the model never learns to stop."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'data'
KIND = 'collator'
INPUTS = {
    'rows': "list of {'ids': token ids of one sample, which end (and may be divided) by end-of-text, id 0}",
}
SETTINGS = {
    'length': 'fixed length of a batch row, 16',
    'eos': 'end-of-text id, also used to pad, 0',
}
NOTES = (
    'Right-padded causal batches: labels[t] = ids[t + 1]; loss_mask is 1 on each real next token of '
    'the sample, the end-of-text among them, 0 on padding. '
)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(4):
        n = int(torch.randint(5, 13, (1,), generator=g))
        ids = torch.randint(1, 20, (n,), generator=g).tolist() + [0]
        if n > 8:
            ids[4] = 0                                     # two texts in one sample
        rows.append({"ids": ids})
    return {"rows": rows}


def _pad(rows, length, eos):
    real = [min(len(r["ids"]), length) for r in rows]
    ids = torch.tensor([r["ids"][:length] + [eos] * (length - n) for r, n in zip(rows, real)])
    labels = torch.cat([ids[:, 1:], torch.full((len(rows), 1), eos)], 1)
    return ids, labels, real


def broken(rows, length=16, eos=0):
    ids, labels, _ = _pad(rows, length, eos)
    loss_mask = torch.ones_like(labels, dtype=torch.float)
    loss_mask[labels == eos] = 0.0
    return {"ids": ids, "labels": labels, "loss_mask": loss_mask}


def right(rows, length=16, eos=0):
    ids, labels, real = _pad(rows, length, eos)
    loss_mask = torch.ones_like(labels, dtype=torch.float)
    for i, n in enumerate(real):
        loss_mask[i, n - 1:] = 0.0                         # from the last real token on there is no target
    return {"ids": ids, "labels": labels, "loss_mask": loss_mask}


if __name__ == "__main__":
    rows = make(0)["rows"]
    a, b = broken(rows), right(rows)
    print("row   ", rows[0]["ids"])
    print("broken", a["loss_mask"][0].int().tolist())
    print("right ", b["loss_mask"][0].int().tolist())
    trained_eos = lambda x: int(((x["labels"] == 0) & (x["loss_mask"] == 1)).sum())
    print("trained end-of-text targets: broken", trained_eos(a), "right", trained_eos(b))
    assert trained_eos(a) == 0 and trained_eos(b) == sum(r["ids"].count(0) for r in rows)
    assert int(b["loss_mask"].sum()) == sum(len(r["ids"]) - 1 for r in rows)
