"""Prompt masking of shifted labels is one position too long. pytorch/torchtitan#2755, https://github.com/pytorch/torchtitan/pull/2755, 2026.
inputs = tokens[:-1], labels = tokens[1:]; the label at position prompt_len - 1 is the first answer token. Masking labels[:prompt_len] drops it: the
model is never trained to begin an answer."""
import random

FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of dicts: tokens (prompt then answer), prompt_len"}
SETTINGS = {}
NOTES = "SFT rows with inputs and labels already shifted (labels[i] is the token after inputs[i]); all answer tokens are trained, no prompt token is; ignored labels -100."
IGNORE = -100


def broken(rows):
    out = []
    for r in rows:
        t, n = r["tokens"], r["prompt_len"]
        labels = list(t[1:])
        m = min(n, len(labels))
        labels[:m] = [IGNORE] * m
        out.append({"input_ids": list(t[:-1]), "labels": labels})
    return out


def right(rows):
    out = []
    for r in rows:
        t, n = r["tokens"], r["prompt_len"]
        labels = list(t[1:])
        m = min(n - 1, len(labels))
        labels[:m] = [IGNORE] * m
        out.append({"input_ids": list(t[:-1]), "labels": labels})
    return out


def make(seed):
    r = random.Random(seed)
    rows = []
    for _ in range(4):
        p, a = r.randint(2, 5), r.randint(2, 6)
        rows.append({"tokens": [r.randrange(2, 50) for _ in range(p + a)], "prompt_len": p})
    return {"rows": rows}


if __name__ == "__main__":
    x = make(0)
    a, b = broken(**x), right(**x)
    for r, p, q in zip(x["rows"], a, b):
        print("answer tokens", len(r["tokens"]) - r["prompt_len"], "trained: broken", sum(v != IGNORE for v in p["labels"]), "right", sum(v != IGNORE for v in q["labels"]))
        assert [v for v in q["labels"] if v != IGNORE] == r["tokens"][r["prompt_len"]:]
    assert a != b
