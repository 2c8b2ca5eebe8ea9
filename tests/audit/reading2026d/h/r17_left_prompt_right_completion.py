"""Prompts padded LEFT and completions padded RIGHT in the same row, so that all completions start in one column (TRL GRPO). Positions come from the cumulative mask, left pads get position 0 (clamped)."""
FAMILY = "collator"; KIND = "collator"
INPUTS = {"rows": "list of dict prompt (ids), completion (ids)"}
SETTINGS = {"pad": "0"}
NOTES = "Padding on both sides of a row on purpose. completion_mask is over the completion columns only. Positions count real tokens."
import torch
def make(seed): return {"rows": [{"prompt": [5 + seed % 3, 6], "completion": [7, 8, 9]}, {"prompt": [4, 5, 6, 7], "completion": [3]}]}
def right(rows, pad=0):
    P, C = max(len(r["prompt"]) for r in rows), max(len(r["completion"]) for r in rows)
    ids = torch.tensor([[pad] * (P - len(r["prompt"])) + r["prompt"] + r["completion"] + [pad] * (C - len(r["completion"])) for r in rows])
    att = torch.tensor([[0] * (P - len(r["prompt"])) + [1] * (len(r["prompt"]) + len(r["completion"])) + [0] * (C - len(r["completion"])) for r in rows])
    return {"input_ids": ids, "attention_mask": att, "position_ids": (att.cumsum(1) - 1).clamp(min=0), "completion_mask": att[:, P:]}
if __name__ == "__main__":
    rows = make(0)["rows"]; o = right(rows)
    for i, r in enumerate(rows):
        m = o["attention_mask"][i].bool()
        assert o["input_ids"][i][m].tolist() == r["prompt"] + r["completion"] and o["position_ids"][i][m].tolist() == list(range(int(m.sum())))
        assert o["input_ids"][i, 4] == r["completion"][0] and o["completion_mask"][i].sum() == len(r["completion"])
    print(o["input_ids"].tolist())
