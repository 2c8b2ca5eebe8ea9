"""Multimodal rotary positions computed over the whole packed row. hiyouga/LlamaFactory#10283,
https://github.com/hiyouga/LlamaFactory/pull/10283, 2026. With neat_packing the 3-axis positions were taken from one call
over the concatenated row, so the second and later samples of a pack start where the one before ended instead of at 0,
and with attention by positions the borders between samples are lost too. The fix computes them per sub-sequence."""
import torch
FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of packed rows: 'ids' (id 3 is an image patch), 'seq_lengths' of the samples in the row, "
                  "'grids': per sample a list of (height, width) of its images in patches"}
SETTINGS = {"pad_id": "padding id, 0"}
NOTES = ("Returns ids, attention_mask with the index of the sample (1, 1, 2, 2, …, 0 for padding), position_ids "
         "[3, rows, time] (time, height, width). Each packed sample gets the positions it would have alone.")

def make(seed):
    g = torch.Generator().manual_seed(seed)
    text = lambda n: torch.randint(5, 40, (n,), generator=g).tolist()
    def row(samples):
        ids, lengths, grids = [], [], []
        for before, grid, after in samples:
            s = text(before) + ([3] * (grid[0] * grid[1]) if grid else []) + text(after)
            ids, lengths, grids = ids + s, lengths + [len(s)], grids + [[grid] if grid else []]
        return {"ids": ids, "seq_lengths": lengths, "grids": grids}
    return {"rows": [row([(3, (2, 3), 4), (2, None, 5), (1, (2, 2), 3)]), row([(4, None, 4), (2, (3, 2), 2)])]}

def rope_index(ids, grids):
    grids, out, pos, i = list(grids), [], 0, 0
    while i < len(ids):
        if ids[i] == 3 and grids:
            h, w = grids.pop(0)
            out += [(pos, pos + r, pos + c) for r in range(h) for c in range(w)]
            pos, i = pos + max(h, w), i + h * w
        else:
            out.append((pos, pos, pos))
            pos, i = pos + 1, i + 1
    return torch.tensor(out).T                         # [3, time]

def _collate(rows, positions, pad_id):
    width = max(len(r["ids"]) for r in rows)
    ids = torch.tensor([r["ids"] + [pad_id] * (width - len(r["ids"])) for r in rows])
    index = [sum(([i + 1] * n for i, n in enumerate(r["seq_lengths"])), []) for r in rows]
    mask = torch.tensor([m + [0] * (width - len(m)) for m in index])
    pos = torch.stack([torch.nn.functional.pad(p, (0, width - p.shape[1])) for p in positions], 1)
    return {"ids": ids, "attention_mask": mask, "position_ids": pos}

def broken(rows, pad_id=0):
    positions = [rope_index(r["ids"], sum(r["grids"], [])) for r in rows]
    return _collate(rows, positions, pad_id)

def right(rows, pad_id=0):
    positions = []
    for r in rows:
        parts, start = [], 0
        for n, grids in zip(r["seq_lengths"], r["grids"]):
            parts.append(rope_index(r["ids"][start:start + n], grids))
            start += n
        positions.append(torch.cat(parts, 1))
    return _collate(rows, positions, pad_id)

if __name__ == "__main__":
    b, r = broken(**make(0)), right(**make(0))
    print("largest position:", int(b["position_ids"].max()), int(r["position_ids"].max()))
    n = make(0)["rows"][0]["seq_lengths"][0]
    print("first position of the second sample:", b["position_ids"][:, 0, n].tolist(), r["position_ids"][:, 0, n].tolist())
    assert r["position_ids"][:, 0, n].tolist() == [0, 0, 0] and not torch.equal(b["position_ids"], r["position_ids"])
