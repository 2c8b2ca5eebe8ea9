"""Collator that pads on the left, repeats position 0 on padding, uses a real token as pad and leaves labels unshifted.
Right: rows end together (needed when generation goes on from the batch), positions are those of the unpadded row, the pad id equals the end token but the attention mask and the labels tell them apart, and the model shifts."""
import random
import torch

FAMILY = "data stages"
KIND = "collator"
INPUTS = {"rows": "list of dicts: ids (prompt, answer, end token), prompt_len"}
SETTINGS = {"pad": "the end token's id, 1"}
NOTES = "input_ids, attention_mask, position_ids, labels. Labels are ids on the answer including the true end token, -100 on prompt and padding; not shifted."


def right(rows, pad=1):
    n = max(len(r["ids"]) for r in rows)
    ids = torch.full((len(rows), n), pad)
    att = torch.zeros(len(rows), n, dtype=torch.long)
    lab = torch.full((len(rows), n), -100)
    for i, r in enumerate(rows):
        k = n - len(r["ids"])
        ids[i, k:] = torch.tensor(r["ids"])
        att[i, k:] = 1
        lab[i, k + r["prompt_len"]:] = torch.tensor(r["ids"][r["prompt_len"]:])
    pos = (att.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": att, "position_ids": pos, "labels": lab}


def make(seed):
    r = random.Random(seed)
    rows = []
    for _ in range(4):
        p, a = r.randint(1, 5), r.randint(1, 6)
        rows.append({"ids": [r.randrange(2, 50) for _ in range(p + a)] + [1], "prompt_len": p})
    return {"rows": rows}


if __name__ == "__main__":
    rows = make(0)["rows"]
    b = right(rows)
    for i, r in enumerate(rows):
        m = b["attention_mask"][i].bool()
        assert b["input_ids"][i][m].tolist() == r["ids"] and b["position_ids"][i][m].tolist() == list(range(len(r["ids"])))
        lab = b["labels"][i]
        assert lab[lab != -100].tolist() == r["ids"][r["prompt_len"]:] and lab[-1] == 1 and (lab[~m] == -100).all()
    print("shape", tuple(b["input_ids"].shape), "trained", int((b["labels"] != -100).sum()), "real", int(b["attention_mask"].sum()))
