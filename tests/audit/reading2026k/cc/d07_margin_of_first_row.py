"""The optional margin column is looked for in the first row only. huggingface/trl#5539, https://github.com/huggingface/trl/issues/5539, 2026.
DataCollatorForPreference emits the margin tensor if "margin" is in examples[0]. If the first row of a shuffled batch has no margin and
others have one, the margins of the whole batch are dropped and the margin-aware reward loss is skipped without a warning; the result
depends on the order of the rows. The fix looks at all rows and takes 0.0 where the key is absent."""
FAMILY = "data"
KIND = "collator"
INPUTS = {"rows": "list of dicts with chosen_ids and rejected_ids (lists of token ids 1 to 39) and, in some rows only, margin (float, how much better the chosen answer is)"}
SETTINGS = {"pad": "padding id, 0"}
NOTES = ("Returns input_ids and attention_mask, [2 * rows, time]: first all chosen, then all rejected, right-padded with pad to the longest; attention_mask 1 on real tokens. "
         "margin, float [rows], is present if any row of the batch has a margin; a row without the key has margin 0.0. Row i of margin belongs to row i of the batch.")
import random
import torch


def make(seed):
    r = random.Random(seed)
    rows = []
    for i in range(5):
        row = {"chosen_ids": [r.randint(1, 39) for _ in range(r.randint(2, 7))], "rejected_ids": [r.randint(1, 39) for _ in range(r.randint(2, 7))]}
        if i > 0 and (i == 2 or r.random() < 0.5):
            row["margin"] = round(r.random() * 2, 3)
        rows.append(row)
    return {"rows": rows}


def pad_all(seqs, pad):
    n = max(len(s) for s in seqs)
    ids = torch.tensor([s + [pad] * (n - len(s)) for s in seqs])
    att = torch.tensor([[1] * len(s) + [0] * (n - len(s)) for s in seqs])
    return ids, att


def broken(rows, pad=0):
    ids, att = pad_all([r["chosen_ids"] for r in rows] + [r["rejected_ids"] for r in rows], pad)
    out = {"input_ids": ids, "attention_mask": att}
    if "margin" in rows[0]:
        out["margin"] = torch.tensor([r["margin"] for r in rows], dtype=torch.float)
    return out


def right(rows, pad=0):
    ids, att = pad_all([r["chosen_ids"] for r in rows] + [r["rejected_ids"] for r in rows], pad)
    out = {"input_ids": ids, "attention_mask": att}
    if any("margin" in r for r in rows):
        out["margin"] = torch.tensor([r.get("margin", 0.0) for r in rows], dtype=torch.float)
    return out


if __name__ == "__main__":
    x = make(0)
    a, b = broken(**x), right(**x)
    print("broken", sorted(a), "right", sorted(b), b["margin"])
    assert "margin" not in a and "margin" in b
