"""Left truncation keeps the left part. verl-project/verl#6372, https://github.com/verl-project/verl/pull/6372, 2026.
The multi-turn SFT dataset has two ways to bring a row to max_length. The padded one honours truncation=left/right, the
no-padding one (default of the trainer) accepted the setting but always kept the first max_length tokens. With
truncation=left the last assistant turn, the only trained part of many rows, was silently cut away."""
import random

FAMILY = "data"
KIND = "data stage"
INPUTS = {"rows": "list of rows: input_ids (list of tokens) and loss_mask (1 where the token is trained, usually the "
                  "last assistant turn at the end of the row)"}
SETTINGS = {"max_length": "longest row, 12", "truncation": "which side of a longer row is cut away, 'left' (or 'right', "
            "'error')"}
NOTES = ("One row in, one row out, order kept; rows up to max_length are unchanged, no padding. With truncation='left' "
         "the end of a longer row is kept, with 'right' its beginning.")


def make(seed):
    rng = random.Random(seed)
    rows = []
    for _ in range(8):
        prompt, answer = rng.randint(3, 14), rng.randint(3, 6)
        ids = [rng.randint(1, 49) for _ in range(prompt + answer)]
        rows.append({"input_ids": ids, "loss_mask": [0] * prompt + [1] * answer})
    return {"rows": rows}


def broken(rows, max_length=12, truncation="left"):
    if truncation not in ("left", "right", "error"):
        raise ValueError(truncation)
    out = []
    for row in rows:
        ids, mask = list(row["input_ids"]), list(row["loss_mask"])
        if len(ids) > max_length:
            if truncation == "error":
                raise ValueError("row is longer than max_length")
            ids, mask = ids[:max_length], mask[:max_length]
        out.append({"input_ids": ids, "loss_mask": mask})
    return out


def right(rows, max_length=12, truncation="left"):
    if truncation not in ("left", "right", "error"):
        raise ValueError(truncation)
    out = []
    for row in rows:
        ids, mask = list(row["input_ids"]), list(row["loss_mask"])
        if len(ids) > max_length:
            if truncation == "error":
                raise ValueError("row is longer than max_length")
            cut = slice(-max_length, None) if truncation == "left" else slice(max_length)
            ids, mask = ids[cut], mask[cut]
        out.append({"input_ids": ids, "loss_mask": mask})
    return out


if __name__ == "__main__":
    c = make(0)
    b, r = broken(**c), right(**c)
    print("rows longer than 12:", sum(len(x["input_ids"]) > 12 for x in c["rows"]), "of", len(c["rows"]))
    print("trained tokens: input", sum(sum(x["loss_mask"]) for x in c["rows"]), "broken",
          sum(sum(x["loss_mask"]) for x in b), "right", sum(sum(x["loss_mask"]) for x in r))
    assert b != r and broken(**c, truncation="right") == right(**c, truncation="right")
