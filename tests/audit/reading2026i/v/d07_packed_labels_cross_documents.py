"""The last token of a packed document is trained to predict the next document. pytorch/torchtitan#4075,
https://github.com/pytorch/torchtitan/pull/4075, 2026. The text dataset cuts one buffer of concatenated documents into
chunks of seq_len + 1 and takes the labels as the chunk shifted by one, so the label at each document's last position is
the first token of an unrelated document. The fix ignores the loss where the next position starts a document."""
import random

FAMILY = "packing and positions"
KIND = "data stage"
INPUTS = {"rows": "list of documents {'ids': list of token ids, ends with the end-of-text id 1}"}
SETTINGS = {"seq_len": "tokens of a packed row, 16"}
NOTES = ("Packs documents into rows of seq_len tokens: input_ids, labels (already shifted, -100 is ignored), positions "
         "that start again at 0 with each document (attention is kept inside a document). The remainder that does not "
         "fill a row is dropped. The first token of a document has no predecessor and is never a label.")


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"ids": [r.randrange(2, 40) for _ in range(r.randrange(3, 14))] + [1]} for _ in range(12)], "seq_len": 16}


def chunks(rows, seq_len):
    tokens, positions = [], []
    for row in rows:
        tokens.extend(row["ids"])
        positions.extend(range(len(row["ids"])))
        while len(tokens) >= seq_len + 1:
            yield tokens[:seq_len + 1], positions[:seq_len + 1]
            tokens, positions = tokens[seq_len + 1:], positions[seq_len + 1:]


def broken(rows, seq_len=16):
    out = []
    for x, pos in chunks(rows, seq_len):
        out.append({"input_ids": x[:-1], "labels": x[1:], "positions": pos[:-1]})
    return out


def right(rows, seq_len=16):
    out = []
    for x, pos in chunks(rows, seq_len):
        labels = [-100 if p == 0 else t for t, p in zip(x[1:], pos[1:])]
        out.append({"input_ids": x[:-1], "labels": labels, "positions": pos[:-1]})
    return out


if __name__ == "__main__":
    d = make(0)
    b, r = broken(**d), right(**d)
    diff = sum(x != y for p, q in zip(b, r) for x, y in zip(p["labels"], q["labels"]))
    print("rows", len(r), "labels that differ", diff)
    print(b[0], r[0], sep="\n")
    assert diff > 0 and all(i == 1 for p, q in zip(b, r) for i, x, y in zip(p["input_ids"], p["labels"], q["labels"]) if x != y)
