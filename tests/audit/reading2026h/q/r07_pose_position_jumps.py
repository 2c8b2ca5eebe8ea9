"""PoSE: positions with random jumps inside a short window. Zhu et al. 2023, "PoSE: Efficient Context Window Extension of LLMs via Positional Skip-wise Training".
A row of length 12 is split into two chunks; the second chunk's positions are moved up by a random skip, so that positions up to the target length 48 are trained on short rows. The tokens are contiguous text, the positions are not, on purpose. Labels are untouched."""
import torch
FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of row dicts with input_ids (list of 12 token ids), cut (where the second chunk starts, 1..11), u (a uniform number in [0, 1) that sets the skip)"}
SETTINGS = {"target": "context length to be reached, 48"}
NOTES = "Returns input_ids, labels (a copy of input_ids, unshifted), position_ids [rows, 12]. All rows have the same length. Positions start at 0, are strictly increasing, step 1 except one jump at cut of size floor(u * (target - length + 1)); the largest is below target. The randomness is drawn by the data stage before, so the collator is deterministic."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(4):
        rows.append({"input_ids": torch.randint(0, 50, (12,), generator=g).tolist(),
                     "cut": int(torch.randint(1, 12, (1,), generator=g)), "u": torch.rand(1, generator=g).item()})
    return {"rows": rows}


def right(rows, target=48):
    ids = torch.tensor([r["input_ids"] for r in rows])
    n, t = ids.shape
    pos = torch.arange(t).repeat(n, 1)
    for i, r in enumerate(rows):
        pos[i, r["cut"]:] += int(r["u"] * (target - t + 1))
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": pos}


if __name__ == "__main__":
    rows = make(0)["rows"]
    b = right(rows)
    print(b["position_ids"].tolist())
    for i, r in enumerate(rows):
        p = b["position_ids"][i].tolist()
        s = int(r["u"] * 37)
        assert p == [k if k < r["cut"] else k + s for k in range(12)] and p[-1] < 48
    assert torch.equal(b["labels"], b["input_ids"])
