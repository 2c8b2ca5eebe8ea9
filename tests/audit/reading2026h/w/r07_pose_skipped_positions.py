"""PoSE: short rows with position ids that jump, to teach a long context.
Zhu et al. 2023 (arXiv 2309.10400). A row of L tokens is cut into two chunks; the first begins at position 0 and the second is moved by a random number of positions up to target - L. The tokens and the labels stay; only the
positions have a hole. Positions are larger than the row is long, and labels across the hole are trained as usual."""
import random
import torch

FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of {ids: list of token ids, index: number of the row in the data set}"}
SETTINGS = {"target": "context length to be taught, 256", "epoch": "0; moves the random holes"}
NOTES = "Right-padded with 0, labels -100 on padding, positions of padding 0, attention mask 0 there. Positions rise by 1 but for one jump per row; all below target. Deterministic in (epoch, index), so that a row gets the same hole on each rank and worker."


def make(seed):
    rng = random.Random(seed)
    return {"rows": [{"ids": [rng.randint(1, 49) for _ in range(rng.randint(8, 16))], "index": rng.randint(0, 10 ** 6)} for _ in range(5)]}


def right(rows, target=256, epoch=0):
    T = max(len(r["ids"]) for r in rows)
    out = {k: torch.zeros(len(rows), T, dtype=torch.long) for k in ("input_ids", "position_ids", "attention_mask")}
    out["labels"] = torch.full((len(rows), T), -100)
    for i, r in enumerate(rows):
        n = len(r["ids"])
        rng = random.Random(epoch * 1_000_003 + r["index"])
        cut, skip = rng.randint(1, n - 1), rng.randint(0, target - n)
        ids = torch.tensor(r["ids"])
        out["input_ids"][i, :n] = ids
        out["labels"][i, :n] = ids
        out["attention_mask"][i, :n] = 1
        out["position_ids"][i, :n] = torch.arange(n) + skip * (torch.arange(n) >= cut)
    return out


if __name__ == "__main__":
    d = make(0); b = right(**d)
    for i, r in enumerate(d["rows"]):
        n = len(r["ids"]); p = b["position_ids"][i, :n]
        assert b["input_ids"][i, :n].tolist() == r["ids"] and p[0] == 0 and p[-1] < 256 and (p.diff() >= 1).all() and (p.diff() > 1).sum() <= 1
        assert b["labels"][i].ne(-100).sum() == n
    print("positions of row 0", b["position_ids"][0].tolist())
    again = right(d["rows"][::-1])
    assert again["position_ids"][-1][:len(d["rows"][0]["ids"])].tolist() == b["position_ids"][0][:len(d["rows"][0]["ids"])].tolist()
