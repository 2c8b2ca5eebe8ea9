"""Positions with a random jump (PoSE, arXiv 2309.10400). To train for a 64-token window with 16-token rows, the row is cut in two chunks and a random offset is added to the positions of the second. Positions are not contiguous, exceed the row length, and differ between rows; the tokens are untouched and all are trained across the gap too."""
import random
import torch

FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of dicts: ids = 16 token ids, seed = integer of the row that fixes cut and offset"}
SETTINGS = {}
NOTES = "Rows of 16 tokens, target window 64. input_ids, labels (equal to the ids, the model shifts), position_ids. First chunk starts at 0; the second is shifted by an offset in [0, 48]. Random by the row's own seed, so the same row gives the same positions."
LENGTH, WINDOW = 16, 64


def make(seed):
    rng = random.Random(seed)
    return {"rows": [{"ids": [rng.randint(0, 31) for _ in range(LENGTH)], "seed": rng.randint(0, 10 ** 6)} for _ in range(5)]}


def right(rows):
    ids, pos = [], []
    for r in rows:
        rng = random.Random(r["seed"])
        cut = rng.randint(1, LENGTH - 1)
        skip = rng.randint(0, WINDOW - LENGTH)
        p = torch.arange(LENGTH)
        p[cut:] += skip
        ids.append(torch.tensor(r["ids"])); pos.append(p)
    ids = torch.stack(ids)
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.stack(pos)}


if __name__ == "__main__":
    rows = make(0)["rows"]; out = right(rows); again = right(rows)
    step = out["position_ids"].diff(dim=1)
    assert (step >= 1).all() and ((step > 1).sum(1) <= 1).all() and out["position_ids"].max() < WINDOW
    assert torch.equal(out["position_ids"], again["position_ids"]) and out["input_ids"].tolist() == [r["ids"] for r in rows]
    print(out["position_ids"])
