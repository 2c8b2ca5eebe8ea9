"""Pretraining stream: documents are glued together, cut anywhere, and neighbouring chunks share one token.
Right: rows of length T + 1 with stride T, so that with the usual shift each token of the stream (but the first) is a target exactly once. Documents are separated by EOS only; attending over the border and
predicting the first token of the next document are wanted in this recipe."""
import random

FAMILY = "packing"
KIND = "data stage"
INPUTS = {"rows": "documents, dicts with tokens"}
SETTINGS = {"T": "targets for each chunk, 8", "eos": "1"}
NOTES = "Concatenate and cut, no document mask. Last incomplete chunk is dropped. The model shifts the labels itself (labels are equal to input_ids)."


def right(rows, T=8, eos=1):
    stream = []
    for r in rows:
        stream += r["tokens"] + [eos]
    out = []
    for s in range(0, len(stream) - T, T):
        c = stream[s:s + T + 1]
        out.append({"input_ids": c, "labels": list(c)})
    return out


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"tokens": [r.randrange(2, 50) for _ in range(r.randint(3, 20))]} for _ in range(6)]}


if __name__ == "__main__":
    x = make(0)
    out = right(**x)
    stream = [t for r in x["rows"] for t in r["tokens"] + [1]]
    targets = [t for c in out for t in c["labels"][1:]]
    print("stream", len(stream), "chunks", len(out), "targets", len(targets))
    assert targets == stream[1:1 + 8 * len(out)] and len(stream) - len(targets) <= 8
    assert all(a["input_ids"][-1] == b["input_ids"][0] for a, b in zip(out, out[1:]))
