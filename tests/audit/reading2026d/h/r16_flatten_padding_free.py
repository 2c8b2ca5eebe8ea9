"""Padding-free collator: the whole batch becomes ONE row; positions restart, the first label of each sequence is -100.
Boundaries go out as position ids and cu_seqlens for variable-length attention instead of an attention mask (HF DataCollatorWithFlattening). The first label is ignored since the shifted loss would otherwise predict it from the sequence before."""
FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of dict ids (list of token ids), prompt_len (number of untrained leading tokens, may be 0)"}
SETTINGS = {}
NOTES = "Labels are unshifted (the model shifts). No padding and no attention mask; rows are concatenated in order; batch dimension is 1 whatever the number of rows. Empty rows are not legal."
import torch, random

def make(seed):
    r = random.Random(seed)
    return {"rows": [{"ids": [r.randrange(3, 40) for _ in range(n)], "prompt_len": p} for n, p in [(5, 2), (3, 0), (7, 3), (1, 0)]]}

def right(rows):
    ids, lab, pos, cu = [], [], [], [0]
    for row in rows:
        n, p = len(row["ids"]), max(1, row["prompt_len"])
        ids += row["ids"]; lab += [-100] * p + row["ids"][p:]; pos += range(n); cu.append(cu[-1] + n)
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([lab]), "position_ids": torch.tensor([pos]),
            "cu_seqlens": torch.tensor(cu, dtype=torch.int32), "max_seqlen": torch.tensor(max(len(r["ids"]) for r in rows))}

if __name__ == "__main__":
    rows = make(0)["rows"]; o = right(rows)
    # trained (context start, token) pairs equal those of the rows taken one by one
    want = [(row["ids"][t - 1], row["ids"][t]) for row in rows for t in range(1, len(row["ids"])) if t >= row["prompt_len"]]
    x, y = o["input_ids"][0], o["labels"][0]
    got = [(x[t - 1].item(), y[t].item()) for t in range(1, len(x)) if y[t] != -100]
    assert got == want and (o["position_ids"][0] == 0).nonzero().flatten().tolist() == o["cu_seqlens"][:-1].tolist()
    print(o)
