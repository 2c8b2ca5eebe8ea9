"""Preference pairs that truncation has made identical are kept. OpenRLHF/OpenRLHF#1311, https://github.com/OpenRLHF/OpenRLHF/issues/1311, 2026.
RewardDataset truncates chosen and rejected each to max_length and then overwrites the last kept token with EOS. If the two answers differ
only behind the cut, or exactly at the last kept token, both model inputs become the same. The pair stayed in the dataset: its loss is
ln 2 with zero preference gradient, it dilutes the batch and distorts the accuracy."""
FAMILY = "data"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with id (unique), prompt, chosen and rejected, each a list of token ids (5 to 39); chosen and rejected always differ"}
SETTINGS = {"max_len": "longest model input in tokens, 12", "eos": "end-of-text id, 2"}
NOTES = ("Turns preference rows into model inputs: dicts with id, chosen_ids, rejected_ids. Each side is prompt + answer + EOS, cut to max_len tokens from the left end, the last kept token replaced by EOS. "
         "Rows whose two sides are the same after that carry no preference and are dropped; all others are kept in order. Every returned row has two different sides that both end with EOS.")
import random


def make(seed):
    r = random.Random(seed)
    rows = []
    for i in range(8):
        def tok(n):
            return [r.randint(5, 39) for _ in range(n)]
        prompt, shared = tok(r.randint(2, 4)), tok(r.randint(0, 9))
        a, b = tok(r.randint(1, 4)), tok(r.randint(1, 4))
        if a == b:
            b = b + [5]
        if i == 5:  # two answers that agree until the cut
            shared = tok(12)
        rows.append({"id": i, "prompt": prompt, "chosen": shared + a, "rejected": shared + b})
    return {"rows": rows}


def tokenize(prompt, answer, max_len, eos):
    ids = (prompt + answer + [eos])[:max_len]
    ids[-1] = eos
    return ids


def broken(rows, max_len=12, eos=2):
    out = []
    for row in rows:
        c = tokenize(row["prompt"], row["chosen"], max_len, eos)
        j = tokenize(row["prompt"], row["rejected"], max_len, eos)
        out.append({"id": row["id"], "chosen_ids": c, "rejected_ids": j})
    return out


def right(rows, max_len=12, eos=2):
    out = []
    for row in rows:
        c = tokenize(row["prompt"], row["chosen"], max_len, eos)
        j = tokenize(row["prompt"], row["rejected"], max_len, eos)
        if c == j:
            continue
        out.append({"id": row["id"], "chosen_ids": c, "rejected_ids": j})
    return out


if __name__ == "__main__":
    x = make(0)
    a, b = broken(**x), right(**x)
    print("rows in", len(x["rows"]), "broken keeps", len(a), "right keeps", len(b))
    assert len(a) > len(b) and all(r["chosen_ids"] != r["rejected_ids"] for r in b)
