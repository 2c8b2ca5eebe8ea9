"""Right: prompts are padded on the left and answers on the right, so every answer starts in the same column. There is padding on both sides of a row, and padding positions are clamped to 0, which repeats position 0."""
import random
import torch

FAMILY = "data stages"
KIND = "collator"
INPUTS = {"rows": "list of {prompt: ids, answer: ids}; ids are 1 or higher"}
SETTINGS = {}
NOTES = "Returns ids (padding 0), attention_mask, position_ids (index among real tokens; 0 on padding), labels (the answer's ids in place, -100 elsewhere; not shifted, the loss shifts). Answers start in column max prompt length."

def make(seed):
    r = random.Random(seed)
    return {"rows": [{"prompt": [r.randint(1, 49) for _ in range(r.randint(2, 7))], "answer": [r.randint(1, 49) for _ in range(r.randint(1, 6))]} for _ in range(5)]}

def right(rows):
    left, wide = max(len(r["prompt"]) for r in rows), max(len(r["answer"]) for r in rows)
    ids = torch.zeros(len(rows), left + wide, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for i, r in enumerate(rows):
        ids[i, left - len(r["prompt"]):left] = torch.tensor(r["prompt"])
        ids[i, left:left + len(r["answer"])] = torch.tensor(r["answer"])
        labels[i, left:left + len(r["answer"])] = torch.tensor(r["answer"])
    attention = (ids != 0).long()
    positions = (attention.cumsum(1) - 1).clamp(min=0) * attention
    return {"ids": ids, "attention_mask": attention, "position_ids": positions, "labels": labels}

if __name__ == "__main__":
    made = make(0)
    out = right(**made)
    for i, r in enumerate(made["rows"]):
        real = out["attention_mask"][i] > 0
        assert out["ids"][i][real].tolist() == r["prompt"] + r["answer"]
        assert out["position_ids"][i][real].tolist() == list(range(len(r["prompt"]) + len(r["answer"])))
        assert out["labels"][i][out["labels"][i] >= 0].tolist() == r["answer"]
    starts = {int((row >= 0).nonzero()[0]) for row in out["labels"]}
    print("shape", tuple(out["ids"].shape), "answers start in columns", starts)
    assert len(starts) == 1
