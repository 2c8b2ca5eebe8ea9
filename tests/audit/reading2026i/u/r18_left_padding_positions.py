"""Left-padded prompts whose padding has position 1 (transformers generate, TRL). position_ids are cumsum(attention_mask) - 1 with padding filled by 1, so positions of a row read 1, 1, 1, 0, 1, 2 ...: padding repeats a position in use and the row does not start at 0. Padding is masked, so the value does not matter; text starts at 0."""
import random
import torch

FAMILY = "data stages"
KIND = "collator"
INPUTS = {"rows": "list of dicts: prompt = token ids, completion = token ids"}
SETTINGS = {}
NOTES = "Prompts are padded on the left, completions on the right, both with id 0 (which does not occur in text), so that all completions start in the same column. labels -100 on prompt and padding. The mask, not the position, marks padding."
PAD = 0


def make(seed):
    rng = random.Random(seed)
    tok = lambda a, b: [rng.randint(1, 31) for _ in range(rng.randint(a, b))]
    return {"rows": [{"prompt": tok(2, 7), "completion": tok(2, 6)} for _ in range(5)]}


def right(rows):
    p = max(len(r["prompt"]) for r in rows)
    c = max(len(r["completion"]) for r in rows)
    ids, mask, labels = [], [], []
    for r in rows:
        a, b = p - len(r["prompt"]), c - len(r["completion"])
        ids.append([PAD] * a + r["prompt"] + r["completion"] + [PAD] * b)
        mask.append([0] * a + [1] * (p - a + c - b) + [0] * b)
        labels.append([-100] * p + r["completion"] + [-100] * b)
    mask = torch.tensor(mask)
    pos = mask.cumsum(1) - 1
    pos.masked_fill_(mask == 0, 1)
    return {"input_ids": torch.tensor(ids), "attention_mask": mask, "position_ids": pos, "labels": torch.tensor(labels)}


if __name__ == "__main__":
    rows = make(0)["rows"]; out = right(rows)
    for i, r in enumerate(rows):
        keep = out["attention_mask"][i] == 1
        assert out["input_ids"][i][keep].tolist() == r["prompt"] + r["completion"]
        assert out["position_ids"][i][keep].tolist() == list(range(len(r["prompt"]) + len(r["completion"])))
        assert (out["position_ids"][i][~keep] == 1).all()
        assert out["labels"][i][out["labels"][i] != -100].tolist() == r["completion"]
    print(out["position_ids"])
