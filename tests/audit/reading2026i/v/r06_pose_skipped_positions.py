"""PoSE: position ids with gaps. Positional skip-wise training (Zhu et al. 2023, arXiv 2309.10400) trains a long context on
short rows: the row is cut in chunks and each later chunk's positions are moved by a random skip, so that all distances up
to the target length occur. Tokens and labels stay; only the positions jump."""
import random
import torch

FAMILY = "packing and positions"
KIND = "collator"
INPUTS = {"rows": "list of {'ids': list of token ids, all of one length}"}
SETTINGS = {"target_len": "context length to train for, 64", "chunks": "chunks per row, 2", "seed": "seed of the skips, 0"}
NOTES = ("Positions strictly increase in a row, start at 0, are consecutive inside a chunk, jump between chunks and stay "
         "below target_len. They are not 0..n-1 on purpose. Skips are drawn per row. labels = input_ids (the model "
         "shifts). All rows have one length, no padding; the length is at least the number of chunks.")


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"ids": [r.randrange(0, 50) for _ in range(16)]} for _ in range(4)], "target_len": 64, "chunks": 2, "seed": seed}


def right(rows, target_len=64, chunks=2, seed=0):
    r = random.Random(seed)
    n = len(rows[0]["ids"])
    positions = []
    for _ in rows:
        cuts = sorted(r.sample(range(1, n), chunks - 1))
        skips = [0] + sorted(r.randint(0, target_len - n) for _ in range(chunks - 1))
        bounds = [0] + cuts + [n]
        positions.append([t + skips[c] for c in range(chunks) for t in range(bounds[c], bounds[c + 1])])
    ids = torch.tensor([row["ids"] for row in rows])
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.tensor(positions)}


if __name__ == "__main__":
    d = make(0)
    out = right(**d)
    p = out["position_ids"]
    print(p)
    step = p[:, 1:] - p[:, :-1]
    assert (p[:, 0] == 0).all() and (step > 0).all() and p.max() < 64 and ((step > 1).sum(1) <= 1).all() and (step > 1).any()
    assert out["input_ids"].tolist() == [x["ids"] for x in d["rows"]]
