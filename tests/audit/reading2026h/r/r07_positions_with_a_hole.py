"""Positions jump in the middle of a document. Positional skip-wise training (PoSE, arXiv 2309.10400): a row of 16 tokens
is cut in two chunks at a random place and the second chunk gets a random offset, so that the model sees relative distances
up to a window of 64 without long rows. Tokens stay contiguous text and the token after the hole is trained as any other."""
import random

import torch

FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of rows: uid (int) and input_ids (list of 16 tokens)"}
SETTINGS = {"window": "target context window, 64", "epoch": "epoch number, 0; changes the holes"}
NOTES = ("Output: input_ids, labels (a copy, shifted inside the model), position_ids, all [rows, 16]. position_ids start at 0, "
         "increase strictly, stay below window and have at most one jump. The random numbers of a row depend on (epoch, "
         "uid) only, not on the batch. All rows must have the same length.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rows": [{"uid": 100 * seed + i, "input_ids": torch.randint(1, 50, (16,), generator=g).tolist()}
                     for i in range(6)]}


def right(rows, window=64, epoch=0):
    ids = torch.tensor([r["input_ids"] for r in rows])
    n = ids.shape[1]
    pos = torch.arange(n).repeat(len(rows), 1)
    for i, r in enumerate(rows):
        rng = random.Random(f"{epoch}-{r['uid']}")
        cut = rng.randint(1, n - 1)
        pos[i, cut:] += rng.randint(0, window - n)
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": pos}


if __name__ == "__main__":
    c = make(0)
    o = right(**c)
    print(o["position_ids"].tolist())
    d = o["position_ids"].diff(dim=1)
    assert (d >= 1).all() and ((d > 1).sum(1) <= 1).all() and o["position_ids"].max() < 64
    assert (o["position_ids"][:, 0] == 0).all() and (d > 1).any()
    swapped = right(c["rows"][::-1])
    assert torch.equal(swapped["position_ids"].flip(0), o["position_ids"])
