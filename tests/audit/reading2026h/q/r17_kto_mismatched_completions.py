"""KTO: each prompt is also paired with the completion of another row, on purpose. Ethayarajh et al. 2024; TRL's KTOTrainer (_get_kl_dataset rolls the completions by one within a batch).
The wrong pairs serve only to estimate the KL term, so they carry a label that the loss never reads as desirable or undesirable. The rolled list of a single batch keeps every completion once."""
FAMILY = "data"
KIND = "data stage"
INPUTS = {"rows": "list of rows: dicts with prompt (list of ids), completion (list of ids), label (bool, desirable)"}
SETTINGS = {"size": "batch within which completions are rolled, 4"}
NOTES = "Returns the rows in order with two more fields: kl_prompt (the row's own prompt) and kl_completion (the completion of the row before it within its batch, the first takes the last one's). The number of rows must be divisible by size, and size at least 2. prompt, completion and label stay as they are. Same multiset of completions within each batch."


def make(seed):
    import random
    r = random.Random(seed)
    c = lambda n: [r.randrange(50) for _ in range(n)]
    return {"rows": [{"prompt": c(3 + i % 2), "completion": c(2 + i % 4), "label": i % 3 != 0} for i in range(8)]}


def right(rows, size=4):
    out = []
    for at in range(0, len(rows), size):
        part = rows[at:at + size]
        comps = [r["completion"] for r in part]
        comps = comps[-1:] + comps[:-1]
        for r, c in zip(part, comps):
            out.append({**r, "kl_prompt": list(r["prompt"]), "kl_completion": list(c)})
    return out


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    for i, o in enumerate(out):
        b = i // 4 * 4
        assert o["kl_completion"] == rows[b + (i - b - 1) % 4]["completion"] and o["completion"] == rows[i]["completion"] and o["label"] == rows[i]["label"]
    print("kl completions come from rows", [4 * (i // 4) + (i % 4 - 1) % 4 for i in range(8)])
