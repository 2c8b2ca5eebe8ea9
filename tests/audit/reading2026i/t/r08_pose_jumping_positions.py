"""PoSE: position ids of a short row jump so that they cover a long window. Zhu et al. 2023 (arXiv 2309.10400), in axolotl as use_pose.
Each row is cut into chunks; a random skip is added to the positions of each chunk after the first. Positions are strictly increasing but have holes and reach beyond the length of the row. ids and labels are untouched, and the jump is no document boundary: later chunks attend to earlier ones."""
import torch
FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of {input_ids: list of equal length, seed: number that fixes the skips of this row}"}
SETTINGS = {"target": "context window to be learned, 64", "chunks": "chunks per row, 3"}
NOTES = "Output: input_ids, position_ids, labels [rows, time]. labels = input_ids (the model shifts). Positions start at 0, grow strictly, stay below target. Deterministic given the row's seed. Row length must be at most target."

def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rows": [{"input_ids": torch.randint(1, 31, (16,), generator=g).tolist(), "seed": 100 * seed + i} for i in range(4)]}

def right(rows, target=64, chunks=3):
    pos = []
    for r in rows:
        g = torch.Generator().manual_seed(r["seed"]); n = len(r["input_ids"])
        cuts = sorted((torch.randperm(n - 1, generator=g)[:chunks - 1] + 1).tolist())
        left = target - n; p = torch.arange(n)
        for c in cuts:
            skip = int(torch.randint(0, left + 1, (1,), generator=g)); left -= skip
            p[c:] += skip
        pos.append(p)
    ids = torch.tensor([r["input_ids"] for r in rows])
    return {"input_ids": ids, "position_ids": torch.stack(pos), "labels": ids.clone()}

if __name__ == "__main__":
    rows = make(0)["rows"]; out = right(rows); p = out["position_ids"]
    assert (p[:, 0] == 0).all() and (p.diff(dim=1) >= 1).all() and p.max() < 64 and ((p.diff(dim=1) > 1).sum(1) <= 2).all()
    assert torch.equal(out["labels"], out["input_ids"]) and torch.equal(right(rows)["position_ids"], p)
    print(p[0].tolist())
