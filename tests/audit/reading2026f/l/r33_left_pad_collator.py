"""Left-padding collator for generation (transformers decoder-only). Padding comes FIRST, positions are cumsum(mask) - 1 with the value 1 at padding (as transformers does it),
the width is rounded up to a multiple of 8, and prompts that are too long lose their beginning, not their end."""
FAMILY = "collators"
KIND = "collator"
INPUTS = {"rows": "list of dicts with prompt_ids (list of int, not empty) and answer (str, passed on)"}
SETTINGS = {"pad_id": "padding id, 0", "max_length": "longest prompt kept, 20 (from the right end)", "multiple": "width is rounded up to a multiple of this, 8"}
NOTES = ("Output: input_ids, attention_mask, position_ids [rows, width]; answers stay in the same order under 'answer' (a list). The pad id may also be a real token "
         "inside a prompt: the mask comes from lengths and never from ids. Width may exceed max_length because of rounding.")
import random

import torch


def make(seed):
    r = random.Random(seed)
    rows = [{"prompt_ids": [r.randint(0, 40) for _ in range(r.randint(1, 26))], "answer": str(i)} for i in range(r.randint(1, 5))]
    return {"rows": rows}


def right(rows, pad_id=0, max_length=20, multiple=8):
    kept = [row["prompt_ids"][-max_length:] for row in rows]
    longest = max(len(k) for k in kept)
    width = -(-longest // multiple) * multiple
    ids = torch.tensor([[pad_id] * (width - len(k)) + k for k in kept])
    mask = torch.tensor([[0] * (width - len(k)) + [1] * len(k) for k in kept])
    pos = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": pos, "answer": [row["answer"] for row in rows]}


if __name__ == "__main__":
    for seed in range(20):
        rows = make(seed)["rows"]
        out = right(rows)
        assert out["input_ids"].shape[1] % 8 == 0
        for i, row in enumerate(rows):
            on = out["attention_mask"][i].bool()
            want = row["prompt_ids"][-20:]
            assert out["input_ids"][i][on].tolist() == want and out["position_ids"][i][on].tolist() == list(range(len(want)))
            assert on[-1] and out["input_ids"][i, -1] == row["prompt_ids"][-1]
    print(out["position_ids"])
