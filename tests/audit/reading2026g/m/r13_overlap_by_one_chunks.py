"""Concatenate-and-chunk with overlap of one token (Megatron's GPTDataset): chunks have seq_len + 1 tokens but advance by seq_len, so the last token of a chunk is the first of the next. That is not a duplicate: as the last it is a target only, as the first an input only, hence each token of the stream but the first is a target exactly once."""
FAMILY = "packing"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with ids (list of tokens)"}
SETTINGS = {"seq_len": "8", "eos": "token that ends every document, 0"}
NOTES = "Documents are cut anywhere and continue in the next row; attention over document borders is allowed. The unfilled tail (< seq_len targets) is dropped. Empty documents give a lone eos. Output rows: tokens (seq_len), labels (seq_len, already shifted)."


def make(seed):
    import random
    r = random.Random(seed)
    return {"rows": [{"ids": [r.randint(1, 31) for _ in range(r.randint(1, 15))]} for _ in range(8)]}


def right(rows, seq_len=8, eos=0):
    stream = [t for r in rows for t in r["ids"] + [eos]]
    out = []
    for s in range(0, len(stream) - seq_len, seq_len):
        c = stream[s:s + seq_len + 1]
        out.append({"tokens": c[:-1], "labels": c[1:]})
    return out


if __name__ == "__main__":
    b = make(0)
    out = right(**b)
    stream = sum((r["ids"] + [0] for r in b["rows"]), [])
    targets = sum((o["labels"] for o in out), [])
    inputs = sum((o["tokens"] for o in out), [])
    assert targets == stream[1:1 + len(targets)] and inputs == stream[:len(inputs)]
    assert len(out) == (len(stream) - 1) // 8 and all(len(o["tokens"]) == len(o["labels"]) == 8 for o in out)
    assert all(x["labels"][-1] == y["tokens"][0] for x, y in zip(out, out[1:]))
    print("stream", len(stream), "targets", len(targets), "rows", len(out))
