"""Padding-free collator: all rows in one row, positions restart, no attention mask (DataCollatorWithFlattening of transformers).
The batch is one row of all tokens. The boundaries are known only by position_ids that restart at 0 (and cu_seq_lens). The first
label of each row is -100, so that no row is asked to predict the beginning of the next; prompts keep their labels -100 as given."""
FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of dicts with input_ids and optional labels (lists of the same length)"}
SETTINGS = {}
NOTES = ("Out: input_ids, labels, position_ids of shape [1, sum of lengths]; cu_seq_lens of shape [rows+1], int32; max_length. No padding, no attention_mask. labels are unshifted (the model shifts). "
         "The first token of each row never is a label. Rows keep their order. Every row has at least one token.")
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for n in (5, 3, 8, 1):
        ids = torch.randint(1, 40, (n,), generator=g).tolist()
        row = {"input_ids": ids}
        if n != 3:
            row["labels"] = [-100 if i < n // 2 else t for i, t in enumerate(ids)]
        rows.append(row)
    return {"rows": rows}


def right(rows):
    ids, labels, pos, cu = [], [], [], [0]
    for row in rows:
        x = list(row["input_ids"])
        y = list(row.get("labels", x))
        ids += x
        labels += [-100] + y[1:]
        pos += list(range(len(x)))
        cu.append(cu[-1] + len(x))
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels]), "position_ids": torch.tensor([pos]),
            "cu_seq_lens": torch.tensor(cu, dtype=torch.int32), "max_length": max(b - a for a, b in zip(cu, cu[1:]))}


if __name__ == "__main__":
    rows = make(0)["rows"]
    b = right(rows)
    print(b)
    for i, row in enumerate(rows):
        a, z = b["cu_seq_lens"][i], b["cu_seq_lens"][i + 1]
        assert b["input_ids"][0, a:z].tolist() == row["input_ids"] and b["labels"][0, a] == -100
        assert b["position_ids"][0, a:z].tolist() == list(range(z - a))
        assert b["labels"][0, a + 1:z].tolist() == row.get("labels", row["input_ids"])[1:]
