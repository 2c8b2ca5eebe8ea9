"""Best-fit packing of chat data discards the loss mask. karpathy/nanochat#582, https://github.com/karpathy/nanochat/pull/582, 2026.
When the SFT loader was rewritten for best-fit packing, the mask returned by render_conversation was thrown away (`ids, _ = ...`).
Only padding was masked afterwards, so user prompts, BOS, special tokens and tool outputs were all trained on. Train loss looked normal; ChatCORE fell by about 12 %."""
import random
import torch

FAMILY = "data stages"
KIND = "collator"
INPUTS = {"rows": "list of conversations, each a dict: ids = token ids of the rendered conversation (first is BOS), mask = 1 where the token is written by the assistant and is to be trained"}
SETTINGS = {}
NOTES = "Rows of 24 inputs; conversations are never cut, best fit first, the rest of a row is filled with BOS (id 0). targets are the ids shifted by one, -1 is ignored by the loss: padding and every token that the assistant did not write. All conversations are at most 25 tokens."
CAPACITY, BOS = 25, 0


def make(seed):
    rng = random.Random(seed)
    rows = []
    for _ in range(9):
        ids, mask = [BOS], [0]
        for _turn in range(rng.randint(1, 2)):
            n = rng.randint(2, 4)
            ids += [1] + [rng.randint(5, 31) for _ in range(n)]      # user start, user text
            mask += [0] * (n + 1)
            n = rng.randint(2, 5)
            ids += [2] + [rng.randint(5, 31) for _ in range(n)] + [3]  # assistant start, text, end
            mask += [0] + [1] * n + [1]
        rows.append({"ids": ids[:CAPACITY], "mask": mask[:CAPACITY]})
    return {"rows": rows}


def _pack(rows):
    """Yield lists of conversations; each list fits into one row."""
    left = list(rows)
    while left:
        room, chosen = CAPACITY, []
        while True:
            fit = [i for i, r in enumerate(left) if len(r["ids"]) <= room]
            if not fit:
                break
            best = max(fit, key=lambda i: len(left[i]["ids"]))
            r = left.pop(best)
            chosen.append(r)
            room -= len(r["ids"])
        yield chosen


def broken(rows):
    xs, ys = [], []
    for chosen in _pack(rows):
        ids = [t for r in chosen for t in r["ids"]]
        n = len(ids)
        row = torch.tensor(ids + [BOS] * (CAPACITY - n))
        y = row[1:].clone()
        y[n - 1:] = -1                       # padding
        xs.append(row[:-1]); ys.append(y)
    return {"inputs": torch.stack(xs), "targets": torch.stack(ys)}


def right(rows):
    xs, ys = [], []
    for chosen in _pack(rows):
        ids = [t for r in chosen for t in r["ids"]]
        mask = [m for r in chosen for m in r["mask"]]
        n = len(ids)
        row = torch.tensor(ids + [BOS] * (CAPACITY - n))
        keep = torch.tensor(mask + [0] * (CAPACITY - n))
        y = row[1:].clone()
        y[n - 1:] = -1
        y[keep[1:] == 0] = -1
        xs.append(row[:-1]); ys.append(y)
    return {"inputs": torch.stack(xs), "targets": torch.stack(ys)}


if __name__ == "__main__":
    rows = make(0)["rows"]
    b, r = broken(rows), right(rows)
    assert torch.equal(b["inputs"], r["inputs"])
    assert (r["targets"] >= 0).sum() == sum(sum(x["mask"]) for x in rows)
    print("trained targets: broken", int((b["targets"] >= 0).sum()), "right", int((r["targets"] >= 0).sum()))
    assert not torch.equal(b["targets"], r["targets"])
