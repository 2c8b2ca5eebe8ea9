"""Flattening collator without attention mask. Hugging Face transformers, DataCollatorWithFlattening (and TRL's
padding-free collators). All rows of a batch become ONE row; nothing is padded and no attention mask is returned: the
restart of position_ids at 0 (and cu_seq_lens) is all that tells the attention kernel where documents end. The label of
the first token of every document is -100, because with the shift inside the model it would be predicted from the last
token of the document before."""
import random
import torch

FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "tokenized rows {'input_ids': list of ints, 'labels': list of ints, -100 where not trained}"}
SETTINGS = {}
NOTES = ("Returns input_ids, position_ids and labels, each [1, total tokens], and cu_seq_lens [rows + 1], int32. The tokens of "
         "the rows stand one after the other in the order of the rows, no padding, no truncation. Labels are unshifted (the "
         "model shifts); they are the rows' labels except the first label of each row, which is -100. position_ids restart at "
         "0 in every row. No attention mask, on purpose.")


def make(seed):
    rng = random.Random(seed)
    rows = []
    for _ in range(5):
        n = rng.randrange(1, 9)
        ids = [rng.randrange(1, 1000) for _ in range(n)]
        cut = rng.randrange(0, n)
        rows.append({"input_ids": ids, "labels": [-100] * cut + ids[cut:]})
    return {"rows": rows}


def right(rows):
    ids, labels, positions, cu = [], [], [], [0]
    for row in rows:
        ids += row["input_ids"]
        labels += [-100] + row["labels"][1:]
        positions += range(len(row["input_ids"]))
        cu.append(len(ids))
    return {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions]), "labels": torch.tensor([labels]),
            "cu_seq_lens": torch.tensor(cu, dtype=torch.int32)}


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    for i, row in enumerate(rows):
        a, b = out["cu_seq_lens"][i:i + 2].tolist()
        assert out["input_ids"][0, a:b].tolist() == row["input_ids"]
        assert out["labels"][0, a:b].tolist()[1:] == row["labels"][1:] and out["labels"][0, a] == -100
        assert out["position_ids"][0, a:b].tolist() == list(range(b - a))
    print({k: tuple(v.shape) for k, v in out.items()}, out["position_ids"].tolist())
