"""BOS-aligned best-fit packing that crops a document and throws its rest away.
karpathy/nanochat tokenizing_distributed_data_loader_bos_bestfit. Each row starts with BOS. The longest buffered document that fits is placed; when none fits, the shortest one is cut to fill the row exactly and its tail is dropped.
No padding and no row crosses, at the price of losing a part of the tokens; the loss of tokens is a known choice and not an error."""
import random

FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of {ids: BOS and the tokens of one document}"}
SETTINGS = {"capacity": "tokens per row, 24", "buffer": "documents looked at, 8"}
NOTES = ("All output rows have exactly capacity tokens and begin with BOS = 1. Each document appears at most once, whole or as a prefix that ends a row. Cropped tails and, at the end of the data, documents that do not fill a row are dropped on purpose "
         "(here about a quarter). The order of documents changes.")
BOS = 1


def make(seed):
    rng = random.Random(seed)
    return {"rows": [{"ids": [BOS] + [rng.randint(2, 49) for _ in range(rng.randint(2, 30))]} for _ in range(60)]}


def right(rows, capacity=24, buffer=8):
    source, held, out = iter(rows), [], []

    def refill():
        while len(held) < buffer:
            nxt = next(source, None)
            if nxt is None:
                return
            held.append(nxt["ids"])

    while True:
        row = []
        while len(row) < capacity:
            refill()
            if not held:
                return out                                  # an unfinished row is dropped
            room = capacity - len(row)
            fitting = [i for i, d in enumerate(held) if len(d) <= room]
            if fitting:
                row += held.pop(max(fitting, key=lambda i: len(held[i])))
            else:
                row += held.pop(min(range(len(held)), key=lambda i: len(held[i])))[:room]
        out.append({"ids": row})


if __name__ == "__main__":
    rows = make(0)["rows"]; out = right(rows)
    docs, crops, used = [tuple(r["ids"]) for r in rows], [], 0
    for o in out:
        assert len(o["ids"]) == 24 and o["ids"][0] == BOS
        starts = [i for i, t in enumerate(o["ids"]) if t == BOS] + [24]
        for a, b in zip(starts, starts[1:]):
            piece = tuple(o["ids"][a:b])
            used += 1
            if piece in docs:
                docs.remove(piece)
            else:
                assert b == 24                              # only the end of a row may be cropped
                crops.append(piece)
    for piece in sorted(crops, key=len, reverse=True):
        docs.remove(next(d for d in docs if d[:len(piece)] == piece))
    kept, total = 24 * len(out), sum(len(r["ids"]) for r in rows)
    print("rows", len(out), "documents used", used, "of", len(rows), "tokens kept", kept, "of", total)
    assert 0.6 < kept / total <= 1
