"""BOS-aligned best-fit packing with cropping (karpathy/nanochat dataloader, tokenizing_distributed_data_loader_bos_bestfit): each row starts with a BOS; if no
document of the buffer fits, the shortest one is cropped to fill the row and its rest is thrown away (about a third of the tokens, by design)."""
FAMILY = "packing and positions"
KIND = "data stage"
INPUTS = {"rows": "list of {'ids': token ids, starts with BOS 1, BOS nowhere else}, one document each"}
SETTINGS = {"seq_len": "T, a row has T + 1 tokens, 15", "buffer_size": "documents among which the best fit is searched, 6"}
NOTES = """(rows) -> packed rows {'input': T ids, 'labels': T ids}. A packed row has T + 1 tokens: input is all but the last, labels all but the first (already shifted; all tokens
trained, also BOS behind the end of a document). It is filled from a buffer of up to buffer_size documents, refilled in source order before each choice:
the longest document that fits whole into the room left is taken (the first of equals); if none fits, the shortest document of the buffer is cut to
the room left and the rest of it is discarded for good. So each packed row is exactly full without padding, begins with BOS, every document begins
with its own BOS, and no row ever begins in the middle of a document; a part of the corpus is dropped, by design. A last row that cannot be filled is dropped. No document occurs
twice. Attention across the documents of a row is allowed and positions run on over the row."""
BOS = 1


def make(seed):
    import random
    r = random.Random(seed)
    return {"rows": [{"ids": [BOS] + [r.randint(2, 40) for _ in range(r.choice([2, 4, 5, 7, 11, 20]))]} for _ in range(20)]}


def right(rows, seq_len=15, buffer_size=6):
    source, buffer, packed = [r["ids"] for r in rows], [], []
    while True:
        row = []
        while len(row) < seq_len + 1:
            while source and len(buffer) < buffer_size:
                buffer.append(source.pop(0))
            if not buffer:
                return packed
            room = seq_len + 1 - len(row)
            best, best_len = -1, 0
            for i, d in enumerate(buffer):
                if best_len < len(d) <= room:
                    best, best_len = i, len(d)
            if best >= 0:
                row += buffer.pop(best)
            else:
                shortest = min(range(len(buffer)), key=lambda i: len(buffer[i]))
                row += buffer.pop(shortest)[:room]
        packed.append({"input": row[:-1], "labels": row[1:]})


if __name__ == "__main__":
    x = make(0)
    out = right(**x)
    docs = [r["ids"] for r in x["rows"]]
    used = 0
    for p in out:
        row = p["input"] + p["labels"][-1:]
        assert len(row) == 16 and row[0] == BOS and p["labels"][:-1] == p["input"][1:]
        starts = [i for i, t in enumerate(row) if t == BOS] + [16]
        for n, (a, b) in enumerate(zip(starts, starts[1:])):
            if row[a:b] in docs:                       # whole
                docs.remove(row[a:b])
            else:                                      # cropped, only at the end of the row
                assert b == 16 and any(d[:b - a] == row[a:b] for d in docs)
            used += b - a
    print(len(out), "rows,", used, "of", sum(len(r["ids"]) for r in x["rows"]), "tokens used")
