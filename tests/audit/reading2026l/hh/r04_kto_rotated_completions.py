"""KTO's KL rows (TRL KTOTrainer, _get_kl_dataset): for the estimate of the KL reference point every prompt is paired with the completion of *another*
row of the batch, completions rotated by one. The mismatch of prompt and completion is the point (Ethayarajh et al. 2024, arXiv 2402.01306)."""
FAMILY = "data stages, collators and chat templates"
KIND = "data stage"
INPUTS = {"rows": "list of {'prompt_ids', 'completion_ids', 'label': bool (desirable)}; their number is a multiple of batch_size"}
SETTINGS = {"batch_size": "rows per KL batch, 4; must be above 1"}
NOTES = """(rows) -> rows, same number and order. Every row keeps prompt_ids, completion_ids, label and gets input_ids = prompt + completion with
completion_mask (1 on completion tokens), and KL_input_ids = prompt + the completion of the previous row of the same batch of batch_size
consecutive rows (the first row takes the completion of the last row), with KL_completion_mask (1 on those completion tokens). The KL rows are
mismatched on purpose: they only serve the estimate of the reference point z0 (no gradient) and never enter the loss as examples; label belongs to
completion_ids, not to the KL completion. Masks belong to the ids at the same place (no shift)."""


def make(seed):
    import random
    r = random.Random(seed)
    tok = lambda a, b: [r.randint(3, 40) for _ in range(r.randint(a, b))]
    return {"rows": [{"prompt_ids": tok(2, 5), "completion_ids": tok(1, 5) + [2], "label": r.random() < 0.5} for _ in range(8)]}


def right(rows, batch_size=4):
    out = []
    for s in range(0, len(rows), batch_size):
        batch = rows[s:s + batch_size]
        completions = [r["completion_ids"] for r in batch]
        for r, kl in zip(batch, [completions[-1]] + completions[:-1]):
            p, c = r["prompt_ids"], r["completion_ids"]
            out.append({**r, "input_ids": p + c, "completion_mask": [0] * len(p) + [1] * len(c),
                        "KL_input_ids": p + kl, "KL_completion_mask": [0] * len(p) + [1] * len(kl)})
    return out


if __name__ == "__main__":
    x = make(0)
    out = right(**x)
    for i, o in enumerate(out):
        j = (i // 4) * 4 + (i % 4 - 1) % 4
        assert o["KL_input_ids"] == x["rows"][i]["prompt_ids"] + x["rows"][j]["completion_ids"] and j != i
        assert sum(o["completion_mask"]) == len(o["completion_ids"]) and sum(o["KL_completion_mask"]) == len(x["rows"][j]["completion_ids"])
    print("8 rows; row 0:", out[0])
