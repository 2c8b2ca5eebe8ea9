"""Positional skip-wise training (PoSE, arXiv:2309.10400, ICLR 2024). A short row is given position ids of a much longer
context window: the row is cut in two chunks, each keeps consecutive positions, and a random gap is left between them. So the
position ids of a row jump, do not start a new document at the jump, and exceed the row's length - on purpose."""
import random
import torch

FAMILY = "positions"
KIND = "collator"
INPUTS = {"rows": "tokenized rows {'input_ids': list of ints, all of the same length, 'seed': int}"}
SETTINGS = {"target": "length of the context window that is simulated, 64"}
NOTES = ("Returns input_ids, labels and position_ids, all [rows, time]. labels equal input_ids (unshifted, all trained). Positions "
         "start at 0, rise strictly, are consecutive except for one jump, and stay below target. Cut and gap are drawn from a "
         "random generator seeded with the row's 'seed', so the result is deterministic. Tokens are unchanged and in order.")


def make(seed):
    rng = random.Random(seed)
    return {"rows": [{"input_ids": [rng.randrange(1, 1000) for _ in range(12)], "seed": rng.randrange(10 ** 6)} for _ in range(4)]}


def right(rows, target=64):
    ids, positions = [], []
    for row in rows:
        rng = random.Random(row["seed"])
        n = len(row["input_ids"])
        cut = rng.randrange(1, n)
        gap = rng.randrange(0, target - n + 1)
        ids.append(row["input_ids"])
        positions.append([t if t < cut else t + gap for t in range(n)])
    ids = torch.tensor(ids)
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.tensor(positions)}


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    step = out["position_ids"].diff(dim=1)
    print(out["position_ids"].tolist()[0])
    assert (step >= 1).all() and ((step > 1).sum(1) <= 1).all() and int(out["position_ids"].max()) < 64
    assert (out["position_ids"][:, 0] == 0).all() and out["input_ids"].tolist() == [r["input_ids"] for r in rows]
