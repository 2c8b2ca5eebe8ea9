"""Padding id and end id are the same and the first one is trained. The collator masks by length, not by id: the real end token keeps its label, the padding after it gets -100 although it is the same id, and the attention mask is 1 on the
former and 0 on the latter. Rows are padded on the left, so the labels begin with -100 that belong to padding and then to the prompt."""
import random
import torch

FAMILY = "data stages"
KIND = "collator"
INPUTS = {"rows": "rows with prompt_ids and answer_ids (without the end token); the answer may itself hold the end id, as an end of an earlier turn"}
SETTINGS = {"eos": "end and padding id, 2", "max_length": "16, cut at the left (the prompt loses its beginning, the answer and its end token are kept)"}
NOTES = "input_ids, attention_mask, labels of the same width, left padded. labels = answer and its end token, -100 on prompt and padding; not shifted. Answers are shorter than max_length."


def make(seed):
    r = random.Random(seed)
    rows = [{"prompt_ids": [r.randrange(3, 40) for _ in range(r.randrange(2, 14))], "answer_ids": [r.randrange(3, 40) for _ in range(r.randrange(1, 6))]} for _ in range(5)]
    rows[1]["answer_ids"] = [7, 2, 9]
    return {"rows": rows}


def right(rows, eos=2, max_length=16):
    ids = [(row["prompt_ids"] + row["answer_ids"] + [eos])[-max_length:] for row in rows]
    width = max(map(len, ids))
    out = {"input_ids": [], "attention_mask": [], "labels": []}
    for x, row in zip(ids, rows):
        gap, n = width - len(x), len(row["answer_ids"]) + 1
        out["input_ids"].append([eos] * gap + x)
        out["attention_mask"].append([0] * gap + [1] * len(x))
        out["labels"].append([-100] * (width - n) + x[-n:])
    return {k: torch.tensor(v) for k, v in out.items()}


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    for i, row in enumerate(rows):
        trained = [t for t in out["labels"][i].tolist() if t != -100]
        kept = out["input_ids"][i][out["attention_mask"][i] == 1].tolist()
        assert trained == row["answer_ids"] + [2] and kept == (row["prompt_ids"] + row["answer_ids"] + [2])[-16:]
    print(out["labels"][1].tolist(), out["attention_mask"][1].tolist())
