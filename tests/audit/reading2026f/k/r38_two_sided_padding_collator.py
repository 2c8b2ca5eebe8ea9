"""Prompt/completion collator of online RL trainers (TRL GRPO). Prompts are padded on the LEFT, completions on the RIGHT, and the halves are joined: padding stands on
both sides of a row, positions come from the cumulated mask, and only the completion half has log-probabilities."""
import torch

FAMILY = "collators"
KIND = "collator"
INPUTS = {"rows": "list of dicts with prompt_ids, completion_ids (lists) and logps (list, one per completion token)"}
SETTINGS = {"pad_id": "0"}
NOTES = ("The last `completion width` columns are the completions, aligned over rows: logits[:, -width-1:-1] predict them. The completion mask keeps the end token. "
         "position_ids = cumulated attention mask - 1, clamped at 0 on the left padding. logps padded with 0.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    r = lambda lo, hi: torch.randint(1, 40, (int(torch.randint(lo, hi, (1,), generator=g)),), generator=g).tolist()
    rows = [{"prompt_ids": r(1, 6), "completion_ids": r(1, 7)} for _ in range(4)]
    for x in rows:
        x["logps"] = (-torch.rand(len(x["completion_ids"]), generator=g)).tolist()
    return {"rows": rows}


def right(rows, pad_id=0):
    P, C = max(len(r["prompt_ids"]) for r in rows), max(len(r["completion_ids"]) for r in rows)
    ids = torch.full((len(rows), P + C), pad_id)
    att, logps = torch.zeros(len(rows), P + C, dtype=torch.long), torch.zeros(len(rows), C)
    for i, r in enumerate(rows):
        p, c = r["prompt_ids"], r["completion_ids"]
        ids[i, P - len(p):P], ids[i, P:P + len(c)] = torch.tensor(p), torch.tensor(c)
        att[i, P - len(p):P + len(c)] = 1
        logps[i, :len(c)] = torch.tensor(r["logps"])
    return {"input_ids": ids, "attention_mask": att, "position_ids": (att.cumsum(1) - 1).clamp(min=0),
            "completion_mask": att[:, P:].clone(), "old_logps": logps}


if __name__ == "__main__":
    for seed in range(4):
        rows = make(seed)["rows"]; o = right(rows); C = o["old_logps"].shape[1]
        for i, r in enumerate(rows):
            real = o["attention_mask"][i].bool()
            assert o["input_ids"][i][real].tolist() == r["prompt_ids"] + r["completion_ids"]
            assert o["position_ids"][i][real].tolist() == list(range(int(real.sum())))
            k = o["completion_mask"][i].bool()
            assert o["input_ids"][i, -C:][k].tolist() == r["completion_ids"] and torch.allclose(o["old_logps"][i][k], torch.tensor(r["logps"]))
    print(o["input_ids"], o["attention_mask"], sep="\n")
