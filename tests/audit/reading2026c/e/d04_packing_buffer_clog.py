"""Best-fit packing buffer that oversized conversations never leave. karpathy/nanochat#811,
https://github.com/karpathy/nanochat/pull/811 (also issue 590), 2026. The SFT loader keeps a small buffer of
conversations and puts the largest one that fits into the row; one longer than a whole row never fits and stays in the
buffer. When all slots hold such conversations no row can be filled any more: each further row is padding only and the
rest of the data is never seen. The fix crops (or skips) what cannot fit before it enters the buffer."""
FAMILY = "packing"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with ids and mask (lists of the same length), conversations of varying length"}
SETTINGS = {"capacity": "tokens in a packed row, 16", "buffer_size": "conversations held, 4", "pad": "padding id, 0",
            "out_rows": "packed rows to make, 12 (the loader is an endless stream)"}
NOTES = ("Returns packed rows of exactly `capacity` tokens with mask 0 on padding; the source is cycled. Conversations "
         "longer than the capacity are cropped to it.")
import random


def make(seed):
    rng = random.Random(seed)
    rows = []
    for _ in range(40):
        n = rng.randrange(18, 30) if rng.random() < 0.35 else rng.randrange(3, 12)
        rows.append({"ids": [rng.randrange(5, 40) for _ in range(n)], "mask": [0, 0] + [1] * (n - 2)})
    return {"rows": rows}


def _pack(rows, capacity, buffer_size, pad, out_rows, crop):
    cursor, buffer, packed = 0, [], []

    def refill():
        nonlocal cursor
        while len(buffer) < buffer_size:
            row = rows[cursor % len(rows)]
            cursor += 1
            ids, mask = row["ids"], row["mask"]
            if crop:
                ids, mask = ids[:capacity], mask[:capacity]
            buffer.append((ids, mask))

    for _ in range(out_rows):
        ids, mask = [], []
        while len(ids) < capacity:
            refill()
            left = capacity - len(ids)
            fits = [i for i, (c, _) in enumerate(buffer) if len(c) <= left]
            if not fits:
                ids += [pad] * left
                mask += [0] * left
                break
            best = max(fits, key=lambda i: len(buffer[i][0]))
            c, m = buffer.pop(best)
            ids += c
            mask += m
        packed.append({"ids": ids, "mask": mask})
    return packed


def broken(rows, capacity=16, buffer_size=4, pad=0, out_rows=12):
    return _pack(rows, capacity, buffer_size, pad, out_rows, crop=False)


def right(rows, capacity=16, buffer_size=4, pad=0, out_rows=12):
    return _pack(rows, capacity, buffer_size, pad, out_rows, crop=True)


if __name__ == "__main__":
    b, r = broken(**make(0)), right(**make(0))
    print("trained tokens per row, broken", [sum(x["mask"]) for x in b])
    print("trained tokens per row, right ", [sum(x["mask"]) for x in r])
    assert sum(sum(x["mask"]) for x in b[-3:]) == 0 < min(sum(x["mask"]) for x in r)
