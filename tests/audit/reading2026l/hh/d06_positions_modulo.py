"""Positions wrapped by modulo in the middle of a document. pytorch/torchtitan#2849, https://github.com/pytorch/torchtitan/pull/2849, 2026.
To keep RoPE positions below the cache size the dataset stored i % seq_len for token i of a document. When a long document is split over
several chunks, the wrap falls somewhere inside a chunk: one contiguous document gets positions 8, 9, 10, 0, 1, 2, ... in the same row. The fix
stores the plain position and subtracts the first position of a continued document in each chunk."""
FAMILY = "packing and positions"
KIND = "data stage"
INPUTS = {"rows": "list of {'ids': list of token ids}, one document each, of any length"}
SETTINGS = {"seq_len": "number of input tokens per chunk, 11"}
NOTES = """(rows) -> chunks {'input': seq_len ids, 'labels': seq_len ids, 'positions': seq_len ints}. The documents are concatenated and cut into
consecutive pieces of seq_len + 1 tokens; input is the piece without its last token, labels the piece without its first (already shifted). What does
not fill a whole piece at the end is dropped. positions belong to the input tokens: within a chunk each document counts 0, 1, 2, ... by one per token;
a document which was begun in an earlier chunk starts again at 0 at the start of the chunk (rows cannot attend to other rows). So positions are
below seq_len, and they return to 0 only at the start of the chunk and at the start of a document, never within one."""


def make(seed):
    import random
    r = random.Random(seed)
    return {"rows": [{"ids": [r.randint(3, 40) for _ in range(n)]} for n in [3, 15, 5, r.randint(14, 30), r.randint(2, 9), r.randint(13, 40)]]}


def _chunks(tokens, positions, seq_len, fix):
    n = seq_len + 1
    out = []
    for s in range(0, len(tokens) - n + 1, n):
        x, p = tokens[s:s + n], fix(positions[s:s + n])
        out.append({"input": x[:-1], "labels": x[1:], "positions": p[:-1]})
    return out


def broken(rows, seq_len=11):
    tokens, positions = [], []
    for r in rows:
        tokens += r["ids"]
        positions += [i % seq_len for i in range(len(r["ids"]))]
    return _chunks(tokens, positions, seq_len, lambda p: p)


def _normalize(p):
    """positions of a document continued from the previous chunk start at 0"""
    first, out = p[0], []
    for i, v in enumerate(p):
        if i and v == 0:
            first = 0
        out.append(v - first)
    return out


def right(rows, seq_len=11):
    tokens, positions = [], []
    for r in rows:
        tokens += r["ids"]
        positions += range(len(r["ids"]))
    return _chunks(tokens, positions, seq_len, _normalize)


if __name__ == "__main__":
    x = make(0)
    a, b = broken(**x), right(**x)
    for p, q in zip(a, b):
        print("broken", p["positions"], "right", q["positions"])
    assert [p["input"] for p in a] == [p["input"] for p in b] and [p["positions"] for p in a] != [p["positions"] for p in b]
