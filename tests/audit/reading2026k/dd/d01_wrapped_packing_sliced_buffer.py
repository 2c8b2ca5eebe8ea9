"""Wrapped packing re-reads the start of the buffer for every map batch after the first.
huggingface/trl#6669, https://github.com/huggingface/trl/issues/6669, 2026 (fix: huggingface/trl#6670).
`pack_dataset(strategy="wrapped")` sized its output from the sliced view of the column (offsets relative to the
slice) but cut the rows out of the raw child buffer. `map(batched=True)` hands over zero-copy slices, so every batch
after the first came back holding the tokens of the first rows; row count and token count stayed right."""
import random

FAMILY = "packing"
KIND = "data stage"
INPUTS = {"rows": "list of tokenized documents, each {'input_ids': list of ints}"}
SETTINGS = {"seq_length": "length of a packed row, 8", "batch_size": "rows per map batch, 4"}
NOTES = ("Concatenate-and-cut packing. The rows are worked on in map batches of batch_size; in each batch all tokens are "
         "concatenated in order and cut in rows of seq_length; the last row of a batch may be shorter. No token is "
         "dropped, duplicated, padded or reordered: the output rows, read in order, are the tokens of the input rows in "
         "order. Deterministic, no seed.")


class Column:
    """A list column as Arrow keeps it: one flat buffer and offsets; slicing copies nothing."""

    def __init__(self, values, offsets):
        self.values, self.offsets = values, offsets

    @classmethod
    def of(cls, lists):
        values, offsets = [], [0]
        for one in lists:
            values += one
            offsets.append(len(values))
        return cls(values, offsets)

    def slice(self, start, stop):
        return Column(self.values, self.offsets[start:stop + 1])

    def flatten(self):
        return self.values[self.offsets[0]:self.offsets[-1]]


def make(seed):
    rng = random.Random(seed)
    rows = [{"input_ids": [rng.randrange(1, 1000) for _ in range(rng.randrange(2, 9))]} for _ in range(11)]
    return {"rows": rows}


def broken(rows, seq_length=8, batch_size=4):
    column = Column.of([row["input_ids"] for row in rows])
    out = []
    for start in range(0, len(rows), batch_size):
        part = column.slice(start, min(start + batch_size, len(rows)))
        total = part.offsets[-1] - part.offsets[0]
        cuts = list(range(0, total, seq_length)) + [total]
        values = part.values
        out += [{"input_ids": values[a:b]} for a, b in zip(cuts[:-1], cuts[1:])]
    return out


def right(rows, seq_length=8, batch_size=4):
    column = Column.of([row["input_ids"] for row in rows])
    out = []
    for start in range(0, len(rows), batch_size):
        part = column.slice(start, min(start + batch_size, len(rows)))
        total = part.offsets[-1] - part.offsets[0]
        cuts = list(range(0, total, seq_length)) + [total]
        values = part.flatten()
        out += [{"input_ids": values[a:b]} for a, b in zip(cuts[:-1], cuts[1:])]
    return out


if __name__ == "__main__":
    rows = make(0)["rows"]
    flat = [t for r in rows for t in r["input_ids"]]
    b = [t for r in broken(rows) for t in r["input_ids"]]
    r = [t for r in right(rows) for t in r["input_ids"]]
    print("tokens", len(flat), len(b), len(r), "| right in order:", r == flat, "| tokens lost by broken:", len(set(flat) - set(b)))
    assert r == flat and b != flat and len(b) == len(flat)
