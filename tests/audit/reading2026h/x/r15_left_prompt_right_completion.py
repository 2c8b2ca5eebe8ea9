"""Prompts padded on the left, completions on the right, so padding is on both ends (TRL GRPO, verl, OpenRLHF).
All completions start in the same column. The attention mask is 0 at both ends; positions are the running count of real tokens minus one, clipped at
0, so the left padding has position 0 many times and right padding repeats the last position. Padding id and end id are the same; the mask, not the id, says what is real."""
FAMILY = "data stages"
KIND = "collator"
INPUTS = {"rows": "list of dicts with prompt (ids) and completion (ids, ends with id 0 if it was finished)"}
SETTINGS = {"pad": "padding id, 0, equal to the end id"}
NOTES = ("Out: input_ids, attention_mask, position_ids [rows, time], completion_mask [rows, completion time]; the end id of a finished completion is trained (completion_mask 1) although it "
         "equals the padding id. time is the longest prompt plus the longest completion.")
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    c = lambda n: torch.randint(1, 40, (n,), generator=g).tolist()
    return {"rows": [{"prompt": c(3), "completion": c(4) + [0]}, {"prompt": c(6), "completion": c(2) + [0]}, {"prompt": c(1), "completion": c(6)}]}


def right(rows, pad=0):
    p = max(len(r["prompt"]) for r in rows)
    c = max(len(r["completion"]) for r in rows)
    ids = torch.full((len(rows), p + c), pad)
    mask = torch.zeros(len(rows), p + c, dtype=torch.long)
    for i, r in enumerate(rows):
        ids[i, p - len(r["prompt"]): p] = torch.tensor(r["prompt"])
        ids[i, p: p + len(r["completion"])] = torch.tensor(r["completion"])
        mask[i, p - len(r["prompt"]): p + len(r["completion"])] = 1
    position = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": position, "completion_mask": mask[:, p:].clone()}


if __name__ == "__main__":
    rows = make(0)["rows"]
    b = right(rows)
    print(b["input_ids"], b["position_ids"], b["completion_mask"])
    for i, r in enumerate(rows):
        real = b["attention_mask"][i].bool()
        assert b["input_ids"][i][real].tolist() == r["prompt"] + r["completion"]
        assert b["position_ids"][i][real].tolist() == list(range(int(real.sum())))
        assert int(b["completion_mask"][i].sum()) == len(r["completion"])
